"""Assimilation on a tiny run: tasks, outcomes, the choice of settings, the file."""

import json
import shutil
from dataclasses import replace

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from namm.constraints import constraint
from namm.datasets import load
from namm.errors import DataError, RunFolderError, UsageError
from namm.experiments.assimilation import posterior_file as assimilation_file
from namm.experiments.assimilation.assimilate import (
    Polishing,
    Sampling,
    Score,
    Setting,
    assimilate,
    guidance,
    priors,
    score,
)
from namm.experiments.assimilation.posterior_file import (
    as_image,
    read_certificates,
    read_scores,
    read_truth,
    remembered,
    write_outcomes,
)
from namm.experiments.assimilation.tasks import Task, make_task, named_operator, other_numbers, papers_observation
from namm.experiments.assimilation.tuning import choose, crossings, grid, tune
from namm.experiments.burgers import BurgersData
from namm.experiments.divergence import DivergenceData
from namm.experiments.engine.run_parts import RunParts
from namm.experiments.flux import FluxData
from namm.generative import Diffusion, Mirrored
from namm.inverse import Columns, DDIMSteps, DPSGuidance, GaussianNoise, sample_posterior
from namm.maps import IdentityMap

FEW = Sampling(n=3, steps=DDIMSteps(4), batch_size=5)
THREE = [Setting("dps", 1e-4), Setting("cg-dps", 1e-4, 50.0), Setting("mirror-dps", 1e-4)]


@pytest.fixture(scope="module")
def trained(whole_run):
    return RunParts.load(whole_run)


@pytest.fixture(scope="module")
def task(trained):
    return make_task(trained, "columns:2", 0.2, range(1, 4), seed=5)


@pytest.fixture(scope="module")
def sources(trained):
    return priors(trained, ("dps", "cg-dps", "mirror-dps"))


# Tasks


def test_the_papers_tasks():
    assert papers_observation(BurgersData(size=64)) == "columns:8"
    assert papers_observation(BurgersData(size=32)) == "columns:4"
    flow = DivergenceData(size=4, rows=2, columns=4)
    x = torch.arange(2 * 8 * 16.0).reshape(1, 2, 8, 16)
    seen = named_operator(papers_observation(flow), flow, (2, 8, 16))(x)
    assert torch.equal(seen, torch.stack([x[:, :, :4, :4], x[:, :, 4:, 12:]], 1))
    with pytest.raises(UsageError, match=r"--observe. There are columns:8"):
        papers_observation(FluxData())


def test_observations_by_name(tmp_path):
    data, shape = BurgersData(size=8), (1, 8, 8)
    x = torch.randn(1, *shape)
    assert torch.equal(named_operator("columns:2", data, shape)(x), x[..., :2])
    assert torch.equal(named_operator("columns:0,5", data, shape)(x), x[..., [0, 5]])
    blocks = x.reshape(1, 1, 4, 2, 4, 2).mean((3, 5))
    torch.testing.assert_close(named_operator("downsample:2", data, shape)(x), blocks)
    assert named_operator("blur:1.5", data, shape)(x).std() < x.std()
    assert named_operator("mask:0.25", data, shape)(x).shape == (1, 16)
    assert torch.equal(*(named_operator("mask:0.25", data, shape)(x) for _ in range(2)))
    mask = np.zeros((8, 8), bool)
    mask[2, 3] = True
    np.save(tmp_path / "m.npy", mask)
    assert named_operator(f"mask:{tmp_path / 'm.npy'}", data, shape)(x).item() == x[0, 0, 2, 3].item()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rows:3", "not known. There are columns:8"),
        ("columns", "not known"),
        ("columns:9", r"does not fit the run's images, 1×8×8: columns .* has columns 0 to 7"),
        ("columns:many", "cannot be read: write columns:8"),
        ("columns:0", "at least one number"),
        ("states:first,last", "Kolmogorov flow only"),
        ("mask:1.5", "between 0 and 1"),
        ("mask:nowhere.npy", "cannot be read"),
        ("blur:-1", "must be positive"),
        ("downsample:3", "divisible by 3"),
    ],
)
def test_observations_that_do_not_fit(name, message):
    with pytest.raises(UsageError, match=message):
        named_operator(name, BurgersData(size=8), (1, 8, 8))


