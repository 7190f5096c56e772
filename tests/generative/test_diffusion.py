"""The diffusion model: its loss by hand, its standardisation, and samples that belong to their seed."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import UNet2DModel
from hypothesis import given
from hypothesis import strategies as st
from oracles import Gaussian, exact_diffusion
from safetensors.torch import load_file
from scipy import stats
from torch import nn

from namm.errors import DataError, UsageError
from namm.generative.base import DrawsNoise, GenerativeModel
from namm.generative.diffusion import DiffusersNetwork, Diffusion
from namm.generative.mirrored import Mirrored
from namm.generative.sample_file import rehearse_sampling
from namm.generative.samplers import DDIM, Ancestral, DPMSolver, EulerMaruyama, UniPC
from namm.generative.schedules import VPSDE, Epsilon, Flow, Straight, Velocity
from namm.generative.times import LogitNormalTimes, UniformTimes
from namm.maps import IdentityMap

SHAPE = (2, 6, 5)


class Convolution(nn.Module):
    """A small network that mixes pixels, channels and time."""

    def __init__(self, channels: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels + 1, 8, 3, padding=1),
            nn.SiLU(),
            nn.Dropout(dropout),
            nn.Conv2d(8, channels, 3, padding=1),
        )

    def forward(self, y_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.cat([y_t, t.reshape(-1, 1, 1, 1).expand_as(y_t[:, :1])], 1))


def convolutional(prediction=Velocity(), **options) -> Diffusion:  # noqa: B008
    return Diffusion(Convolution(**options), SHAPE, prediction=prediction)


def images(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, *SHAPE, generator=torch.Generator().manual_seed(seed))


# The loss


@pytest.mark.parametrize("prediction", [Epsilon(), Velocity(), Flow()], ids=str)
def test_loss_by_hand(prediction):
    """One pixel, network(u, t) = 3 u, mean 1 and scale 2, so u = (y − 1)/2."""

    class Triple(nn.Module):
        def forward(self, y_t, t):
            return 3 * y_t

    straight = isinstance(prediction, Flow)
    model = Diffusion(Triple(), (1, 1, 1), prediction=prediction, sde=Straight() if straight else VPSDE())
    model.fit_statistics(torch.tensor([3.0, -1.0]).reshape(2, 1, 1, 1))
    assert (float(model.mean), float(model.scale)) == (1.0, 2.0)
    total = 0.0
    for y, t, e in ((5.0, 0.2, 0.7), (-3.0, 0.9, -1.1)):
        u = (y - 1) / 2
        m = 1 - t if straight else math.exp(-0.05 * t - 4.975 * t**2)
        s = t if straight else math.sqrt(1 - m**2)
        target = e if isinstance(prediction, Epsilon) else e - u if straight else m * e - s * u
        total += (3 * (m * u + s * e) - target) ** 2 / 2
    y, t, e = torch.tensor([[5.0, -3.0], [0.2, 0.9], [0.7, -1.1]])
    loss = model.loss(y.reshape(2, 1, 1, 1), t, e.reshape(2, 1, 1, 1))
    assert loss.shape == ()
    assert float(loss) == pytest.approx(total, rel=1e-5)


def test_the_exact_network_has_the_smallest_loss():
    """For N(0, 1) the best ε has expected squared error E[1 − s²] = E m², whatever the draws around it."""
    best = exact_diffusion(Gaussian(torch.zeros(1), torch.eye(1)), 1)
    y = torch.randn(50_000, 1, 1, 1)
    t, epsilon = best.draw(y)
    expected = torch.exp(-0.1 * t - 9.95 * t**2).mean()
    assert float(best.loss(y, t, epsilon)) == pytest.approx(float(expected), rel=0.03)
    assert best.loss(y) < exact_diffusion(Gaussian(torch.zeros(1), 1.5 * torch.eye(1)), 1).loss(y)


def test_draws():
    model = Diffusion(Convolution(), SHAPE, t_min=0.25)
    y = images(1).expand(4000, *SHAPE)
    t, epsilon = model.draw(y, torch.Generator().manual_seed(3))
    assert t.shape == (4000,)
    assert 0.25 <= t.min() < 0.252
    assert 0.998 < t.max() <= 1
    assert t.mean() == pytest.approx(0.625, abs=4 * 0.75 / math.sqrt(12 * 4000))
    assert epsilon.shape == y.shape
    assert epsilon.std() == pytest.approx(1, abs=0.01)
    again = model.draw(y, torch.Generator().manual_seed(3))
    assert torch.equal(again[0], t)
    assert torch.equal(again[1], epsilon)


@pytest.mark.parametrize("times", [LogitNormalTimes(-0.4, 1.3), LogitNormalTimes(), UniformTimes()], ids=str)
def test_times_have_the_distribution_of_their_name(times):
    """By SciPy: the logits of t, mapped back from [t_min, 1], are normal, or t itself is uniform."""
    model = Diffusion(Convolution(), SHAPE, t_min=0.1, times=times)
    t, _ = model.draw(images(1).expand(4000, *SHAPE), torch.Generator().manual_seed(0))
    u = (t.double().numpy() - 0.1) / 0.9
    assert t.dtype == torch.float32
    assert 0.1 <= t.min() < t.max() <= 1
    if isinstance(times, UniformTimes):
        assert stats.kstest(u, stats.uniform.cdf).pvalue > 0.01
        return
    law = stats.norm(times.mean, times.std)
    assert stats.kstest(np.log(u / (1 - u)), law.cdf).pvalue > 0.01
    assert stats.kstest(u, stats.uniform.cdf).pvalue < 1e-6


def test_a_training_knows_which_times_it_draws():
    """What a resumed training compares; with uniform times it reads as it did before there were others."""
    plain, other = (Diffusion(Convolution(), SHAPE, times=each) for each in (UniformTimes(), LogitNormalTimes()))
    assert plain.extra_repr().endswith("sde=VPSDE(beta_min=0.1, beta_max=20.0)")
    assert other.extra_repr() == plain.extra_repr() + ", times=LogitNormalTimes(mean=0.0, std=1.0)"


@pytest.mark.parametrize("straight", [False, True], ids=["vp", "straight"])
def test_the_loss_is_one_graph(straight):
    model, y = convolutional(), images(3)
    if straight:
        model = Diffusion(model.network, SHAPE, prediction=Flow(), sde=Straight(), times=LogitNormalTimes())
    draws = model.draw(y)
    compiled = torch.compile(model.loss, backend="eager", fullgraph=True)
    assert torch.equal(compiled(y, *draws), model.loss(y, *draws))


def test_autocast_rounds_the_network_alone():
    model, y = convolutional(Epsilon()), images(8)
    draws = model.draw(y)
    with torch.autocast("cpu", torch.bfloat16):
        loss, epsilon = model.loss(y, *draws), model.epsilon(y, draws[0])
    plain = model.loss(y, *draws)
    assert loss.dtype == epsilon.dtype == torch.float32
    assert loss.item() != plain.item()
    assert loss.item() == pytest.approx(plain.item(), rel=0.02)


# Conversions


@pytest.mark.parametrize("options", [{}, {"velocity": True}, {"straight": True}], ids=str)
def test_score_and_denoised_of_a_gaussian(options):
    mean, covariance = torch.tensor([0.5, -1.0]).double(), torch.tensor([[1.0, 0.6], [0.6, 0.5]]).double()
    model = exact_diffusion(Gaussian(mean, covariance, **options), 2).double()
    t, y_t = torch.linspace(1e-3, 0.99, 20, dtype=torch.double), torch.randn(20, 1, 1, 2, dtype=torch.double)
    for k in range(20):
        m = 1 - t[k] if options.get("straight") else torch.exp(-0.05 * t[k] - 4.975 * t[k] ** 2)
        variance = t[k].square() if options.get("straight") else 1 - m**2
        law = torch.distributions.MultivariateNormal(m * mean, m**2 * covariance + variance * torch.eye(2).double())
        point = y_t[k].flatten().requires_grad_()
        (score,) = torch.autograd.grad(law.log_prob(point), point)
        assert torch.allclose(model.score(y_t, t)[k].flatten(), score, rtol=1e-8, atol=1e-8)
        tweedie = (point + variance * score) / m
        assert torch.allclose(model.denoise(y_t, t)[k].flatten(), tweedie, rtol=1e-6, atol=1e-6)


def test_denoise_is_differentiable():
    model, t = convolutional().double(), torch.rand(2, dtype=torch.double)
    assert torch.autograd.gradcheck(lambda y: model.denoise(y, t), images(2).double().requires_grad_())


# Standardisation


def test_a_constant_channel_keeps_its_value():
    model, y = convolutional(), images(10)
    y[:, 1] = 3.0
    model.fit_statistics(y)
    assert model.mean[1] == 3.0
    assert model.scale[1] == 1.0
    assert torch.allclose(model.unstandardise(model.standardise(y)), y, atol=1e-6)


@given(st.floats(0.01, 100.0), st.floats(-50.0, 50.0))
def test_scaling_the_data_scales_the_samples(scale, shift):
    model, y = convolutional(), images(20)
    draws = model.draw(y)
    model.fit_statistics(y)
    loss, samples = model.loss(y, *draws), model.sample(3, sampler=DDIM(4), generator=0, progress=False)
    model.fit_statistics(scale * y + shift)
    moved = model.sample(3, sampler=DDIM(4), generator=0, progress=False)
    size = scale + abs(shift)
    assert torch.allclose(moved, scale * samples + shift, rtol=1e-4, atol=1e-4 * size)
    assert model.loss(scale * y + shift, *draws).item() == pytest.approx(loss.item(), rel=1e-3 * size / scale)


def test_statistics_are_part_of_the_state():
    model, other = convolutional(), convolutional()
    model.fit_statistics(5 + 2 * images(20))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.mean, model.mean)
    assert torch.equal(other.scale, model.scale)
    assert other.mean.min() > 4


# Samples belong to (seed, i)

FEW = [EulerMaruyama(6), Ancestral(6), DDIM(6), DDIM(6, eta=1.0), DPMSolver(6), DPMSolver(6, stochastic=True), UniPC(6)]


@pytest.mark.parametrize("sampler", FEW, ids=str)
def test_batch_size_does_not_change_samples(sampler):
    model = convolutional()
    whole = model.sample(70, sampler=sampler, batch_size=64, generator=5, progress=False)
    sevens = model.sample(70, sampler=sampler, batch_size=7, generator=5, progress=False)
    fewer = model.sample(3, sampler=sampler, generator=5, progress=False)
    other = model.sample(3, sampler=sampler, generator=6, progress=False)
    assert whole.shape == (70, *SHAPE)
    assert (whole - sevens).abs().max() <= 1e-4
    assert (whole[:3] - fewer).abs().max() <= 1e-4
    assert (whole[:3] - other).abs().amax((1, 2, 3)).min() > 0.1
    assert whole.unique(dim=0).shape[0] == 70


@pytest.fixture
def compiled(monkeypatch):
    """The sizes of batches that compiled networks were given, one list per network; nothing is compiled really."""
    networks = []

    def compile(network, **options):
        assert (options["fullgraph"], options["dynamic"]) == (True, False)
        sizes = []
        networks.append(sizes)

        def call(y, t):
            sizes.append(len(y))
            return network(y, t)

        return call

    monkeypatch.setattr(torch, "compile", compile)
    return networks


def test_a_compiled_network_is_given_whole_batches_only(compiled):
    model = convolutional()
    plain = model.sample(10, sampler=DDIM(3), batch_size=4, generator=5, progress=False)
    assert not compiled
    quick = model.sample(10, sampler=DDIM(3), batch_size=4, generator=5, progress=False, compile=True)
    assert (plain - quick).abs().max() <= 1e-6
    assert compiled == [[4] * 9]
    model.sample(2, sampler=DDIM(3), batch_size=4, progress=False, compile=True)
    assert compiled == [[4] * 12]
    model.sample(2, sampler=DDIM(3), batch_size=5, progress=False, compile=True)
    assert compiled == [[4] * 12, [5] * 3]


def test_a_rehearsal_leaves_nothing_to_record(compiled):
    """CUDA graphs are recorded at a second call, which must not count as sampling."""
    source = Mirrored(convolutional(), IdentityMap())
    rehearse_sampling(source, 4, compile=True)
    assert compiled == [[4] * 3]
    rehearse_sampling(source, 4)
    assert compiled == [[4] * 3]


def test_outside_of_sampling_the_network_is_the_plain_one(compiled):
    model = convolutional()
    with pytest.raises(KeyboardInterrupt), model.compiled(4):
        raise KeyboardInterrupt
    model.denoise(torch.zeros(3, *SHAPE), torch.full((3,), 0.5))
    assert compiled == [[]]


def test_two_processes_make_the_samples_of_one(tmp_path):
    script = Path(__file__).with_name("distributed_sampling.py")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    torch.manual_seed(0)
    model = convolutional()
    in_one_process = model.sample(67, sampler=EulerMaruyama(5), batch_size=16, generator=2, progress=False)
    torch.manual_seed(0)  # that of the first process
    unseeded = model.sample(3, sampler=EulerMaruyama(5), batch_size=16, progress=False)
    for rank in (0, 1):
        made = load_file(tmp_path / f"rank{rank}.safetensors")
        assert (made["seeded"] - in_one_process).abs().max() <= 1e-4
        assert (made["unseeded"] - unseeded).abs().max() <= 1e-4


def test_sampling_leaves_the_model_as_it_was():
    model = convolutional(dropout=0.5)
    model.network.layers[0].eval()
    a, b = (model.sample(2, sampler=DDIM(4), generator=0, progress=False) for _ in range(2))
    assert torch.equal(a, b)
    assert model.network.layers[2].training
    assert not model.network.layers[0].training
    assert not a.requires_grad


def test_half_precision_weights_do_not_shrink_the_state():
    model = convolutional().to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.sample(2, sampler=DDIM(3), generator=0, progress=False).dtype == torch.float32


# Other networks, and what is refused


def test_it_is_a_generative_model():
    assert isinstance(convolutional(), GenerativeModel)
    assert isinstance(convolutional(), DrawsNoise)
    assert not isinstance(nn.Identity(), GenerativeModel)


def test_a_network_of_diffusers():
    unet = UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    network, y = DiffusersNetwork(unet), torch.randn(2, 1, 8, 8)
    assert torch.equal(network(y, torch.tensor([0.001, 1.0])), unet(y, torch.tensor([0.0, 999.0])).sample)
    model = Diffusion(network, (1, 8, 8))
    model.loss(y).backward()
    assert model.sample(2, sampler=DPMSolver(3), progress=False).shape == (2, 1, 8, 8)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"sample_shape": (1, 8)}, r"three positive sizes \(C, H, W\), not \(1, 8\)"),
        ({"sample_shape": (1, 0, 8)}, "three positive sizes"),
        ({"sample_shape": SHAPE, "t_min": 0.0}, "t_min must lie between 0 and 1, not 0.0"),
        ({"sample_shape": SHAPE, "t_min": 0.9, "sde": Straight(0.8)}, "t_min must lie between 0 and 0.8, not 0.9"),
        ({"sample_shape": SHAPE, "prediction": Flow()}, r"Flow\(\) does not go with VPSDE.*Flow\(\) for Straight\(\)"),
        ({"sample_shape": SHAPE, "prediction": Velocity(), "sde": Straight()}, "does not go with Straight"),
    ],
)
def test_settings_that_make_no_sense(options, match):
    with pytest.raises(UsageError, match=match):
        Diffusion(Convolution(), **options)


def test_times_that_are_all_the_same_are_refused():
    with pytest.raises(UsageError, match="std must be positive, not 0"):
        LogitNormalTimes(std=0)


def test_images_that_do_not_fit():
    model = convolutional()
    with pytest.raises(DataError, match=r"\(3, 1, 6, 5\) do not fit a model of sample_shape \(2, 6, 5\)"):
        model.loss(torch.randn(3, 1, 6, 5))
    with pytest.raises(DataError, match="do not fit"):
        model.fit_statistics(torch.randn(3, 2, 5, 6))
    y = images(3)
    y[1, 0, 0, 0] = torch.nan
    with pytest.raises(DataError, match="NaN"):
        model.fit_statistics(y)
    with pytest.raises(UsageError, match="at least 0, not 0, 64 and 0"):
        model.sample(0, progress=False)
