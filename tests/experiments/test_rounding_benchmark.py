"""The benchmark of rounding inside f, on a map of seconds."""

import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from namm.errors import UsageError
from namm.experiments.run import run

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "rounding.py"


@pytest.fixture(scope="module")
def main():
    return runpy.run_path(str(SCRIPT))["main"]


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


def test_an_f_without_skip_is_refused(main, tiny_preset, tmp_path):
    with pytest.raises(UsageError, match="no skip"):
        main([str(trained(tiny_preset, tmp_path / "run", skip=False))])