def test_truths_are_held_out_and_their_noise_is_their_own(trained, task, whole_run):
    held_out = load(whole_run / "data" / "images.h5", "test")
    assert torch.equal(task.truth, held_out[1:4])
    single = make_task(trained, "columns:2", 0.2, range(2, 3), seed=5)
    assert torch.equal(single.measurement[0], task.measurement[1])
    many = make_task(trained, "columns:2", 0.2, range(70))
    chi2 = many.noise.chi2(many.measurement - many.operator(many.truth)) / many.measured
    assert float(chi2.mean()) == pytest.approx(1, abs=4 * (2 / (70 * 16)) ** 0.5)  # the truth's own misfit
    assert make_task(trained, None, 0.2, range(1)).observed == "columns:1"
    with pytest.raises(UsageError, match="the run has 70 held-out images"):
        make_task(trained, None, 0.2, range(60, 71))
    assert other_numbers(trained, range(66), 4) == range(66, 70)
    with pytest.raises(UsageError, match="67 truths to judge by and 4 others"):
        other_numbers(trained, range(67), 4)


def test_an_observation_is_an_image_again(task):
    image = as_image(task.operator, task.measurement[0], (1, 8, 8))
    np.testing.assert_allclose(image[..., :2], task.measurement[0], rtol=1e-6)
    assert np.isnan(image[..., 2:]).all()
    blurred = named_operator("downsample:2", BurgersData(size=8), (1, 8, 8))
    assert as_image(blurred, torch.zeros(1, 4, 4), (1, 8, 8)) is None


# Outcomes


