"""Numbers that are chosen for a map: the same for the same images and seed, and those that the data call for."""

from dataclasses import replace

import pytest
import torch

import namm
from namm.errors import ConstraintError, RunFolderError
from namm.maps import ICNN, MirrorMap, ResNet
from namm.training.objectives import ModelErrors, Weights, perturb, smoothed
from namm.training.settings import CHOSEN, TrainSettings
from namm.training.tune import COSTS, LEAST, RANGE, Trial, build_mirror, calibrate, find_boundary, tune

SHORT = TrainSettings(budget="2 steps", batch_size=4)


@namm.constraint
def total(x):
    return (x.sum((1, 2, 3)) - 8).abs()


def images(n: int = 48, size: int = 8) -> torch.Tensor:
    x = torch.rand(n, 1, size, size, generator=torch.Generator().manual_seed(0))
    return 8 * x / x.sum((1, 2, 3), keepdim=True)


@pytest.fixture(scope="module")
def tuning():
    return tune(build_mirror(images(), filters=4, blocks=1), images(), total, seed=3)


def test_the_same_images_and_seed_give_the_same_numbers_whatever_was_drawn_before(tuning):
    torch.manual_seed(0)
    mirror = build_mirror(images(), filters=4, blocks=1)
    torch.manual_seed(0)
    first = tune(mirror, images(), total, seed=3)
    torch.rand(7)
    second = tune(mirror, images(), total, seed=3)
    assert replace(first, compute_seconds=0.0) == replace(second, compute_seconds=0.0)
    assert first.sigma == tuning.sigma  # which does not depend on the map's first weights


def test_what_is_chosen_is_in_range_and_rests_on_what_is_kept(tuning):
    assert RANGE[0] <= tuning.sigma <= RANGE[1]
    assert [trial.cost for trial in tuning.trials] == list(COSTS)
    assert tuning.weight / tuning.unit in COSTS
    assert tuning.unit == pytest.approx(tuning.sigma / tuning.distance_errors, rel=1e-2)  # these images' own ℓ is zero


def test_units_of_the_images_and_of_the_rule_do_not_matter():
    thousand = namm.constraint(lambda x: (x.sum((1, 2, 3)) - 8000).abs())
    mirror = build_mirror(images(), filters=4, blocks=1)
    large = MirrorMap(mirror.g, mirror.f).standardise_by(1000 * mirror.mean.flatten(), 1000 * mirror.scale.flatten())
    noise = ModelErrors(0.1)
    a = tune(mirror, images(), total, noise=noise, trials=False)
    b = tune(large, 1000 * images(), thousand, noise=noise, trials=False)
    assert a.weight == pytest.approx(1000 * b.weight, rel=1e-2)


def test_a_map_that_sees_images_as_they_are_gets_errors_in_their_units():
    x = 100 * images()
    rule = namm.constraint(lambda x: (x.sum((1, 2, 3)) - 800).abs())
    mirror = MirrorMap(ICNN(layers=1, filters=2), ResNet(filters=2, blocks=1, downsamplings=1, normalisation="none"))
    found = tune(mirror, x, rule, trials=False)
    assert RANGE[0] <= found.sigma / float(x.std()) <= RANGE[1] * 1.01


def test_a_rule_that_does_not_notice_errors_is_refused():
    blind = namm.constraint(lambda x: (x.sum((1, 2, 3)) - 8).abs().clamp(min=50) - 50 + 0 * x.sum((1, 2, 3)))
    with pytest.raises(ConstraintError, match="does not notice errors of σ_max"):
        tune(build_mirror(images(), filters=4, blocks=1), images(), blind, noise=ModelErrors(0.1))


@pytest.mark.parametrize(("periodic", "boundary"), [((-2, -1), "circular"), ((-2,), "cylinder"), ((), "zeros")])
def test_the_boundary_is_that_of_the_images(periodic, boundary):
    z = torch.randn(32, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    x = smoothed(z, torch.full((32, 1, 1, 1), 0.5))  # smooth on a torus: a part of it is not periodic
    x = x if -2 in periodic else x[..., :16, :]
    x = x if -1 in periodic else x[..., :16]
    assert find_boundary(x) == boundary


def test_a_trial_that_loses_images_scores_worse_than_one_that_keeps_them():
    good = Trial(10.0, 0.3, 0.05, 1.0)
    assert good.score < replace(good, cycle_error=0.5).score
    assert good.score < replace(good, total_variation=0.3).score
    assert replace(good, left=LEAST).score < good.score
    assert replace(good, left=float("nan")).score == float("inf")


def test_errors_of_models_move_a_sum_more_than_white_noise_of_the_same_size():
    x, rng = torch.zeros(512, 1, 16, 16), torch.Generator().manual_seed(0)
    z, gain = ModelErrors(1.0).errors(x, rng)
    assert gain.std() == pytest.approx(0.3, rel=0.1)
    assert z.square().mean() == pytest.approx(1 + 0.3**2, rel=0.1)
    assert z.mean((1, 2, 3)).std() > 4 / 16  # white noise: 1/16
    assert torch.equal(perturb(x + 1, torch.tensor(2.0), torch.zeros_like(x), gain), 1 + 2 * gain.expand_as(x))


def test_train_map_needs_images_and_a_rule_alone_and_goes_on_with_what_it_chose(tmp_path):
    first = namm.train_map(images(), total, settings=SHORT, folder=tmp_path, progress=False)
    assert first.tuning is not None
    assert (tmp_path / CHOSEN).exists()
    assert first.mirror.f.is_calibrated
    assert first.mirror.standardise(images()).std() == pytest.approx(1, rel=1e-3)
    again = namm.train_map(images(), total, first.mirror, settings=SHORT, folder=tmp_path, progress=False)
    assert again.tuning == first.tuning
    assert again.steps == 2
    (tmp_path / CHOSEN).write_text("{")
    with pytest.raises(namm.errors.CheckpointError, match=r"tuning\.json cannot be read"):
        namm.train_map(images(), total, first.mirror, settings=SHORT, folder=tmp_path, progress=False)


def test_a_foreign_folder_is_refused_and_left_as_it_is(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    given = {"noise": ModelErrors(0.1), "settings": SHORT, "folder": tmp_path, "progress": False}
    with pytest.raises(RunFolderError, match="not a training"):
        namm.train_map(images(), total, build_mirror(images(), filters=4, blocks=1), weights=Weights(), **given)
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == ["mine.txt"]


def test_calibration_is_the_same_whichever_way_the_data_are_stored():
    mirrors = [build_mirror(images(), filters=4, blocks=1) for _ in range(2)]
    for mirror, data in zip(mirrors, (images(), images().numpy()), strict=True):
        mirror.g.load_state_dict(mirrors[0].g.state_dict())
        calibrate(mirror, data, total, ModelErrors(0.1))
    assert torch.equal(mirrors[0].f.whole.whitening, mirrors[1].f.whole.whitening)
    assert mirrors[0].f.whole.templates[0].abs().std() < 1e-5  # a sum over the image has a constant template
