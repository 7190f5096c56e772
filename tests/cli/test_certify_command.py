"""`namm certify`: the certificate of any file, its exit code, and what is refused."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from namm import Burgers, Certificate, TotalFlux, certify
from namm.simulators.burgers import euler

RULES = """
def symmetric(x):
    return (x - x.flip(-1)).abs().mean((1, 2, 3))

def signed(x):
    return x.mean((1, 2, 3)) - 2

def broken(x):
    return x.no_such_thing
"""


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    """Images whose total is 120 to the last bit, the same with one outlier and with errors of 10⁻⁴, and rules."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rules", raising=False)
    pixels = (120 + np.arange(-63, 64, 2)) / 64  # 64 numbers that float32 holds and adds up without rounding
    x = np.stack([np.random.default_rng(k).permutation(pixels) for k in range(70)]).reshape(70, 1, 8, 8)
    np.save("flux.npy", x.astype(np.float32))
    np.save("other.npy", np.random.default_rng(0).random((70, 1, 8, 8), np.float32))
    np.save("last.npy", x.astype(np.float32).transpose(0, 2, 3, 1))
    noisy = x * (1 + 1e-4 * np.random.default_rng(1).standard_normal((70, 1, 1, 1)))
    np.savez("noisy.npz", images=noisy.astype(np.float32))
    x[66] *= 1.001
    np.save("outlier.npy", x.astype(np.float32))
    (tmp_path / "my_rules.py").write_text(RULES)


NCHW = ("--layout", "NCHW")
FLUX = ("--constraint", "flux", "--total", "120")


def test_images_on_the_rule_reach_it(namm):
    code, said = namm("certify", "flux.npy", *FLUX, *NCHW, "-o", "found/certificate.json")
    assert code == 0, said
    wanted = certify(np.load("flux.npy"), TotalFlux(120.0))
    assert "\n".join(wanted.lines()) in said
    assert "70 of 70 images reach the rule" in said
    found = Certificate.load("found/certificate.json")
    np.testing.assert_array_equal(found.after, wanted.after)
    assert found.after.max() == 0
    assert json.loads(Path("found/certificate.json").read_text())["reached"] == [True] * 70
    assert namm("certify", "last.npy", *FLUX, "--layout", "NHWC")[0] == 0


def test_one_image_off_the_rule_is_named_and_the_exit_code_is_1(namm):
    code, said = namm("certify", "outlier.npy", *FLUX, *NCHW)
    assert code == 1
    assert "69 of 70 images reach the rule" in said
    assert "largest 0.120 (image 66)" in said
    assert "Traceback" not in said


def test_data_give_the_floor(namm):
    noisy = np.abs(np.load("noisy.npz")["images"].astype(float).sum((1, 2, 3)) - 120)
    theirs = ("certify", "noisy.npz", "--key", "images", *FLUX, *NCHW)
    data = ("--data", "noisy.npz", "--data-key", "images", "--data-layout", "NCHW")
    assert namm(*theirs)[0] == 1
    code, _ = namm(*theirs, *data, "-o", "c.json")
    found = Certificate.load("c.json")
    assert found.floor == pytest.approx(noisy.mean(), rel=1e-6)
    assert code == int(not (noisy <= 3 * (found.floor + found.rounding)).all())
    assert namm("certify", "flux.npy", *FLUX, *NCHW, *data)[0] == 0


def test_a_file_of_ours_brings_the_rule_and_its_numbers(namm):
    sizes = ["--n-train", "4", "--n-val", "0", "--n-test", "8", "--size", "16", "--dt", "0.05"]
    assert namm("data", "burgers", *sizes, "--out", "ours.h5")[0] == 0
    code, said = namm("certify", "ours.h5")
    assert code == 0
    assert "Burgers: 8 of 8 images reach the rule" in said
    start = 0.5 + 0.4 * torch.sin(torch.linspace(0, 6.28, 16) + torch.arange(4.0)[:, None])
    images = Burgers(step=euler, dt=0.05).project(start[:, None, :, None].expand(4, 1, 16, 8).contiguous())
    np.save("euler.npy", images.numpy())
    burgers = ("certify", "euler.npy", *NCHW, "--constraint", "burgers", "--dt", "0.05")
    assert namm(*burgers, "--step", "euler")[0] == 0
    assert namm(*burgers)[0] == 1
    assert namm("certify", "euler.npy", *NCHW, "--data", "ours.h5")[0] == 1  # the same rule, named by the data


def test_a_users_own_rule(namm):
    code, said = namm("certify", "flux.npy", "--constraint", "my_rules:symmetric", *NCHW)
    assert code == 1
    assert "symmetric: 0 of 70 images reach the rule" in said


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "usage: namm certify FILE --constraint"),
        (["--help"], 0, "Exit code 0: all images reach the rule; 1: some do not"),
        (["flux.npy", *NCHW], 2, "which rule?"),
        (["flux.npy", "--data", "flux.npy", *NCHW], 2, "which rule?"),
        (["flux.npy", *FLUX], 2, "does not say which axis"),
        (["none.npy", *FLUX, *NCHW], 1, "no file or folder none.npy"),
        (["flux.npy", "--constraint", "fluxx", *NCHW], 2, "Did you mean 'flux'?"),
        (["flux.npy", *FLUX, *NCHW, "-o", "flux.npy"], 2, "-o must name a JSON file"),
        (["flux.npy", "--constraint", "my_rules:broken", *NCHW], 1, "the rule my_rules:broken raised AttributeError"),
        (["flux.npy", "--constraint", "my_rules:symetric", *NCHW], 2, "Did you mean 'symmetric'?"),
        (["flux.npy", "--constraint", "my_rules:signed", *NCHW], 1, "a distance from a rule is 0 where it holds"),
        (["flux.npy", *FLUX, *NCHW, "--data", "other.npy", "--data-layout", "NCHW"], 1, "break the constraint"),
    ],
)
def test_what_cannot_be_certified_is_said_in_a_sentence(namm, arguments, code, message):
    found, said = namm("certify", *arguments)
    assert found == code, said
    assert message in " ".join(said.split())
    assert np.load("flux.npy").shape == (70, 1, 8, 8)
