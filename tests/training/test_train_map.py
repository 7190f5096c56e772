"""`train_map` and `finetune_map`: what they learn, and what they refuse before anything is spent."""

import json
from dataclasses import replace
from functools import partial

import h5py
import pytest
import torch
from torch import nn

import namm
from namm import Constraint, MirrorMap, Periodic, TotalFlux, constraint, finetune_map
from namm.errors import CheckpointError, ConstraintError, DataError, NammWarning, RunFolderError
from namm.maps import ICNN, ResNet
from namm.training.objectives import FixedNoise, UniformNoise, Weights, gradient_regulariser
from namm.training.settings import TrainSettings
from namm.training.train_map import load_weights

QUICK = TrainSettings(budget="30 steps", batch_size=8, learning_rate=2e-3, log_every=10)
train_map = partial(namm.train_map, noise=UniformNoise(0.1), weights=Weights())  # which are not chosen then


def cells(n: int, size: int = 16) -> torch.Tensor:
    """Images that are 2 × 2 copies of a random cell."""
    return torch.rand(n, 1, size // 2, size // 2).repeat(1, 1, 2, 2)


def small() -> MirrorMap:
    return MirrorMap(ICNN(layers=1, filters=4), ResNet(filters=4, blocks=1, dropout=0.0, normalisation="none"))


def test_training_lowers_the_objective_and_keeps_g_strongly_monotone(tmp_path):
    mirror, data = small(), cells(64)
    result = train_map(
        mirror,
        data,
        Periodic(),
        regulariser=gradient_regulariser,
        settings=TrainSettings(**{**QUICK.__dict__, "budget": "100 steps", "learning_rate": 1e-2}),
        folder=tmp_path,
        progress=False,
    )
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert result.losses["loss"] < 0.8 * first["loss"]
    assert min(mirror.g.hidden.min(), mirror.g.output.min()) >= 0
    a, b = torch.randn(2, 16, 1, 16, 16, dtype=torch.double)
    g = mirror.g.double()
    inner = ((g(a) - g(b)) * (a - b)).sum((1, 2, 3))
    assert (inner >= 0.9 * (a - b).square().sum((1, 2, 3)) * (1 - 1e-9)).all()


def test_weights_that_must_not_be_negative_are_stopped_at_zero():
    """A heavy regulariser pulls the potential's gradient, and with it these weights, down to the edge of the cone."""
    mirror = small()
    train_map(
        mirror,
        cells(32),
        Periodic(),
        weights=Weights(regulariser=10.0),
        regulariser=gradient_regulariser,
        settings=TrainSettings(**{**QUICK.__dict__, "learning_rate": 1e-2, "ema_decay": 0.0}),
        progress=False,
    )
    assert (mirror.g.hidden == 0).any()
    assert mirror.g.hidden.min() == 0


def test_a_saved_map_is_the_trained_map(tmp_path):
    mirror = small()
    train_map(mirror, cells(32), Periodic(), settings=QUICK, folder=tmp_path, progress=False)
    again = MirrorMap.load(tmp_path / "mirror")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), mirror.parameters(), strict=True))


def test_the_folder_says_which_regulariser_was_taken(tmp_path):
    settings, resnet = replace(QUICK, budget="1 steps"), ResNet(filters=4, blocks=1, dropout=0.0)
    for name, mirror in (("gradient_regulariser", small()), ("identity_regulariser", MirrorMap(resnet, small().f))):
        train_map(mirror, cells(16), Periodic(), settings=settings, folder=tmp_path / name, progress=False)
        assert json.loads((tmp_path / name / "settings.json").read_text())["regulariser"] == name


