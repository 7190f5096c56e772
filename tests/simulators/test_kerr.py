"""Rays against closed forms (shadow, critical curve, deflection), conserved quantities and Hamilton's equations."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.integrate import solve_ivp

from namm.errors import UsageError
from namm.simulators.accretion import STEPS, Flow, _near_the_ring
from namm.simulators.kerr import Camera, Ray, captured, horizon, last_stable_orbit, trace


def camera(spin: float, degrees: float, alpha, beta) -> Camera:
    numbers = (spin, math.radians(degrees), alpha, beta)
    return Camera(*(torch.as_tensor(number, dtype=torch.float64) for number in numbers))


def constants(spin: torch.Tensor, ray: Ray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Energy E, angular momentum L and Carter's Q of rays around a hole of `spin` (R,), from where they are and go.

    L is −(n × ṅ)_z and Q = |ṅ|² − L² − a²n_z²; E then solves the null condition (a quadratic equation),
    (E(r² + a²) − aL)² = ṙ² + Δ(Q + (L − aE)²), here divided by r⁴. A perfect integration keeps 1, ξ and η.
    """
    aw, w = spin * ray.w, ray.w
    dw, dx, dy, dz = (part / ray.step for part in (ray.dw, ray.dx, ray.dy, ray.dz))
    momentum = ray.y * dx - ray.x * dy
    carter = dx**2 + dy**2 + dz**2 - momentum**2 - (spin * ray.z) ** 2
    delta = 1 - 2 * w + aw**2
    square = (1 + aw**2) ** 2 - delta * aw**2
    middle = aw * w * momentum * (1 + aw**2 - delta)
    rest = (aw * w * momentum) ** 2 - dw**2 - delta * w**2 * (carter + momentum**2)
    return (middle + (middle**2 - square * rest).sqrt()) / square, momentum, carter


def critical_curve(a: float, degrees: float) -> tuple[np.ndarray, np.ndarray]:
    """Bardeen's (α, β): the constants ξ, η of circular photon orbits of radius r, as seen at infinity."""
    prograde, retrograde = (2 * (1 + np.cos(2 / 3 * np.arccos(sign * a))) for sign in (-1, 1))
    r = np.linspace(prograde, retrograde, 401)[1:-1]
    xi = -(r**3 - 3 * r**2 + a**2 * r + a**2) / (a * (r - 1))
    eta = r**3 * (4 * a**2 - r * (r - 3) ** 2) / (a * (r - 1)) ** 2
    i = np.radians(degrees)
    height = eta + (a * np.cos(i)) ** 2 - (xi / np.tan(i)) ** 2
    alpha, beta = -xi[height > 0] / np.sin(i), np.sqrt(height[height > 0])
    return np.concatenate([alpha, alpha]), np.concatenate([beta, -beta])


@pytest.mark.parametrize("degrees", [0, 17, 90])
def test_the_shadow_without_spin_is_a_disc_of_radius_root_27(degrees):
    angle = np.linspace(0, 2 * np.pi, 16, endpoint=False)[:, None]
    b = np.linspace(5.1, 5.3, 101)
    inside = captured(camera(0.0, degrees, b * np.cos(angle), b * np.sin(angle)), steps=300, turns=2)
    radii = b[inside.sum(1)]
    np.testing.assert_allclose(radii, math.sqrt(27), rtol=5e-4)


def test_the_shadow_of_a_spinning_hole_is_bardeens():
    alpha, beta = critical_curve(0.94, 60)
    assert alpha.max() - alpha.min() > 9  # the curve is whole
    middle = (alpha.max() + alpha.min()) / 2
    assert captured(camera(0.94, 60, middle + 0.999 * (alpha - middle), 0.999 * beta), 300, turns=3).all()
    assert not captured(camera(0.94, 60, middle + 1.001 * (alpha - middle), 1.001 * beta), 300, turns=3).any()


@settings(max_examples=10)
@given(spin=st.floats(0.05, 0.97), degrees=st.floats(5, 175), retrograde=st.booleans())
def test_every_shadow_is_bardeens_within_a_percent(spin, degrees, retrograde):
    alpha, beta = critical_curve(spin, degrees)
    if retrograde:
        spin, alpha = -spin, -alpha
    middle = (alpha.max() + alpha.min()) / 2
    for scale, expected in ((0.99, True), (1.01, False)):
        inside = captured(camera(spin, degrees, middle + scale * (alpha - middle), scale * beta), STEPS, turns=2)
        assert (inside == expected).all()


