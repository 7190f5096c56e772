"""Few-step models: the teacher's ODE by SciPy, exact jumps of Gaussian data, and a training kept like any other."""

import numpy as np
import pytest
import torch
from oracles import Exact, Gaussian, Mixture, exact_diffusion, marginals
from scipy.integrate import solve_ivp
from test_diffusion import SHAPE, Convolution, convolutional, images
from torch import nn

import namm
from namm.errors import DataError, RunFolderError, UsageError
from namm.generative import DDIM, Consistency, Diffusion, Flow, Mirrored, Straight, Velocity
from namm.generative.base import DrawsNoise, GenerativeModel
from namm.generative.consistency import Jumps
from namm.maps import IdentityMap, MirrorMap
from namm.training.settings import TrainSettings
from namm.training.train_model import load_model, train_model

MEAN = torch.tensor([0.3, -0.2])
COVARIANCE = torch.tensor([[1.0, 0.6], [0.6, 0.5]])
GAUSSIAN = Gaussian(MEAN, COVARIANCE, velocity=True)
QUICK = TrainSettings(budget="20 steps", batch_size=8, learning_rate=1e-2, log_every=10, checkpoint_seconds=0.0)


class ExactJump(nn.Module):
    """The v with which m y − s v is the end of the trajectory through y(t), for y ~ N(MEAN, COVARIANCE).

    Along an axis of variance v the ODE keeps (y(t) − m μ) / √(m² v + s²).
    """

    def forward(self, y_t, t):
        (m, s), y = marginals(t), y_t.flatten(1).double()
        along = (y - m * GAUSSIAN.mean) @ GAUSSIAN.axes
        end = along * (GAUSSIAN.variances / (m**2 * GAUSSIAN.variances + s**2)).sqrt()
        end = GAUSSIAN.mean + end @ GAUSSIAN.axes.T
        return ((m * y - end) / s).reshape(y_t.shape).to(y_t.dtype)


def exact(grid: int) -> Consistency:
    """A model whose F is exact, with an exact teacher."""
    model = Consistency(exact_diffusion(GAUSSIAN, 2).double(), grid=grid)
    model.student.network = ExactJump()
    return model


def pairs(n: int) -> torch.Tensor:
    """Images of two pixels from N(MEAN, COVARIANCE)."""
    law = torch.distributions.MultivariateNormal(MEAN, COVARIANCE)
    return law.sample((n,)).reshape(n, 1, 1, 2)


# The teacher's trajectories


MIXTURE = Mixture(torch.tensor([[-1.0], [0.7]]), torch.tensor([0.3, 0.7]), 0.04)


def slope(t: float, y: np.ndarray) -> np.ndarray:
    """dy/dt = −½ β (y + score) of the mixture, in float64."""
    m = np.exp(-0.05 * t - 4.975 * t**2)
    variance = m**2 * 0.04 + 1 - m**2
    offsets = y[:, None] - m * np.array([-1.0, 0.7])
    weights = np.array([0.3, 0.7]) * np.exp(-(offsets**2) / (2 * variance))
    score = -(weights * offsets).sum(1) / weights.sum(1) / variance
    return -0.5 * (0.1 + 19.9 * t) * (y + score)


def follow_all(grid: int, y: torch.Tensor) -> torch.Tensor:
    """The state at t_min after the teacher's steps from t = 1."""
    model = Consistency(exact_diffusion(MIXTURE, 1).double(), grid=grid)
    for t, below in zip(model.times[:-2], model.times[1:-1], strict=True):
        y = model.follow(y, t.expand(len(y)), below.expand(len(y)))
    return y


def test_the_target_follows_the_ode_as_scipy_integrates_it():
    start = torch.linspace(-2.5, 2.5, 9, dtype=torch.double)
    found = solve_ivp(slope, (1.0, 1e-3), start.numpy(), rtol=1e-10, atol=1e-12)
    assert found.success
    end = torch.from_numpy(found.y[:, -1])
    coarse, fine = (float((follow_all(n, start.reshape(-1, 1, 1, 1)).flatten() - end).abs().max()) for n in (64, 256))
    assert fine < 2e-3
    assert coarse / fine == pytest.approx(16, rel=0.5)  # of second order


def test_one_step_of_the_teacher_by_scipy():
    model = Consistency(exact_diffusion(MIXTURE, 1).double(), grid=128)
    t, below = model.times[:-2], model.times[1:-1]
    y = torch.randn(len(t), 1, 1, 1, dtype=torch.double)
    after = model.follow(y, t, below).flatten()
    for k in range(0, len(t), 9):
        by_scipy = solve_ivp(slope, (float(t[k]), float(below[k])), y[k].flatten().numpy(), rtol=1e-10, atol=1e-12)
        assert float(after[k]) == pytest.approx(by_scipy.y[0, -1], abs=5e-4)


