"""f for rules of any reach: its bases, what calibration finds, and that it learns what a local f cannot."""

import math

import numpy as np
import pytest
import torch
from scipy.fft import dct

from namm.errors import DataError, UsageError
from namm.maps import ICNN, MirrorMap, RuleNet
from namm.maps.rulenet import basis, principal_directions, statistics

DOUBLE = torch.zeros(1, dtype=torch.float64)


@pytest.mark.parametrize("size", [5, 8, 12])
@pytest.mark.parametrize("periodic", [True, False])
def test_bases_are_orthonormal(size, periodic):
    rows = basis(size, 64, periodic, DOUBLE)
    assert torch.allclose(rows @ rows.T, torch.eye(size, dtype=torch.float64), atol=1e-14)


def test_the_basis_of_an_open_axis_is_the_cosine_transform():
    x = np.random.default_rng(0).standard_normal(9)
    assert np.allclose(basis(9, 64, False, DOUBLE).numpy() @ x, dct(x, type=2, norm="ortho"), atol=1e-13)


def test_the_basis_of_a_periodic_axis_has_the_energies_of_the_fourier_transform():
    x = np.random.default_rng(1).standard_normal(8)
    found = basis(8, 64, True, DOUBLE).numpy() @ x
    energy = np.abs(np.fft.fft(x)) ** 2 / 8
    pairs = [found[0] ** 2, *(found[k] ** 2 + found[k + 1] ** 2 for k in (1, 3, 5)), found[7] ** 2]
    assert np.allclose(pairs, [energy[0], *(2 * energy[1:4]), energy[4]], atol=1e-13)


def test_it_starts_as_the_identity():
    y = torch.randn(2, 2, 8, 12)
    assert torch.equal(RuleNet(2, 8, 12, filters=4, blocks=1)(y), y)


def test_a_rule_on_a_part_of_the_image_has_that_part_as_its_template():
    part = torch.zeros(2, 8, 8)
    part[1, 2:5, 3:7] = 1
    signs = torch.randn(64, 1, 1, 1, generator=torch.Generator().manual_seed(0)).sign()
    f = RuleNet(2, 8, 8, filters=4, blocks=1).calibrate(torch.randn(64, 2, 8, 8), signs * part)
    template, *others = f.whole.templates
    assert torch.allclose(template.abs(), part * math.sqrt(part.numel() / part.sum()), atol=1e-6)
    assert all(bool((other == 0).all()) for other in others)
    assert torch.equal(f.whole.mask, part)
    assert f.is_calibrated


def test_principal_directions_are_those_of_a_singular_value_decomposition():
    gradients = torch.randn(16, 1, 4, 4, dtype=torch.float64) * torch.linspace(1, 9, 16, dtype=torch.float64).view(4, 4)
    found = principal_directions(gradients, 2).flatten(1)
    rows = gradients.flatten(1) / gradients.flatten(1).norm(dim=1, keepdim=True)
    expected = torch.linalg.svd(rows).Vh[:2] * 4  # of root mean square one
    assert torch.allclose((found * expected).mean(1).abs(), torch.ones(2, dtype=torch.float64), atol=1e-10)


