"""`namm sweep`: cells from the command line, through submitit, to one table."""

import csv
import json
import shutil

import pytest

from namm.cli import main
from namm.experiments.engine.folder import read_record
from namm.experiments.engine.settings import with_seed
from namm.experiments.engine.settings_file import to_yaml
from namm.experiments.presets import preset
from namm.experiments.sweeps import sweep
from namm.experiments.sweeps.sweep import combinations, make_cell, read_values


@pytest.fixture
def config(tiny_preset, tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(to_yaml(tiny_preset))
    return "tiny.yaml"


# What is varied


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("map.sigma-max=0.1,2,1e-3", ("map.sigma_max", [0.1, 2, 0.001])),
        ("map.train.budget=5 steps, 2 minutes", ("map.train.budget", ["5 steps", "2 minutes"])),
        ("mdm.network.multipliers=[1, 2],[1]", ("mdm.network.multipliers", [[1, 2], [1]])),
        ("map.f.skip=true,false", ("map.f.skip", [True, False])),
    ],
)
def test_values_are_read_as_in_a_settings_file(text, expected):
    assert read_values(text) == expected


@pytest.mark.parametrize(
    ("value", "word"),
    [(-1, "-1"), (1, "1"), (-1e-3, "-0.001"), ([-1, 2], "-1-2"), ("5 steps", "5-steps"), ("/a/b", "a-b")],
)
def test_values_are_told_apart_by_the_names_of_folders(value, word):
    assert sweep._word(value) == word


