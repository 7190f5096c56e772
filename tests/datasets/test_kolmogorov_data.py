"""Kolmogorov images: which states they hold, their divergence, their statistics, and what a seed means."""

import math
from dataclasses import fields

import numpy as np
import pytest
import torch

from namm.constraints import DivergenceFree
from namm.datasets import DATASETS, KolmogorovFlow, kolmogorov_flow
from namm.errors import UsageError
from namm.experiments.divergence import DivergenceData
from namm.experiments.engine import build
from namm.simulators.fluid import FluidGrid, advance, cut, initial_field, project, vorticity

SMALL = {"size": 16, "rows": 2, "columns": 2, "inner_steps": 3, "start": 0.05}


@pytest.fixture(scope="module")
def paper():
    """A few of the paper's images."""
    return KolmogorovFlow().draw(3, torch.Generator().manual_seed(1))


def test_the_paper_s_images_have_no_divergence_but_rounding(paper):
    assert paper.shape == (3, 2, 128, 256)
    assert paper.dtype == torch.float32
    rule = DivergenceFree()
    assert rule(paper).max() < 5e-7
    assert rule.check(paper).floor_ratio < 1e-6


def test_the_paper_s_images_are_stirred(paper):
    """Speeds of about 1 (0.95 in the published data), up to 5, and vortices that live on from state to state."""
    assert 0.8 < paper.std() < 1.1
    assert 2.5 < paper.abs().max() < 5
    spin = vorticity(cut(paper, 64), 2 * np.pi / 64).flatten(1, 2).flatten(2)
    assert 3 < spin.std() < 6
    alike = [np.corrcoef(spin[0, 0], spin[0, k])[0, 1] for k in (1, 7)]
    assert 0.5 < alike[0] < 0.99
    assert abs(alike[1]) < alike[0] - 0.2


def test_turbulence_makes_little_of_rounding_by_the_last_state(paper):
    """What another device may change: an image made of noise that differs in its last digits is the same image."""
    (white,) = KolmogorovFlow().ingredients(3, torch.Generator().manual_seed(1))
    digits = torch.finfo(white.dtype).eps * (2 * torch.randint(0, 2, white.shape) - 1)
    nearly = KolmogorovFlow().make((white * (1 + digits),))
    assert 0 < (nearly - paper).abs().max() < 1e-4


def test_states_are_the_simulator_s_from_start_on_row_by_row():
    recipe = KolmogorovFlow(**SMALL, reynolds=200.0, forcing=2.0, wavenumber=3, damping=0.4, max_speed=1.5, dt=0.005)
    images = recipe.draw(2, torch.Generator().manual_seed(5))
    white = torch.randn(2, 2, 16, 16, generator=torch.Generator().manual_seed(5))
    grid = FluidGrid(size=16, dt=0.005, viscosity=1 / 200, forcing=2.0, wavenumber=3, damping=0.4)
    start = initial_field(white.double(), 3, 1.5)
    for k, state in enumerate(cut(images, 16).flatten(1, 2).unbind(1)):
        expected = advance(start, grid, 10 + 3 * k)
        torch.testing.assert_close(state.double(), expected, rtol=0, atol=2e-5)


def test_the_last_projection_is_in_float64():
    recipe = KolmogorovFlow(**SMALL)
    start = initial_field(torch.randn(2, 2, 16, 16))
    images = recipe.trajectories(start)
    states = advance(start, recipe.grid, 5)
    assert torch.equal(cut(images, 16)[:, 0, 0], project(states.double()).float())
    assert not torch.equal(cut(images, 16)[:, 0, 0], states)


def test_start_may_be_the_initial_field_itself():
    recipe = KolmogorovFlow(size=16, rows=1, columns=1, start=0.0)
    state = recipe.draw(1, torch.Generator().manual_seed(0))
    speed = state.square().sum(1).sqrt().max()
    assert speed.item() == pytest.approx(3.0, rel=1e-6)


def test_images_depend_on_seed_split_and_number_alone():
    recipe = KolmogorovFlow(**SMALL)
    whole = recipe.images(1, "train", 0, 70)
    assert torch.equal(recipe.images(1, "train", 60, 68), whole[60:68])
    assert len(np.unique(whole.numpy(), axis=0)) == 70
    others = [recipe.images(2, "train", 0, 1), recipe.images(1, "val", 0, 1)]
    assert all((other - whole[:1]).abs().max() > 0.1 for other in others)


def test_images_do_not_depend_on_the_number_of_threads():
    recipe, drawn, threads = KolmogorovFlow(rows=1, columns=1, start=0.1), [], torch.get_num_threads()
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            drawn.append(recipe.draw(4, torch.Generator().manual_seed(0)))
            assert torch.get_num_threads() == n
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*drawn)


def test_the_short_form_draws_the_same_images(monkeypatch):
    monkeypatch.setattr(KolmogorovFlow, "draw", lambda self, n, rng: torch.randn(n, *self.shape, generator=rng))
    x = kolmogorov_flow(1, size=8, rows=1, columns=2, seed=3, split="test")
    assert torch.equal(x, KolmogorovFlow(size=8, rows=1, columns=2).images(3, "test", 0, 1))


def test_the_dataset_is_known_by_name_and_by_its_settings():
    assert DATASETS["kolmogorov"] is KolmogorovFlow
    assert KolmogorovFlow.sizes == {"train": 10_000, "val": 1000, "test": 10_000}
    assert DivergenceData().recipe == {f.name: f.default for f in fields(KolmogorovFlow)}
    data = DivergenceData(size=8, rows=1, columns=3, dt=0.02, start=0.4)
    recipe = build.dataset(data)
    assert recipe == KolmogorovFlow(size=8, rows=1, columns=3, dt=0.02, start=0.4)
    assert recipe.shape == (2, 8, 24)
    assert build.constraint(data.rule)(recipe.draw(4, torch.Generator().manual_seed(0))).max() < 1e-6


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"rows": 0}, "rows.*must be 1 or more"),
        ({"inner_steps": 0}, "inner_steps.*must be 1 or more"),
        ({"reynolds": 0.0}, "reynolds.*must be positive"),
        ({"max_speed": -1.0}, "max_speed.*must be positive"),
        ({"size": 2}, "size must be 3 or more"),
        ({"reynolds": 1.0, "dt": 0.005}, "explicit diffusion.*dt of at most 0.00241"),
        ({"dt": 0.025}, r"crosses 0\.764 cells.*dt of at most 0\.0229"),
        ({"start": 0.333}, "start must be a whole number of steps"),
        ({"start": -1.0}, "start must be .* 0 or more"),
        ({"start": math.inf}, "start must be .* finite"),
        ({"start": math.nan}, "start must be .* finite"),
    ],
)
def test_settings_without_meaning_are_refused(bad, words):
    with pytest.raises(UsageError, match=words):
        KolmogorovFlow(**bad)


def test_the_longest_step_that_is_allowed_is_stable_and_a_longer_one_is_not(monkeypatch):
    one_state = {"rows": 1, "columns": 1}
    allowed = KolmogorovFlow(dt=0.0225, start=4.5, **one_state).draw(4, torch.Generator().manual_seed(0))
    assert 0.8 < allowed.std() < 1.1
    monkeypatch.setattr("namm.datasets.kolmogorov.MAX_COURANT", 2.0)
    with pytest.raises(UsageError, match=r"overflowed.*smaller dt"):
        KolmogorovFlow(dt=0.04, start=4.4, **one_state).draw(4, torch.Generator().manual_seed(0))
