"""Doppler and gravitational shift against closed forms; symmetries, convergence and spirals of the images."""

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.ndimage import map_coordinates
from torch import Tensor

from namm.simulators.accretion import EDDIES, REACH, Flow, _Gas, frequency_ratio, images, stirred
from namm.simulators.kerr import horizon, last_stable_orbit


def eddies(n: int, *, generator: torch.Generator) -> Tensor:
    return stirred(torch.randn(n, *EDDIES, generator=generator, dtype=torch.float64))


SMOOTH = {
    "spin": 0.5,
    "inclination": 0.0,
    "position_angle": 0.0,
    "thickness": 0.3,
    "steepness": 3.5,
    "rotation": 0.7,
    "turbulence": 0.0,
    "shear": 2.0,
}


def flow(**changes: float | list[float]) -> Flow:
    values = {name: torch.tensor(value, dtype=torch.float64) for name, value in (SMOOTH | changes).items()}
    n = max(value.numel() for value in values.values())
    return Flow(**{name: value.expand(n) for name, value in values.items()})


def smooth_images(size: int = 32, field_of_view: float = 26.0, **changes: float | list[float]) -> Tensor:
    gas = flow(**changes)
    return images(gas, torch.zeros(len(gas.spin), *EDDIES, dtype=torch.float64), size, field_of_view)


def ratio(a: float, beta: float, r: float, xi: float = 0.0, dr: float = 0.0, z2: float = 0.0) -> float:
    a, beta, r, z2, xi, dr = (torch.tensor([v], dtype=torch.float64) for v in (a, beta, r, z2, xi, dr))
    return frequency_ratio(a, beta, last_stable_orbit(a), r, z2, xi, dr).item()


@given(a=st.floats(-0.97, 0.97), away=st.floats(0.001, 30), xi=st.floats(-4, 4))
def test_orbiting_gas_is_shifted_as_bardeens_circular_orbits(a, away, xi):
    r = last_stable_orbit(torch.tensor(a, dtype=torch.float64)).item() + away
    slow = r**-1.5
    expected = math.sqrt(1 - 3 / r + 2 * a * slow) / (1 + a * slow - xi * slow)
    assert ratio(a, 1.0, r, xi) == pytest.approx(expected, rel=1e-9)


@given(r=st.floats(2.01, 100))
def test_light_straight_out_of_falling_gas(r):
    """Without spin and from rest at infinity: 1 − √(2/r) outwards, 1 + √(2/r) for light that still goes in."""
    assert ratio(0.0, 0.0, r, dr=r**2) == pytest.approx(1 - math.sqrt(2 / r), rel=1e-6)
    assert 1 / ratio(0.0, 0.0, r) == pytest.approx(1 / (1 - 2 / r), rel=1e-6)


@given(a=st.floats(-0.97, 0.97), part=st.floats(0.02, 0.98))
def test_plunging_gas_keeps_the_last_orbits_energy_and_angular_momentum(a, part):
    spin = torch.tensor(a, dtype=torch.float64)
    r_ms = last_stable_orbit(spin).item()
    r = horizon(spin).item() + part * (r_ms - horizon(spin).item())
    u_t = 1 / ratio(a, 1.0, r)
    u_phi = u_t - 1 / ratio(a, 1.0, r, xi=1.0)
    energy = (1 - 2 / r) * u_t + 2 * a / r * u_phi
    momentum = -2 * a / r * u_t + (r**2 + a**2 + 2 * a**2 / r) * u_phi
    slow = r_ms**-1.5
    root = math.sqrt(1 - 3 / r_ms + 2 * a * slow)
    assert energy == pytest.approx((1 - 2 / r_ms + a * slow) / root, rel=1e-5)
    assert momentum == pytest.approx(math.sqrt(r_ms) * (1 - 2 * a * slow + (a / r_ms) ** 2) / root, rel=1e-5)


@given(
    a=st.floats(-0.97, 0.97), beta=st.floats(0, 1), z=st.floats(0, 0.95), part=st.floats(0.001, 1), b=st.floats(-6, 6)
)
def test_gas_is_never_faster_than_light(a, beta, z, part, b):
    """g is a finite positive number wherever light of that ξ can be (ṙ² = W(w)r⁴ ≥ 0 with the least possible η)."""
    r = horizon(torch.tensor(a, dtype=torch.float64)).item() / part**0.5 * 1.001
    eta = max(0.0, (b * z) ** 2 / (1 - z**2) - (a * z) ** 2)
    potential = (r**2 + a**2 - a * b) ** 2 - (r**2 - 2 * r + a**2) * (eta + (b - a) ** 2)
    if potential >= 0:
        for sign in (1, -1):
            assert 0 < ratio(a, beta, r, b, sign * math.sqrt(potential), z**2) < math.inf