def test_statistics_that_f_sees_are_white_on_what_it_was_calibrated_with():
    y = torch.randn(512, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 0.2 + torch.rand(512, 1, 1, 1)
    f = RuleNet(1, 8, 8, filters=4, blocks=1).calibrate(y, torch.ones(8, 1, 8, 8))
    whole = f.whole
    seen = ((statistics(y, whole.mask, whole.templates) - whole.centre) @ whole.whitening).double()
    covariance = torch.cov(seen.T)
    used = covariance.diagonal() > 0.5
    assert int(used.sum()) == 3  # mean, mean square and mean modulus: mask and template add nothing here
    assert torch.allclose(covariance[used][:, used], torch.eye(3, dtype=torch.float64), atol=1e-2)


def test_it_learns_a_sum_which_convolutions_alone_do_not():
    """Noise moves the mean of 256 pixels by a sixteenth of itself: whitened, that is learned in seconds."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(256, 1, 16, 16, generator=rng)
    x = x - x.mean((1, 2, 3), keepdim=True)
    left = {}
    for calibrated in (True, False):
        torch.manual_seed(0)
        f = RuleNet(1, 16, 16, filters=4, blocks=1)
        if calibrated:
            noisy = (x + 0.1 * torch.randn(x.shape, generator=rng)).requires_grad_()
            f.calibrate(noisy.detach(), torch.autograd.grad(noisy.mean((1, 2, 3)).abs().sum(), noisy)[0])
        optimiser = torch.optim.Adam(f.parameters(), 5e-3)
        for _ in range(80):
            batch = x[torch.randint(256, (32,), generator=rng)]
            made = f(batch + 0.1 * torch.randn(batch.shape, generator=rng))
            loss = 100 * made.mean((1, 2, 3)).abs().mean() + (made - batch).abs().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        with torch.no_grad():
            left[calibrated] = float(f(x + 0.1 * torch.randn(x.shape, generator=rng)).mean((1, 2, 3)).abs().mean())
    noise = 0.1 / 16 * math.sqrt(2 / math.pi)
    assert left[True] < 0.3 * noise
    assert left[False] > 3 * left[True]


def test_a_calibrated_map_is_saved_and_loaded_to_the_bit(tmp_path):
    torch.manual_seed(0)
    f = RuleNet(2, 8, 8, filters=4, blocks=1, templates=2, boundary="cylinder")
    f.calibrate(torch.randn(32, 2, 8, 8), torch.randn(8, 2, 8, 8))
    torch.nn.init.normal_(f.whole.last.weight)
    torch.nn.init.normal_(f.tail.weight)
    mirror = MirrorMap(ICNN(2, layers=1, filters=4), f, mean=[0.5, 3.0], scale=[0.1, 7.0]).eval()
    mirror.save(tmp_path)
    again, x = MirrorMap.load(tmp_path), torch.rand(3, 2, 8, 8)
    assert again.f.is_calibrated
    assert again.standardisation == mirror.standardisation
    y = mirror.to_mirror(x)
    assert torch.equal(again.to_mirror(x), y)
    assert torch.equal(again.to_data(y), mirror.to_data(y))
    assert not torch.equal(mirror.to_data(y), y)


@pytest.mark.parametrize("size", [(8, 8), (12, 20), (16, 16)])
def test_other_sizes_than_the_trained_one_pass(size):
    f = RuleNet(1, 12, 12, filters=4, blocks=2).calibrate(torch.randn(16, 1, 12, 12), torch.randn(8, 1, 12, 12))
    torch.nn.init.normal_(f.tail.weight)
    made = f(torch.randn(2, 1, *size))
    assert made.shape == (2, 1, *size)
    assert torch.isfinite(made).all()


def test_under_autocast_the_image_itself_is_not_rounded():
    torch.manual_seed(0)
    f = RuleNet(1, 8, 8, filters=4, blocks=2).calibrate(torch.randn(32, 1, 8, 8), torch.ones(8, 1, 8, 8))
    torch.nn.init.normal_(f.tail.weight, std=1e-3)
    y = 1 + torch.rand(2, 1, 8, 8)
    exact = f(y)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = f(y)
    assert narrow.dtype == torch.float32
    assert (narrow - exact).abs().max() < 1e-3  # y in bfloat16 would be off by 8e-3


@pytest.mark.parametrize("options", [{"channels": 0}, {"filters": 0}, {"modes": 0}, {"boundary": "torus"}])
def test_bad_sizes_are_refused(options):
    with pytest.raises(UsageError, match="RuleNet"):
        RuleNet(**options)


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 3, 8, 8), (1, 1, 2, 8)])
def test_other_images_are_refused(shape):
    with pytest.raises(DataError, match="RuleNet"):
        RuleNet(1, 8, 8, filters=2, blocks=1)(torch.zeros(shape))
