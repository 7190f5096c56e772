"""`train_model`: it learns the exact score, keeps what it learned, and refuses what cannot work."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from oracles import Gaussian, exact_diffusion
from safetensors.torch import load_file
from torch import nn

from namm.errors import CheckpointError, DataError, RunFolderError, UsageError
from namm.generative.diffusion import Diffusion
from namm.generative.mirrored import Mirrored
from namm.generative.samplers import UniPC
from namm.generative.schedules import Epsilon, Velocity
from namm.maps import IdentityMap, MirrorMap
from namm.training import checkpoint
from namm.training.settings import TrainSettings
from namm.training.train_model import ModelObjective, load_model, mirror_images, train_model
from namm.training.trainer import validate

MEAN = torch.tensor([3.0, -2.0])
COVARIANCE = torch.tensor([[4.0, 2.4], [2.4, 2.0]])
QUICK = TrainSettings(budget="20 steps", batch_size=8, learning_rate=1e-2, log_every=10, checkpoint_seconds=0.0)


class Perceptron(nn.Module):
    """Two pixels and a few functions of t in, two pixels out."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2)
        )

    def forward(self, y_t, t):
        angles = t[:, None] * torch.tensor([1.0, 3.0])
        features = torch.cat([y_t.flatten(1), t[:, None], t[:, None].log() / 7, angles.cos(), angles.sin()], 1)
        return self.layers(features).reshape(y_t.shape)


def pairs(n: int) -> torch.Tensor:
    """Two-pixel images from N(MEAN, COVARIANCE)."""
    law = torch.distributions.MultivariateNormal(MEAN, COVARIANCE)
    return law.sample((n,)).reshape(n, 1, 1, 2)


def model(prediction=Velocity(), width: int = 8) -> Diffusion:  # noqa: B008
    torch.manual_seed(0)
    return Diffusion(Perceptron(width), (1, 1, 2), prediction=prediction)


def error_of_score(diffusion: Diffusion, like: Diffusion | None = None) -> float:
    """Root mean square of s (score − exact score) over y(t) and t, in the standardised space of `like`."""
    like = like or diffusion
    scale = float(like.scale)
    mean, covariance = (MEAN - float(like.mean)) / scale, COVARIANCE / scale**2
    t = torch.linspace(0.02, 1, 4000)
    y = torch.distributions.MultivariateNormal(mean, covariance).sample((4000,)).reshape(-1, 1, 1, 2)
    marginal = diffusion.sde.marginal(t)
    y_t = marginal.mean * y + marginal.std * torch.randn_like(y)
    with torch.no_grad():
        exact = exact_diffusion(Gaussian(mean, covariance), 2).score(y_t, t)
        return float((marginal.std * (diffusion.score(y_t, t) - exact)).square().mean().sqrt())


@pytest.mark.parametrize(("prediction", "bound"), [(Epsilon(), 0.06), (Velocity(), 0.05)], ids=str)
def test_the_loss_leads_to_the_exact_score(prediction, bound):
    data, diffusion = pairs(20_000), model(prediction, width=64)
    settings = TrainSettings(
        budget="1000 steps", batch_size=512, learning_rate=5e-3, betas=(0.9, 0.999), schedule="cosine", ema_decay=0.99
    )
    train_model(diffusion, data, IdentityMap(), settings=settings, progress=False)
    trained, untrained = error_of_score(diffusion), error_of_score(model(prediction, width=64), like=diffusion)
    assert trained <= bound
    assert untrained >= 5 * bound
    y = Mirrored(diffusion, IdentityMap()).sample(4000, sampler=UniPC(25), batch_size=4000, generator=0, progress=False)
    assert torch.allclose(y.flatten(1).mean(0), MEAN, atol=0.2)
    assert torch.allclose(torch.cov(y.flatten(1).T), COVARIANCE, atol=0.4)


# Mapping, once


class Stretch(nn.Module):
    """g(x) = 2 x + 1 with dropout that must be off; counts its images."""

    def __init__(self, weight: float = 2.0) -> None:
        super().__init__()
        self.dropout, self.seen = nn.Dropout(0.5), 0
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, x):
        self.seen += len(x)
        return self.dropout(self.weight * x) + 1


def test_data_are_mapped_once_and_set_the_statistics():
    g, data, diffusion = Stretch(), pairs(150), model()
    train_model(diffusion, data, MirrorMap(g, nn.Identity()), settings=QUICK, validation=data[:10], progress=False)
    assert g.seen == 160
    assert float(diffusion.mean) == pytest.approx(float(2 * data.mean() + 1), rel=1e-5)
    assert float(diffusion.scale) == pytest.approx(float(2 * data.std(correction=0)), rel=1e-5)
    assert g.dropout.training
    assert g.weight.item() == 2.0


