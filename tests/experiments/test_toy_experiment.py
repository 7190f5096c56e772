"""An experiment that namm has never heard of, declared in one file, goes through every stage and command."""

import re
from dataclasses import replace
from pathlib import Path

import h5py
import pytest
from toy_experiment import EXPERIMENT, NOTE

from namm.cli import main
from namm.errors import UsageError
from namm.experiments.engine.folder import read_record
from namm.experiments.engine.settings_file import read_yaml
from namm.experiments.engine.stages import stages_until
from namm.experiments.presets import EXPERIMENTS, OWN, preset, register


@pytest.fixture
def namm(tmp_path, monkeypatch, capsys):
    """The experiment registered, and commands in an empty folder: their code, and what they print."""
    monkeypatch.chdir(tmp_path)
    register(EXPERIMENT)

    def command(*arguments):
        code = main(list(arguments))
        out = capsys.readouterr()
        return code, out.out + out.err

    yield command
    del EXPERIMENTS["toy"]


def test_one_file_is_an_experiment(namm):
    code, said = namm("run", "toy", "--force", "--data.total", "3", "--until", "evaluate")
    assert code == 0, said
    run = Path("runs/toy")
    chosen = read_yaml(run / "settings.yaml")
    assert (chosen.experiment, chosen.settings.data.total) == ("toy", 3.0)
    names = [stage.name for stage in stages_until("evaluate", chosen.settings)]
    assert {"data", "map", "mdm", "samples", "finetune", "dm"} <= set(names)
    assert all(read_record(run / name).is_complete(run / name) for name in names)

    data = read_record(run / "data")
    assert (data.results["noted"], (run / "data" / NOTE).read_text()) == (3.0, "3.0\n")
    assert NOTE in data.files
    with h5py.File(run / "data/images.h5") as file:
        x = file["train"][:]
    assert x.shape == (64, 1, 8, 8)
    assert abs(x[..., 1:] + x[..., :-1] - 3).max() < 1e-6

    code, said = namm("status", "toy")
    assert code == 0
    assert len(re.findall(r"\bcomplete\b", said)) == len(names)
    assert "toy" in namm("list")[1]

    assert namm("sample", "toy", "-n", "5", "-o", "five.h5")[0] == 0
    with h5py.File("five.h5") as file:
        images, distances = file["images"][:], file["distances"][:]
    assert images.shape == (5, 1, 8, 8)
    assert distances == pytest.approx(abs(images[..., 1:] + images[..., :-1] - 3).mean((1, 2, 3)), rel=1e-4)

    assert namm("report", "toy")[0] == 0  # the last stage
    assert "Neighbours in a row add up to" in (run / "report/report.html").read_text()


def test_commands_know_its_data_and_its_rule_by_name(namm):
    for command in ("run", "data", "check"):
        assert "toy" in namm(command, "--help")[1]
    for name in ("toy", "boards"):
        assert namm("data", name, "--n-train", "20", "--total", "2.5", "--out", f"{name}.h5")[0] == 0
        code, said = namm("check", "toy", f"{name}.h5")  # the file brings its total
        assert code == 0, said
    code, said = namm("run", "tou")
    assert (code, "Did you mean 'toy'" in said) == (2, True)
    code, said = namm("run", "toy", "--preset", "gpu")
    assert code == 2
    assert "no preset 'gpu'" in said


def test_a_name_is_given_once(namm):
    register(EXPERIMENT)  # the same again is no other
    for name in ("burgers", "toy", OWN):
        with pytest.raises(UsageError, match=f"'{name}' already"):
            register(replace(EXPERIMENT, name=name, dataset="others"))
    assert preset("burgers").settings.data.dt == 0.05