@given(spin=st.floats(0.02, 0.95), degrees=st.floats(5, 65), retrograde=st.booleans(), turned=st.floats(0, 6.28))
@example(spin=0.95, degrees=65.0, retrograde=False, turned=1.0)
def test_fine_pixels_lie_around_every_critical_curve(spin, degrees, retrograde, turned):
    """In images of up to 1024 pixels a side, and all along the curve, its flattened side too."""
    alpha, beta = critical_curve(spin, degrees)
    if retrograde:
        spin, alpha = -spin, -alpha
    x, y = alpha * np.cos(turned) - beta * np.sin(turned), alpha * np.sin(turned) + beta * np.cos(turned)
    values = (spin, math.radians(degrees), turned, *[0.5] * 5)
    flow = Flow(*(torch.tensor([value], dtype=torch.float64) for value in values))
    assert _near_the_ring(flow, *(torch.from_numpy(part)[None] for part in (x, y)), pixel=26 / 1024).all()


@pytest.mark.parametrize("spin", [-0.95, 0.0, 0.5, 0.95])
@pytest.mark.parametrize("degrees", [0, 17, 60, 85])
def test_energy_angular_momentum_and_carters_constant_do_not_drift(spin, degrees):
    """With as many steps as images are made with. The integrator knows E, L and Q as coefficients of its forces only;
    `constants` measures them on the positions and velocities it arrives at, which nothing holds to them."""
    grid = torch.linspace(-13, 13, 27, dtype=torch.float64) + 0.1
    view = camera(spin, degrees, grid.repeat(27), grid.repeat_interleave(27)).flat()
    b = (view.alpha**2 + view.beta**2).sqrt()
    exact = torch.ones_like(b), view.momentum, view.carter
    points = 0
    for every in trace(view, STEPS):
        ray = every.some(every.live)
        points += len(ray.w)
        scales = 1.0, 1 + b[ray.index], 1 + b[ray.index] ** 2
        for found, true, scale in zip(constants(view.spin[ray.index], ray), exact, scales, strict=True):
            assert ((found - true[ray.index]).abs() / scale).max() < 1e-6
    assert points > 20_000


def test_the_measured_constants_are_those_of_the_metric():
    """`constants` itself, at a point and momentum made up here: p_μ = g_μν ẋ^ν/Σ with g written out."""
    a, r, theta = 0.7, 4.0, 1.1
    sigma, delta = r**2 + (a * np.cos(theta)) ** 2, r**2 - 2 * r + a**2
    s2 = np.sin(theta) ** 2
    g_tt, g_tp = -(1 - 2 * r / sigma), -2 * a * r * s2 / sigma
    g_pp = (r**2 + a**2 + 2 * a**2 * r * s2 / sigma) * s2
    p_r, p_theta, p_phi = 0.3, -0.2, 0.05  # upper index
    root = np.sqrt((g_tp * p_phi) ** 2 - g_tt * (sigma / delta * p_r**2 + sigma * p_theta**2 + g_pp * p_phi**2))
    p_t = (-g_tp * p_phi - root) / g_tt  # null
    energy, momentum = -(g_tt * p_t + g_tp * p_phi), g_tp * p_t + g_pp * p_phi
    carter = (sigma * p_theta) ** 2 + np.cos(theta) ** 2 * (momentum**2 / s2 - (a * energy) ** 2)

    view = camera(a, 60, [3.0], [4.0])
    ray = next(iter(trace(view, STEPS)))
    h, n = 0.25, np.array([np.sin(theta), 0, np.cos(theta)])  # backwards, so with reversed velocities
    spun = momentum / s2  # the part of dφ/dλ that is not frame dragging
    dn = -sigma * p_theta * np.array([np.cos(theta), 0, -np.sin(theta)]) - spun * np.array([0, np.sin(theta), 0])
    # Energy 1 is what rays have; Q then carries the energy's own share.
    values = {"step": h, "w": 1 / r, "dw": h * sigma * p_r / r**2}
    values |= dict(zip(("x", "y", "z", "dx", "dy", "dz"), (*n, *(h * dn)), strict=True))
    point = type(ray)(**vars(ray) | {name: torch.tensor([v], dtype=torch.float64) for name, v in values.items()})
    scaled = type(ray)(**vars(point) | {k: getattr(point, k) / energy for k in ("dw", "dx", "dy", "dz")})
    found = constants(torch.tensor([a], dtype=torch.float64), scaled)
    expected = 1.0, momentum / energy, carter / energy**2
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.item() == pytest.approx(theirs, rel=1e-12)