def test_cells_are_the_product_and_carry_their_values():
    base = preset("periodic")
    values = combinations({"map.sigma_max": [0.1, 0.2], "mdm.network.multipliers": [[1, 2]]}, seeds=[0, 7])
    cells = [make_cell(base, each, "map") for each in values]
    assert [cell.name for cell in cells] == [
        f"map.sigma_max={sigma}_mdm.network.multipliers=1-2_seed={seed}" for sigma in (0.1, 0.2) for seed in (0, 7)
    ]
    last = cells[-1].preset.settings
    assert (last.map.sigma_max, last.mdm.network.multipliers) == (0.2, (1, 2))
    seeded = with_seed(base.settings, 7)
    assert (last.data, last.samples, last.map.train.seed) == (seeded.data, seeded.samples, 7)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--vary", "map.sigma_maks=1,2"], "Did you mean 'sigma_max'"),
        (["--vary", "mpa.sigma_max=1,2"], "Did you mean 'map'"),
        (["--vary", "map.sigma_max=small"], "map.sigma_max must be a number"),
        (["--vary", "map.sigma_max=0.1,-1"], "sigma_max must be positive"),
        (["--vary", "map.sigma_max.more=1"], "'sigma_max' is a value itself"),
        (["--vary", "map.weights=1"], "must be a mapping"),
        (["--vary", "map.sigma_max"], "looks like map.sigma_max=0.05,0.1,0.2"),
        (["--vary", "map.sigma_max=1,"], "looks like map.sigma_max=0.05,0.1,0.2"),
        (["--vary", "map.sigma_max=1", "--vary", "map.sigma-max=2"], "varied twice"),
        (["--vary", "map.sigma_max=1,1"], "two cells are called"),
        (["--seeds", "one"], "--seeds takes whole numbers"),
        (["--seeds", "0", "--jobs", "0"], "--jobs takes whole numbers of 1 or more"),
        (["--seeds", "0", "--jobs", "2"], "add --on local or --on slurm"),
        (["--seeds", "0", "--on", "slrum"], "Did you mean 'slurm'"),
        (["--seeds", "0", "--slurm", "partition=gpu"], "add --on slurm"),
        (["--seeds", "0", "--until", "mpa"], "Did you mean 'map'"),
        (["--seeds", "0", "--vray", "map.sigma_max=1"], "Did you mean --vary"),
        ([], "what is varied?"),
    ],
)
def test_mistakes_are_refused_before_anything_runs(arguments, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "periodic", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_something_else_is_refused(config, tmp_path, capsys):
    for name in ("run.json", "sweep.json"):
        out = tmp_path / f"with-{name}"
        out.mkdir()
        (out / name).write_text('{"kind": "another"}')
        assert main(["sweep", "--config", config, "--seeds", "0", "--out", str(out)]) == 1
        assert "choose another" in capsys.readouterr().err
        assert [path.name for path in out.iterdir()] == [name]


# From cells to a table


def table(out) -> list[dict[str, str]]:
    with (out / "sweep.csv").open() as file:
        return list(csv.DictReader(file))


def foreign(folder):
    """Make what a sweep would write into somebody else's folder."""
    folder.mkdir(parents=True)
    (folder / "foreign").write_text("not ours")
    return folder


def require_own_numbers(out, rows):
    """Each row has the settings of its cell, and what that cell measured; the images were drawn once, for all."""
    for row in rows:
        record = read_record(out / row["cell"] / "map")
        assert record.settings["sigma_max"] == float(row["map.sigma_max"])
        assert record.settings["weights"]["constraint"] == float(row["map.weights.constraint"])
        assert float(row["distance_map"]) == record.results["distance_map"]
    assert len({(out / row["cell"] / "data" / "images.h5").stat().st_ino for row in rows}) == 1


def test_four_cells_one_of_which_fails_and_is_tried_again(config, tmp_path, capsys):
    out = tmp_path / "out"
    bad = foreign(out / "map.sigma_max=0.2_map.weights.constraint=1")
    vary = ["--vary", "map.sigma-max=0.1,0.2", "--vary", "map.weights.constraint=1,5"]
    command = ["sweep", "--config", config, "--out", str(out), *vary, "--until", "map"]

    assert main(command) == 1
    rows = table(out)
    assert [(row["map.sigma_max"], row["map.weights.constraint"], row["status"]) for row in rows] == [
        ("0.1", "1", "complete"),
        ("0.1", "5", "complete"),
        ("0.2", "1", "failed"),
        ("0.2", "5", "complete"),
    ]
    require_own_numbers(out, rows[:2] + rows[3:])

    (bad / "foreign").unlink()
    finished = {row["cell"]: read_record(out / row["cell"] / "map").finished for row in rows if row["error"] == ""}
    assert main(command) == 1  # it failed before, and nobody asked to try again
    assert main([*command, "--retry"]) == 0
    rows = table(out)
    assert [row["status"] for row in rows] == ["complete"] * 4
    assert {name: read_record(out / name / "map").finished for name in finished} == finished


def test_cells_through_submitit_one_of_which_raises(config, tmp_path, capsys):
    out = tmp_path / "out"
    bad = foreign(out / "map.sigma_max=0.2_map.weights.constraint=5")
    vary = ["--vary", "map.sigma-max=0.1,0.2,0.3", "--vary", "map.weights.constraint=5"]
    command = ["sweep", "--config", config, "--out", str(out), *vary, "--until", "map", "--on", "local", "--jobs", "2"]

    assert main(command) == 1
    assert f"{bad.name} failed: {bad} is not empty and not a run of namm" in capsys.readouterr().out
    rows = table(out)
    assert [row["status"] for row in rows] == ["complete", "failed", "complete"]
    require_own_numbers(out, rows[::2])
    assert rows[1]["distance_map"] == ""
    cells = json.loads((out / "sweep.json").read_text())["cells"]
    assert "not a run of namm" in cells[1]["error"]


def test_a_cell_has_what_those_before_it_have_done(config, tmp_path, capsys):
    assert (
        main(["sweep", "--config", config, "--out", "out", "--vary", "mdm.train.ema-decay=0.5,0.9", "--until", "mdm"])
        == 0
    )
    told = capsys.readouterr().out
    assert "mdm.train.ema_decay=0.5: map      running" in told
    assert "mdm.train.ema_decay=0.9: map      done before" in told
    assert told.count("map      running") == 1
    assert told.count("mdm      running") == 2


def test_a_sweep_shows_the_evaluation_where_it_is_done(config, whole_run, tmp_path, capsys):
    shutil.copytree(whole_run, tmp_path / "out" / "evaluate.seed=2")
    command = ["sweep", "--config", config, "--out", "out", "--vary", "evaluate.seed=2"]
    assert main([*command, "--until", "evaluate"]) == 0
    assert "√MMD² ours" in capsys.readouterr().out
    metrics = json.loads((whole_run / "evaluate" / "metrics.json").read_text())["rows"]
    (row,) = table(tmp_path / "out")
    assert float(row["distance_ours"]) == metrics["finetuned"]["distance"]["mean"]
    assert float(row["mmd_baseline"]) == metrics["dm"]["mmd"][0]
