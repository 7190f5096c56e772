"""What RESULTS.md shows is what was measured, and the maps beside it do what it says."""

import json
import runpy
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from namm import Burgers, MirrorMap
from namm.datasets import burgers_trajectories
from namm.experiments.engine import build_models
from namm.experiments.presets import preset

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "burgers"
pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason="no results beside the tests, as in a source distribution")


@pytest.fixture(scope="module")
def metrics():
    return json.loads((RESULTS / "metrics.json").read_text())


@pytest.fixture(scope="module")
def lines():
    """Those of RESULTS.md, without emphasis."""
    return [line.replace("−", "-").replace("**", "") for line in (ROOT / "RESULTS.md").read_text().splitlines()]


@pytest.fixture(scope="module")
def mirror():
    return MirrorMap.load(RESULTS / "maps")


def of(lines, start, *shown):
    """How many lines start so and have all of these in them."""
    return sum(line.startswith(f"| {start}") and all(each in line for each in shown) for line in lines)


def short(value, digits=2):
    """1.02e-4 and not 1.02e-04."""
    return f"{value:.{digits}e}".replace("e-0", "e-")


def test_the_tables_are_of_the_figures(metrics):
    tables = runpy.run_path(str(ROOT / "benchmarks" / "against_baseline.py"))
    assert tables["page"](metrics) == (RESULTS / "tables.md").read_text()


def test_the_page_shows_the_rows(metrics, lines):
    """ℓ, CD, √MMD², KID, FID, total variation and spread of every row, in a line of its own."""
    for seed, found in metrics["seeds"].items():
        for name, row in found["rows"].items():
            shown = ["{:.4f} ± {:.4f}".format(*row["mmd"]), "{:.2f} ± {:.2f}".format(*(1e4 * v for v in row["kid"]))]
            shown += [f"{row['fid']:.3f}", f"{row['total_variation']:.3f} | {row['spread']:.3f}"]
            if name not in ("data", "projected"):  # which are zero, but for rounding
                shown += [short(row["distance"]), f"{row['cd']:.4f}"]
            assert of(lines, f"{seed} |", *shown) == 1


def test_the_page_shows_the_costs_and_what_is_judged(metrics, lines):
    for name in ("map", "mdm", "samples", "finetune", "dm"):
        costs = [found["stages"][name] for found in metrics["seeds"].values()]
        seconds = " | ".join(f"{cost['compute_seconds']:.1f}" for cost in costs)
        assert of(lines, f"{name} |", seconds, ", ".join(f"{cost['images_per_second']:.0f}" for cost in costs)) == 1
    for each in zip(*(found["judged"] for found in metrics["seeds"].values()), strict=True):
        assert all(line["met"] or line["stretch"] for line in each)
        assert any(" | ".join(line["shown"].lstrip("-") for line in each) in line for line in lines)


def test_the_page_shows_the_assimilations_and_their_tuning(lines):
    found = json.loads((RESULTS / "assimilation.json").read_text())
    for name, row in found["methods"].items():
        shown = [f"{row['chi2']:.3f}", f"{row['error']:.4f}", f"{row['spread']:.4f}", f"{row['coverage']:.2f}"]
        label = name.replace("dps", "DPS").replace("cg", "CG").replace("mirror-", "mirror ")
        assert of(lines, label, short(row["distance"]), *shown) == 1
    for method in ("dps", "mirror-dps"):
        for row in found["tuning"][method]:
            shown = f"| {row['chi2']:.3f} | {short(row['distance'], 1)} | {row['error']:.3f} |"
            assert row["zeta"] > 0.005 or of(lines, f"{round(row['zeta'], 4):g}", shown) == 1


def test_the_maps_are_of_the_preset(mirror):
    settings = preset("burgers", "gpu").settings.map
    for network, asked in ((mirror.g, settings.g), (mirror.f, settings.f)):
        config = dict(network.config)
        wanted = {name: value for name, value in asdict(asked).items() if name not in ("kind", *build_models.RULENET)}
        assert {name: config[name] for name in wanted} == wanted


@torch.no_grad()
def test_the_maps_invert_each_other_near_the_rule(mirror):
    x = burgers_trajectories(16, split="test")
    made = mirror.to_data(mirror.to_mirror(x))
    assert (made - x).abs().mean() < 2e-4
    assert Burgers()(made).mean() < 6e-5
