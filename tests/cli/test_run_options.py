"""Options of `namm run` that change many settings, or none: --seed, --device, --layout, --key, --dry-run."""

import os

import numpy as np
import pytest
import yaml
from own_files import RULE

from namm.cli.run import choose
from namm.errors import UsageError
from namm.experiments.engine.device import VISIBLE, computing_on
from namm.experiments.engine.settings import LARGEST_SEED, with_seed
from namm.experiments.presets import preset


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_seed_draws_everything_anew_and_single_ones_can_be_changed():
    asked = choose("namm run", "burgers", {"seed": "7"}, ["--evaluate.seed", "3"]).settings
    expected = with_seed(preset("burgers").settings, 7)
    assert asked.data.seed == asked.dm.train.seed == 7
    assert (asked.samples.seed, asked.evaluate.seed) == (expected.samples.seed, 3)
    for wrong in ("-1", "one", str(LARGEST_SEED)):
        with pytest.raises(UsageError, match="seed"):
            choose("namm run", "burgers", {"seed": wrong}, [])


@pytest.mark.parametrize(
    ("name", "before", "message"),
    [
        ("mps", None, "no float64"),
        ("gpu", None, "takes cpu, cuda or cuda:N"),
        ("cuda:-1", None, "takes cpu, cuda or cuda:N"),
        ("cuda:2", "4,5", "shows 2 GPUs here"),
        ("cuda:1", "", "is empty, which hides all GPUs"),
        ("cuda:99", None, "is not there"),
    ],
)
def test_a_device_that_is_not_there_is_refused(name, before, message, monkeypatch):
    monkeypatch.delenv(VISIBLE, raising=False)
    if before is not None:
        monkeypatch.setenv(VISIBLE, before)
    with pytest.raises(UsageError, match=message), computing_on(name):
        pass
    assert os.environ.get(VISIBLE) == before


def test_what_is_shown_is_put_back(monkeypatch):
    monkeypatch.setenv(VISIBLE, "4,5")
    with computing_on("cpu"):
        assert os.environ[VISIBLE] == ""
    assert os.environ[VISIBLE] == "4,5"


def test_a_device_on_the_command_line(namm):
    assert namm("data", "flux", "--device", "mps")[0] == 2
    assert "needs a value" in namm("data", "flux", "--device")[1]
    assert "given twice" in namm("data", "flux", "--device", "cpu", "--device=cpu")[1]
    for on in (["--on", "slurm"], ["--on=slurm"]):
        code, said = namm("sweep", "burgers", "--seeds", "0", "--device", "cuda", *on)
        assert (code, "gives each job its devices" in said) == (2, True)
    code, said = namm("data", "periodic", "--device=cpu", "--n-train", "2", "--n-val", "0", "--n-test", "0")
    assert code == 0, said


def test_layout_and_key_of_images_of_ones_own_and_a_dry_run(namm, tmp_path):
    """Both are needed here: two arrays, and an axis at either end that may be the channels."""
    x = np.random.default_rng(0).standard_normal((60, 3, 8, 3)).astype(np.float32)
    np.savez(tmp_path / "two.npz", density=x - x.mean(1, keepdims=True), other=x)
    (tmp_path / "charges.py").write_text(RULE)
    own = ["--data", "two.npz", "--constraint", "charges:neutral", "--map.f.downsamplings", "1"]
    asked = {"data": "two.npz", "constraint": "charges:neutral", "key": "density", "layout": "NCHW"}
    found = choose("namm run", None, asked, []).settings.data
    assert (found.key, found.layout, found.shape) == ("density", "NCHW", (3, 8, 3))
    dotted = choose("namm run", None, {**asked, "layout": "NHWC"}, ["--data.layout", "NCHW"]).settings.data
    assert dotted == found
    assert "Did you mean 'NCHW'" in namm("run", *own, "--key", "density", "--layout", "NCHV")[1]
    assert "for images of your own" in namm("run", "burgers", "--layout", "NCHW")[1]


def test_a_rule_of_the_package_is_kept_as_text_and_resumes(namm, tmp_path):
    x = np.random.default_rng(0).random((60, 1, 8, 8)).astype(np.float32)
    np.save(tmp_path / "bright.npy", x * (80 / x.sum((1, 2, 3), keepdims=True)))
    text = "namm:TotalFlux(80) + 0.5 * namm:TotalFlux(total=80)"
    call = ["run", "--data", "bright.npy", "--layout", "NCHW", "--constraint", text, "--until", "data"]
    call += ["--evaluate.subset", "4", "--evaluate.n", "8"]
    code, said = namm(*call, "--dry-run")
    assert code == 0, said
    assert not (tmp_path / "runs").exists()
    assert namm(*call)[0] == 0
    kept = yaml.safe_load((tmp_path / "runs" / "own" / "settings.yaml").read_text())["data"]
    assert (kept["constraint"], kept["source"]) == (text, "")
    code, said = namm("run", "--config", "runs/own/settings.yaml", "--until", "data")
    assert code == 0, said
    assert "done before" in said
    assert "nothing to allow" in namm("trust", "own")[1]
    assert namm("check", "namm:TotalFlux(80)", "bright.npy", "--layout", "NCHW")[0] == 0
    assert namm("certify", "bright.npy", "--constraint", "namm:TotalFlux(90)", "--layout", "NCHW")[0] == 1
    assert "Did you mean 'TotalFlux'" in namm("check", "namm:TotalFlow(80)", "bright.npy", "--layout", "NCHW")[1]
