"""Whatever goes wrong, in whatever command: an exit code, one readable message, no traceback unless it is asked for."""

import errno
import shutil
import subprocess
import sys
import warnings

import h5py
import numpy as np
import pytest
import torch

import namm.cli
from namm.cli import COMMANDS, main, warnings_as_sentences
from namm.errors import DataError, Interrupted, MemoryShortage, NammWarning, UsageError, explain

ERRORS = {
    "usage": (UsageError("n must be positive."), 2, "n must be positive."),
    "failure": (DataError("no images\n  here."), 1, "no images here."),
    "long": (DataError("x" * 5000), 1, "--debug shows all"),
    "asked to stop": (Interrupted("stopped at step 3: the same command goes on."), 1, "stopped at step 3"),
    "Ctrl-C": (KeyboardInterrupt(), 1, "interrupted; the same command goes on where"),
    "full disk": (OSError(errno.ENOSPC, "No space left on device", "a.h5"), 1, "no space left on device (a.h5): free"),
    "permissions": (
        PermissionError(errno.EACCES, "Permission denied", "/root/x"),
        1,
        "permission denied (/root/x): choose",
    ),
    "a folder": (IsADirectoryError(errno.EISDIR, "Is a directory", "runs"), 1, "is a directory (runs): choose another"),
    "no file": (
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        1,
        "connection refused. --debug shows",
    ),
    "no memory": (MemoryError(), 1, "memory has run out (the machine has no more): ask for smaller batches"),
    "no memory, CPU": (
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9"),
        1,
        "smaller batch",
    ),
    "no memory, GPU": (
        torch.OutOfMemoryError("CUDA out of memory. Tried 20 GiB\nmore"),
        1,
        "memory has run out (CUDA out",
    ),
    "no memory, said": (MemoryShortage("a batch_size of 4 fits."), 1, "a batch_size of 4 fits."),
    "driver": (
        RuntimeError("CUDA error: unknown error\nCUDA kernel errors might be"),
        1,
        "CUDA_VISIBLE_DEVICES=-1. --debug",
    ),
    "no driver": (RuntimeError("Found no NVIDIA driver on your system."), 1, "see `nvidia-smi`"),
    "anything": (ZeroDivisionError("division by zero"), 1, "ZeroDivisionError: division by zero. --debug shows where"),
    "nothing said": (AssertionError(), 1, "AssertionError. --debug shows where"),
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_is_one_line_and_debug_shows_more(error, monkeypatch, capsys):
    raised, code, text = ERRORS[error]

    class Broken:
        @staticmethod
        def main(arguments):
            raise raised

    monkeypatch.setattr(namm.cli, "import_module", lambda name: Broken)
    assert main(["run"]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("namm: ")
    assert printed.err.count("\n") == 1
    assert text in printed.err
    for arguments in (["run", "--debug"], ["--debug", "run"]):
        assert main(arguments) == code
        said = capsys.readouterr().err
        assert "Traceback" in said
        assert said.splitlines()[-1] == printed.err.strip()


@pytest.mark.parametrize(("command", "again"), [("sweep", "goes on where this one stopped"), ("check", "starts again")])
def test_ctrl_c_says_what_the_same_command_does(command, again):
    said = explain(KeyboardInterrupt(), resumes=COMMANDS[command].resumes)
    assert said == (f"interrupted; the same command {again}.", 1)


# What really goes wrong

RULE = """
def neutral(x):
    return x.sum(1).abs().mean((1, 2))

def raises(x):
    raise ValueError("not today")
"""
IONS = ["--data", "ions.npy", "--constraint", "charges:neutral", "--until", "data"]
SMALL = ["--n-train", "4", "--n-val", "0", "--n-test", "0", "--size", "8"]
PIXELS = ["ions.npy", "--layout", "NCHW", "--against", "ions.npy", "--against-layout", "NCHW"]


@pytest.fixture
def place(whole_run, tmp_path):
    """A folder with a run and with everything that is not what it should be."""
    shutil.copytree(whole_run, tmp_path / "runs" / "mine")
    for folder in ("empty", "full", "folder.h5"):
        (tmp_path / folder).mkdir()
    for file in ("text.txt", "full/x", "blocked", "junk.h5", "junk.npy", "junk.npz", "junk.yaml"):
        (tmp_path / file).write_bytes(b"\xff\xfe junk")
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "charges.py").write_text(RULE)
    (tmp_path / "sick.py").write_text("def neutral(x:\n")
    (tmp_path / "exits.py").write_text("raise SystemExit(3)\n")
    x = np.random.default_rng(0).standard_normal((60, 3, 8, 8)).astype(np.float32)
    np.save("ions.npy", x - x.mean(1, keepdims=True))
    x[3, 0, 0, 0] = np.nan
    np.save("nan.npy", x)
    yield tmp_path
    for module in ("charges", "sick", "exits"):
        sys.modules.pop(module, None)


def fails(place, capsys, arguments, code, message):
    assert main(arguments) == code
    printed = capsys.readouterr()
    assert message in " ".join((printed.out + printed.err).split()), printed.err
    assert "Traceback" not in printed.out + printed.err


RUN_COMMANDS = {
    "status": [],
    "report": [],
    "evaluate": [],
    "sample": ["-n", "4", "-o", "s.h5"],
    "repair": ["samples.npy", "-o", "r.h5"],
    "export": ["-o", "pipe"],
    "assimilate": ["-o", "a.h5"],
}
BROKEN_RUNS = {
    "run.json": (b"junk", 1, "run.json cannot be read"),
    "settings.yaml": (b"a: [1", 2, "settings.yaml is not YAML"),
    "map/stage.json": (b"{", 1, "stage.json cannot be read"),
}


@pytest.mark.parametrize(
    ("command", "name"), [*((command, "none") for command in RUN_COMMANDS), ("status", "text.txt"), ("status", "empty")]
)
def test_a_run_that_is_none(command, name, place, capsys):
    fails(place, capsys, [command, name, *RUN_COMMANDS[command]], 2, f"there is no run '{name}'")


@pytest.mark.parametrize("file", BROKEN_RUNS)
def test_a_run_that_is_damaged(file, place, capsys):
    content, code, message = BROKEN_RUNS[file]
    (place / "runs/mine" / file).write_bytes(content)
    fails(place, capsys, ["status", "mine"], code, message)


@pytest.mark.parametrize(
    "file",
    [
        "mdm/training/model.safetensors",
        "finetune/training/mirror/f/diffusion_pytorch_model.safetensors",
        "finetune/training/mirror/g/config.json",
    ],
)
def test_a_network_that_is_damaged(file, place, capsys):
    path = place / "runs/mine" / file
    path.write_bytes(path.read_bytes()[:100])
    fails(place, capsys, ["sample", "mine", *RUN_COMMANDS["sample"]], 1, str(path.parent.relative_to(place)))


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("evaluate", "evaluate/metrics.json"),
        ("report", "evaluate/mdm.h5"),
        ("report", "data/images.h5"),
        ("assimilate", "data/images.h5"),
    ],
)
def test_results_that_are_damaged(command, file, place, capsys):
    (place / "runs/mine" / file).write_bytes(b"{")
    fails(place, capsys, [command, "mine", *RUN_COMMANDS[command]], 1, file)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["sample", "mine", "-n", "0"], 2, "must be at least 1"),
        (["sample", "mine", "-n", "many"], 2, "-n"),
        (["sample", "mine", "-o", "empty"], 2, "-o must name an HDF5 file"),
        (["sample", "mine", "-o", "blocked/s.h5"], 1, "blocked/s.h5 cannot be written"),
        (["sample", "mine", "-n", "4", "-o", "junk.h5"], 1, "junk.h5 exists and is not a readable HDF5 file"),
        (["export", "mine", "-o", "full"], 1, "full is there already"),
        (["export", "mine", "-o", "text.txt"], 1, "text.txt is there already"),
        (["export", "mine", "-o", "blocked/p"], 1, "not a directory (blocked/.p.partial)"),
        (["run", "burgers", "--out", "text.txt"], 1, "text.txt is a file"),
        (["run", "burgers", "--out", "blocked/x"], 1, "the folder blocked/x cannot be written"),
        (["run", "--config", "empty"], 2, "the settings file empty cannot be read"),
        (["run", "--config", "junk.yaml"], 2, "the settings file junk.yaml cannot be read"),
        (["run", "--config", "list.yaml"], 2, "does not say which experiment"),
        (["run", "burgers", "--map.train.bathc-size", "3"], 2, "--map.train.batch-size"),
        (["run", "burgers", "--map.train.batch-size", "few"], 2, "--map.train.batch-size"),
        (["run", "--data", "none.h5", *IONS[2:]], 1, "There is no file or folder"),
        (["run", "--data", "empty", *IONS[2:]], 1, "holds no .png file"),
        (["run", "--data", "text.txt", *IONS[2:]], 1, "has the suffix '.txt'"),
        (["run", "--data", "junk.h5", *IONS[2:]], 1, "cannot be read as HDF5"),
        (["run", "--data", "junk.npy", *IONS[2:]], 1, "cannot be read as an NPY file"),
        (["run", "--data", "junk.npz", *IONS[2:]], 1, "cannot be read as an NPZ file"),
        (["run", "--data", "nan.npy", *IONS[2:]], 1, "nan at index (3, 0, 0, 0)"),
        (["run", *IONS, "--out", "text.txt"], 1, "text.txt is a file"),
        (["run", *IONS[:3], "sick:neutral"], 1, "importing sick failed: SyntaxError"),
        (["run", *IONS[:3], "exits:neutral"], 1, "importing exits failed: SystemExit: 3"),
        (["train", "mpa", "burgers"], 2, "Did you mean 'map'?"),
        (["train", "map", "burgers", "--out", "blocked/x"], 1, "cannot be written"),
        (["train", "counter", "-o", "empty"], 2, "ends in .safetensors"),
        (["train", "counter", "--budget", "1 parsec"], 2, "'1 parsec' is not"),
        (["data", "burgers", "--out", "empty"], 2, "--out must name an HDF5 file"),
        (["data", "burgers", "--out", "folder.h5", *SMALL], 1, "folder.h5 exists and is not a readable HDF5 file"),
        (["data", "burgers", "--out", "blocked/x.h5", *SMALL], 1, "blocked/x.h5 cannot be written"),
        (["data", "burgers", "--out", "junk.h5", *SMALL], 1, "junk.h5 exists"),
        (["data", "burgers", "--size", "1"], 2, "size must be 3 or more"),
        (["check", "flux", "none.npy", "--layout", "NCHW"], 1, "There is no file or folder none.npy"),
        (["check", "flux", "junk.h5"], 1, "cannot be read as HDF5"),
        (
            ["check", "charges:raises", "ions.npy", "--layout", "NCHW"],
            1,
            "raises raised ValueError: not today (charges",
        ),
        (["check", "charges:neutral", "ions.npy", "--layout", "NCHW", "--out", "empty"], 2, "must name a picture"),
        (
            ["check", "charges:neutral", "ions.npy", "--layout", "NCHW", "--out", "blocked/w.png"],
            1,
            "cannot be written",
        ),
        (["import", "none"], 1, "the checkpoint none cannot be read"),
        (["import", "empty"], 1, "the checkpoint empty cannot be read"),
        (["import", "junk.h5"], 1, "junk.h5 is not a flax checkpoint"),
        (["evaluate", *PIXELS, "--constraint", "charges:raises"], 1, "ValueError: not today. --debug shows where"),
        (["evaluate", *PIXELS], 2, "which rule?"),
        (["evaluate", "none.h5", "--against", "ions.npy", "--constraint", "flux"], 1, "There is no file none.h5"),
        (
            ["evaluate", *PIXELS, "--constraint", "charges:neutral", "--subsets", "1", "-o", "blocked/m.json"],
            1,
            "(blocked)",
        ),
        (["list", "text.txt"], 2, "there is no folder text.txt"),
        (["paper", "table9"], 2, "Did you mean 'table"),
        (["sweep", "burgers", "--out", "blocked/x"], 2, "what is varied?"),
        (["demo", "--out", "text.txt", "--quick"], 1, "text.txt is a file"),
        (["assimilate", "mine", "-o", "a.txt"], 2, "-o must name an HDF5 file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_goes_wrong_is_said_in_a_sentence(arguments, code, message, place, capsys):
    fails(place, capsys, arguments, code, message)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_that_nobody_knows_is_wrong_usage(command, capsys):
    assert main([command, "--nonsense"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_full_disk_in_the_middle_of_a_run_names_the_folder_and_the_way_on(monkeypatch, capsys, tmp_path):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("namm.experiments.engine.stages.data.write_store", full)
    assert main(["run", "periodic", "--until", "data"]) == 1
    said = capsys.readouterr().err
    assert "runs/periodic cannot be used ([Errno 28] No space left on device)" in said
    assert "run the same command to resume" in said
    assert said.count("\n") == 1


def test_a_reader_that_has_seen_enough_of_a_run_is_no_error(tmp_path):
    command = f"{sys.executable} -m namm run periodic --until data --data.size 8 | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout == "periodic, preset demo, in runs/periodic\n"
    assert done.stderr == ""


def test_a_file_that_became_unreadable_half_way_is_named(place, capsys):
    """The header is whole and the pixels are not."""
    with h5py.File(place / "cut.h5", "w") as file:
        file["x"] = np.load(place / "ions.npy")
    content = (place / "cut.h5").read_bytes()
    (place / "cut.h5").write_bytes(content[: len(content) // 2])
    fails(place, capsys, ["run", "--data", "cut.h5", *IONS[2:]], 1, "cut.h5 cannot be read as HDF5")


def test_our_own_warnings_are_sentences_and_others_keep_their_place():
    before = warnings.formatwarning
    with warnings_as_sentences():
        ours = warnings.formatwarning("σ_max is large.", NammWarning, "maps.py", 7)
        others = warnings.formatwarning("old", DeprecationWarning, "maps.py", 7, "code")
    assert ours == "namm: warning: σ_max is large.\n"
    assert "maps.py:7: DeprecationWarning: old" in others
    assert warnings.formatwarning is before
