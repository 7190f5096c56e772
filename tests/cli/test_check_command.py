"""`namm check` on good and bad files, with our rules and with a user's own."""

import sys

import numpy as np
import pytest
from PIL import Image

from namm.cli import main
from namm.datasets import write_store
from namm.datasets.blackholes import BlackHoles
from namm.datasets.readers import LazyImages

RULES = """
import torch
from namm import Constraint, constraint

def symmetric(x):
    return (x - x.flip(-1)).abs().mean((1, 2, 3))

@constraint
def negative(x):
    return x.mean((1, 2, 3)) - 10

class Bounded(Constraint):
    def __init__(self, most=2.0):
        super().__init__()
        self.most = most

    def distance(self, x):
        return (x - self.most).clamp(min=0).mean((1, 2, 3))

class Needy(Constraint):
    def __init__(self, most):
        super().__init__()

    def distance(self, x):
        return x.mean((1, 2, 3))

number = 3
"""


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """A folder with files and rules, and the command: exit code, what was printed, what was complained about."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "my_rules", raising=False)
    rng = np.random.default_rng(0)
    x = rng.random((30, 1, 8, 8), dtype=np.float32)
    np.save("random.npy", x)
    x *= 120 / x.sum((1, 2, 3), keepdims=True)
    np.save("flux.npy", x)
    x[17] *= 1.001
    np.save("outlier.npy", x)
    np.save("last.npy", x.transpose(0, 2, 3, 1))
    cells = np.tile(rng.random((20, 2, 4, 4), dtype=np.float32), (1, 1, 2, 2))
    np.savez("cells.npz", images=cells, mirrored=(cells + cells[..., ::-1]) / 2)
    broken = cells.copy()
    broken[3, 1, 2, 2] = np.nan
    np.save("nan.npy", broken)
    (tmp_path / "my_rules.py").write_text(RULES)

    def call(*arguments):
        code = main(["check", *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def test_good_images_pass_and_the_worst_is_named_and_shown(check, tmp_path):
    code, out, _ = check("flux", "outlier.npy", "--layout", "NCHW", "--total", "120", "--out", "pictures/worst.png")
    assert code == 0
    assert "TotalFlux on 30 images" in out
    assert "at image 17" in out
    assert "max 0.12" in out  # a thousandth of 120
    assert "pictures/worst.png" in out
    with Image.open(tmp_path / "pictures" / "worst.png") as picture:
        assert np.asarray(picture.convert("L")).std() > 10


def test_options_may_come_before_the_file(check):
    assert check("flux", "--total", "120", "--layout", "NCHW", "flux.npy")[0] == 0
    assert check("flux", "--total", "119", "--layout", "NCHW", "flux.npy")[0] == 1


def test_images_that_break_the_rule_fail_with_the_measured_floor(check, tmp_path):
    code, out, err = check("periodic", "random.npy", "--layout", "NCHW")
    assert code == 1
    assert "floor" in out
    assert "the data break the constraint Periodic" in err
    assert (tmp_path / "random-worst.png").exists()


@pytest.mark.parametrize(
    ("parameters", "code"),
    [(["--tiles", "2"], 0), (["--tiles", "4"], 1), (["--tiles", "1", "--across", "2"], 0)],
)
def test_parameters_reach_the_rule(check, parameters, code):
    assert check("periodic", "cells.npz", "--key", "images", "--layout", "NCHW", *parameters)[0] == code


def test_burgers_with_the_authors_scheme(check, tmp_path):
    import torch

    from namm.constraints.burgers import Burgers
    from namm.simulators.burgers import euler

    start = 0.5 + 0.4 * torch.sin(torch.linspace(0, 6.28, 16) + torch.arange(4.0)[:, None])
    images = Burgers(step=euler, dt=0.05).project(start[:, None, :, None].expand(4, 1, 16, 8).contiguous())
    np.save("euler.npy", images.numpy())
    code, out, _ = check("burgers", "euler.npy", "--layout", "NCHW", "--dt", "0.05", "--step", "euler")
    assert code == 0
    assert float(out.split("floor")[1].split("mean ")[1].split(",")[0]) < 1e-6
    _, out, _ = check("burgers", "euler.npy", "--layout", "NCHW", "--dt", "0.05")
    assert float(out.split("floor")[1].split("mean ")[1].split(",")[0]) > 1e-5


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["flux", "flux.npy"], 2, "does not say which axis"),
        (["flux", "none.npy", "--layout", "NCHW"], 1, "no file or folder none.npy"),
        (["flux", "nan.npy", "--layout", "NCHW"], 1, "nan at index (3, 1, 2, 2)"),
        (["flux", "cells.npz", "--layout", "NCHW"], 1, "images, mirrored"),
        (["flux", "cells.npz", "--layout", "NCHW", "--key", "image"], 1, "no array 'image'"),
        (["periodic", "flux.npy", "--layout", "NCHW", "--tiles", "3"], 1, "cannot cut images"),
        (["flux", "--layout", "NCHW"], 2, "file"),
        (["fluxx", "flux.npy"], 2, "Did you mean 'flux'?"),
        (["flux", "flux.npy", "--layout", "NCWH"], 2, "NCHW"),
        (["flux", "flux.npy", "--layout", "NCHW", "--totl", "3"], 2, "--total"),
        (["count", "flux.npy", "--layout", "NCHW"], 2, "`namm train counter -o counter.safetensors`"),
        (["--total", "3"], 2, "which rule? Its name comes first: namm check RULE FILE."),
        (["my_rules:symetric", "flux.npy", "--layout", "NCHW"], 2, "Did you mean 'symmetric'?"),
        (["my_rules:number", "flux.npy", "--layout", "NCHW"], 2, "my_rules:number is 3"),
        (["my_rules:Needy", "flux.npy", "--layout", "NCHW"], 2, "cannot be made without arguments"),
        (["my_rulez:x", "flux.npy", "--layout", "NCHW"], 2, "there is no module 'my_rulez'"),
        (["my_rules:negative", "flux.npy", "--layout", "NCHW"], 1, "negative is negative"),
    ],
)
def test_what_cannot_be_checked_is_said_in_a_sentence(check, arguments, code, message):
    got, out, err = check(*arguments)
    assert got == code
    assert message in " ".join((out + err).split())
    assert "Traceback" not in err


def test_a_users_own_rule(check, tmp_path):
    code, out, _ = check("my_rules:symmetric", "cells.npz", "--key", "mirrored", "--layout", "NCHW")
    assert code == 0
    assert "symmetric on 20 images" in out
    assert (tmp_path / "cells-worst.png").exists()
    assert check("my_rules:symmetric", "cells.npz", "--key", "images", "--layout", "NCHW")[0] == 1
    code, out, _ = check("my_rules:Bounded", "random.npy", "--layout", "NCHW", "--noise", "5")
    assert code == 0
    assert "Bounded on 30 images" in out


def test_a_rule_that_does_not_notice_the_noise_is_refused(check):
    code, out, err = check("my_rules:Bounded", "random.npy", "--layout", "NCHW", "--noise", "0.2")
    assert code == 1
    assert "inactive at this noise" in out
    assert "the constraint Bounded is inactive: its mean distance is 0 on the data and 0 with noise of 0.2" in err
    assert "--noise of `namm check`" in err


@pytest.mark.parametrize(
    ("images", "code", "message"),
    [
        (np.full((6, 1, 8, 8), 0.7), 1, "the images are constant: in all 6 images every channel has the same value"),
        (np.tile(np.random.default_rng(1).random((1, 1, 8, 8)), (6, 1, 1, 1)), 1, "all 6 images are copies of one"),
        (1e20 * np.random.default_rng(1).random((6, 1, 8, 8)), 1, "the images reach 9.99·10¹⁹"),
        (np.arange(6.0)[:, None, None, None] * np.ones((1, 1, 8, 8)), 0, "every image of the images is constant in"),
    ],
)
def test_images_with_nothing_to_learn_are_refused(check, images, code, message):
    np.save("odd.npy", images.astype(np.float32))
    got, out, err = check("my_rules:symmetric", "odd.npy", "--layout", "NCHW")
    assert (got, message in out + err) == (code, True), out + err


def test_a_module_that_fails_is_named(check, tmp_path):
    (tmp_path / "broken_rules.py").write_text("1 / 0\n")
    code, _, err = check("broken_rules:x", "flux.npy", "--layout", "NCHW")
    assert code == 1
    assert "importing broken_rules failed: ZeroDivisionError" in err
    (tmp_path / "lacking_rules.py").write_text("import no_such_thing\n")
    code, _, err = check("lacking_rules:x", "flux.npy", "--layout", "NCHW")
    assert code == 1
    assert "no_such_thing" in err


def test_channels_last_is_read_as_said(check):
    code, out, _ = check("flux", "last.npy", "--layout", "NHWC")
    assert code == 0
    assert "at image 17" in out


def test_a_file_of_ours_brings_its_split_and_its_numbers(check):
    sizes = ["--n-train", "8", "--n-val", "0", "--n-test", "0", "--size", "16", "--dt", "0.05"]
    assert main(["data", "burgers", *sizes, "--out", "ours.h5"]) == 0
    code, out, _ = check("burgers", "ours.h5")
    assert code == 0
    assert "Burgers on 8 images" in out
    code, _, err = check("burgers", "ours.h5", "--dt", "0.025")  # another rule than the images were made with
    assert code == 1
    assert "the data break the constraint Burgers" in err


@pytest.mark.parametrize("suffix", ["npy", "h5"])
def test_images_stay_in_their_file(check, suffix, monkeypatch):
    """A file that is larger than memory can be checked."""
    write_store("flux.h5", BlackHoles(size=8), {"train": 70})
    read, whole = [], LazyImages.__getitem__
    monkeypatch.setattr(LazyImages, "__getitem__", lambda x, i: read.append(len(np.arange(len(x))[i])) or whole(x, i))
    arguments = ["flux", f"flux.{suffix}", *(["--layout", "NCHW"] if suffix == "npy" else [])]
    code, said, _ = check(*arguments)
    assert code == 0, said
    assert f"TotalFlux on {70 if suffix == 'h5' else 30} images" in said
    assert read
    assert max(read) <= 256
