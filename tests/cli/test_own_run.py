"""`namm run --data FILE --constraint module:name`: a user's own images and rule through every stage."""

import json
import re
import shutil
import sys

import h5py
import numpy as np
import pytest
import yaml
from own_files import OWN, RULE, TINY, ions, write

from namm.cli.run import choose
from namm.constraints import constraint
from namm.datasets import open_store
from namm.errors import DataError, NammWarning
from namm.experiments.engine.folder import read_record
from namm.training.tune import COSTS, RANGE


@pytest.fixture
def mine(own_run, tmp_path, monkeypatch):
    """A copy of it, as the current folder."""
    folder = shutil.copytree(own_run, tmp_path / "copy")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("COLUMNS", "200")
    sys.modules.pop("charges", None)
    yield folder
    sys.modules.pop("charges", None)


def states(namm, run="own"):
    _, said = namm("status", run)
    rows = [line.split("│") for line in said.splitlines() if line.count("│") > 3]
    return {row[1].strip(): row[2].strip() for row in rows}


def test_every_stage_is_done_and_the_numbers_are_of_these_images_and_this_rule(mine, namm):
    found = states(namm)
    assert [name for name, state in found.items() if state == "complete"] == [
        *("data", "map", "mdm", "samples", "finetune", "dm", "repair", "evaluate", "report")
    ]
    data = read_record(mine / "runs/own/data")
    assert data.results["shape"] == "3×8×8"
    assert data.results["distance_mean"] < 1e-6
    metrics = json.loads((mine / "runs/own/evaluate/metrics.json").read_text())["rows"]
    with h5py.File(mine / "runs/own/evaluate/mdm.h5") as file:
        assert metrics["finetuned"]["distance"]["mean"] == pytest.approx(
            np.abs(file["images"][:].sum(1)).mean(), rel=1e-4
        )
    page = (mine / "runs/own/report/report.html").read_text()
    assert "charges:neutral" in page
    assert "nan" not in re.findall(r"<data[^>]*>([^<]*)</data>", page)
    assert len(re.findall(r"<data", page)) > 30


def test_settings_say_which_data_and_which_rule(mine):
    data = yaml.safe_load((mine / "runs/own/settings.yaml").read_text())["data"]
    assert data["file"].endswith("/ions.h5")
    assert (data["constraint"], data["shape"], data["layout"]) == ("charges:neutral", [3, 8, 8], "NCHW")
    assert (data["n_train"], data["n_val"], data["n_test"]) == (160, 20, 20)
    assert len(data["content"]) == len(data["source"]) == 16
    with open_store(mine / "runs/own/data/images.h5") as store:
        copied = np.concatenate([store[split][:].numpy() for split in ("train", "val", "test")])
    assert sorted(copied[:, 0, 0, 0]) == sorted(ions()[:, 0, 0, 0])


def test_sigma_and_lambda_are_chosen_by_trials_that_the_run_keeps(mine):
    settings = yaml.safe_load((mine / "runs/own/settings.yaml").read_text())
    assert settings["map"]["tune"]
    assert settings["evaluate"]["subset"] == 20
    results = read_record(mine / "runs/own/map").results
    tuning = results["tuning"]
    assert RANGE[0] <= tuning["sigma"] == results["sigma_max"] <= RANGE[1]
    assert [trial["cost"] for trial in tuning["trials"]] == list(COSTS)
    assert tuning["weight"] / tuning["unit"] == pytest.approx(results["weight_unit"] * 10 / tuning["unit"])
    assert tuning["unit"] == pytest.approx(tuning["sigma"] / tuning["distance_errors"], rel=0.01)
    assert read_record(mine / "runs/own/map").compute_seconds > tuning["compute_seconds"] > 0


def test_the_same_command_does_nothing_again_and_says_what_it_found(mine, namm):
    (mine / "charges.py").write_text("# the same rule\n" + RULE)
    shutil.move(mine / "ions.h5", mine / "moved.h5")
    code, said = namm("run", "--data", "moved.h5", *OWN[2:], *TINY)
    assert code == 0
    assert said.count("done before") == 9
    assert "160 for train, 20 for val, 20 for test: it has no splits, and is split at random (data.seed 0)" in said
    assert "neutral: ℓ is" in said


def test_a_run_goes_on_without_its_file(mine, namm):
    (mine / "ions.h5").unlink()
    code, said = namm("run", "--config", "runs/own/settings.yaml")
    assert code == 0
    assert said.count("done before") == 9
    code, said = namm("run", *OWN, *TINY)
    assert code == 1
    assert "There is no file or folder" in said