def test_mirror_images_that_do_not_fit_into_memory(monkeypatch):
    data, device = pairs(150), torch.device("cpu")
    inside = mirror_images(MirrorMap(Stretch(), nn.Identity()), data, device)
    monkeypatch.setattr("namm.datasets.batches.psutil.virtual_memory", lambda: SimpleNamespace(available=100))
    outside = mirror_images(MirrorMap(Stretch(), nn.Identity()), data.double().numpy(), device)
    assert isinstance(outside, np.memmap)
    assert not isinstance(inside, np.memmap)
    assert inside.dtype == outside.dtype == np.float32
    assert np.array_equal(inside, outside)


def test_arrays_and_a_map_that_is_no_module():
    class Half:
        def to_mirror(self, x):
            return x / 2

        def to_data(self, y):
            return 2 * y

    data, diffusion = pairs(40), model()
    train_model(diffusion, data.numpy(), Half(), settings=QUICK, progress=False)
    assert float(diffusion.mean) == pytest.approx(float(data.mean()) / 2, rel=1e-5)


# Keeping


def test_a_training_cut_short_ends_with_the_same_bits(tmp_path, monkeypatch):
    data, whole, cut, resumed = pairs(40), model(), model(), model()
    train_model(whole, data, IdentityMap(), settings=QUICK, folder=tmp_path / "whole", progress=False)

    steps = iter(range(12))

    def draw(y, generator):
        if next(steps) == 11:
            raise RuntimeError("power cut")
        return Diffusion.draw(cut, y, generator)

    monkeypatch.setattr(cut, "draw", draw)
    with pytest.raises(RuntimeError, match="power cut"):
        train_model(cut, data, IdentityMap(), settings=QUICK, folder=tmp_path / "cut", progress=False)
    nn.init.zeros_(resumed.network.layers[0].weight)
    result = train_model(resumed, data, IdentityMap(), settings=QUICK, folder=tmp_path / "cut", progress=False)
    assert result.steps == 20
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_statistics_come_back_from_the_folder(tmp_path, monkeypatch):
    """They are read from the checkpoint, not only computed again."""
    data, diffusion = pairs(40), model()
    train_model(diffusion, data, IdentityMap(), settings=QUICK, folder=tmp_path, progress=False)
    saved = checkpoint.CheckpointFolder(tmp_path / "checkpoints").latest()
    for group in ("model", "ema"):
        assert torch.equal(saved.tensors[f"{group}/model.mean"], diffusion.mean)
        assert torch.equal(saved.tensors[f"{group}/model.scale"], diffusion.scale)
    monkeypatch.setattr(Diffusion, "fit_statistics", lambda self, y: None)
    again = model()
    train_model(again, data, IdentityMap(), settings=QUICK, folder=tmp_path, progress=False)
    loaded = model()
    loaded.load_state_dict(load_file(tmp_path / "model.safetensors"))
    for other in (again, loaded):
        assert all(torch.equal(t, diffusion.state_dict()[name]) for name, t in other.state_dict().items())
    assert float(again.mean) != 0


def test_every_average_is_a_model_of_its_own(tmp_path):
    """Whole, with statistics: its validation loss is the one that was reported for it."""
    settings = replace(QUICK, ema_decay=0.3, averages=(0.5, 0.6), validations=1)
    data, diffusion = pairs(40), model()
    chosen = {"settings": settings, "validation": data[:10], "folder": tmp_path, "progress": False}
    result = train_model(diffusion, data, IdentityMap(), **chosen)
    y, found = (mirror_images(IdentityMap(), data[:10], torch.device("cpu")),), []
    for decay in (None, *settings.averages):
        loaded = model()
        load_model(loaded, tmp_path, decay)
        assert torch.equal(loaded.scale, diffusion.scale)
        if decay is not None:
            assert all(torch.equal(t, loaded.state_dict()[name]) for name, t in result.averages[decay].items())
        found.append(validate(ModelObjective(loaded), y, settings, torch.device("cpu"), torch.float32)["val/loss"])
    assert found == [result.losses[name] for name in ("val/loss", "val@0.5/loss", "val@0.6/loss")]
    assert len(set(found)) == 3
    with pytest.raises(CheckpointError, match=r"model-0.9.safetensors is not there: 0.9 is none of the averages"):
        load_model(model(), tmp_path, 0.9)
    (tmp_path / "model-0.5.safetensors").unlink()
    train_model(model(), data, IdentityMap(), **chosen)
    again = model()
    load_model(again, tmp_path, 0.5)
    assert torch.equal(again.network.layers[0].weight, result.averages[0.5]["network.layers.0.weight"])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model": model(Epsilon())}, "Epsilon"),
        ({"model": model(width=9)}, "parameters: "),
        ({"mirror": IdentityMap()}, "mirror.class: MirrorMap -> IdentityMap"),
        ({"mirror": MirrorMap(Stretch(3.0), nn.Identity())}, r"\(mirror.weights: [^;]*\)"),
        ({"data": pairs(41)}, "data: "),
    ],
    ids=["prediction", "width", "mirror", "weights of g", "data"],
)
def test_another_training_is_refused(tmp_path, change, match):
    arguments = {"model": model(), "data": pairs(40), "mirror": MirrorMap(Stretch(), nn.Identity())}
    options = {"settings": QUICK, "folder": tmp_path, "progress": False}
    train_model(*arguments.values(), **options)
    with pytest.raises(RunFolderError, match=match):
        train_model(*(arguments | change).values(), **options)


