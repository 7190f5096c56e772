"""`namm run`, `namm list` and `namm status` as a person calls them."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from namm.cli import main

TINY = [
    *("--data.size", "8", "--data.n-train", "100", "--data.n-val", "8", "--data.n-test", "0"),
    *("--map.g.layers", "1", "--map.g.filters", "4"),
    *("--map.f.filters", "4", "--map.f.blocks", "1", "--map.f.downsamplings", "1"),
    *("--map.train.batch-size", "4"),
]
SHORT = [*TINY, "--map.train.budget", "5 steps"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def namm(capsys):
    """Call the command line: exit code, what was printed, what was complained about."""

    def call(*arguments):
        code = main(list(arguments))
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def test_run_list_status(namm, tmp_path):
    code, out, _ = namm("run", "periodic", "--until", "map", *SHORT)
    assert code == 0
    assert "data     done in" in out
    assert "map      done in" in out
    assert "steps 5" in out
    assert "runs/periodic" in out
    code, out, _ = namm("run", "periodic", "--until", "map", *SHORT)
    assert code == 0
    assert out.count("done before") == 2

    code, out, _ = namm("run", "periodic", "--until=map", *SHORT, "--map.sigma-max", "0.2")
    assert code == 0
    assert out.count("done before") == 1
    assert "map.sigma_max: 0.3 -> 0.2" in out

    code, out, _ = namm("list")
    assert code == 0
    assert "runs/periodic" in out
    assert "demo, changed" in out
    assert "data map" in out
    for name in ("periodic", "runs/periodic", str(tmp_path / "runs" / "periodic")):
        code, out, _ = namm("status", name)
        assert code == 0
        rows = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in out.splitlines() if "│" in line}
        assert (rows["data"], rows["map"], rows["mdm"]) == ("complete", "complete", "not there yet")
        assert [state for stage, state in rows.items() if stage.startswith("map.")] == ["aside"]


def test_optimiser_and_averages_are_options(namm, tmp_path):
    """The map's and the model's; each average of the model is a file, and its validation loss is in the record."""
    network = [f"--mdm.network.{option}" for option in ("filters=16", "multipliers=1", "blocks=1", "unshuffle=2")]
    muon = ["--mdm.train.optimiser", "muon", "--mdm.train.budget", "2 steps", "--mdm.train.averages", "0.5", "0.9"]
    adamw = ["--map.train.optimiser", "adamw", "--map.train.weight-decay", "0.1"]
    code, out, _ = namm("run", "periodic", "--until", "mdm", "--force", *SHORT, *network, *muon, *adamw)
    assert code == 0, out
    folder = tmp_path / "runs" / "periodic"
    training = folder / "mdm" / "training"
    assert {path.name for path in training.glob("model*")} == {f"model{d}.safetensors" for d in ("", "-0.5", "-0.9")}
    kept = json.loads((training / "settings.json").read_text())["settings"]
    assert (kept["optimiser"], kept["averages"]) == ("muon", [0.5, 0.9])
    assert json.loads((folder / "map" / "training" / "settings.json").read_text())["settings"]["weight_decay"] == 0.1
    results = json.loads((folder / "mdm" / "stage.json").read_text())["results"]
    assert results.keys() >= {"val/loss", "val@0.5/loss", "val@0.9/loss"}


def test_settings_of_a_run_are_read_back(namm, tmp_path):
    namm("run", "periodic", "--until", "data", *SHORT, "--data.seed", "3")
    code, out, _ = namm("run", "--config", "runs/periodic/settings.yaml", "--until", "data")
    assert code == 0
    assert "done before" in out
    assert "changed" not in out
    code, out, _ = namm("run", "--config", "runs/periodic/settings.yaml", "--until", "data", "--data.seed", "4")
    assert code == 0
    assert "data.seed: 3 -> 4" in out
    assert yaml.safe_load((tmp_path / "runs/periodic/settings.yaml").read_text())["data"]["seed"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["burgrs"], "Did you mean 'burgers'?"),
        (["burgers", "--preset", "dem", "--until", "map"], "Did you mean 'demo'?"),
        (["burgers", "--until", "mpa"], "Did you mean 'map'?"),
        (["burgers", "--presett", "demo"], "Did you mean --preset?"),
        (["burgers", "--preset"], "--preset needs a value"),
        (["burgers", "--until", "map", "--until", "data"], "--until is given twice"),
        (["burgers", "--until", "map", "--map.train.bugdet", "5 steps"], "--map.train.budget"),
        (["burgers", "--until", "map", "--map.train.budget", "30 seconds"], "'30 seconds' is not"),
        (["burgers", "--until", "map", "--data.size", "many"], "--data.size"),
        (["burgers", "--until", "map", "--data.tiles", "3"], "--data.tiles"),
        (["burgers", "--until", "map", "--config", "none.yaml"], "none.yaml cannot be read"),
        (["--until", "map"], "which experiment?"),
        (["periodic", "--until", "map", "--data.size", "33"], "cannot be cut into 2 tiles"),
    ],
)
def test_wrong_usage_is_answered_with_a_remedy_and_exit_code_2(namm, tmp_path, arguments, message):
    code, out, err = namm("run", *arguments)
    assert code == 2
    assert message in " ".join((out + err).split())
    assert not (tmp_path / "runs").exists()


def test_a_misspelt_key_in_a_file_is_answered_with_the_right_one(namm, tmp_path):
    (tmp_path / "my.yaml").write_text("experiment: periodic\nmap:\n  train:\n    bugdet: 5 steps\n")
    code, _, err = namm("run", "--config", "my.yaml", "--until", "map")
    assert code == 2
    assert "there is no setting 'bugdet' in 'map.train'. Did you mean 'budget'?" in err


def test_a_file_of_another_experiment_or_preset_is_refused(namm, tmp_path):
    (tmp_path / "my.yaml").write_text("experiment: periodic\npreset: paper\n")
    code, _, err = namm("run", "burgers", "--config", "my.yaml", "--until", "map")
    assert code == 2
    assert "is for the experiment 'periodic', not 'burgers'" in err
    code, _, err = namm("run", "periodic", "--preset", "demo", "--config", "my.yaml", "--until", "map")
    assert code == 2
    assert "is for the preset 'paper', not 'demo'" in err


def test_folders_that_are_not_this_run_are_refused(namm, tmp_path):
    namm("run", "periodic", "--until", "data", *SHORT)
    code, _, err = namm("run", "burgers", "--until", "data", "--out", "runs/periodic")
    assert code == 1
    assert "experiment: periodic -> burgers" in err
    code, _, err = namm("run", "burgers", "--until", "data", "--out", str(tmp_path))
    assert code == 1
    assert "not a run of namm" in err


def test_list_and_status_without_runs(namm, tmp_path):
    assert namm("list")[:2] == (0, "there are no runs here yet; `namm run NAME` makes one in the folder runs.\n")
    assert namm("list", "nowhere")[0] == 2
    code, _, err = namm("status", "burgers")
    assert code == 2
    assert "there is no run 'burgers'" in err
    (tmp_path / "some").mkdir()
    assert "no runs in some" in namm("list", "some")[1]
    assert namm("list", "some", "more")[0] == 2


def test_list_shows_a_run_that_it_cannot_read(namm, tmp_path):
    namm("run", "periodic", "--until", "data", *SHORT)
    (tmp_path / "runs/periodic/settings.yaml").write_text("experiment: periodic\nmpa: 3\n")
    code, out, _ = namm("list")
    assert code == 0
    assert "unreadable" in out


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_lives_and_ctrl_c_says_how_to_go_on(namm, tmp_path):
    arguments = ["run", "periodic", "--until", "map", *TINY, "--map.train.budget", "1000000 steps"]
    first = subprocess.Popen(
        [sys.executable, "-m", "namm", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("runs/periodic/map/training/checkpoints/*")) and time.monotonic() < deadline:
            assert first.poll() is None
            time.sleep(0.05)
        before = (tmp_path / "runs/periodic/settings.yaml").read_bytes()
        code, _, err = namm("run", "periodic", "--until", "map", *SHORT)
        assert code == 1
        assert f"in use by process {first.pid}" in err
        assert (tmp_path / "runs/periodic/settings.yaml").read_bytes() == before
        assert namm("status", "periodic")[0] == 0
        first.send_signal(signal.SIGINT)
        _, said = first.communicate(timeout=60)
    finally:
        first.kill()
        first.wait()
    assert first.returncode == 1
    assert "the same command goes on from there" in said.splitlines()[-1]
    assert "Traceback" not in said
    assert namm("run", "periodic", "--until", "map", *SHORT)[0] == 0
    record = json.loads((tmp_path / "runs/periodic/map/stage.json").read_text())
    assert record["results"]["steps"] == 5
