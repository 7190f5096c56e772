"""What RESULTS.md shows is what was measured, and the weights beside it do what it says."""

import json
import runpy
from pathlib import Path

import pytest
import torch

from namm import NAMMPipeline
from namm.datasets import burgers_trajectories

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "burgers"


@pytest.fixture(scope="module")
def metrics():
    return json.loads((RESULTS / "metrics.json").read_text())


@pytest.fixture(scope="module")
def pipe():
    return NAMMPipeline.from_pretrained(RESULTS / "pipeline")


def test_the_tables_are_of_the_figures(metrics):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        tables = runpy.run_path(str(ROOT / "benchmarks" / "full_size_tables.py"))
    judged = {seed: tables["judge"](found) for seed, found in metrics["seeds"].items()}
    assert tables["page"](metrics, judged) == (RESULTS / "tables.md").read_text()


def test_the_page_shows_the_figures(metrics):
    """CD, √MMD², KID and FID of every row, in a line of its own."""
    lines = [line.replace("−", "-").replace("**", "") for line in (ROOT / "RESULTS.md").read_text().splitlines()]
    for seed, found in metrics["seeds"].items():
        for row in found["rows"].values():
            shown = ["{:.4f} ± {:.4f}".format(*row["mmd"]), "{:.2f} ± {:.2f}".format(*(1e4 * v for v in row["kid"]))]
            shown += [f"{row['fid']:.3f}", f"{row['total_variation']:.3f} | {row['spread']:.3f}"]
            assert sum(line.startswith(f"| {seed} |") and all(each in line for each in shown) for line in lines) == 1


def test_the_page_shows_the_assimilations():
    lines = (ROOT / "RESULTS.md").read_text().splitlines()
    for name, row in json.loads((RESULTS / "assimilation.json").read_text())["methods"].items():
        shown = (f"{row['chi2']:.3f}", f"{row['error']:.4f}", f"{row['spread']:.4f}", f"{row['coverage']:.2f}")
        label = name.replace("dps", "DPS").replace("cg", "CG").replace("mirror-", "mirror ")
        assert sum(line.startswith(f"| {label}") and all(each in line for each in shown) for line in lines) == 1


def test_the_weights_are_small_enough_to_be_kept_here():
    size = sum(path.stat().st_size for path in (RESULTS / "pipeline").rglob("*") if path.is_file())
    assert size < 40e6


@torch.no_grad()
def test_the_maps_invert_each_other_near_the_rule(pipe):
    x = burgers_trajectories(16, split="test")
    made = pipe.f(pipe.g(x))
    assert (made - x).abs().mean() < 1e-3
    assert pipe.constraint(made).mean() < 1e-4


def test_samples_keep_the_rule_as_well_as_reported(pipe, metrics):
    """A few samples of the network in float16, on a CPU, against 10 000 of the run."""
    row = metrics["seeds"]["0"]["rows"]["finetuned"]
    out = pipe(batch_size=8, num_inference_steps=25, generator=0)
    assert float(out.distances.mean()) == pytest.approx(row["distance"], rel=0.3)
    assert out.images.std() == pytest.approx(burgers_trajectories(64).std(), rel=0.2)  # and no constant images
