"""What a studio makes of a run, against the package's own commands and against formulas written out here."""

import json
import re
import shutil

import numpy as np
import pytest
import torch

from namm.cli import main
from namm.constraints import Burgers
from namm.datasets import load
from namm.errors import DataError, UsageError
from namm.exact import polish
from namm.experiments.assimilation.tasks import make_task
from namm.experiments.engine.rule_facts import RuleFacts
from namm.experiments.engine.run_parts import RunParts
from namm.generative.sample_file import SampleFile
from namm.maps import MirrorMap
from namm.studio import answers
from namm.studio.studio import KEPT, Studio
from namm.studio.work import Busy, Stopped, Work


@pytest.fixture(scope="session")
def test_images(whole_run):
    return load(whole_run / "data" / "images.h5", "test")


@pytest.fixture(scope="session")
def mirror(whole_run):
    return MirrorMap.load(whole_run / "finetune" / "training" / "mirror")


@pytest.fixture(scope="session")
def rule():
    """The equation with the numbers of `BurgersData`, made without the run."""
    return Burgers(inner_steps=5)


def left_columns(count, size=8):
    mask = torch.zeros(size, size, dtype=torch.bool)
    mask[:, :count] = True
    return mask


# Samples


@pytest.mark.parametrize(("model", "name"), [("mdm", "ours"), ("dm", "baseline")])
def test_samples_are_those_of_the_command(studio, whole_run, tmp_path, model, name):
    file = tmp_path / "samples.h5"
    asked = ["-n", "3", "--seed", "5", "--steps", "6", "--model", model, "-o", str(file)]
    assert main(["sample", str(whole_run), *asked]) == 0
    found = studio.draw(seed=5, steps=6, n=3)
    with SampleFile(file) as samples:
        assert torch.equal(getattr(found, name).images, samples.images[:])
        np.testing.assert_allclose(getattr(found, name).distances, samples.distances, rtol=1e-6)
        if name == "ours":
            assert torch.equal(found.mirror_images, samples.mirror_images[:])


def test_distances_and_residuals_are_those_of_the_rule(studio, whole_run):
    shown, rule = studio.draw(seed=1, steps=3, n=2).ours, RunParts.load(whole_run).rule()
    assert torch.equal(shown.distances, rule(shown.images).double())
    residual = rule.residual(shown.images)
    np.testing.assert_array_equal(shown.residuals, residual[:, 0])
    np.testing.assert_allclose(residual.abs().mean((1, 2, 3)), shown.distances, rtol=1e-5)  # ℓ of Burgers' equation


def test_every_step_of_both_models_is_counted(whole_run):
    work = Work()
    studio = Studio(whole_run, work)
    with work.doing("drawing"):
        studio.draw(steps=5, n=2)
        assert work.state == {"doing": "drawing", "done": 10, "total": 10}
    studio.close()
    assert not studio.ours.model.network._forward_pre_hooks


def test_a_computation_stops_where_it_is_told_to(studio, monkeypatch):
    def stop_at_the_third():
        if studio.work.state["done"] == 2:
            studio.work.stop()
        tick()

    tick = studio.work.tick
    monkeypatch.setattr(studio.work, "tick", stop_at_the_third)
    with pytest.raises(Stopped, match="stopped after 2 of 20 steps"), studio.work.doing("drawing"):
        studio.draw(steps=10, n=1)
    monkeypatch.undo()
    with studio.work.doing("drawing"):
        assert len(studio.draw(steps=3, n=1).ours.images) == 1  # and goes on as if nothing had been


def test_one_thing_at_a_time():
    work = Work()
    with work.doing("painting"), pytest.raises(Busy, match="the studio is painting"), work.doing("drawing"):
        pass
    work.close()
    with pytest.raises(Stopped, match="closed"), work.doing("drawing"):
        pass


def test_samples_that_are_not_finite_are_a_sentence(studio, monkeypatch):
    bad = torch.full((1, 1, 8, 8), torch.nan)
    monkeypatch.setattr(studio.ours, "sample_pairs", lambda *_, **__: (bad, bad))
    with pytest.raises(DataError, match="samples of 3 steps are not finite: take more steps"):
        studio.draw(steps=3, n=1)