def test_the_last_step_is_the_denoised_image():
    model, y = Consistency(convolutional()), images(3)
    t = torch.full((3,), 1e-3)
    assert torch.allclose(model.follow(y, t, 0 * t), model.teacher.denoise(y, t), atol=1e-6)


@pytest.mark.parametrize("variance", [0.1, 1.0, 4.0])
def test_the_spread_along_the_default_grid(variance):
    """The figures of the module's docstring: 1 % by these steps, 7 % by DDIM's."""
    teacher = exact_diffusion(Gaussian(torch.zeros(1), variance * torch.eye(1)), 1).double()
    model, y = Consistency(teacher), torch.ones(1, 1, 1, 1, dtype=torch.double)
    for t, below in zip(model.times[:-1, None], model.times[1:, None], strict=True):
        y = model.follow(y, t, below)
    assert float(y) / variance**0.5 == pytest.approx(0.988, abs=0.003)
    by_ddim = DDIM(32)(teacher, lambda step: torch.ones_like(y))
    assert float(by_ddim) / variance**0.5 == pytest.approx(0.926, abs=0.004)


# The consistency function


def test_nothing_is_moved_at_the_end():
    model, y = Consistency(convolutional()), images(4)
    assert torch.equal(model.end(y, torch.zeros(4)), y)
    near = model.end(y, torch.full((4,), 1e-3)) - y
    assert 0 < near.abs().max() < 0.05  # s = 0.01 times what the network says


def test_it_begins_as_the_teacher():
    teacher = convolutional()
    teacher.fit_statistics(5 + 2 * images(20))
    model, t = Consistency(teacher), torch.tensor([0.1, 0.9])
    assert torch.equal(model.end(images(2), t), teacher.denoise(images(2), t))
    nn.init.zeros_(teacher.network.layers[0].weight)
    assert not torch.equal(model.end(images(2), t), teacher.denoise(images(2), t))
    assert torch.equal(model.teacher.scale, teacher.scale)
    assert teacher.network.layers[0].weight.requires_grad


def test_the_exact_function_has_no_loss():
    y = pairs(2000).double()
    draws = exact(256).draw(y, torch.Generator().manual_seed(0))
    loss = float(exact(256).loss(y, *draws))
    assert loss < 1e-8
    assert float(Consistency(exact_diffusion(GAUSSIAN, 2).double(), grid=256).loss(y, *draws)) > 1e3 * loss