def hamilton(_: float, state: np.ndarray, a: float, xi: float) -> np.ndarray:
    """Hamilton's equations of ΣH = ½(Δp_r² + p_θ² + (ξ − a sin²θ)²/sin²θ − (r² + a² − aξ)²/Δ) in Mino time."""
    parts = [torch.tensor(part, dtype=torch.float64, requires_grad=True) for part in (*state[[0, 1, 3, 4]], xi)]
    r, theta, p_r, p_theta, x = parts
    delta, s2 = r**2 - 2 * r + a**2, theta.sin() ** 2
    energy = (delta * p_r**2 + p_theta**2 + (x - a * s2) ** 2 / s2 - (r**2 + a**2 - a * x) ** 2 / delta) / 2
    d_r, d_theta, v_r, v_theta, v_phi = (d.item() for d in torch.autograd.grad(energy, parts))
    return np.array([v_r, v_theta, v_phi, -d_r, -d_theta])


@pytest.mark.parametrize(("spin", "alpha", "beta"), [(0.9, -6.5, 1.0), (-0.6, 0.5, -5.5), (0.8, 2.0, 1.0)])
def test_rays_follow_hamiltons_equations(spin, alpha, beta):
    """r, θ and the azimuth, frame dragging included, from the sixth point to the last one well outside the horizon."""
    steps = 200
    view = camera(spin, 50, [alpha], [beta])
    rays = [r for r in trace(view, steps) if len(r.w) and r.live.item() and r.w < 0.9 / horizon(view.spin)]
    azimuths = np.unwrap([(torch.atan2(r.y, r.x)).item() for r in rays]) + [r.psi.item() for r in rays]
    first, last = rays[5], rays[-1]
    h = first.step.item()
    r, theta = 1 / first.w.item(), math.acos(first.z.item())
    p_r = first.dw.item() / h * r**2 / (r**2 - 2 * r + spin**2)  # of the light, which comes the other way
    p_theta = first.dz.item() / h / math.sin(theta)
    xi = view.momentum.item()
    state = np.array([r, theta, azimuths[5], p_r, p_theta])
    time = h * (len(rays) - 6)
    answer = solve_ivp(hamilton, (0, -time), state, args=(spin, xi), rtol=1e-8, atol=1e-9).y[:, -1]
    assert last.w.item() == pytest.approx(1 / answer[0], abs=1e-6)
    assert last.z.item() == pytest.approx(math.cos(answer[1]), abs=1e-5)
    assert azimuths[-1] == pytest.approx(answer[2], abs=1e-4)


def deflection(spin: float, alpha: float) -> float:
    """Angle by which a ray in the equatorial plane is bent: what it sweeps beyond π."""
    view = camera(spin, 90, [alpha], [0.0])
    rays = [ray for ray in trace(view, 500) if len(ray.w)]
    azimuths = np.unwrap([torch.atan2(ray.y, ray.x).item() for ray in rays])
    k = next(k for k, ray in enumerate(rays) if not ray.live)
    ray = rays[k - 1]
    rest = -ray.w.item() / ray.dw.item()  # steps from there to infinity, where ẅ = 0
    after = azimuths[k - 1] + rest * (azimuths[k] - azimuths[k - 1]) + ray.psi.item()
    return abs(after - azimuths[0]) - math.pi


@pytest.mark.parametrize("b", [100.0, 1000.0])
def test_weak_deflection_is_four_over_b(b):
    assert deflection(0.0, b) == pytest.approx(4 / b, rel=0.035 if b == 100 else 0.0035)
    assert deflection(0.0, b) == pytest.approx(4 / b + 15 * math.pi / (4 * b**2), rel=30 / b**2 + 1e-4)


def test_light_that_goes_with_the_spin_is_bent_less():
    """To second order the spin adds ∓4a/b²; light of α < 0 turns with the hole."""
    b, a = 300.0, 0.9
    assert deflection(a, b) - deflection(a, -b) == pytest.approx(8 * a / b**2, rel=0.05)
    assert deflection(-a, b) == pytest.approx(deflection(a, -b), abs=1e-9)


@given(spin=st.floats(-0.99, 0.99))
def test_the_last_stable_orbit_solves_its_equation(spin):
    r = last_stable_orbit(torch.tensor(spin, dtype=torch.float64)).item()
    assert r**2 - 6 * r + 8 * spin * math.sqrt(r) - 3 * spin**2 == pytest.approx(0, abs=1e-6)
    assert (r < 6) == (spin > 0) or abs(spin) < 1e-6
    assert r > horizon(torch.tensor(spin)).item()


@pytest.mark.parametrize("spin", [1.0, -1.5, float("nan")])
def test_a_spin_without_a_horizon_is_refused(spin):
    with pytest.raises(UsageError, match="spin lies within"):
        camera(spin, 30, 1.0, 1.0)
