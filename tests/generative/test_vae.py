"""The β-VAE: its loss by hand, the optimum it must reach on Gaussian data, its samples, its way through training."""

import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributions import Independent, Normal, kl_divergence

from namm.errors import DataError, RunFolderError, UsageError
from namm.generative.base import DrawsNoise, GenerativeModel, SampleNoise
from namm.generative.mirrored import Mirrored
from namm.generative.vae import VAE, kl_to_standard_normal
from namm.maps import IdentityMap, MirrorMap
from namm.training import checkpoint
from namm.training.settings import TrainSettings
from namm.training.train_model import ModelObjective, train_model

QUICK = TrainSettings(budget="12 steps", batch_size=8, learning_rate=1e-2, log_every=6, checkpoint_seconds=0.0)


def small(shape=(1, 8, 8), **options) -> VAE:
    torch.manual_seed(0)
    return VAE(shape, **({"latent": 3, "features": 2} | options))


def images(n: int, shape=(1, 8, 8)) -> torch.Tensor:
    return 5 + 3 * torch.randn(n, *shape, generator=torch.Generator().manual_seed(1))


# The loss


def test_divergence_from_the_standard_normal():
    mu, log_variance = 3 * torch.randn(50, 4, dtype=torch.double), 4 * torch.randn(50, 4, dtype=torch.double)
    q = Independent(Normal(mu, (log_variance / 2).exp()), 1)
    p = Independent(Normal(torch.zeros_like(mu), torch.ones_like(mu)), 1)
    assert torch.allclose(kl_to_standard_normal(mu, log_variance), kl_divergence(q, p), rtol=1e-12, atol=1e-12)


def test_loss_by_hand():
    shape, beta = (2, 16, 8), 0.37
    y = images(6, shape).double() * torch.tensor([1.0, 9.0]).reshape(2, 1, 1)
    model = small(shape, features=8, beta=beta).double()
    model.fit_statistics(y)
    nn.init.normal_(model.posterior.weight, std=3)  # far from the prior, so that every term counts
    (epsilon,) = model.draw(y, torch.Generator().manual_seed(3))
    assert epsilon.shape == (6, 3)
    mu, log_variance = model.encode(y)
    sigma = (log_variance / 2).exp()
    scale = y.std((0, 2, 3), correction=0).reshape(2, 1, 1)
    error = ((model.decode(mu + sigma * epsilon) - y) / scale).square().mean()
    divergence = kl_divergence(Normal(mu, sigma), Normal(0.0, 1.0)).sum(1).mean()
    assert model.loss(y, epsilon).item() == pytest.approx((error + beta * divergence).item(), rel=1e-6)
    assert beta * divergence > 0.1 * error


def test_the_posterior_is_of_standardised_images():
    model, y = small(), images(20)
    model.fit_statistics(y)
    moved = small()
    moved.fit_statistics(100 * y - 7)
    for one, other in zip(model.encode(y), moved.encode(100 * y - 7), strict=True):
        assert torch.allclose(one, other, atol=1e-4)
    assert torch.allclose(moved.decode(torch.ones(1, 3)), 100 * model.decode(torch.ones(1, 3)) - 7, rtol=1e-4)


def test_rounding_of_autocast_stays_inside():
    model, y = small(features=8, latent=16), torch.randn(32, 1, 8, 8)  # mean 0, scale 1: an image is the last layer's
    (epsilon,) = model.draw(y, torch.Generator().manual_seed(3))
    exact = model.loss(y, epsilon)
    with torch.autocast("cpu", torch.bfloat16):
        rough, (mu, log_variance), image = model.loss(y, epsilon), model.encode(y), model.decode(epsilon)
        inside = model.encoder(y)
    assert inside.dtype == torch.bfloat16
    for tensor in (mu, log_variance, image):
        assert tensor.dtype == torch.float32
        assert not torch.equal(tensor, tensor.bfloat16().float())
    assert rough.dtype == torch.float32
    assert rough.item() == pytest.approx(exact.item(), rel=2e-2)
    assert rough.item() != exact.item()


