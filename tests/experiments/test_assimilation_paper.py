"""Figs. 5 and 11 on a tiny run: what is measured is what is shown, and nothing is measured twice."""

import json

import h5py
import numpy as np
import pytest

from namm.experiments.assimilation.assimilate import Sampling, Setting, assimilate, priors, score
from namm.experiments.assimilation.tasks import make_task
from namm.experiments.engine.run_parts import RunParts
from namm.experiments.paper import fig5_fig11 as paper
from namm.experiments.paper.items import ITEMS
from namm.experiments.sweeps.cell import Cell, CellOutcome
from namm.inverse import DDIMSteps


@pytest.fixture
def outcome(whole_run, tiny_preset, tmp_path, monkeypatch):
    """A finished cell whose measurements go elsewhere."""
    monkeypatch.setattr(paper, "FEW_STEPS", 3)
    monkeypatch.setattr(paper, "ZETAS", (1e-5, 1e-4))
    monkeypatch.setattr(paper, "SETTINGS", [Setting(s.method, 1e-4, s.weight) for s in paper.SETTINGS])
    run = tmp_path / "run"
    run.mkdir()
    for stage in whole_run.iterdir():
        (run / stage.name).symlink_to(stage)
    return CellOutcome(Cell("burgers-seed0", tiny_preset, "evaluate"), run, None)


def test_the_two_figures_are_items():
    assert ITEMS["fig5"].experiments == ITEMS["fig11"].experiments == ("burgers", "divergence")


def test_fig5(outcome):
    ITEMS["fig5"].measure(outcome, False)
    shown = ITEMS["fig5"].show([outcome])
    (file,) = (outcome.folder / "studies").glob("*/*.h5")
    stamp = file.stat().st_mtime_ns
    with h5py.File(file) as h5:
        for row in shown.table.plain():
            group = h5[{"DPS": "dps", "CG-DPS-200": "cg-dps", "mirror DPS": "mirror-dps"}[row["method"]]]
            assert group["samples"].shape == (1, 32, 1, 8, 8)
            assert row["mean ℓ"] == pytest.approx(group["distance"][:].mean(), rel=1e-4)
            assert row["coverage"] == pytest.approx(group["coverage"][:].mean(), rel=1e-4)
    assert len(shown.table.rows) == 3
    assert list(shown.figures) == ["fig5-burgers"]
    assert len(shown.drawn["fig5-burgers"]["distances"]["mirror DPS"]) == 32
    ITEMS["fig5"].measure(outcome, False)
    assert file.stat().st_mtime_ns == stamp


def test_fig11(outcome):
    ITEMS["fig11"].measure(outcome, False)
    shown = ITEMS["fig11"].show([outcome])
    assert len(shown.table.rows) == 2 * (1 + 1 + 2)
    trained = RunParts.load(outcome.folder)
    setting = Setting("cg-dps", 1e-4, 50.0)
    wanted = score(
        assimilate(
            priors(trained, ["cg-dps"])["cg-dps"],
            make_task(trained, None, 0.2, range(1)),
            setting,
            trained.rule(),
            Sampling(8, DDIMSteps(3)),
        )
    )
    (row,) = (r for r in shown.table.plain() if r["method"] == "CG-DPS-50" and r["ζ"] == 1e-4)
    assert (row["mean ℓ"], row["χ² per value"]) == pytest.approx((wanted.distance, wanted.chi2), rel=1e-3)
    (scores,) = (outcome.folder / "studies").glob("*/scores.json")
    assert len(json.loads(scores.read_text())) == 8
    with np.load(scores.parent / "pictures.npz") as pictures:
        assert pictures["mirror DPS 1e-05"].shape == (1, 8, 7)
    stamp = scores.stat().st_mtime_ns
    ITEMS["fig11"].measure(outcome, False)
    assert scores.stat().st_mtime_ns == stamp


def test_a_run_that_failed_leaves_its_rows_out(outcome):
    failed = CellOutcome(outcome.cell, outcome.folder, "it broke")
    assert ITEMS["fig5"].show([failed]).table.rows == []
    assert ITEMS["fig11"].show([failed]).figures == {}
