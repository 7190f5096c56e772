"""The benchmark of memory runs in miniature, and judges what it measures."""

import json
import runpy
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "posterior_memory.py"


@pytest.fixture
def script():
    return runpy.run_path(str(SCRIPT))


def test_every_batch_size_and_precision_is_measured(script, tmp_path, capsys):
    found = tmp_path / "found.json"
    assert script["main"](["--quick", "--n", "3", "--batch-size", "2", "--steps", "2", "--json", str(found)]) == 0
    rows = json.loads(found.read_text())
    assert [(row["batch_size"], row["precision"]) for row in rows] == [
        (256, "auto"),
        (256, "fp32"),
        (2, "auto"),
        (2, "fp32"),
    ]
    assert all(row["finite"] and row["seconds_per_step"] > 0 and row["gib"] is None for row in rows)
    assert capsys.readouterr().out.count("not counted") == 4


@pytest.mark.parametrize(("gib", "code"), [(39.0, 0), (41.0, 1)])
def test_more_than_40_gib_is_too_much(script, monkeypatch, gib, code):
    main = script["main"]
    monkeypatch.setitem(main.__globals__, "measure", lambda *_: script["Found"](16, "auto", gib, 1.0, True))
    assert main(["--quick"]) == code


def test_the_full_size_is_the_papers(script):
    s = script["experiment"](quick=False)
    assert script["build"].dataset(s.data).shape == (2, 128, 256)
    with torch.device("meta"):
        model = script["build"].diffusion(s.mdm.network, s.mdm.diffusion, (2, 128, 256), seed=0)
    assert sum(p.numel() for p in model.network.parameters()) == 15_698_178
