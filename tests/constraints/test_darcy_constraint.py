"""The Darcy rule: what ℓ averages, the natural and the nearest pair, what is refused."""

import json

import pytest
import torch

import namm
from namm.constraints import Darcy
from namm.constraints.description import describe, rebuild
from namm.datasets import darcy_flow
from namm.errors import DataError
from namm.experiments.darcy import PUBLISHED, DarcyRule
from namm.experiments.engine.build import constraint
from namm.simulators.darcy import solve

SCALE = torch.tensor([0.06, 1.2])[:, None, None]


def noisy(x, sigma, seed=0):
    return x + sigma * SCALE.to(x) * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x)


@pytest.fixture(scope="module")
def images():
    return darcy_flow(3, size=16)


def test_distance_is_the_mean_over_three_planes_zeros_included():
    """p = x² and K = 1 at 8 points: −2 less the source, walls of 2 on the last row, nothing at the columns."""
    x = torch.linspace(0, 1, 8, dtype=torch.float64)[:, None].expand(8, 8)
    image = torch.stack([x**2, torch.ones_like(x)])[None]
    # One point of each corner has the source: |−2 − 10| and |−2 + 10| in place of 2.
    expected = (62 * 2 + 12 + 8 + 8 * 2) / (3 * 64)
    assert Darcy()(image).item() == pytest.approx(expected, rel=1e-12)
    assert Darcy().residual(image).shape == (1, 3, 8, 8)


def test_data_obey_and_noise_does_not(images):
    report = Darcy().check(images)
    assert report.floor_ratio < 1e-3
    report.require_obeyed().require_active()
    assert Darcy()(noisy(images, 0.02)).min() > 5 * Darcy()(images).max()


def test_projection_keeps_the_permeability_and_stays(images):
    rule, x = Darcy(), noisy(images, 0.02)
    projected = rule.project(x)
    assert projected.dtype == torch.float32
    assert torch.equal(projected[:, 1], x[:, 1])
    torch.testing.assert_close(projected[:, 0], solve(x[:, 1]).float(), rtol=0, atol=0)
    torch.testing.assert_close(rule.project(images), images, rtol=1e-4, atol=1e-6)
    x[:, 1, 5] = -3.0
    assert rule.project(x)[:, 1, 5].eq(0.01).all()
    assert rule.project(x).isfinite().all()


def test_the_nearest_pair_obeys_as_data_do_and_is_nearer_than_the_projection(images):
    rule, x = Darcy(), noisy(images, 0.02)
    found, projected = rule.nearest(x, SCALE), rule.project(x)
    assert found.dtype == torch.float32

    def far(y):
        return ((y - x) / SCALE).square().mean((1, 2, 3)).sqrt()

    assert (far(found) < 0.7 * far(projected)).all()
    assert (far(found) < 0.02).all()
    # On the set: its own pressure again.
    torch.testing.assert_close(rule.project(found)[:, 0], found[:, 0], rtol=0, atol=1e-5)
    by_image = SCALE.expand(3, 2, 1, 1) * torch.tensor([1.0, 2.0, 3.0])[:, None, None, None]
    torch.testing.assert_close(rule.nearest(x, by_image), found, rtol=1e-4, atol=1e-5)  # units change nothing


def test_the_scale_decides_which_of_the_two_gives_way(images):
    rule, x = Darcy(), noisy(images, 0.02)
    stiff_p, stiff_K = (rule.nearest(x, torch.tensor(s)[:, None, None]) for s in ([1e-3, 1.2], [0.06, 1e-3]))
    assert ((stiff_p - x)[:, 0].norm(dim=(1, 2)) < 0.7 * (stiff_K - x)[:, 0].norm(dim=(1, 2))).all()
    assert ((stiff_K - x)[:, 1].norm(dim=(1, 2)) < 0.1 * (stiff_p - x)[:, 1].norm(dim=(1, 2))).all()


def test_a_scale_that_varies_within_a_channel_has_no_nearest(images):
    assert Darcy().nearest(images, torch.linspace(1, 2, 16)) is None
    with pytest.raises(DataError, match="units > 0"):
        Darcy().nearest(images, torch.zeros(()))


@pytest.mark.parametrize("method", ["distance", "residual", "project"])
def test_gradients_are_exact(method):
    x = noisy(darcy_flow(1, size=8).double(), 0.01).requires_grad_()
    assert torch.autograd.gradcheck(getattr(Darcy(), method), x, fast_mode=True)


def test_autocast_and_narrow_types_change_nothing(images):
    rule = Darcy()
    with torch.autocast("cpu", torch.bfloat16):
        inside = rule(images), rule.residual(images), rule.project(images)
    outside = rule(images), rule.residual(images), rule.project(images)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))
    assert torch.equal(rule.residual(images.bfloat16()), rule.residual(images.bfloat16().float()))


def test_compiles_whole_at_one_size_after_another():
    torch.compiler.reset()
    rule = Darcy()
    compiled = torch.compile(rule, fullgraph=True, backend="eager")
    for size, n in ((8, 2), (9, 3)):
        x = torch.rand(n, 2, size, size, dtype=torch.float64).requires_grad_()
        torch.testing.assert_close(compiled(x), rule(x))
        torch.testing.assert_close(*(torch.autograd.grad(ell.sum(), x) for ell in (compiled(x), rule(x))))


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((2, 1, 8, 8), r"two channels.*\(2, 1, 8, 8\)"),
        ((2, 8, 8), r"\(B, 2, H, W\)"),
        ((2, 2, 8, 10), "square images.*8×10"),
        ((2, 2, 6, 6), "8×8 points or more.*6×6"),
    ],
)
@pytest.mark.parametrize("method", ["distance", "residual", "project", "nearest"])
def test_images_that_are_no_pair_of_fields_are_refused(shape, words, method):
    with pytest.raises(DataError, match=words):
        getattr(Darcy(), method)(torch.ones(shape), *[torch.ones(())] * (method == "nearest"))


def test_the_rule_survives_json_and_is_what_the_settings_describe(images):
    assert namm.Darcy is Darcy
    assert describe(Darcy()) == {"name": "Darcy"}
    for rule in (Darcy(), constraint(DarcyRule())):
        again = rebuild(json.loads(json.dumps(describe(2.0 * rule))))
        assert repr(again) == "2 * Darcy()"
        assert torch.equal(again(images), 2.0 * Darcy()(images))


def test_published_figures_are_those_of_the_table():
    assert min(PUBLISHED, key=lambda name: PUBLISHED[name].re) == "PIDM-ME"
    assert min(PUBLISHED, key=lambda name: PUBLISHED[name].wd) == "PMosFM"
    assert (PUBLISHED["PBFM"].re, PUBLISHED["FM-OT"].re, PUBLISHED["CoCoGen"].seconds) == (0.838, 4.159, 7.395)