def test_the_loss_is_one_graph():
    objective, y = ModelObjective(small()), images(4)
    draws = objective.draw((y,), torch.Generator().manual_seed(1))
    compiled = torch.compile(objective, backend="eager", fullgraph=True)
    assert torch.equal(compiled(y, *draws)["loss"], objective(y, *draws)["loss"])
    torch.manual_seed(7)
    assert torch.equal(objective.draw((y,), torch.Generator().manual_seed(1))[0], draws[0])
    assert isinstance(objective.model, GenerativeModel)
    assert isinstance(objective.model, DrawsNoise)


# The network


def test_the_papers_sizes():
    model = VAE((1, 16, 16))
    assert (model.latent, model.beta) == (128, 0.001)
    there = [layer for layer in model.encoder.modules() if isinstance(layer, nn.Conv2d)]
    back = [layer for layer in (*model.decoder.modules(), model.tail) if isinstance(layer, nn.modules.conv._ConvNd)]
    assert [(c.out_channels, c.stride[0]) for c in there] == [(64, 2), (64, 1), (128, 2), (128, 1), (128, 2)]
    assert [(c.out_channels, c.stride[0]) for c in back] == [(128, 2), (128, 1), (64, 2), (64, 1), (1, 2)]
    activations = [type(m) for m in model.modules() if type(m).__module__ == "torch.nn.modules.activation"]
    assert activations == 10 * [nn.GELU]


def test_latents_reach_the_image_before_training():
    """torch's own weights let the images of different z differ by less than 0.001."""
    model = small((1, 16, 16), latent=32, features=16)
    assert 0.01 < model.sample(200, generator=0).std(0).mean() < 1
    mu, _ = model.encode(torch.randn(200, 1, 16, 16))
    assert 0.01 < mu.std(0).mean() < 1