def test_the_other_commands_take_such_a_run_from_any_folder(mine, namm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = mine / "runs/own"
    assert "own" in namm("list", mine / "runs")[1]
    code, said = namm("sample", run, "-n", 6, "-o", "s.h5", "--steps", 3)
    assert code == 0
    with h5py.File("s.h5") as file:
        np.testing.assert_allclose(
            file["distances"][:], np.abs(file["images"][:].sum(1)).mean((1, 2)), rtol=1e-4, atol=1e-6
        )
    code, said = namm("evaluate", run)
    assert (code, "finetuned" in said) == (0, True)
    code, said = namm("report", run)
    assert (code, said.strip()) == (0, str(run / "report/report.html"))
    code, said = namm("export", run, "-o", "pipe")
    assert code == 0
    assert "constraint=rule" in said
    assert "where rule is charges:neutral" in said


def test_a_changed_rule_is_refused_by_what_would_measure_with_it_and_reruns_what_depends_on_it(mine, namm):
    (mine / "charges.py").write_text(RULE.replace("mean((1, 2))", "mean((1, 2)) * 3"))
    command = ("sample", "own", "-n", 4, "-o", "s.h5")
    settings = yaml.safe_load((mine / "runs/own/settings.yaml").read_text())
    settings["data"]["folder"] = str(mine)
    (mine / "runs/own/settings.yaml").write_text(yaml.safe_dump(settings))
    code, said = namm(*command)
    assert code == 1
    assert "the module of the rule charges:neutral has changed since this run" in said
    code, said = namm("run", *OWN, *TINY, "--until", "data")
    assert code == 0
    assert "data.source" in said
    found = states(namm)
    assert (found["data"], found["map"], found["dm"]) == ("complete", "stale", "stale")


def test_changed_images_rerun_what_depends_on_them(mine, namm):
    with h5py.File(mine / "ions.h5", "a") as file:
        file["density"][3] *= 2
    code, said = namm("run", *OWN, *TINY, "--until", "data")
    assert code == 0
    assert "data.content" in said
    assert states(namm)["map"] == "stale"


def test_what_is_asked_for_wins_over_what_is_measured(mine, namm):
    options = [
        "--map.sigma-max",
        "0.2",
        "--data.n-train",
        "50",
        "--evaluate.subset",
        "10",
        "--finetune.sigma-max",
        "0.3",
    ]
    assert namm("run", *OWN, *TINY, *options, "--until", "data", "--out", "other")[0] == 0
    settings = yaml.safe_load((mine / "other/settings.yaml").read_text())
    assert settings["map"]["sigma_max"] == 0.2
    assert settings["finetune"]["sigma_max"] == 0.3
    assert settings["evaluate"]["subset"] == 10
    assert settings["data"]["n_train"] == 50
    assert not settings["map"]["tune"]
    assert namm("run", *OWN, *TINY, "--map.weights.constraint", "3", "--until", "data", "--out", "third")[0] == 0
    settings = yaml.safe_load((mine / "third/settings.yaml").read_text())
    assert settings["finetune"]["weights"]["constraint"] == 3


@pytest.mark.parametrize("preset", ["gpu", "paper"])
def test_other_presets_take_own_data_too(mine, namm, preset):
    np.save("a.npy", np.repeat(np.repeat(ions(40), 2, 2), 2, 3))
    code, said = namm("run", "--data", "a.npy", *OWN[2:], "--preset", preset, "--until", "data", "--out", "other")
    assert code == 0, said
    settings = yaml.safe_load((mine / "other/settings.yaml").read_text())
    assert preset == "gpu" or settings["map"]["f"]["activation"] == "none"  # images of any sign
    assert not settings["map"]["train"]["compile"]
    assert settings["evaluate"]["n_fid"] == settings["evaluate"]["kid_subsets"] == 0  # these are no pictures
    assert settings["dm"]["equal_compute"]


def test_images_of_unusual_size_get_a_word(mine, namm):
    np.save("a.npy", 1e-3 * ions(40))
    _, said = namm("run", "--data", "a.npy", *OWN[2:], "--preset", "paper", "--until", "data", "--out", "other")
    assert "standard deviation is 4.1·10⁻⁴: maps learn best near 1" in said


def test_training_one_thing_and_a_file_of_settings(mine, namm):
    code, said = namm("train", "map", *OWN, *TINY, "--out", "runs/own")
    assert (code, said.count("done before")) == (0, 2)
    (mine / "own.yaml").write_text(f"experiment: own\ndata: {{file: {mine}/ions.h5, constraint: 'charges:neutral'}}\n")
    code, said = namm("run", "--config", "own.yaml", "--until", "data", "--out", "other")
    assert code == 0
    assert yaml.safe_load((mine / "other/settings.yaml").read_text())["data"]["n_train"] == 160


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A user's folder without a run."""
    monkeypatch.chdir(write(tmp_path / "here"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("charges", None)
    yield tmp_path / "here"
    for module in ("charges", "trainable"):
        sys.modules.pop(module, None)


def settled(*arguments, **own):
    """The settings that a command would run with."""
    own = own or {"data": "ions.h5", "constraint": "charges:neutral"}
    return choose("namm run", None, own, list(arguments)).settings


def test_what_is_given_stays_also_where_it_is_what_the_preset_says(here, capsys):
    found = settled("--map.sigma-max", "0.1", "--finetune.weights.constraint=5.0")
    assert (found.map.sigma_max, found.finetune.sigma_max) == (0.1, 0.025)
    assert not found.map.tune
    assert "with noise of 0.1 of their spread" in capsys.readouterr().out
    assert found.finetune.weights.constraint == 5
    assert settled("--evaluate.subset", "1000").evaluate.subset == 1000


def test_a_short_file_of_settings_is_measured_but_for_what_it_gives(here):
    data = "experiment: own\ndata: {file: ions.h5, constraint: 'charges:neutral'}\n"
    (here / "short.yaml").write_text(data)
    measured = settled()  # by which the rule is this user's own
    found = settled(config="short.yaml")
    assert (found.map, found.finetune, found.evaluate) == (measured.map, measured.finetune, measured.evaluate)
    assert found.map.tune
    (here / "more.yaml").write_text(data + "map: {sigma_max: 0.1}\nfinetune: {sigma_max: 0.1}\n")
    found = settled("--finetune.sigma-max", "0.3", config="more.yaml")
    assert (found.map.sigma_max, found.finetune.sigma_max) == (0.1, 0.3)
    assert not found.map.tune
    assert found.evaluate.subset == 20


def test_a_file_of_settings_that_were_measured_is_taken_as_it_is(mine):
    config = mine / "runs/own/settings.yaml"
    said = yaml.safe_load(config.read_text())
    said["map"]["sigma_max"], said["finetune"]["weights"]["constraint"] = 0.1, 5.0
    config.write_text(yaml.safe_dump(said))
    found = settled(config=str(config))
    assert (found.map.sigma_max, found.finetune.weights.constraint) == (0.1, 5)
    assert found.finetune.sigma_max == said["finetune"]["sigma_max"]


def test_images_that_are_no_pictures_are_refused_before_they_are_trained_on(here):
    (here / "charges.py").write_text(RULE + "def kept(x):\n    return x[:, :1].abs().mean((1, 2, 3))\n")
    np.save("pairs.npy", np.stack([0 * ions()[:, 0], ions()[:, 1]], 1))
    own = {"data": "pairs.npy", "constraint": "charges:kept"}
    assert settled(**own).data.shape == (2, 8, 8)
    with pytest.raises(DataError, match="images with 2 channels are no pictures"):
        settled("--evaluate.kid-subsets", "3", **own)


def test_a_dozen_images_are_too_few_and_counted(here, namm):
    np.save("few.npy", ions(12))
    code, said = namm("run", "--data", "few.npy", *OWN[2:])
    assert code == 1
    assert "holds 12 images to take 10 for train, 1 for val, 1 for test" in said


def test_a_residual_that_fails_in_the_report_costs_its_pictures_alone(mine, namm, monkeypatch):
    def fails(x):
        raise RuntimeError("only two images at a time")

    rule = constraint(lambda x: x.sum(1).abs().mean((1, 2)), residual=fails)
    monkeypatch.setattr("namm.experiments.engine.build.constraint", lambda _: rule)
    shutil.rmtree(mine / "runs/own/report")
    (mine / "runs/own/evaluate/rule.json").unlink()  # as in a run of version 0.1
    code, said = namm("report", "own")
    assert code == 0, said
    page = (mine / "runs/own/report/report.html").read_text()
    assert page.count("the rule&#39;s residual: RuntimeError: only two images at a time") == 1
    assert len(re.findall(r"<data", page)) > 30


TRAINABLE = """
import torch
from namm import Constraint

class Rule(Constraint):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def distance(self, x):
        return (self.scale * self.residual(x)).abs().mean((1, 2, 3))

    def residual(self, x):
        return self.scale * x.sum(1, keepdim=True)

class Late(Rule):
    def distance(self, x):
        return x.sum(1).abs().mean((1, 2))

    def residual(self, x):
        raise ValueError("not here")
"""


def test_the_residual_of_a_rule_with_parameters_can_be_checked(here, namm):
    (here / "trainable.py").write_text(TRAINABLE)
    how = ("ions.h5", "--key", "density", "--layout", "NCHW")
    code, said = namm("check", "trainable:Rule", *how)
    assert code == 0, said
    assert (here / "ions-worst.png").stat().st_size > 1000
    code, said = namm("check", "trainable:Late", *how)
    assert code == 1
    assert "the rule trainable:Late raised ValueError: not here (trainable.py, line" in said


WRONG = """
import torch

def flat(x):
    return torch.round(x).sum(1).abs().mean((1, 2))

def whole(x):
    return x.sum(1).abs().mean()

def breaks(x):
    return (x - 5).abs().mean((1, 2, 3))

def raises(x):
    raise ValueError("not today")

def bounded(x):
    return (x.abs() - 3).clamp(min=0).mean((1, 2, 3))

def faint(x):
    return 1e-33 * x.sum(1).abs().mean((1, 2))

def huge(x):
    return 1e33 * x.sum(1).abs().mean((1, 2))

def steep(x):
    return torch.exp(5000 * x.sum(1).abs().mean((1, 2))) - 1

number = 3
"""


@pytest.mark.parametrize(
    ("rule", "code", "message"),
    [
        ("wrong:bounded", 1, "bounded is inactive: its mean distance is 0 on the data and 0 with noise of 0."),
        ("wrong:faint", 1, "and float32 cannot train with that: multiply ℓ by 2e+34"),
        ("wrong:huge", 1, "float32 cannot train with that: multiply ℓ by 2e-32 in the rule"),
        ("wrong:steep", 1, "steep is inf at image 0 of the data with noise"),
        ("wrong:flat", 1, "flat has zero gradient"),
        ("wrong:whole", 1, "whole returned shape ()"),
        ("wrong:breaks", 1, "the data break the constraint breaks"),
        ("wrong:raises", 1, "the rule wrong:raises raised ValueError: not today (wrong.py, line 14)"),
        ("wrong:number", 2, "it must be a function"),
        ("wrong:numbr", 2, "Did you mean 'number'?"),
        ("wrogn:flat", 2, "there is no module 'wrogn'"),
        ("flux", 2, 'such as "namm:TotalFlux(120)"'),
    ],
)
def test_a_rule_that_cannot_be_used_is_refused_before_anything_is_made(mine, namm, rule, code, message):
    (mine / "wrong.py").write_text(WRONG)
    got, said = namm("run", "--data", "ions.h5", "--constraint", rule, "--out", "new")
    sys.modules.pop("wrong", None)
    assert (got, message in said) == (code, True), said
    assert not (mine / "new").exists()


def neutral_with(channel):
    """Three charges that add up to nothing, of which the first is `channel`, (N, 8, 8)."""
    second = ions()[: len(channel), 1]
    return np.stack([channel, second, -channel - second], 1)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((40, 3, 8, 8)), "the images are constant: in all 32 images every channel has the same value"),
        (np.repeat(ions(1), 40, 0), "the images are constant: all 32 images are copies of one"),
        (1e18 * ions(40), "cannot hold sums of squares of values above 1e+15"),
        (1e-20 * ions(40), "the images have a standard deviation of"),
    ],
)
def test_images_that_cannot_be_learned_from_are_refused_before_anything_is_made(here, namm, images, message):
    np.save("odd.npy", images.astype(np.float32))
    code, said = namm("run", "--data", "odd.npy", *OWN[2:], "--out", "new")
    assert (code, message in said) == (1, True), said
    assert not (here / "new").exists()


