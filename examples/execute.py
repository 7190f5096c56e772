"""Run the notebooks of this folder from top to bottom, and keep in them what they print and draw.

python examples/execute.py [NOTEBOOK ...]     (`make notebooks`; minutes on a CPU, seconds with NAMM_QUICK=1)
"""

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
OPTIONS = {
    "kernel_name": "python3",
    "timeout": None,
    "startup_timeout": 600,
    "record_timing": False,
    "coalesce_streams": True,
}
QUIET = "ignore:IProgress not found"  # tqdm's, about a package that no notebook here needs


def executed(path: Path) -> Any:
    """The notebook with the outputs of a run in its own folder, by this Python; a cell that fails raises."""
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, resources=where, **OPTIONS)
    inherited = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}  # the kernel has its own
    client.execute(env=inherited | {"PYTHONWARNINGS": QUIET})
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python", "file_extension": ".py", "mimetype": "text/x-python"},
    }
    return notebook


def main(paths: list[Path]) -> None:
    """Run each notebook and write it back."""
    for path in paths:
        nbformat.write(executed(path), path)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]] or sorted(HERE.glob("*.ipynb")))