def test_arrays_and_hdf5_train_to_the_same_bits(tmp_path):
    data = cells(32)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = data.numpy()
        weights = []
        for source in (data, data.numpy(), file["x"]):
            torch.manual_seed(0)
            mirror = small()
            train_map(mirror, source, Periodic(), settings=QUICK, progress=False)
            weights.append(mirror.f.tail.weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


def test_either_architecture_on_either_side():
    mirror = MirrorMap(
        ResNet(filters=4, blocks=1, activation="none", dropout=0.0), ResNet(filters=4, blocks=1, dropout=0.0)
    )
    before = mirror.g.tail.weight.detach().clone()
    train_map(mirror, cells(16), Periodic(), noise=FixedNoise(0.05), settings=QUICK, progress=False)
    assert not torch.equal(mirror.g.tail.weight, before)


def test_a_network_of_the_users_own(tmp_path):
    mirror = MirrorMap(nn.Conv2d(1, 1, 3, padding=1), nn.Conv2d(1, 1, 3, padding=1))
    result = train_map(mirror, cells(16), Periodic(), settings=QUICK, folder=tmp_path, progress=False)
    assert result.steps == 30
    assert not (tmp_path / "mirror").exists()


def near_identity() -> MirrorMap:
    """A pair as it is after training: f inverts g well enough that finetuning has images to lose."""
    f = ResNet(filters=4, blocks=1, dropout=0.0, normalisation="none", skip=True, activation="none")
    with torch.no_grad():
        f.tail.weight.mul_(0.01)
    return MirrorMap(ICNN(layers=1, filters=4, strong_convexity=0.999), f)


def test_finetuning_changes_f_alone(tmp_path):
    mirror, data = near_identity(), cells(32)
    g = {name: tensor.clone() for name, tensor in mirror.g.state_dict().items()}
    tail = mirror.f.tail.weight.detach().clone()
    samples = data[:20] + 0.05 * torch.randn(20, 1, 16, 16)
    result = finetune_map(
        mirror,
        data,
        samples,
        Periodic(),
        settings=QUICK,
        validation=(data[:8], samples[:8]),
        folder=tmp_path,
        progress=False,
    )
    assert all(torch.equal(tensor, g[name]) for name, tensor in mirror.g.state_dict().items())
    assert result.kept_step > 0
    assert not torch.equal(mirror.f.tail.weight, tail)
    assert mirror.g.hidden.requires_grad
    assert result.losses.keys() >= {"loss", "cycle", "constraint", "val/loss"}


def test_finetuning_of_another_start_is_refused(tmp_path):
    data = cells(16)
    finetune_map(small(), data, data, Periodic(), settings=QUICK, folder=tmp_path, progress=False)
    with pytest.raises(RunFolderError, match="start: "):
        finetune_map(small(), data, data, Periodic(), settings=QUICK, folder=tmp_path, progress=False)


def test_samples_must_look_like_the_data():
    with pytest.raises(DataError, match=r"samples are \(1, 8, 8\) but the data are \(1, 16, 16\)"):
        finetune_map(small(), cells(8), cells(8, size=8), Periodic(), settings=QUICK)


# Refusals, each before the first step


def refused(rule, error, match, data=None, mirror=None):
    mirror = mirror or small()
    before = [p.detach().clone() for p in mirror.parameters()]
    with pytest.raises(error, match=match):
        train_map(mirror, cells(16) if data is None else data, rule, settings=QUICK, progress=False)
    assert all(torch.equal(a, b) for a, b in zip(before, mirror.parameters(), strict=True))


def mean_abs(x):
    return x.abs().mean((1, 2, 3))


@pytest.mark.parametrize(
    ("rule", "match"),
    [
        (lambda x: mean_abs(x)[:, None], r"\(16, 1\)"),
        (lambda x: mean_abs(x) - 100, "negative"),
        (lambda x: mean_abs(x) * torch.nan, "(?i)nan"),
        (lambda x: mean_abs(x).long(), "int64"),
        (lambda x: mean_abs(x.detach()), "(?i)gradient|graph|differentiable"),
    ],
    ids=["shape", "negative", "nan", "integer", "detached"],
)
def test_a_constraint_that_breaks_its_contract_is_refused(rule, match):
    refused(constraint(rule), ConstraintError, match)


def test_data_that_break_the_constraint_are_refused_with_their_floor():
    refused(Periodic(), DataError, r"(?s)break the constraint Periodic.*image \d+", data=torch.rand(16, 1, 16, 16))
    refused(TotalFlux(3.0), DataError, "break the constraint TotalFlux", data=torch.rand(16, 1, 16, 16))


def test_floor_limit_can_be_lifted():
    result = train_map(small(), torch.rand(16, 1, 16, 16), Periodic(), settings=QUICK, floor_limit=None, progress=False)
    assert result.steps == 30


def test_an_image_size_f_cannot_take_is_refused():
    refused(Periodic(), DataError, "divisible by 4; these images are 18×18", data=cells(16, size=18))


def test_maps_that_change_the_shape_are_refused():
    refused(
        Periodic(),
        DataError,
        r"g turns an image of \(1, 16, 16\) into \(1, 14, 14\)",
        mirror=MirrorMap(nn.Conv2d(1, 1, 3), nn.Identity()),
    )


@pytest.mark.parametrize(("data", "match"), [(torch.rand(16, 16), "four axes"), (torch.rand(0, 1, 16, 16), "empty")])
def test_what_is_no_set_of_images_is_refused(data, match):
    refused(Periodic(), DataError, match, data=data)


def test_data_with_nan_are_refused():
    data = cells(16)
    data[3, 0, 2, 2] = torch.nan
    refused(Periodic(), DataError, "(?i)nan", data=data)


def test_float64_data_train_a_float32_map(tmp_path):
    single, weights = cells(16), []
    for name, data in (("single", single), ("double", single.double().numpy())):
        torch.manual_seed(0)
        mirror = small()
        train_map(mirror, data, Periodic(), validation=data, settings=QUICK, folder=tmp_path / name, progress=False)
        weights.append(mirror.f.tail.weight.detach())
    assert torch.equal(*weights)
    assert weights[0].dtype == torch.float32
    assert mirror.to_mirror(torch.rand(1, 1, 16, 16, dtype=torch.double)).dtype == torch.float32


def test_validation_images_must_look_like_the_data():
    with pytest.raises(DataError, match=r"validation images are \(1, 8, 8\) but the data are \(1, 16, 16\)"):
        train_map(small(), cells(16), Periodic(), validation=cells(8, size=8), settings=QUICK, progress=False)


def test_a_rule_whose_code_changed_is_another_training(tmp_path):
    """Both rules have the same name; what they measure tells them apart."""

    def shifted(axis):
        def rule(x):
            return (2 - axis) * (x - x.roll(8, axis)).abs().mean((1, 2, 3))

        return rule

    train_map(small(), cells(16), shifted(-1), settings=QUICK, folder=tmp_path, progress=False)
    with pytest.raises(RunFolderError, match="constraint on noisy data"):
        train_map(small(), cells(16), shifted(-2), settings=QUICK, folder=tmp_path, progress=False)


class Learned(Constraint):
    """A rule with a network in it, as a counter of objects would be."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5)).eval()

    def distance(self, x):
        return (self.network(x) - self.network(x.roll(8, -1))).abs().mean((1, 2, 3))


def test_a_network_inside_the_rule_is_neither_trained_nor_in_training_mode():
    rule = Learned()
    before = {name: tensor.clone() for name, tensor in rule.state_dict().items()}
    train_map(small(), cells(16), rule, settings=QUICK, validation=cells(4), floor_limit=None, progress=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in rule.state_dict().items())
    assert not rule.network.training


def test_a_frozen_g_is_not_in_training_mode_either():
    g = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.BatchNorm2d(1))
    mirror, data = MirrorMap(g, ResNet(filters=4, blocks=1, dropout=0.0)), cells(16)
    x = torch.rand(2, 1, 16, 16)
    before = mirror.eval().to_mirror(x).detach()
    finetune_map(mirror, data, data, Periodic(), settings=QUICK, progress=False)
    assert torch.equal(mirror.to_mirror(x), before)


def test_finetuning_can_be_repeated_in_one_process(tmp_path):
    mirror, data = small(), cells(16)
    first = finetune_map(mirror, data, data, Periodic(), settings=QUICK, folder=tmp_path, progress=False)
    assert finetune_map(mirror, data, data, Periodic(), settings=QUICK, folder=tmp_path, progress=False) == first


def test_weights_of_checkpoints_and_milestones_can_be_loaded(tmp_path):
    trained = small()
    settings = TrainSettings(**{**QUICK.__dict__, "milestones": 2, "averages": (0.5,)})
    result = train_map(trained, cells(16), Periodic(), settings=settings, folder=tmp_path, progress=False)
    for path in (sorted(tmp_path.glob("checkpoints/*"))[-1], sorted(tmp_path.glob("milestones/*"))[-1]):
        mirror = small()
        load_weights(mirror, path)
        assert all(torch.equal(a, b) for a, b in zip(mirror.parameters(), trained.parameters(), strict=True))
    with pytest.raises(CheckpointError, match="not of this map"):
        load_weights(MirrorMap(nn.Identity(), nn.Identity()), path)
    mirror, newest = small(), sorted(tmp_path.glob("checkpoints/*"))[-1]
    load_weights(mirror, newest, decay=0.5)
    assert result.averages[0.5].keys() == mirror.state_dict().keys() - {"g.bias"}  # which is not trained
    assert all(torch.equal(mirror.state_dict()[name], tensor) for name, tensor in result.averages[0.5].items())
    assert not torch.equal(mirror.f.tail.weight, trained.f.tail.weight)
    with pytest.raises(CheckpointError, match="it holds no map at all"):
        load_weights(mirror, newest, decay=0.9)


def test_muon_trains_f_and_keeps_g_in_its_cone():
    mirror = MirrorMap(ICNN(layers=1, filters=16), ResNet(filters=16, blocks=1, dropout=0.0, normalisation="none"))
    settings = replace(QUICK, optimiser="muon", learning_rate=1e-2)
    found = [
        train_map(mirror, cells(32, 8), Periodic(), settings=replace(settings, budget=budget), progress=False)
        for budget in ("1 steps", "30 steps")
    ]
    assert found[1].losses["loss"] < 0.8 * found[0].losses["loss"]
    assert min(mirror.g.hidden.min(), mirror.g.output.min()) >= 0


def at_most_2(x):
    """An inequality that images in [0, 1] obey, with noise of 0.1 as without."""
    return (x - 2).clamp(min=0).mean((1, 2, 3))


@pytest.mark.parametrize("limit", [0.1, None])
def test_a_rule_that_does_not_notice_the_noise_it_is_trained_with_is_refused(limit):
    with pytest.raises(ConstraintError, match=r"at_most_2 is inactive: .* the argument noise of train_map"):
        train_map(small(), cells(16), at_most_2, floor_limit=limit, settings=QUICK, progress=False)
    settings = replace(QUICK, budget="1 steps")
    assert train_map(small(), cells(16), at_most_2, noise=FixedNoise(2.0), settings=settings, progress=False).steps == 1


def test_images_that_cannot_be_learned_from_are_refused():
    for data, message in (
        (torch.full((16, 1, 16, 16), 0.3), "every channel has the same value everywhere, 0.3"),
        (cells(1).repeat(16, 1, 1, 1), "all 16 images are copies of one"),
        (1e17 * cells(16), "the data reach 1\\.00·10¹⁷"),
    ):
        with pytest.raises(DataError, match=message):
            train_map(small(), data, Periodic(), settings=QUICK, progress=False)
        with pytest.raises(DataError, match=message):
            finetune_map(small(), data, cells(16), Periodic(), settings=QUICK, progress=False)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"noise": FixedNoise(30.0)}, "σ_max = 30 is 1e"),
        ({"noise": FixedNoise(1e-5)}, "too little to learn anything from"),
        ({"weights": Weights(constraint=1e8)}, "the map will ignore all but the rule"),
        ({"weights": Weights(constraint=1e-8)}, "the map will ignore the rule"),
    ],
)
def test_noise_and_weights_far_from_usual_are_warned_of(asked, message):
    with pytest.warns(NammWarning, match=message):
        train_map(small(), cells(16), Periodic(), settings=replace(QUICK, budget="1 steps"), progress=False, **asked)


def test_usual_noise_and_weights_are_not_warned_of(recwarn):
    train_map(small(), cells(16), Periodic(), settings=replace(QUICK, budget="1 steps"), progress=False)
    train_map(
        small(),
        cells(16),
        Periodic(),
        weights=Weights(constraint=0.0),
        settings=replace(QUICK, budget="1 steps"),
        progress=False,
    )
    assert not [each for each in recwarn if issubclass(each.category, NammWarning)]