def test_the_loss_by_hand():
    """One pixel; the teacher's v is 0, so D = m y; the student's is 1, so F = m y − s."""

    class Constant(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.value = value

        def forward(self, y_t, t):
            return torch.full_like(y_t, self.value)

    model = Consistency(Diffusion(Constant(0.0), (1, 1, 1), prediction=Velocity()))
    model.student.network = Constant(1.0)
    y, t, below, epsilon = 0.8, 0.5, 0.3, -0.4
    (m, s), (m1, s1) = ((float(each) for each in marginals(torch.tensor([time]))) for time in (t, below))
    y_t = m * y + s * epsilon
    first = m1 * m * y_t + s1 / s * (y_t - m * m * y_t)
    denoised = (m * y_t + m1 * first) / 2
    after = m1 * denoised + s1 / s * (y_t - m * denoised)
    expected = ((m * y_t - s) - (m1 * after - s1)) ** 2
    found = model.loss(torch.full((1, 1, 1, 1), y), *torch.tensor([[t], [below]]), torch.full((1, 1, 1, 1), epsilon))
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_draws_are_neighbours_on_the_grid():
    model, y = Consistency(convolutional(), grid=4), images(1).expand(4000, *SHAPE)
    t, below, epsilon = model.draw(y, torch.Generator().manual_seed(0))
    pairs_drawn, counts = torch.stack([t, below], 1).unique(dim=0, return_counts=True)
    assert pairs_drawn[0].tolist() == pytest.approx([1e-3, 0.0])
    assert pairs_drawn[-1, 0] == 1
    assert torch.equal(pairs_drawn[:-1, 0], pairs_drawn[1:, 1])
    ratios = torch.expm1(0.1 * pairs_drawn[:, 0].double() + 9.95 * pairs_drawn[:, 0].double() ** 2).sqrt().log()
    assert ratios.diff().tolist() == pytest.approx([float(ratios.diff().mean())] * 3, rel=1e-4)
    assert counts.tolist() == pytest.approx([1000] * 4, abs=120)
    assert epsilon.std() == pytest.approx(1, abs=0.01)


def test_the_loss_is_one_graph_without_dropout():
    model, y = Consistency(convolutional(dropout=0.5)).train(), images(3)
    draws = model.draw(y)
    compiled = torch.compile(model.loss, backend="eager", fullgraph=True)
    assert torch.equal(compiled(y, *draws), model.loss(y, *draws))
    assert not any(part.training for part in model.modules())


# Samples


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_exact_jumps_give_the_right_distribution(steps):
    """F is affine in every y, so the image of 0 and of a basis tells the whole distribution of one evaluation."""
    model = exact(4)
    if steps == 1:
        points = torch.cat([torch.zeros(1, 2), torch.eye(2)]).double().reshape(3, 1, 1, 2)
        centre, *columns = model.end(points, torch.ones(3, dtype=torch.double)).flatten(1)
        matrix = torch.stack(columns, 1) - centre[:, None]
        assert torch.allclose(centre, MEAN.double(), atol=0.005)  # m(1) = 0.007 of it is in the noise
        assert torch.allclose(matrix @ matrix.T, COVARIANCE.double(), atol=1e-4)
    y = model.sample(20_000, steps=steps, batch_size=20_000, generator=0, progress=False).flatten(1)
    assert torch.allclose(y.mean(0), MEAN.double(), atol=0.03)
    assert torch.allclose(torch.cov(y.T), COVARIANCE.double(), atol=0.03)


class StraightJump(nn.Module):
    """The same for y(t) = (1 − t) y + t ε, whose F is y(t) − t output."""

    def forward(self, y_t, t):
        t, y = t.reshape(-1, 1).double(), y_t.flatten(1).double()
        along = (y - (1 - t) * GAUSSIAN.mean) @ GAUSSIAN.axes
        end = along * (GAUSSIAN.variances / ((1 - t) ** 2 * GAUSSIAN.variances + t**2)).sqrt()
        return ((y - GAUSSIAN.mean - end @ GAUSSIAN.axes.T) / t).reshape(y_t.shape).to(y_t.dtype)


@pytest.mark.parametrize("steps", [1, 2])
def test_jumps_along_straight_paths_give_the_right_distribution(steps):
    teacher = Diffusion(StraightJump(), (1, 1, 2), prediction=Flow(), sde=Straight())
    teacher.fit_statistics(torch.tensor([[-1.0, 1.0]]).reshape(2, 1, 1, 1).expand(2, 1, 1, 2))
    model = Consistency(teacher)
    assert Jumps(steps).table(model.student)[0].t == Straight().t_max
    y = model.sample(20_000, steps=steps, batch_size=4000, generator=0, progress=False).flatten(1)
    assert torch.allclose(y.mean(0), MEAN, atol=0.03)
    assert torch.allclose(y.T.cov(), COVARIANCE, atol=0.03)


def test_times_of_the_evaluations():
    seen = []

    class Noted(Exact):
        def denoised(self, y, m, s):
            seen.append(float((s / m)[0, 0]))
            return y

    model = Consistency(exact_diffusion(Noted(), 1))
    for steps, ratios in ((1, []), (2, [1.0]), (4, [2.41421356, 1.0, 0.41421356])):
        seen.clear()
        model.sample(2, steps=steps, progress=False)
        assert seen[0] > 150
        assert seen[1:] == pytest.approx(ratios, rel=1e-4)


def test_samples_belong_to_their_seed():
    model = Consistency(convolutional())
    options = {"steps": 2, "generator": 5, "progress": False}
    whole = model.sample(70, batch_size=64, **options)
    assert (whole - model.sample(70, batch_size=7, **options)).abs().max() <= 1e-4
    assert (whole[66:] - model.sample(4, first=66, **options)).abs().max() <= 1e-4
    assert (whole[:3] - model.sample(3, steps=2, generator=6, progress=False)).abs().amax((1, 2, 3)).min() > 0.1
    assert (whole[:3] - model.sample(3, steps=1, generator=5, progress=False)).abs().amax((1, 2, 3)).min() > 0.01


def test_it_is_a_generative_model():
    assert isinstance(Consistency(convolutional()), GenerativeModel)
    assert isinstance(Consistency(convolutional()), DrawsNoise)
    assert namm.Consistency is Consistency


# Training


class Corrected(Gaussian):
    """The exact v of the Gaussian and a small network that may change it, zero at first."""

    def __init__(self) -> None:
        super().__init__(MEAN, COVARIANCE, velocity=True)
        self.change = nn.Sequential(nn.Linear(6, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 2))
        nn.init.zeros_(self.change[-1].weight)
        nn.init.zeros_(self.change[-1].bias)

    def forward(self, y_t, t):
        angles = t.log()[:, None] * torch.tensor([0.5, 1.0])
        features = torch.cat([y_t.flatten(1), t.log()[:, None], t[:, None], angles.cos()], 1)
        return super().forward(y_t, t) + self.change(features).reshape(y_t.shape)


def error_of_moments(y: torch.Tensor) -> float:
    mean, covariance = y.flatten(1).mean(0) - MEAN, torch.cov(y.flatten(1).T) - COVARIANCE
    return float(torch.cat([mean, covariance.flatten()]).abs().max())


def test_a_trained_student_needs_one_evaluation_where_its_teacher_needs_many():
    torch.manual_seed(0)
    model = Consistency(exact_diffusion(Corrected(), 2), grid=16)
    settings = TrainSettings(
        budget="300 steps", batch_size=256, learning_rate=5e-3, betas=(0.9, 0.999), schedule="cosine", ema_decay=0.9
    )
    options = {"batch_size": 4000, "generator": 1, "progress": False}
    by_ddim = error_of_moments(model.sample(4000, **options))  # it begins as one step of DDIM
    train_model(model, pairs(4000), IdentityMap(), settings=settings, progress=False)
    one, two = (error_of_moments(model.sample(4000, steps=steps, **options)) for steps in (1, 2))
    assert by_ddim > 0.9
    assert one < 0.12
    assert two < 0.12


def small(teacher: Diffusion | None = None) -> Consistency:
    torch.manual_seed(0)
    return Consistency(teacher or Diffusion(Convolution(), SHAPE, prediction=Velocity()), grid=4)


def test_a_training_cut_short_ends_with_the_same_bits(tmp_path, monkeypatch):
    data, whole, cut, resumed = images(40), small(), small(), small()
    train_model(whole, data, IdentityMap(), settings=QUICK, folder=tmp_path / "whole", progress=False)
    steps = iter(range(12))

    def draw(y, generator):
        if next(steps) == 11:
            raise RuntimeError("power cut")
        return Consistency.draw(cut, y, generator)

    monkeypatch.setattr(cut, "draw", draw)
    with pytest.raises(RuntimeError, match="power cut"):
        train_model(cut, data, IdentityMap(), settings=QUICK, folder=tmp_path / "cut", progress=False)
    result = train_model(resumed, data, IdentityMap(), settings=QUICK, folder=tmp_path / "cut", progress=False)
    assert result.steps == 20
    other = Consistency(convolutional(), grid=4)
    load_model(other, tmp_path / "whole")
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
        assert torch.equal(tensor, other.state_dict()[name]), name
        if name.startswith("teacher."):
            assert torch.equal(tensor, small().state_dict()[name]), name
    assert not torch.equal(whole.student.network.layers[0].weight, whole.teacher.network.layers[0].weight)
    assert torch.equal(other.sample(2, generator=0, progress=False), whole.sample(2, generator=0, progress=False))


def test_a_folder_belongs_to_its_teacher(tmp_path):
    options = {"settings": QUICK, "folder": tmp_path, "progress": False}
    train_model(small(), images(40), IdentityMap(), **options)
    another = convolutional()
    with pytest.raises(RunFolderError, match=r"networks\.teacher\.weights"):
        train_model(small(another), images(40), IdentityMap(), **options)


def test_samples_go_through_the_map():
    """A teacher of mirror space keeps its statistics there, and f brings its student's samples back."""

    class Times(nn.Module):
        def __init__(self, factor, shift):
            super().__init__()
            self.factor, self.shift = factor, shift

        def forward(self, x):
            return self.factor * x + self.shift

    mirror = MirrorMap(Times(10.0, 30.0), Times(0.1, -3.0))
    teacher, data = convolutional(), images(40)
    train_model(teacher, data, mirror, settings=QUICK, progress=False)
    model = small(teacher)
    train_model(model, data, mirror, settings=QUICK, progress=False)
    x, y = Mirrored(model, mirror).sample_pairs(3, steps=2, generator=0, progress=False)
    assert torch.allclose(x, 0.1 * y - 3, atol=1e-5)
    assert 20 < y.mean() < 40
    with pytest.raises(DataError, match="give the data and the mirror that it was trained with"):
        train_model(small(teacher), data, IdentityMap(), settings=QUICK, progress=False)


def test_no_evaluation_is_too_few():
    with pytest.raises(UsageError, match="at least 1 evaluation, not 0"):
        Consistency(convolutional()).sample(2, steps=0, progress=False)
    with pytest.raises(UsageError, match="at least 2 steps, not 1"):
        Consistency(convolutional(), grid=1)
    assert Jumps(3).steps == 3