@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 32, 32), (1, 64, 64), (2, 128, 256), (1, 8, 24)], ids=str)
@pytest.mark.parametrize("boundary", ["zeros", "circular", "cylinder"])
def test_any_size_that_can_be_halved_three_times(shape, boundary):
    model, y = small(shape, boundary=boundary), images(2, shape)
    model.fit_statistics(y)
    model.loss(y, torch.ones(2, 3)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().sum() > 0, name
    assert model.sample(2, generator=0).shape == (2, *shape)


@pytest.mark.parametrize("boundary", ["zeros", "circular"])
def test_periodic_images_have_no_edge(boundary):
    model, y = small((1, 16, 16), boundary=boundary), torch.randn(2, 1, 16, 16)
    features = model.encoder[:-1](y)
    moved = model.encoder[:-1](y.roll((8, 8), (2, 3))).roll((-1, -1), (2, 3))
    assert torch.allclose(features, moved, atol=1e-6) == (boundary == "circular")
    z = torch.randn(2, 4, 2, 2)
    image = model.tail(model.decoder[3:](z))
    moved = model.tail(model.decoder[3:](z.roll((1, 1), (2, 3)))).roll((-8, -8), (2, 3))
    assert torch.allclose(image, moved, atol=1e-6) == (boundary == "circular")


@pytest.mark.parametrize(
    ("error", "match", "shape", "options"),
    [
        (DataError, r"divisible by 8; sample_shape \(1, 28, 32\) has 28×32", (1, 28, 32), {}),
        (DataError, "has 16×4", (1, 16, 4), {}),
        (UsageError, "three positive sizes", (8, 8), {}),
        (UsageError, "three positive sizes", (0, 8, 8), {}),
        (UsageError, "latent must be at least 1, not 0", (1, 8, 8), {"latent": 0}),
        (UsageError, "features must be at least 1, not -1", (1, 8, 8), {"features": -1}),
        (UsageError, "beta must be a number of at least 0, not nan", (1, 8, 8), {"beta": math.nan}),
        (UsageError, "beta must be a number of at least 0, not -1", (1, 8, 8), {"beta": -1}),
        (UsageError, "one of zeros, circular, cylinder, not 'mirror'", (1, 8, 8), {"boundary": "mirror"}),
    ],
)
def test_what_cannot_be_built(error, match, shape, options):
    with pytest.raises(error, match=match):
        VAE(shape, **options)


def test_images_of_another_shape():
    model = small()
    for call in (model.loss, model.encode, model.fit_statistics):
        with pytest.raises(DataError, match=r"\(2, 1, 8, 16\) do not fit .* \(1, 8, 8\)"):
            call(torch.rand(2, 1, 8, 16))
    with pytest.raises(DataError, match=r"\(1, 8, 8\) do not fit"):
        model.loss(torch.rand(1, 8, 8))


# What it learns


def test_gaussian_data_lead_to_the_analytic_optimum():
    """On Gaussian data of rank 2 the optimum is known: probabilistic PCA with the noise s² = β d / 2.

    Its samples have the variance λ − s² along a direction of variance λ, and its loss is
    2 s²/d + β Σ ½ log(λ/s²), which nothing can beat.
    """
    angle = (torch.arange(8) + 0.5) * math.pi / 8
    rows, columns = torch.meshgrid(angle, angle, indexing="ij")
    weights = torch.randn(4000, 2) * torch.tensor([3.0, 1.8])
    x = 5 + 2 * rows.sin() * columns.sin() + torch.einsum("nk,khw->nhw", weights, torch.stack([rows, columns]).cos())
    x, beta = x[:, None], 0.05
    model = small(latent=4, features=8, beta=beta)
    settings = TrainSettings(
        budget="800 steps", batch_size=64, learning_rate=5e-3, betas=(0.9, 0.999), schedule="cosine", ema_decay=0.99
    )
    train_model(model, x, IdentityMap(), settings=settings, progress=False)

    u, v = (model.standardise(y).flatten(1) for y in (x, model.sample(4000, generator=0, batch_size=1000)))
    variances, directions = (part[..., -2:] for part in torch.linalg.eigh(torch.cov(u.T)))
    noise = beta * 64 / 2
    optimum = float(2 * noise / 64 + beta * 0.5 * (variances / noise).log().sum())
    with torch.no_grad():
        loss = float(torch.stack([model.loss(x) for _ in range(5)]).mean())
    assert 0.99 * optimum <= loss <= 1.05 * optimum
    assert torch.allclose(v.mean(0), u.mean(0), atol=0.15)
    expected = (directions.square() * (variances - noise)).sum(1).sqrt()
    assert torch.allclose(v.std(0), expected, rtol=0.12)
    assert torch.allclose(torch.linalg.eigvalsh(torch.cov(v.T))[-2:], variances - noise, rtol=0.12)


# Samples


@pytest.mark.parametrize("batch_size", [1, 7, 64, 100])
def test_samples_do_not_depend_on_the_batch(batch_size):
    model = small()
    model.fit_statistics(images(20))
    reference = model.sample(70, generator=5, batch_size=70)
    assert torch.allclose(model.sample(70, generator=5, batch_size=batch_size), reference, rtol=0, atol=1e-5)
    assert torch.allclose(model.sample(3, generator=5, batch_size=batch_size), reference[:3], rtol=0, atol=1e-5)
    z = SampleNoise(5, 0, 70, (3,), torch.zeros(1))(0)
    assert torch.allclose(model.decode(z), reference, rtol=0, atol=1e-5)
    assert reference.std(0).min() > 1e-3


def test_seeds_and_modes():
    model = small().train()
    first, again, other = (model.sample(4, generator=seed, progress=False) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    one, two = (model.sample(4, generator=torch.Generator().manual_seed(9)) for _ in range(2))
    assert torch.equal(one, two)
    several, alone = model.sample(3, generator=[4, 5, 6]), model.sample(1, generator=[5])
    assert torch.allclose(several[1], alone[0], rtol=0, atol=1e-5)
    assert model.training
    assert not first.requires_grad
    assert model.double().sample(2).dtype == torch.double
    with pytest.raises(UsageError, match="n and batch_size must be at least 1"):
        model.sample(0)


# Training, in either space


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(factor))

    def forward(self, x):
        return self.factor * x


def test_a_linear_mirror_changes_nothing():
    """Powers of two are exact and standardisation takes them out, so both ways lead to the same bits."""
    x, samples = images(40), []
    for mirror, factor in ((IdentityMap(), 1), (MirrorMap(Times(4.0), Times(0.25)), 4)):
        model = small()
        train_model(model, x, mirror, settings=QUICK, validation=x[:8], progress=False)
        assert model.mean.item() == pytest.approx(factor * x.mean().item(), rel=1e-5)
        assert model.scale.item() == pytest.approx(factor * x.std(correction=0).item(), rel=1e-5)
        data, mirrored = Mirrored(model, mirror).sample_pairs(6, generator=2, batch_size=4)
        assert torch.equal(mirrored, factor * data)
        samples.append(data)
    assert torch.equal(*samples)
    untrained = small()
    untrained.fit_statistics(x)
    assert not torch.allclose(samples[0], untrained.sample(6, generator=2))


def test_a_training_cut_short_ends_with_the_same_bits(tmp_path, monkeypatch):
    x, whole, cut, resumed = images(20), small(), small(), small()
    train_model(whole, x, IdentityMap(), settings=QUICK, folder=tmp_path / "whole", progress=False)
    steps = iter(range(12))

    def draw(y, generator):
        if next(steps) == 7:
            raise RuntimeError("power cut")
        return VAE.draw(cut, y, generator)

    monkeypatch.setattr(cut, "draw", draw)
    with pytest.raises(RuntimeError, match="power cut"):
        train_model(cut, x, IdentityMap(), settings=QUICK, folder=tmp_path / "cut", progress=False)
    saved = checkpoint.CheckpointFolder(tmp_path / "cut" / "checkpoints").latest()
    assert torch.equal(saved.tensors["model/model.scale"], whole.scale)

    nn.init.zeros_(resumed.posterior.weight)
    monkeypatch.setattr(VAE, "fit_statistics", lambda self, y: None)
    result = train_model(resumed, x, IdentityMap(), settings=QUICK, folder=tmp_path / "cut", progress=False)
    assert result.steps == 12
    assert resumed.mean.item() == pytest.approx(x.mean().item(), rel=1e-5)
    loaded = small()
    loaded.load_state_dict(load_file(tmp_path / "cut" / "model.safetensors"))
    for other in (resumed, loaded):
        assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in whole.state_dict().items())


def test_saved_and_loaded(tmp_path):
    x, model = images(20, (2, 8, 16)), small((2, 8, 16), beta=0.2, boundary="circular")
    train_model(model, x, IdentityMap(), settings=QUICK, folder=tmp_path / "training", progress=False)
    model.save_pretrained(tmp_path / "model")
    loaded = VAE.from_pretrained(tmp_path / "model")
    assert (loaded.sample_shape, loaded.latent, loaded.beta) == ((2, 8, 16), 3, 0.2)
    assert torch.equal(loaded.mean, model.mean)
    assert loaded.mean.flatten().tolist() == pytest.approx(x.mean((0, 2, 3)).tolist(), rel=1e-5)
    assert torch.equal(loaded.sample(5, generator=0), model.sample(5, generator=0))
    result = train_model(loaded, x, IdentityMap(), settings=QUICK, folder=tmp_path / "training", progress=False)
    assert result.steps == 12
    with pytest.raises(RunFolderError, match=r"beta: 0\.2 -> 0\.3"):
        train_model(
            small((2, 8, 16), beta=0.3, boundary="circular"),
            x,
            IdentityMap(),
            settings=QUICK,
            folder=tmp_path / "training",
            progress=False,
        )