def test_a_calm_disc_seen_face_on_is_round():
    x = smooth_images()[0]
    torch.testing.assert_close(x, x.rot90(), rtol=1e-9, atol=0)
    torch.testing.assert_close(x, x.T, rtol=1e-9, atol=0)
    torch.testing.assert_close(x, smooth_images(position_angle=1.0)[0], rtol=1e-9, atol=0)
    # Pixels at one distance by Pythagoras, 5² + 5² = 1² + 7² and so on, apart from the finely sampled ring.
    steps = 2 * torch.arange(32) - 31
    distance = (steps[:, None] ** 2 + steps**2).flatten()
    outside = distance > (2 * 8) ** 2
    for d in distance[outside].unique():
        group = x.flatten()[distance == d]
        torch.testing.assert_close(group, group[:1].expand_as(group), rtol=1e-9, atol=0)


def test_the_shadow_is_dark_and_the_ring_bright():
    x = smooth_images(64)[0]
    row = x[32]
    peak = row[:32].argmax().item()
    assert (31.5 - peak) * 26 / 64 == pytest.approx(math.sqrt(27), abs=0.5)
    assert x[31:33, 31:33].max() < 0.1 * row.max()
    assert x[0, 0] < 0.1 * row.max()


def test_the_approaching_side_is_brighter_the_more_so_the_steeper_the_view():
    degrees = [5, 20, 35, 50, 65, 80]
    for spin in (-0.9, 0.0, 0.9):
        x = smooth_images(spin=spin, inclination=[math.radians(d) for d in degrees])
        left, right = x[:, :, :16].sum((1, 2)), x[:, :, 16:].sum((1, 2))
        asymmetry = ((left - right) / (left + right)).tolist()
        assert asymmetry[0] > 0.01
        assert all(later > earlier + 0.01 for earlier, later in pairwise(asymmetry))


def test_brightness_goes_with_the_cube_of_the_shift():
    """Without spin, pixels at ±α on the equator see the same path through a thin disc in Kepler's orbits at r = 19.
    What is left of their ratio is that of g³, g ∝ 1/(1 − Ωξ)."""
    row = smooth_images(5, spin=0.0, inclination=math.pi / 3, thickness=0.1, rotation=1.0, field_of_view=50.0)[0, 2]
    drift = 20 * math.sin(math.pi / 3) * 19**-1.5
    assert (row[0] / row[4]).item() == pytest.approx(((1 + drift) / (1 - drift)) ** 3, rel=0.05)


@pytest.mark.parametrize(("steepness", "thickness", "turbulence"), [(3.0, 0.1, 0.0), (4.0, 0.15, 0.8)])
def test_far_from_the_hole_the_light_is_the_column_of_gas(steepness, thickness, turbulence):
    """Straight down on orbits of r = b − 1 = 29: g³ j integrated over a Gaussian of height hr, δ being 0."""
    changes = {"steepness": steepness, "thickness": thickness, "turbulence": turbulence}
    x = smooth_images(5, spin=0.0, rotation=1.0, field_of_view=75.0, **changes)[0, 2, 4].item()
    r = 29.0
    column = r**-steepness * math.sqrt(2 * math.pi) * thickness * r * math.exp(-(turbulence**2) / 2)
    assert x == pytest.approx((1 - 3 / r) ** 1.5 * column, rel=0.08)


def test_symmetries_of_the_camera():
    x = smooth_images(inclination=0.8)[0]
    below = smooth_images(inclination=math.pi - 0.8)[0]
    torch.testing.assert_close(below, x.flip(0), rtol=1e-8, atol=1e-12)
    turned = smooth_images(inclination=0.8, position_angle=math.pi / 2)[0]
    torch.testing.assert_close(turned, x.rot90(), rtol=1e-6, atol=1e-10)  # counter-clockwise
    assert (x - x.flip(0)).abs().max() > 0.01 * x.max()


def test_more_steps_and_finer_pixels_change_little():
    rng = torch.Generator().manual_seed(0)
    gas = flow(inclination=[0.3, 1.1], spin=[0.9, -0.9], thickness=[0.1, 0.5], turbulence=0.8)
    delta = eddies(2, generator=rng)
    x = images(gas, delta, 32)
    finer = images(gas, delta, 32, steps=240)
    assert ((x - finer).abs().amax((1, 2)) < 0.02 * x.amax((1, 2))).all()
    averaged = torch.nn.functional.avg_pool2d(images(gas, delta, 96)[:, None], 3)[:, 0]
    assert ((x - averaged).abs().mean((1, 2)) < 0.05 * x.mean((1, 2))).all()


