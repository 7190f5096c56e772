"""The benchmark of rounding inside f, on a map of seconds."""

import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from namm.errors import UsageError
from namm.experiments.run import run

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "rounding.py"


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


@pytest.fixture(scope="module")
def main(script):
    return script["main"]


def trained(chosen, folder, skip):
    s = chosen.settings
    settings = replace(s, map=replace(s.map, f=replace(s.map.f, skip=skip, normalisation="none")))
    run(replace(chosen, settings=settings), folder, until="map", tell=lambda line: None, progress=False)
    return folder


def test_only_what_is_rounded_adds_noise(main, tiny_preset, tmp_path):
    folder = trained(tiny_preset, tmp_path / "run", skip=True)
    assert main([str(folder), "--n", "4", "--json", str(tmp_path / "found.json")]) == 0
    found = {case: figures["rms"] for case, figures in json.loads((tmp_path / "found.json").read_text()).items()}
    assert found["nothing"] < 1e-6
    assert found["head"] > 100 * found["nothing"]
    assert found["everything but the tail"] > found["middle"] > 10 * found["nothing"]
    assert found["head"] > found["tail"] > 10 * found["nothing"]


def test_ten_bits_are_kept(script):
    x = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-12, 1 + 3 * 2**-12, -(2.0 + 2**-11), 0.0])
    kept = torch.tensor([1.0, 1 + 2**-10, 1.0, 1 + 2**-10, -2.0, 0.0])
    assert torch.equal(script["in_tf32"](x), kept)
    wide = torch.linspace(-5, 5, 1001)
    assert ((script["in_tf32"](wide) - wide).abs() <= 2**-11 * wide.abs()).all()


def test_an_f_without_skip_is_refused(main, tiny_preset, tmp_path):
    with pytest.raises(UsageError, match="no skip"):
        main([str(trained(tiny_preset, tmp_path / "run", skip=False))])