# Mirror space


def test_without_noise_an_image_is_repaired(studio, test_images, mirror):
    x = test_images[7:8]
    with torch.no_grad():
        y, repaired = mirror.to_mirror(x), mirror.repair(x)
    found = studio.perturb(index=7, sigma=0.0, seed=3)
    assert torch.equal(found.original.images, x)
    assert torch.equal(found.mirror, y)
    assert torch.equal(found.moved, y)
    assert torch.equal(found.returned.images, repaired)
    torch.testing.assert_close(found.untouched.images, x, rtol=0, atol=1e-6)
    assert found.errors[0] == pytest.approx(float((repaired - x).square().mean().sqrt()))


@pytest.mark.parametrize("white", [False, True])
def test_moves_grow_with_sigma_along_one_direction(studio, mirror, white):
    sigma = studio.numbers.sigma_max
    once, twice = (studio.perturb(index=2, sigma=k * sigma, seed=9, white=white) for k in (1, 2))
    move = once.moved - once.mirror
    assert float(move.abs().max()) > sigma / 10
    torch.testing.assert_close(twice.moved - twice.mirror, 2 * move, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(once.returned.images, mirror.to_data(once.moved))
    other = studio.perturb(index=2, sigma=sigma, seed=10, white=white)
    assert not torch.equal(other.moved, once.moved)


def test_white_noise_has_the_size_that_it_is_said_to_have(studio):
    sigma = studio.numbers.sigma_max
    found = [studio.perturb(index=0, sigma=sigma, seed=k, white=True) for k in range(20)]
    moves = torch.cat([each.moved - each.mirror for each in found])  # 1280 values
    assert float(moves.std()) == pytest.approx(sigma, rel=0.1)
    assert abs(float(moves.mean())) < 0.1 * sigma


def test_a_curve_is_what_the_slider_finds(studio):
    curve = studio.curve(index=4, seed=2)
    for k in (0, 5, 20):
        found = studio.perturb(index=4, sigma=curve.sigmas[k], seed=2)
        assert curve.returned[k] == pytest.approx(float(found.returned.distances[0]), rel=1e-3)
        assert curve.untouched[k] == pytest.approx(float(found.untouched.distances[0]), rel=1e-3, abs=1e-7)
    assert curve.sigmas[5] == pytest.approx(studio.numbers.sigma_max)
    assert curve.untouched[20] > curve.untouched[5] > curve.untouched[0]


# Polishing


def test_polishing_is_that_of_the_package(studio, whole_run):
    shown = studio.draw(seed=2, steps=4, n=2).ours
    found = studio.polish(shown.key)
    trained = RunParts.load(whole_run)
    polisher = trained.polisher(trained.rule())
    wanted = polish(shown.images, trained.rule(), scale=polisher.scale, floor=polisher.floor)
    assert torch.equal(found.after.images, wanted.images)
    np.testing.assert_allclose(found.before, shown.distances, rtol=1e-3)
    rms = ((wanted.images - shown.images) / polisher.scale[0]).square().mean((1, 2, 3)).sqrt()
    torch.testing.assert_close(found.moved.float(), rms.float(), rtol=1e-3, atol=1e-5)
    assert (found.after.distances < 1e-3 * found.before).all()
    assert found.reached == (True, True)


def test_old_images_are_forgotten_and_said_to_be(studio):
    first = studio.perturb(index=0, sigma=0.0)
    keys = [studio.perturb(index=0, sigma=0.0).returned.key for _ in range(KEPT)]
    assert len(set(keys)) == KEPT
    for key in (first.returned.key, first.original.key, "images", "draw-x"):
        with pytest.raises(UsageError, match="no longer kept"):
            studio.polish(key)


# Observations


def test_posterior_samples_and_their_figures(studio, whole_run, test_images):
    mask, std = left_columns(2), 0.3
    found = studio.posterior(3, mask, std, n=3, steps=6, seed=4)
    task = make_task(RunParts.load(whole_run), "columns:2", std, range(3, 4), seed=4)
    assert torch.equal(found.observed[0, :, :, :2], task.measurement[0])  # that of `namm assimilate`
    assert found.observed[0, :, :, 2:].isnan().all()
    x = found.samples.images
    residual = (x[:, 0] - found.observed[0, 0])[:, mask] / std
    np.testing.assert_allclose(found.chi2[:-1], residual.square().mean(1), rtol=1e-4)
    truth = (test_images[3, 0] - found.observed[0, 0])[mask] / std
    assert found.chi2[-1] == pytest.approx(float(truth.square().mean()), rel=1e-4)
    torch.testing.assert_close(found.mean[0], x.mean(0))
    torch.testing.assert_close(found.spread[0], x.std(0))
    assert found.error == pytest.approx(float((x.mean(0) - test_images[3]).square().mean().sqrt()), rel=1e-4)
    assert (found.measured, found.failed) == (16, 0)
    again = studio.posterior(3, mask, std, n=3, steps=6, seed=4)
    assert torch.equal(again.samples.images, x)
    other = studio.posterior(3, mask, std, n=3, steps=6, seed=5)
    assert not torch.equal(other.samples.images, x)


def test_what_is_seen_well_decides_more(studio):
    """Samples behind a measurement that is known well are nearer to the truth, even those of a model of six steps."""
    mask = left_columns(8)
    near, far = (studio.posterior(0, mask, std, n=2, steps=20) for std in (0.05, 5.0))
    assert near.error < 0.8 * far.error


def test_polished_posterior_samples_know_their_chi2(studio):
    mask, std = left_columns(4), 0.2
    found = studio.posterior(1, mask, std, n=2, steps=5)
    after = studio.polish(found.samples.key)
    residual = (after.after.images[:, 0] - found.observed[0, 0])[:, mask] / std
    np.testing.assert_allclose(after.chi2, residual.square().mean(1), rtol=1e-4)
    assert (after.after.distances < found.samples.distances).all()


# What is refused


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda s: s.draw(n=17), "n must be a whole number from 1 to 16, not 17"),
        (lambda s: s.draw(n=True), "n must be a whole number"),
        (lambda s: s.draw(n=2.0), "not 2.0"),
        (lambda s: s.draw(steps=1), "steps must be a whole number from 2 to 200, not 1"),
        (lambda s: s.draw(seed=-1), "seed must be a whole number"),
        (lambda s: s.perturb(index=70), "index must be a whole number from 0 to 69, not 70"),
        (lambda s: s.perturb(sigma=-0.1), "sigma must be a number from 0 to"),
        (lambda s: s.perturb(sigma=1e9), "sigma must be a number from 0 to"),
        (lambda s: s.perturb(sigma=float("nan")), "sigma must be a number"),
        (lambda s: s.perturb(sigma="much"), "sigma must be a number"),
        (lambda s: s.posterior(0, left_columns(1), 0.0), "noise must be a number from 1e-06 to 1e+06, not 0.0."),
        (lambda s: s.posterior(0, left_columns(1), 10**400), "not " + "1" + "0" * 39 + "."),
        (lambda s: s.posterior(0, left_columns(1), float("inf")), "noise must be a number"),
        (lambda s: s.posterior(0, left_columns(1), 0.1, n=9), "n must be a whole number from 1 to 8"),
        (lambda s: s.posterior(0, left_columns(0), 0.1), "nothing is observed"),
        (lambda s: s.posterior(0, left_columns(1, 9), 0.1), "a yes or no for each of 8×8 pixels"),
    ],
)
def test_what_is_out_of_range_is_refused_in_a_sentence(studio, call, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        call(studio)


# Runs that lack something


@pytest.fixture
def copied(whole_run, tmp_path):
    def without(*stages):
        folder = shutil.copytree(whole_run, tmp_path / "copied")
        for stage in stages:
            shutil.rmtree(folder / stage)
        return folder

    return without


def test_a_run_without_baseline_and_finetuning_says_so(copied):
    studio = Studio(copied("dm", "finetune", "evaluate"))
    about = answers.about(studio)
    assert set(about["lacking"].values()) == {""}
    assert "--until dm" in next(note for note in about["notes"] if note.startswith("No baseline"))
    assert "--until finetune" in next(note for note in about["notes"] if "not finetuned" in note)
    found = studio.draw(steps=2, n=1)
    assert found.baseline is None
    assert set(found.variation) == {"ours"}
    with torch.no_grad():
        wanted = MirrorMap.load(studio.run / "map" / "training" / "mirror").to_data(found.mirror_images)
    assert torch.equal(found.ours.images, wanted)
    studio.close()


def test_a_run_of_a_map_alone_moves_images(copied):
    studio = Studio(copied("mdm", "samples", "dm", "finetune", "evaluate", "mvae", "vae"))
    about = answers.about(studio)
    assert about["lacking"]["perturb"] == ""
    assert "--until mdm" in about["lacking"]["draw"]
    assert "--until mdm" in about["lacking"]["posterior"]
    assert studio.perturb(index=1, sigma=0.05).returned.images.shape == (1, 1, 8, 8)
    studio.close()


@pytest.fixture
def residual_that_takes(monkeypatch):
    """Let residuals of images be those that `takes` accepts, and fail for others."""

    def replace(takes):
        def residual(facts, key, images):
            if not takes(images):
                raise ValueError("log of a negative number")
            return found(facts, key, images)

        found = RuleFacts.residual_pictures
        monkeypatch.setattr(RuleFacts, "residual_pictures", residual)

    return replace


def test_a_residual_of_moved_images_that_fails_costs_its_pictures_alone(whole_run, test_images, residual_that_takes):
    residual_that_takes(lambda images: all((image == test_images).flatten(1).all(1).any() for image in images))
    studio, said = Studio(whole_run), "the rule's residual cannot be shown: ValueError: log of a negative number"
    assert said not in answers.about(studio)["notes"]
    found = studio.perturb(index=1, sigma=0.1)
    assert found.original.residuals.shape == (1, 8, 7)
    assert (found.returned.residuals, found.returned.problem) == (None, said)
    assert torch.isfinite(found.returned.distances).all()
    told = answers.perturbed(studio, found)
    assert [told[name]["notes"] for name in ("original", "returned", "untouched")] == [[], [said], [said]]
    polished = answers.answer(studio, "polish", {"key": found.returned.key})
    assert said in polished["notes"]
    studio.close()


def test_a_residual_that_always_fails_is_said_once(whole_run, residual_that_takes):
    residual_that_takes(lambda images: False)
    studio = Studio(whole_run)
    found = studio.perturb(index=1)
    assert "ValueError: log of a negative number" in answers.about(studio)["notes"][0]
    assert (found.returned.residuals, found.returned.problem) == (None, "")
    studio.close()


# As JSON


def test_what_the_page_is_told_is_json_and_true(studio, whole_run):
    told = json.loads(json.dumps(answers.about(studio), allow_nan=False))
    metrics = json.loads((whole_run / "evaluate" / "metrics.json").read_text())
    ours = next(row for row in told["measured"] if row["row"] == "finetuned")
    assert ours["distance"] == metrics["rows"]["finetuned"]["distance"]["mean"]
    assert told["verdict"]["outcome"] == metrics["verdict"]["outcome"]
    assert (told["shape"], told["held_out"], told["split"]) == ([1, 8, 8], 70, "test")
    assert told["seed"] not in (studio.settings.samples.seed, studio.settings.evaluate.seed)
    assert len(told["colours"]["values"]) == 256


def test_pictures_arrive_as_they_are(studio):
    import base64

    told = answers.answer(studio, "draw", {"seed": 6, "steps": 3, "n": 2})
    packed = told["ours"]["pictures"]
    values = np.frombuffer(base64.b64decode(packed["data"]), "<f4").reshape(packed["shape"])
    shown = studio.draw(seed=6, steps=3, n=2).ours
    np.testing.assert_array_equal(values, shown.images[:, 0])
    assert told["ours"]["distances"] == shown.distances.tolist()


def test_masks_are_read_row_by_row():
    mask = answers.read_mask("110" + "000", (1, 2, 3))
    assert mask.tolist() == [[True, True, False], [False, False, False]]
    for text in ("11", "11000x"):
        with pytest.raises(UsageError, match="mask must be 6 characters 0 or 1"):
            answers.read_mask(text, (1, 2, 3))
