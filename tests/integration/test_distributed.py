"""Two processes that share a batch learn what one process learns."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from namm.training.log import read_metrics

SCRIPT = Path(__file__).with_name("distributed_training.py")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[int, Path]:
    """Folders of the same training on one and on two processes."""
    folder = tmp_path_factory.mktemp("processes")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, SCRIPT, folder], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return {world: folder / str(world) for world in (1, 2)}


@pytest.mark.parametrize("name", ["rank", "muon"])
def test_ranks_end_with_equal_weights(runs, name):
    first, second = (load_file(runs[2] / f"{name}{rank}.safetensors") for rank in (0, 1))
    assert first.keys() == second.keys()
    assert all((first[name] == second[name]).all() for name in first)


@pytest.mark.parametrize(("name", "steps"), [("run", 50), ("muon", 8)])
def test_losses_follow_the_single_process(runs, name, steps):
    one, two = (read_metrics(runs[n] / name / "metrics.jsonl") for n in (1, 2))
    assert len(one) == len(two) == steps
    for a, b in zip(one, two, strict=True):
        for term in ("loss", "cycle", "constraint", "regulariser"):
            assert b[term] == pytest.approx(a[term], rel=1e-6)
    assert one[0]["loss"] != one[-1]["loss"]
    assert two[-1]["val/loss"] == pytest.approx(one[-1]["val/loss"], rel=1e-6)
    averages = [name for name in one[-1] if name.startswith("val@")]
    assert bool(averages) == (name == "muon")
    assert [two[-1][each] for each in averages] == pytest.approx([one[-1][each] for each in averages], rel=1e-6)