# Other models


class Location(nn.Module):
    """A model of the user's own that draws inside its loss: N(location, 1)."""

    sample_shape = (1, 1, 2)

    def __init__(self) -> None:
        super().__init__()
        self.location = nn.Parameter(torch.zeros(1, 1, 2))

    def fit_statistics(self, y):
        self.fitted = y.shape

    def loss(self, y):
        return (y + 0.1 * torch.randn_like(y) - self.location).square().mean()

    def sample(self, n, *, generator=None):
        return self.location + torch.randn(n, *self.sample_shape, generator=generator)


def test_a_model_of_the_users_own():
    data, own = pairs(400), Location()
    settings = TrainSettings(budget="300 steps", batch_size=100, learning_rate=0.1, schedule="cosine", ema_decay=0.9)
    train_model(own, data, IdentityMap(), settings=settings, progress=False)
    assert own.fitted == data.shape
    assert torch.allclose(own.location.flatten(), data.mean(0).flatten(), atol=0.1)
    again = Location()
    train_model(again, data, IdentityMap(), settings=settings, progress=False)
    assert torch.equal(own.location, again.location)


def test_the_objective_draws_outside_of_its_graph():
    objective, y = ModelObjective(model()), pairs(4)
    draws = objective.draw((y,), torch.Generator().manual_seed(1))
    compiled = torch.compile(objective, backend="eager", fullgraph=True)
    assert torch.equal(compiled(y, *draws)["loss"], objective(y, *draws)["loss"])
    assert torch.equal(objective.draw_whole((y[:2],), 4, torch.Generator().manual_seed(1))[1], draws[1])
    assert ModelObjective(Location()).draw((y,), torch.Generator()) == ()


# Refusals


def refused(error, match, *, data=None, mirror=None, **options):
    diffusion = model()
    before = {name: t.clone() for name, t in diffusion.state_dict().items()}
    with pytest.raises(error, match=match):
        train_model(
            diffusion,
            pairs(10) if data is None else data,
            mirror or IdentityMap(),
            settings=QUICK,
            progress=False,
            **options,
        )
    assert all(torch.equal(t, before[name]) for name, t in diffusion.state_dict().items())


def test_data_of_another_shape():
    refused(DataError, r"data are images of \(1, 2, 1\) but the model makes \(1, 1, 2\)", data=torch.rand(5, 1, 2, 1))
    refused(DataError, "four axes", data=torch.rand(5, 2))
    refused(DataError, "validation are images of", validation=torch.rand(5, 2, 1, 2))


def test_data_with_nothing_to_learn():
    refused(DataError, "the data are constant: in all 9 images every channel", data=torch.full((9, 1, 1, 2), 0.5))
    refused(DataError, "all 9 images are copies of one", data=pairs(1).repeat(9, 1, 1, 1))
    refused(DataError, "the data reach .* divide the images", data=1e18 * pairs(9))


def test_data_with_nan():
    data = pairs(100)
    data[70, 0, 0, 1] = math.nan
    refused(DataError, r"g\(x\) is not finite for images 64 to 99", data=data)


def test_a_g_that_changes_the_shape():
    mirror = MirrorMap(nn.ZeroPad2d(1), nn.Identity())
    refused(DataError, r"g turns an image of \(1, 1, 2\) into \(1, 3, 4\)", mirror=mirror)


def test_a_model_that_is_no_module():
    with pytest.raises(UsageError, match="is not a torch"):
        train_model(SimpleNamespace(sample_shape=(1, 1, 2)), pairs(4), IdentityMap(), settings=QUICK)
