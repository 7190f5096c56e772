"""A rule with weights and buffers of a user's own, through every stage and command.

A CPU cannot tell where a rule is: everything is in one place. So this rule demands what a GPU would: it counts as being
in the right place only after somebody has put it there, and refuses images before.
"""

import json
import sys

import h5py
import numpy as np
import pytest

from namm.cli import main

RULE = '''
import torch
from torch import nn
from namm import Constraint


class Level(Constraint):
    """The mean pixel is what a buffer says, as a layer weighs it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("level", torch.tensor(0.5))
        self.weigh = nn.Conv2d(1, 1, 1, bias=False)
        self.drop = nn.Dropout(0.9)
        nn.init.ones_(self.weigh.weight)
        self.is_placed = False

    def _apply(self, fn, recurse=True):
        self.is_placed = True
        return super()._apply(fn, recurse)

    def distance(self, x):
        return self.residual(x).abs().mean((1, 2, 3))

    def residual(self, x):
        if not self.is_placed:
            raise RuntimeError("Expected all tensors to be on the same device: nobody has put the rule anywhere")
        return self.drop(self.weigh(x).mean((1, 2, 3), keepdim=True) - self.level)

    def project(self, x):
        return x - self.residual(x)
'''
RUN = ["run", "--force", "--data", "images.npy", "--data.layout", "NCHW", "--constraint", "levels:Level"]
TINY = [
    *("--map.g.layers", "1", "--map.g.filters", "4", "--map.f.filters", "4", "--map.f.blocks", "1"),
    *("--map.f.downsamplings", "1", "--map.train.batch-size", "4", "--map.train.budget", "4 steps"),
    *("--mdm.network.filters", "8", "--mdm.network.multipliers", "1", "--mdm.train.budget", "4 steps"),
    *("--mdm.train.batch-size", "4", "--dm.train.batch-size", "4"),
    *("--samples.n", "16", "--samples.n-val", "8", "--samples.sampler.steps", "3"),
    *("--finetune.train.budget", "2 steps", "--evaluate.n", "16", "--evaluate.subset", "8"),
    *("--evaluate.mmd-subsets", "1", "--evaluate.sampler.steps", "3", "--evaluate.milestone-samples", "4"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder after a whole run."""
    folder = tmp_path_factory.mktemp("stateful")
    x = np.random.default_rng(0).normal(size=(80, 1, 8, 8)).astype(np.float32)
    np.save(folder / "images.npy", x - x.mean((1, 2, 3), keepdims=True) + 0.5)
    (folder / "levels.py").write_text(RULE)
    with pytest.MonkeyPatch.context() as patch:
        enter(folder, patch)
        assert main([*RUN, *TINY]) == 0
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    enter(folder, monkeypatch)
    return folder


def enter(folder, patch):
    patch.chdir(folder)
    patch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("levels", None)


def levels(file):
    with h5py.File(file) as opened:
        return np.abs(opened["images"][:].mean((1, 2, 3)) - 0.5), opened["distances"][:]


def test_every_stage_measures_the_rule_as_it_was_made(here):
    rows = json.loads((here / "runs/own/evaluate/metrics.json").read_text())["rows"]
    for row, file in (("finetuned", "mdm.h5"), ("dm", "dm.h5")):
        expected, written = levels(here / "runs/own/evaluate" / file)
        np.testing.assert_allclose(written, expected, rtol=1e-3, atol=1e-6)  # dropout is off
        assert rows[row]["distance"]["mean"] == pytest.approx(expected.mean(), rel=1e-3)
    assert rows["projected"]["distance"]["mean"] < 1e-5
    assert (here / "runs/own/report/report.html").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["sample", "own", "-n", "4", "-o", "samples.h5"],
        ["export", "own", "-o", "pipeline"],
        ["check", "levels:Level", "images.npy", "--layout", "NCHW"],
        ["report", "own"],
        [
            *("evaluate", "runs/own/evaluate/mdm.h5", "--against", "runs/own/data/images.h5"),
            *("--constraint", "levels:Level", "--subsets", "1"),
        ],
        [
            *("assimilate", "own", "--observe", "mask:0.5", "--truths", "1", "-n", "2", "--steps", "3"),
            *("--method", "cg-dps", "mirror-dps"),
        ],
    ],
    ids=lambda command: command[0],
)
def test_every_command_puts_the_rule_in_its_place(here, command, capsys):
    assert main(command) == 0, capsys.readouterr().err
    if command[0] == "sample":
        expected, written = levels("samples.h5")
        np.testing.assert_allclose(written, expected, rtol=1e-3, atol=1e-6)
