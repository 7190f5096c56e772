"""The fluid against a literal NumPy step, dense linear algebra, exact flows, their order of convergence and budgets."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from namm.errors import DataError, UsageError
from namm.simulators.fluid import (
    FluidGrid,
    advance,
    cut,
    divergence,
    force,
    initial_field,
    lay_out,
    project,
    rollout,
    step,
    vorticity,
)

sizes = st.integers(3, 7)
seeds = st.integers(0, 2**31)


def noise(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def unforced(n, dt, viscosity=0.0):
    return FluidGrid(size=n, dt=dt, viscosity=viscosity, forcing=0.0, damping=0.0)


def places(n):
    """Coordinates of cell faces and of cell centres along an axis of length 2π."""
    index = torch.arange(n, dtype=torch.float64)
    return (index + 1) * 2 * math.pi / n, (index + 0.5) * 2 * math.pi / n


def divergence_matrix(n, m):
    """Dense (nm, 2nm) matrix of the divergence on cells of width 1."""
    back_x = np.kron(np.eye(n) - np.roll(np.eye(n), -1, 1), np.eye(m))
    back_y = np.kron(np.eye(n), np.eye(m) - np.roll(np.eye(m), -1, 1))
    return np.hstack([back_x, back_y])


def dense_projection(velocity):
    """Subtract from (2, n, m) what lies in the range of the transposed divergence."""
    n, m = velocity.shape[1:]
    gradient = divergence_matrix(n, m).T
    potential, *_ = np.linalg.lstsq(gradient, velocity.reshape(-1), rcond=None)
    return velocity - (gradient @ potential).reshape(velocity.shape)


def face_value(c, k, w, dt, h):
    """Van Leer limited Lax–Wendroff on the face between c[k] and c[k + 1], on a ring."""
    n = len(c)
    behind, here, there, beyond = (c[(k + shift) % n] for shift in (-1, 0, 1, 2))
    q, d = w * dt / h, there - here
    low, high = (here, here + (1 - q) * d / 2) if w > 0 else (there, there - (1 + q) * d / 2)
    r = (here - behind if w > 0 else beyond - there) / (d if d != 0 else 1.0)
    return low + (2 * r / (1 + r) if r > 0 else 0.0) * (high - low)


def slow_step(velocity, grid):
    """One step, cell by cell; velocity: NumPy (2, n, n)."""
    n, h, dt = grid.size, grid.spacing, grid.dt
    after = np.empty_like(velocity)
    unit = ((1, 0), (0, 1))
    for c, field in enumerate(velocity):

        def flux(i, j, a, c=c, field=field):
            side = unit[c]
            w = (velocity[a, i % n, j % n] + velocity[a, (i + side[0]) % n, (j + side[1]) % n]) / 2
            line, k = (field[:, j % n], i % n) if a == 0 else (field[i % n], j % n)
            return w * face_value(line, k, w, dt, h)

        for i in range(n):
            for j in range(n):
                here = field[i, j]
                rate = -(flux(i, j, 0) - flux(i - 1, j, 0) + flux(i, j, 1) - flux(i, j - 1, 1)) / h
                around = field[i - 1, j] + field[(i + 1) % n, j] + field[i, j - 1] + field[i, (j + 1) % n]
                rate += grid.viscosity * (around - 4 * here) / h**2 - grid.damping * here
                if c == 0:
                    rate += grid.forcing * math.sin(2 * math.pi * grid.wavenumber * (j + 0.5) / n)
                after[c, i, j] = here + dt * rate
    return dense_projection(after)


@settings(max_examples=15)
@given(sizes, seeds, st.floats(0.01, 0.3), st.booleans())
def test_a_step_is_the_formula_cell_by_cell(n, seed, dt, plateaus):
    grid = FluidGrid(size=n, extent=3.0, dt=dt, viscosity=0.02, forcing=0.7, wavenumber=2, damping=0.3)
    velocity = noise(2, n, n, seed=seed)
    if plateaus:  # equal neighbours, where ratios of differences have no denominator
        velocity = velocity.round()
    np.testing.assert_allclose(step(velocity, grid), slow_step(velocity.numpy(), grid), rtol=0, atol=1e-12)


def test_differences_land_on_centres_and_corners():
    """In a smooth flow they err by h²/24 of its third derivatives there, and by h elsewhere."""

    def errors(n):
        face, centre = places(n)
        u, v = torch.outer(face.sin(), (2 * centre).cos()), torch.outer((3 * centre).cos(), face.sin())
        source = torch.outer(centre.cos(), (2 * centre).cos()) + torch.outer((3 * centre).cos(), centre.cos())
        spin = 2 * torch.outer(face.sin(), (2 * face).sin()) - 3 * torch.outer((3 * face).sin(), face.sin())
        velocity, h = torch.stack([u, v]), 2 * math.pi / n
        return [(divergence(velocity, h) - source).abs().max(), (vorticity(velocity, h) - spin).abs().max()]

    coarse, fine = errors(32), errors(64)
    assert max(fine) < 0.02
    assert np.divide(coarse, fine) == pytest.approx([4, 4], rel=0.05)


@given(sizes, sizes, seeds)
def test_a_stream_function_gives_no_divergence_and_its_laplacian_as_vorticity(n, m, seed):
    stream, h = noise(n, m, seed=seed), 0.3
    velocity = torch.stack([(stream - stream.roll(1, 1)) / h, -(stream - stream.roll(1, 0)) / h])
    around = sum(stream.roll(shift, axis) for shift in (1, -1) for axis in (0, 1))
    assert divergence(velocity, h).abs().max() < 1e-12
    torch.testing.assert_close(vorticity(velocity, h), -(around - 4 * stream) / h**2, rtol=0, atol=1e-11)


@given(sizes, sizes, seeds)
def test_projection_is_dense_least_squares(n, m, seed):
    velocity = noise(2, n, m, seed=seed)
    projected = project(velocity)
    np.testing.assert_allclose(projected, dense_projection(velocity.numpy()), rtol=0, atol=1e-12)
    np.testing.assert_allclose(divergence(projected, 0.1), 0, atol=1e-12)
    torch.testing.assert_close(project(projected), projected, rtol=0, atol=1e-13)
    torch.testing.assert_close(projected.mean((1, 2)), velocity.mean((1, 2)), rtol=0, atol=1e-14)
    removed = velocity - projected
    assert abs((removed * project(noise(2, n, m, seed=seed + 1))).sum()) < 1e-12 < removed.square().sum()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_flow_of_one_cell_per_step_carries_profiles_unchanged(sign, axis):
    n = 16
    grid = unforced(n, dt=0.1)
    profile = noise(n)
    along = torch.full((n, n), sign * grid.spacing / grid.dt, dtype=torch.float64)
    across = profile[:, None].expand(n, n)
    velocity = torch.stack([along, across] if axis == 0 else [across.T, along])
    torch.testing.assert_close(step(velocity, grid), velocity.roll(sign, axis + 1), rtol=0, atol=1e-12)


@given(seeds, st.floats(-1, 1))
def test_no_profile_overshoots_or_roughens(seed, courant):
    n = 12
    grid = unforced(n, dt=0.1)
    across = noise(n, seed=seed)[:, None].expand(n, n)
    velocity = torch.stack([torch.full_like(across, courant * grid.spacing / grid.dt), across])
    after, before = advance(velocity, grid, 5)[1, :, 0], across[:, 0]
    assert (before.min() - 1e-12 <= after).all()
    assert (after <= before.max() + 1e-12).all()
    assert (after - after.roll(1)).abs().sum() <= (before - before.roll(1)).abs().sum() + 1e-12


def test_the_force_drives_the_laminar_flow_from_rest():
    """U sin(ky) feels F − (νλ + μ)U, λ = (2 − 2cos kh)/h²: after m steps U = F(1 − (1 − Δt(νλ + μ))ᵐ)/(νλ + μ)."""
    grid = FluidGrid(size=24, dt=0.05, viscosity=0.1, forcing=0.8, wavenumber=3, damping=0.2)
    drag = grid.viscosity * (2 - 2 * math.cos(3 * grid.spacing)) / grid.spacing**2 + grid.damping
    speed = 0.8 / drag * (1 - (1 - grid.dt * drag) ** 40)
    _, centre = places(24)
    laminar = torch.stack([(speed * torch.sin(3 * centre)).expand(24, 24), torch.zeros(24, 24)])
    torch.testing.assert_close(advance(torch.zeros(2, 24, 24).double(), grid, 40), laminar, rtol=0, atol=1e-13)


def taylor_green(n, decay):
    face, centre = places(n)
    u = torch.outer(face.sin(), centre.cos())
    return decay * torch.stack([u, -u.T])


def taylor_green_error(n, steps, viscosity=0.2):
    """Largest error at time 1 of u = e^{−2νt} sin x cos y, v = −e^{−2νt} cos x sin y."""
    grid = unforced(n, 1 / steps, viscosity)
    after = advance(taylor_green(n, 1.0), grid, steps)
    return (after - taylor_green(n, math.exp(-2 * viscosity))).abs().max().item()


def test_the_taylor_green_vortex_decays_at_the_scheme_s_order():
    """Second order in space and first in time: with Δt ∝ h² errors fall at least fourfold, with Δt ∝ h by about two."""
    errors = [taylor_green_error(16, 32), taylor_green_error(32, 128), taylor_green_error(64, 512)]
    assert errors[-1] < 2e-4
    assert all(4 <= coarse / fine < 8 for coarse, fine in pairwise(errors))
    assert 1.9 <= taylor_green_error(32, 64) / taylor_green_error(64, 128) < 4


def energy(velocity):
    return velocity.square().sum(-3).mean((-1, -2)) / 2


@pytest.mark.parametrize(("n", "share"), [(32, 0.3), (64, 0.1)])
def test_energy_is_what_the_force_gives_less_what_viscosity_and_limiter_take(n, share):
    """Viscosity takes ν⟨ω²⟩; the limiter takes energy too, never gives it, and less on a finer grid."""
    grid = FluidGrid(size=n, viscosity=0.02)
    velocity = advance(initial_field(noise(2, 2, n, n), 4, 1.5), grid, 50)
    before, given_, taken = energy(velocity), 0.0, 0.0
    for _ in range(50):
        after = step(velocity, grid)
        midway = (velocity + after) / 2
        given_ = given_ + grid.dt * (force(midway, grid) * midway).sum(1).mean((1, 2))
        taken = taken + grid.dt * grid.viscosity * vorticity(midway, grid.spacing).square().mean((1, 2))
        velocity = after
    lost = given_ - taken - (energy(velocity) - before)
    assert (given_ > 0.05).all()
    assert (lost > 0).all()
    assert (lost < share * taken).all()


@given(st.integers(4, 9), seeds, st.floats(1, 3))
def test_initial_fields_are_filtered_noise(n, seed, k0):
    white = noise(3, 2, n, n, seed=seed)
    freq = np.fft.fftfreq(n, 1 / n)
    k = np.hypot(freq[:, None], freq)
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = np.nan_to_num(np.exp(-((np.log(k0) + 0.25 - np.log(k)) ** 2) / 0.5) / k**2)
    filtered = np.fft.ifft2(np.fft.fft2(white.numpy()) * gain).real
    expected = np.stack([dense_projection(field) for field in filtered])
    expected *= 2.5 / np.sqrt((expected**2).sum(1)).max((1, 2))[:, None, None, None]
    np.testing.assert_allclose(initial_field(white, k0, 2.5), expected, rtol=0, atol=1e-11)


def test_initial_fields_in_float32_have_no_divergence_but_rounding():
    start = initial_field(noise(4, 2, 64, 64, dtype=torch.float32))
    assert divergence(start, 0.1).abs().mean() < 2e-6  # one projection leaves 1e-5


def test_a_rollout_holds_the_states_it_names():
    grid, start = FluidGrid(size=8), project(noise(3, 2, 8, 8))
    states = rollout(start, grid, 3, 2, start=4)
    assert states.shape == (3, 3, 2, 8, 8)
    for k in range(3):
        assert torch.equal(states[:, k], advance(start, grid, 4 + 2 * k))
    assert torch.equal(rollout(start, grid, 1, 7)[:, 0], start)


def test_every_flow_of_a_batch_goes_its_own_way():
    grid, batch = FluidGrid(size=8), noise(2, 3, 2, 8, 8)
    one_by_one = torch.stack([torch.stack([step(flow, grid) for flow in row]) for row in batch])
    torch.testing.assert_close(step(batch, grid), one_by_one, rtol=0, atol=1e-14)


def test_gradients_are_exact():
    grid = FluidGrid(size=4, dt=0.1, viscosity=0.1)
    assert torch.autograd.gradcheck(lambda v: step(v, grid), noise(2, 4, 4).requires_grad_())
    still = torch.zeros(2, 4, 4, requires_grad=True)
    assert torch.autograd.grad(step(still, grid).square().sum(), still)[0].isfinite().all()


@pytest.mark.parametrize("function", [lambda v: step(v, FluidGrid(size=8)), project, initial_field])
def test_narrow_types_are_computed_in_float32(function):
    velocity = noise(2, 8, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        inside = function(velocity)
    assert torch.equal(inside, function(velocity.float()))


def test_states_are_laid_out_row_by_row():
    states = noise(5, 2, 3, 2, 4, 4)
    image = lay_out(states)
    assert image.shape == (5, 2, 8, 12)
    for r in range(2):
        for c in range(3):
            assert torch.equal(image[:, :, 4 * r : 4 * r + 4, 4 * c : 4 * c + 4], states[:, r, c])
    assert torch.equal(cut(image, 4), states)


@pytest.mark.parametrize("function", [lambda v: divergence(v, 0.1), lambda v: vorticity(v, 0.1), project])
@pytest.mark.parametrize("shape", [(8, 8), (3, 8, 8), (2, 1, 8, 8)])
def test_what_is_no_velocity_is_refused(function, shape):
    with pytest.raises(DataError, match="2, n, n"):
        function(torch.zeros(shape))


def test_a_velocity_of_another_grid_is_refused():
    with pytest.raises(DataError, match=r"size 64 needs .*\(2, 32, 32\)"):
        step(torch.zeros(2, 32, 32), FluidGrid())


BAD = [{"size": 2}, {"extent": 0.0}, {"dt": -0.1}, {"viscosity": -1.0}, {"damping": -0.1}, {"forcing": math.inf}]


@pytest.mark.parametrize("bad", [*BAD, {"viscosity": 0.3}])
def test_settings_without_meaning_are_refused(bad):
    with pytest.raises(UsageError, match=f"{next(iter(bad))}.*(must|stable)"):
        FluidGrid(**bad)