def test_without_turbulence_the_random_field_does_nothing():
    delta = eddies(1, generator=torch.Generator().manual_seed(0))
    calm, stormy = flow(inclination=0.5), flow(inclination=0.5, turbulence=1.0)
    assert torch.equal(images(calm, delta, 24), images(calm, 0 * delta, 24))
    even = images(stormy, 0 * delta, 24)
    assert (images(stormy, delta, 24) - even).abs().mean() > 0.2 * even.mean()


def test_arms_trail_as_logarithmic_spirals():
    """δ = cos(φ + s ln r) in a thin disc face-on: bright at φ = −s ln r, while the gas turns counter-clockwise."""
    shear = 1.5
    delta = torch.cos(2 * math.pi * torch.arange(EDDIES[1]) / EDDIES[1]).double().expand(1, *EDDIES)
    x = images(flow(spin=0.0, thickness=0.1, turbulence=1.0, shear=shear), delta, 96, field_of_view=100.0)[0]
    centres = (torch.arange(96) - 47.5) * 100 / 96
    phase = torch.atan2(-centres[:, None].expand(96, 96), centres.expand(96, 96))
    b = (centres[:, None] ** 2 + centres**2).sqrt()
    angles, radii = [], np.array([15.0, 35.0])
    for radius in radii:
        ring = (b - radius).abs() < 1
        angles.append(math.atan2((x * phase.sin())[ring].sum(), (x * phase.cos())[ring].sum()))
    swept = (angles[1] - angles[0] + math.pi) % (2 * math.pi) - math.pi
    # Light that arrives b off the middle left the disc near r = b − 1.
    assert swept == pytest.approx(-shear * math.log(34 / 14), rel=0.1)


def test_eddies_have_unit_variance_and_kolmogorovs_power():
    delta = eddies(200, generator=torch.Generator().manual_seed(0))
    assert delta.shape == (200, *EDDIES)
    assert delta.var().item() == pytest.approx(1, abs=0.05)
    power = torch.fft.fft2(delta).abs().square().mean(0)
    for i, j in ((1, 3), (5, 2), (10, 20)):
        k2 = (2 * math.pi * i / REACH) ** 2 + j**2
        expected = ((1 + 0.64 * k2) / (1 + 0.64)) ** (-11 / 6)
        assert (power[i, j] / power[0, 1]).item() == pytest.approx(expected, rel=0.35)


def test_the_random_field_is_read_off_linearly_and_periodically():
    delta = eddies(2, generator=torch.Generator().manual_seed(1))
    rng = torch.Generator().manual_seed(2)
    which = torch.randint(0, 2, (500,), generator=rng)
    along, across = (torch.rand(500, generator=rng, dtype=torch.float64) * 4 - 2 for _ in range(2))
    ours = _Gas(flow(spin=[0.0, 0.0]), delta, which)._interpolate(which, along, across)
    places = [which.numpy(), along.numpy() * EDDIES[0], across.numpy() * EDDIES[1]]
    # Order 1 between the two fields would mix them, but they are asked for at whole numbers.
    np.testing.assert_allclose(ours, map_coordinates(delta.numpy(), places, order=1, mode="grid-wrap"), atol=1e-9)


def test_images_do_not_depend_on_the_batch_they_are_in(monkeypatch):
    monkeypatch.setattr("namm.simulators.accretion.GRAIN", 2400)  # two images to a piece
    rng = torch.Generator().manual_seed(3)
    gas = flow(inclination=[0.2, 0.6, 1.0, 1.4, 2.0, 0.4, 0.1], turbulence=0.7)
    delta = eddies(7, generator=rng)
    together = images(gas, delta, 24)
    one_by_one = torch.cat([images(gas[i : i + 1], delta[i : i + 1], 24) for i in range(7)])
    torch.testing.assert_close(together, one_by_one, rtol=1e-9, atol=0)


@pytest.mark.parametrize(("grain", "workers"), [(145, 3), (144, 1)])
def test_threads_are_ours_or_pytorchs_but_not_both(monkeypatch, grain, workers):
    """From `grain` elements on PyTorch splits operations: images of 144 pixels are then made one at a time."""
    made = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, max_workers):
            made.append(max_workers)
            super().__init__(max_workers)

    monkeypatch.setattr("namm.simulators.accretion.GRAIN", grain)
    monkeypatch.setattr("namm.simulators.accretion.ThreadPoolExecutor", Pool)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    smooth_images(12, inclination=[0.1, 0.2])
    assert made == [workers]