def test_a_constant_channel_is_pointed_out(here, capsys):
    np.save("still.npy", neutral_with(np.full((40, 8, 8), 0.5, np.float32)))
    settled(data="still.npy", constraint="charges:neutral")
    assert "channel 0 of the images is constant" in capsys.readouterr().out


def test_sigma_and_lambda_far_from_usual_are_warned_of_before_the_map_is_trained(here, namm):
    asked = ("--map.sigma-max", "50", "--map.weights.constraint", "1e8", "--until", "map")
    with pytest.warns(NammWarning) as found:
        assert namm("run", *OWN, *TINY, *asked)[0] == 0
    said = [str(each.message) for each in found]
    assert any("σ_max = 50 is 50 standard deviations of the images (1), which drowns" in each for each in said)
    assert any("makes λ·ℓ" in each and "ignore all but the rule" in each for each in said)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "ions.h5"], "needs images and a rule"),
        (["own"], "needs images and a rule"),
        (["burgers", *OWN], "leave out 'burgers'"),
        (["--config", "runs/own/settings.yaml", *OWN], "names its own data"),
        ([*OWN, "--data.layuot", "NCHW"], "--data.layout"),
        ([*OWN, "--data.n-train", "-3"], "n_train must be 0 or more"),
    ],
)
def test_wrong_usage(mine, namm, arguments, message):
    code, said = namm("run", *arguments)
    assert code == 2
    assert message in " ".join(said.split())
