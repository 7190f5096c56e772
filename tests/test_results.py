"""What RESULTS.md shows is what was measured, and the weights beside it do what it says."""

import json
import runpy
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from namm import NAMMPipeline
from namm.datasets import burgers_trajectories
from namm.experiments.presets import preset

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "burgers"
pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason="no results beside the tests, as in a source distribution")


@pytest.fixture(scope="module")
def metrics():
    return json.loads((RESULTS / "metrics.json").read_text())


@pytest.fixture(scope="module")
def assimilation():
    return json.loads((RESULTS / "assimilation.json").read_text())


@pytest.fixture(scope="module")
def lines():
    """Those of RESULTS.md, without emphasis."""
    return [line.replace("−", "-").replace("**", "") for line in (ROOT / "RESULTS.md").read_text().splitlines()]


@pytest.fixture(scope="module")
def pipe():
    return NAMMPipeline.from_pretrained(RESULTS / "pipeline")


def of(lines, start, *shown):
    """How many lines start so and have all of these in them."""
    return sum(line.startswith(f"| {start}") and all(each in line for each in shown) for line in lines)


def short(value, digits=2):
    """1.02e-4 and not 1.02e-04."""
    return f"{value:.{digits}e}".replace("e-0", "e-")


def test_the_tables_are_of_the_figures(metrics):
    tables = runpy.run_path(str(ROOT / "benchmarks" / "full_size_tables.py"))
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


def test_the_page_shows_the_costs(metrics, lines):
    for name in ("map", "mdm", "samples", "finetune", "dm"):
        costs = [found["stages"][name] for found in metrics["seeds"].values()]
        seconds = " | ".join(f"{cost['compute_seconds']:.1f}" for cost in costs)
        assert of(lines, f"{name} |", seconds, ", ".join(f"{cost['images_per_second']:.0f}" for cost in costs)) == 1


def test_the_page_shows_what_is_judged(metrics, lines):
    """Ratios and percentages of both seeds in one line, and that nothing but the stretch is short."""
    judged = [found["judged"] for found in metrics["seeds"].values()]
    for each in zip(*judged, strict=True):
        assert all(line["met"] or line["stretch"] for line in each)
        if not each[0]["name"].startswith(("10⁴ · KID", "compute")):  # told in other words
            assert any(" | ".join(line["shown"] for line in each) in line for line in lines)


def test_the_page_shows_the_assimilations(assimilation, lines):
    rows = assimilation["methods"]
    for name, row in rows.items():
        shown = [f"{row['chi2']:.3f}", f"{row['error']:.4f}", f"{row['spread']:.4f}", f"{row['coverage']:.2f}"]
        label = name.replace("dps", "DPS").replace("cg", "CG").replace("mirror-", "mirror ")
        assert of(lines, label, short(row["distance"]), *shown) == 1
    text = " ".join(lines)
    for name in ("dps", "cg-dps"):
        assert f"{rows[name]['distance'] / rows['mirror-dps']['distance']:.1f} times better" in text


def test_the_page_shows_the_tuning(assimilation, lines):
    for method in ("dps", "mirror-dps"):
        tried = [row for row in assimilation["tuning"][method] if row["zeta"] <= 0.005]
        assert len(tried) >= 4
        for row in tried:
            shown = f"| {row['chi2']:.3f} | {short(row['distance'], 1)} | {row['error']:.3f} |"
            assert of(lines, f"{round(row['zeta'], 4):g}", shown) == 1


def test_the_weights_are_small_enough_to_be_kept_here():
    size = sum(path.stat().st_size for path in (RESULTS / "pipeline").rglob("*") if path.is_file())
    assert size < 40e6


def test_the_weights_are_of_the_preset(pipe):
    settings = preset("burgers", "gpu").settings
    for network, asked in ((pipe.g, settings.map.g), (pipe.f, settings.map.f), (pipe.network, settings.mdm.network)):
        config = dict(network.config)
        for name, value in asdict(asked).items():
            assert config[name] == (list(value) if isinstance(config[name], list) else value)


@torch.no_grad()
def test_the_maps_invert_each_other_near_the_rule(pipe):
    x = burgers_trajectories(16, split="test")
    made = pipe.f(pipe.g(x))
    assert (made - x).abs().mean() < 2e-4
    assert pipe.constraint(made).mean() < 6e-5


def test_samples_keep_the_rule_as_well_as_reported(pipe, metrics):
    """A few samples of the network in float16, on a CPU, against 10 000 of the run."""
    row = metrics["seeds"]["0"]["rows"]["finetuned"]
    out = pipe(batch_size=8, num_inference_steps=25, generator=0)
    assert float(out.distances.mean()) == pytest.approx(row["distance"], rel=0.3)
    assert float(out.images.std()) == pytest.approx(float(burgers_trajectories(64).std()), rel=0.2)  # no constants
