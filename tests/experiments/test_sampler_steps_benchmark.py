"""The benchmark that says how many steps of the sampler quality needs."""

import json
import runpy
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from namm.evaluation import compare
from namm.experiments.trained import Trained
from namm.generative import DPMSolver, EulerMaruyama
from namm.generative.schedules import VPSDE

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sampler_steps.py"


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


def test_the_variance_of_samples_is_exact(script):
    """Against the closed form of Euler–Maruyama, whose state has a variance that follows from step to step."""
    sde, t_min, variance, steps = VPSDE(), 1e-3, 0.5, 40
    times = np.append(np.linspace(1, t_min, steps), 0.0)
    found = 1.0
    for k, (t, after) in enumerate(pairwise(times)):
        rate = (sde.beta_min + (sde.beta_max - sde.beta_min) * t) * (t - after)
        m2 = np.exp(-sde.beta_min * t - 0.5 * (sde.beta_max - sde.beta_min) * t**2)
        found *= (1 + rate / 2 - rate / (variance * m2 + 1 - m2)) ** 2
        found += rate if k < steps - 1 else 0.0
    process = script["Gaussian"](variance, t_min, sde)
    assert script["variance_left"](EulerMaruyama(steps), process) == pytest.approx(found / variance, rel=1e-6)


def test_more_steps_are_nearer(script):
    process = script["Gaussian"](1.0, 1e-3, VPSDE())
    off = [abs(script["variance_left"](DPMSolver(steps, stochastic=True), process) - 1) for steps in (10, 25, 100)]
    assert off[0] > off[1] > off[2]


def test_a_run_through_the_command(script, whole_run, tmp_path, capsys):
    file = tmp_path / "steps.json"
    assert script["main"]([str(whole_run), "--steps", "3", "4", "--n", "8", "--json", str(file)]) == 0
    assert "total variation" in capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert [(row["model"], row["steps"]) for row in rows] == [(m, n) for n in (3, 4) for m in ("MDM + f", "DM")]
    parts = Trained.load(whole_run)
    settings = parts.settings.evaluate
    source = parts.source("mdm", parts.mirror("finetune"))
    x = source.sample(8, sampler=DPMSolver(4), generator=settings.seed, batch_size=8, progress=False)
    with script["open_store"](whole_run / "data" / "images.h5") as store:
        how = {"subsets": settings.mmd_subsets, "size": min(settings.subset, 8), "seed": settings.seed}
        same = compare(x, store[settings.reference], parts.rule(), **how)
    ours = rows[2]
    assert ours["distance"] == pytest.approx(same.distance.mean, rel=1e-4)
    assert ours["total_variation"] == pytest.approx(same.total_variation, rel=1e-4)
    assert ours["mmd"] == pytest.approx(same.mmd[0], rel=1e-3)
    assert ours["kid"] is None
