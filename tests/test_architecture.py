"""Imports point one way, heavy ones wait, and what is public exists."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
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
    *("simulators", "constraints", "datasets", "evaluation", "exact", "maps", "generative", "training"),
    *("rivals", "inverse", "report", "pipeline", "import_flax", "experiments", "studio", "cli"),
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


# What takes seconds to import, and what does without it. diffusers brings torch's compiler with it.
HEAVY = {"torch", "numpy", "h5py", "diffusers", "torch._dynamo", "accelerate", "matplotlib", "scipy", "torchmetrics"}
IMAGES = ["x.npy", "--layout", "NCHW"]
RULE = ["--constraint", "periodic"]
REAL = ["--against", "x.npy", "--against-layout", "NCHW", "--subsets", "2"]
LIGHT = {
    "import namm, namm.experiments.presets, namm.experiments.engine.folder, namm.experiments.sweeps.jobs": set(),
    "import namm.constraints": {"torch", "numpy"},
    "import namm.datasets, namm.evaluation, namm.exact": {"torch", "numpy", "h5py"},
    "import namm.experiments.engine.build": {"torch", "numpy", "h5py", "accelerate"},
    f"assert not main({['certify', *IMAGES, *RULE]})": {"torch", "numpy", "h5py", "accelerate"},
    f"assert not main({['evaluate', *IMAGES, *RULE, *REAL]})": {"torch", "numpy", "h5py", "accelerate"},
    f"assert not main({['check', 'periodic', *IMAGES]})": HEAVY - {"diffusers", "torch._dynamo", "scipy"},
    "import namm.maps, namm.generative, namm.training.train_map, namm.training.train_model, namm.inverse": HEAVY
    - {"scipy", "torchmetrics"},
}
"""Statements, from the lightest on, and which heavy modules may be there after each."""


def test_heavy_imports_wait_for_what_needs_them(tmp_path):
    np.save(tmp_path / "x.npy", np.tile(np.random.default_rng(0).random((60, 1, 4, 4), np.float32), (1, 1, 2, 2)))
    program = "import json, sys\nfrom namm.cli import main\n"
    for statement in LIGHT:
        program += f"{statement}\nprint('#', json.dumps(sorted(sys.modules.keys() & {HEAVY})))\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    loaded = [set(json.loads(line[2:])) for line in done.stdout.splitlines() if line.startswith("# ")]
    for (statement, allowed), found in zip(LIGHT.items(), loaded, strict=True):
        assert found <= allowed, statement