def test_each_method_is_its_prior_and_guidance(trained, task, sources):
    """Against sample_posterior called by hand, ζ converted by hand: over the squared scale, 1000/steps times longer."""
    rule = trained.rule()
    by_hand = {
        "dps": (trained.source("dm", IdentityMap()), {}),
        "cg-dps": (trained.source("dm", IdentityMap()), {"constraint": rule, "weight": 50.0}),
        "mirror-dps": (trained.source("mdm", trained.mirror("finetune")), {}),
    }
    for setting in THREE:
        prior, extra = by_hand[setting.method]
        zeta = 1e-4 * 1000 / 4 / float(prior.model.scale) ** 2
        wanted = sample_posterior(
            prior,
            task.measurement,
            task.operator,
            task.noise,
            n=3,
            guidance=DPSGuidance(zeta, **extra),
            steps=DDIMSteps(4),
            constraint=rule,
            generator=0,
            progress=False,
        )
        found = assimilate(sources[setting.method], task, setting, rule, FEW)
        torch.testing.assert_close(found.samples, wanted.samples, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(found.chi2, wanted.chi2 / 16, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(found.residuals[1], rule.residual(found.samples[1]))
        torch.testing.assert_close(found.mean, found.samples.mean(1))
        torch.testing.assert_close(found.spread, found.samples.std(1))
        away = (found.samples.mean(1) - task.truth).numpy()
        np.testing.assert_allclose(found.error, np.sqrt((away**2).mean((1, 2, 3))), rtol=1e-5)
        s = score(found)
        assert s.distance == pytest.approx(float(found.distance.mean()), rel=1e-5)
        assert (s.truths, s.samples, s.coverage, s.failed) == (3, 3, None, 0)
    assert not torch.allclose(found.samples, assimilate(sources["dps"], task, THREE[0], rule, FEW).samples)


def test_neither_the_batch_size_nor_the_company_changes_a_sample(trained, task, sources):
    rule, setting = trained.rule(), THREE[2]
    all_at_once = assimilate(sources["mirror-dps"], task, setting, rule, replace(FEW, batch_size=64))
    one_by_one = assimilate(sources["mirror-dps"], task, setting, rule, replace(FEW, batch_size=1))
    single = assimilate(sources["mirror-dps"], task, setting, rule, FEW, rows=range(2, 3))
    for name in ("samples", "distance", "chi2", "error"):
        torch.testing.assert_close(getattr(one_by_one, name), getattr(all_at_once, name), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(getattr(single, name)[0], getattr(all_at_once, name)[2], rtol=1e-3, atol=1e-4)


def test_coverage_needs_nineteen_samples(trained, task, sources):
    enough = assimilate(sources["dps"], task, THREE[0], trained.rule(), replace(FEW, n=19, batch_size=64))
    low, high = enough.samples.min(1).values, enough.samples.max(1).values  # of 19, the central 90 % is from end to end
    inside = ((low <= task.truth) & (task.truth <= high)).float().mean((1, 2, 3))
    torch.testing.assert_close(enough.coverage, inside)
    assert score(enough).coverage == pytest.approx(float(inside.mean()), rel=1e-5)


def test_samples_that_fail_are_counted_and_left_out(trained, task, sources):
    wild = Setting("dps", 1e30)
    with pytest.warns(UserWarning, match="9 of 9 samples diverged 1 times"):
        s = score(assimilate(sources["dps"], task, wild, trained.rule(), replace(FEW, retries=0)))
    assert s.failed == 9
    assert np.isnan(s.error)
    assert np.isnan(s.distance)
    with pytest.raises(UsageError, match="samples that diverged: try a smaller ζ"):
        choose([s])


def test_a_missing_stage_is_named(whole_run, tmp_path):
    copy = shutil.copytree(whole_run, tmp_path / "run")
    shutil.rmtree(copy / "finetune")
    with pytest.raises(RunFolderError, match=r"the stage 'finetune' of .* --until finetune` completes it"):
        priors(RunParts.load(copy), ("dps", "mirror-dps"))


def test_guidance_by_the_likelihood_has_a_strength_that_steps_do_not_change(trained, sources):
    rule, made = trained.rule(), []
    for steps in (4, 40):
        setting = Setting("cg-dps", 1.5, 70.0, "likelihood")
        made.append(guidance(setting, sources["cg-dps"], rule, DDIMSteps(steps)))
    assert [g.strength for g in made] == [1.5, 1.5]
    assert made[0].variance == pytest.approx(float(sources["cg-dps"].model.scale) ** 2)
    assert made[0].weight == 70
    assert made[0].constraint is rule
    assert guidance(Setting("dps", 1.0, 0.0, "likelihood"), sources["dps"], rule, DDIMSteps(4)).constraint is None


# The choice


def tried(zeta, chi2, error, distance, failed=0):
    return Score(Setting("dps", zeta), 1, 1, distance, 0.0, chi2, error, 0.0, 0.0, None, 0, failed, 0.0)


def test_of_those_that_fit_and_err_least_the_one_nearest_to_the_rule():
    a, b, c = tried(1, 1.09, 0.100, 0.3), tried(2, 0.91, 0.104, 0.2), tried(3, 1.0, 0.106, 0.1)
    worse = tried(4, 1.2, 0.01, 0.01)  # does not fit, however well it does otherwise
    broken = tried(5, 1.0, 0.01, 0.01, failed=1)
    assert choose([a, b, c, worse, broken]) is b
    assert choose([a, c]) is a
    assert choose([worse, tried(6, 0.7, 0.0, 0.0)]) is worse  # 1.2 is nearer to 1 than 0.7
    assert choose([worse, tried(6, 0.85, 0.0, 0.0)]).setting.zeta == 6


def test_zeta_is_sought_where_the_misfit_crosses_one():
    (zeta,) = crossings([tried(0.1, 4.0, 0, 0), tried(0.4, 0.25, 0, 0), tried(1.6, 0.1, 0, 0)])
    assert zeta == pytest.approx(0.2)  # a straight line in the logarithms
    assert crossings([tried(0.1, 4.0, 0, 0), tried(0.4, 1.04, 0, 0), tried(0.8, 0.2, 0, 0)]) == []
    assert crossings([tried(0.1, 4.0, 0, 0, failed=1), tried(0.4, 0.2, 0, 0)]) == []


def test_the_grid_has_weights_only_where_the_rule_guides():
    settings = grid(("dps", "cg-dps"), (0.1, 0.2), (50.0, 100.0, 200.0))
    assert [s.title for s in settings] == ["DPS"] * 2 + [f"CG-DPS-{w}" for w in (50, 100, 200) for _ in range(2)]
    with pytest.raises(UsageError, match="must be positive"):
        grid(("dps",), (0.0,), (1.0,))
    with pytest.raises(UsageError, match="there is no method 'sda'"):
        Setting("sda")
    with pytest.raises(UsageError, match="there is no guidance 'ddrm'"):
        Setting("dps", guidance="ddrm")


class WhiteNoise(nn.Module):
    """E[ε | y(t)] of white noise: y(t) is white noise too."""

    def forward(self, y_t, t):
        return torch.sqrt(-torch.expm1(-0.1 * t - 9.95 * t**2)).reshape(-1, 1, 1, 1) * y_t


@constraint
def size(x):
    """Mean square: no image of the prior obeys it, but there is something to measure."""
    return x.square().mean((1, 2, 3))


def gaussian_task(numbers, seed):
    truth = torch.randn(len(numbers), 1, 4, 8, generator=torch.Generator().manual_seed(seed))
    seen, noise = Columns(range(4)), GaussianNoise(0.5)
    measurement = seen(truth) + noise.sample(seen(truth), torch.Generator().manual_seed(seed + 1))
    return Task("columns:4", seen, noise, numbers, truth, measurement)


def test_what_is_chosen_fits_other_measurements_as_the_truth_does():
    """White noise with its exact score; too small and too large a ζ both miss χ² = 1, and the grid misses it too."""
    source = Mirrored(Diffusion(WhiteNoise(), (1, 4, 8)), IdentityMap())
    sampling = Sampling(n=8, steps=DDIMSteps(30), batch_size=256)
    found = tune({"dps": source}, gaussian_task(range(16), 0), size, sampling, zetas=(1e-4, 0.03), refinements=4)
    on_grid, refined = found["dps"][:2], found["dps"][2:]
    assert all(abs(s.chi2 - 1) > 0.1 for s in on_grid)
    assert refined
    best = choose(found["dps"])
    assert abs(best.chi2 - 1) <= 0.1
    assert best.error == min(s.error for s in found["dps"] if abs(s.chi2 - 1) <= 0.1)
    fresh = score(assimilate(source, gaussian_task(range(16), 7), best.setting, size, sampling))
    assert fresh.chi2 == pytest.approx(1, abs=0.25)


# The file


def test_a_file_holds_what_assimilate_gives(trained, task, sources, tmp_path):
    rule, path = trained.rule(), tmp_path / "a.h5"
    write_outcomes(path, task, sources, THREE, rule, FEW, progress=False)
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["truth"], task.truth)
        np.testing.assert_array_equal(file["numbers"], [1, 2, 3])
        assert json.loads(file.attrs["made_from"])["steps"] == "DDIMSteps 4"
        for setting in THREE:
            wanted = assimilate(sources[setting.method], task, setting, rule, FEW)
            for name in assimilation_file.ARRAYS:
                stored = file[setting.method][name][:]
                np.testing.assert_allclose(stored, getattr(wanted, name), rtol=1e-3, atol=1e-4, equal_nan=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.h5"]
    scores = read_scores(path)
    assert [s.setting for s in scores] == THREE
    wanted = score(assimilate(sources["mirror-dps"], task, THREE[2], rule, FEW))
    assert scores[2].distance == pytest.approx(wanted.distance, rel=1e-3)
    own, found = read_truth(path, 1)
    np.testing.assert_array_equal(own["measurement"], task.measurement[1])
    assert found[THREE[0]]["samples"].shape == (3, 1, 8, 8)


def test_certificates_that_were_changed_are_not_read(trained, task, sources, tmp_path):
    path, polishing = tmp_path / "a.h5", replace(FEW, polish=Polishing.of(trained))
    write_outcomes(path, task, sources, THREE[:1], trained.rule(), polishing, progress=False)
    certificate = read_certificates(path)[THREE[0]]
    assert len(certificate.after) == 9
    assert (certificate.after <= certificate.before).all()
    with h5py.File(path, "r+") as file:
        file["dps/after"][0, 0] = 0.0
    with pytest.raises(DataError, match=r"rows 0 to 0 of 'dps/after' do not match their checksum"):
        read_certificates(path)


def test_an_interrupted_file_goes_on_and_another_is_not_overwritten(trained, task, sources, tmp_path, monkeypatch):
    rule, path, made = trained.rule(), tmp_path / "a.h5", []

    def stopping(*arguments, **options):
        if len(made) == 4:
            made.append(None)
            raise KeyboardInterrupt
        made.append(options["rows"])
        return assimilate(*arguments, **options)

    monkeypatch.setattr(assimilation_file, "assimilate", stopping)
    one = replace(FEW, batch_size=3)  # one truth at a time: nine pieces
    with pytest.raises(KeyboardInterrupt):
        write_outcomes(path, task, sources, THREE, rule, one, progress=False)
    assert not path.exists()
    with pytest.raises(RunFolderError, match=r"a.h5.partial holds other data .*seed: 0 -> 1"):
        write_outcomes(path, task, sources, THREE, rule, replace(one, seed=1), progress=False)
    write_outcomes(path, task, sources, THREE, rule, one, progress=False)
    assert len([rows for rows in made if rows]) == 9
    before = path.read_bytes()
    write_outcomes(path, task, sources, THREE, rule, replace(one, batch_size=99), progress=False)
    assert len(made) == 10
    changed = [replace(THREE[0], zeta=2e-4), *THREE[1:]]
    with pytest.raises(RunFolderError, match=r"methods.dps.zeta: 0.0001 -> 0.0002"):
        write_outcomes(path, task, sources, changed, rule, one, progress=False)
    assert path.read_bytes() == before


def test_what_was_tried_is_remembered_for_the_same_question(task, sources, tmp_path):
    calls = []

    def make():
        calls.append(None)
        return {"dps": [tried(0.1, 1.0, 0.2, 0.3)]}

    first = remembered(tmp_path / "a.h5", task, sources, FEW, {"zetas": (0.1,)}, make)
    again = remembered(tmp_path / "a.h5", task, sources, replace(FEW, batch_size=1), {"zetas": (0.1,)}, make)
    assert again == first
    assert len(calls) == 1
    remembered(tmp_path / "a.h5", task, sources, FEW, {"zetas": (0.1, 0.2)}, make)
    assert len(calls) == 2
