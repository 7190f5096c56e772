"""Imports point one way, heavy ones wait, and what is public exists."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import namm
from namm.experiments.presets import EXPERIMENTS, OWN

SOURCE = Path(namm.__file__).parent

# From left to right in the picture of the design: a package may import those before it and itself.
ORDER = [
    *(
        "errors",
        "_version",
        "formatting",
        "reading",
        "hdf5",
        "hdf5_inspector",
        "files",
        "digests",
        "weights_file",
        "precision",
        "numerics",
        "clock",
        "gpu",
        "progress",
    ),
    *("memory", "distributed"),
    *("simulators", "constraints", "datasets", "evaluation", "exact", "maps", "generative", "training", "inverse"),
    *("report", "pipeline", "import_flax", "experiments", "studio", "cli"),
]


def imports(path: Path) -> set[str]:
    """Top-level members of `namm` that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found |= {name.split(".")[1] for name in names if name.startswith("namm.")}
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_left(path):
    home = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if home in ("__init__", "__main__"):
        return
    later = {name for name in imports(path) if ORDER.index(name) > ORDER.index(home)}
    assert not later, f"{home} imports {later}, which come after it"


def test_the_engine_and_the_sweeps_know_no_experiment_by_name():
    files = {f"namm.experiments.{name}" for name in (*EXPERIMENTS, OWN)}
    for path in sorted(p for folder in ("engine", "sweeps") for p in (SOURCE / "experiments" / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                named = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
                assert not named & files, f"{path} imports {named & files}"


def test_public_names_exist():
    assert set(namm.__all__) - {"__version__"} == set(namm._HOMES)
    (typed,) = (node for node in ast.parse((SOURCE / "__init__.py").read_text()).body if isinstance(node, ast.If))
    assert {alias.asname: node.module for node in typed.body for alias in node.names} == namm._HOMES
    for name in namm.__all__:
        assert getattr(namm, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'TotalFlow'"):
        _ = namm.TotalFlow


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["demo", "--help"], ["dmo"]])
def test_help_and_mistakes_do_not_load_torch(arguments):
    code = (
        "import sys; from namm.cli import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
