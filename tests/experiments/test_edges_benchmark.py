"""The benchmark that says where in the image f is wrong."""

import json
import runpy
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from namm import Burgers, NAMMPipeline, TotalFlux, constraint
from namm.cli import main as namm
from namm.datasets import open_store
from namm.experiments.trained import Trained

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "edges.py"


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


def test_an_error_is_found_where_it_is(script):
    x = torch.rand(3, 1, 16, 16)
    made = x.clone()
    made[..., 0] += 0.1
    found = script["figures"](x, made, Burgers(), 2)
    assert found["columns 0 to 1"]["error"] == pytest.approx((0.1**2 / 2) ** 0.5, rel=1e-4)
    assert found["everything"]["error"] == pytest.approx((0.1**2 / 16) ** 0.5, rel=1e-4)
    assert found["columns between"]["error"] == found["columns 14 to 15"]["error"] == 0
    residual = Burgers().residual(made).abs()
    assert residual.shape[-1] == 15
    for name, columns in (
        ("columns 0 to 1", slice(2)),
        ("columns between", slice(2, 13)),
        ("columns 14 to 15", slice(13, 15)),
    ):
        assert found[name]["residual"] == pytest.approx(float(residual[..., columns].mean()), rel=1e-5)
    assert found["rows 14 to 15"]["residual"] == pytest.approx(float(residual[:, :, 14:].mean()), rel=1e-5)


@pytest.mark.parametrize("rule", [constraint(lambda x: x.mean((1, 2, 3))), TotalFlux(1.0)])
def test_a_rule_without_a_residual_for_every_pixel_has_none(script, rule):
    x = torch.rand(3, 1, 16, 16)
    for name, figures in script["figures"](x, x, rule, 2).items():
        whole_columns = {} if name.startswith("rows") else {"fine": pytest.approx(1.0)}
        assert figures == {"error": 0.0} | whole_columns


def test_a_rule_that_is_kept_leaves_nothing_to_be_smooth(script):
    found = script["residuals"](torch.zeros(2, 1, 16, 16), Burgers(), 2)
    assert found["everything"] == {"residual": 0.0}


def test_what_is_smooth_is_told_from_what_is_rough(script):
    """A rule that asks for zeros, so that the residual is the image: one wave of either kind, and both."""
    rows = torch.arange(32.0)
    slow, fast = (torch.sin(2 * torch.pi * k * rows / 32)[:, None].expand(1, 1, 32, 32) for k in (1, 2))

    class Zero(Burgers):
        def residual(self, x):
            return x

    for x, share in ((slow, 1.0), (fast, 0.0), (slow + 3 * fast, 0.1)):
        found = script["residuals"](x, Zero(), 4)
        assert found["columns between"]["smooth"] == pytest.approx(share, abs=1e-5)
        assert found["everything"]["residual"] == pytest.approx(float(x.abs().mean()), rel=1e-5)
        assert "smooth" not in found["rows between"]


def test_what_is_left_of_fine_detail(script):
    """Waves of 32 rows: of the seventh nothing counts, of the eighth and those above it what is left in each part."""
    rows = torch.arange(32.0)
    waves = {k: torch.cos(2 * torch.pi * k * rows / 32)[:, None].expand(2, 1, 32, 32) for k in (7, 8, 14, 16)}
    x = waves[7] + 2 * waves[8] + waves[14] + waves[16]  # mean squares 1/2, 2, 1/2 and, of the shortest wave, 1
    made = 3 * waves[7] + 2 * waves[8] + 0.5 * waves[14]
    made[..., -4:] = waves[7][..., -4:]
    found = script["figures"](x, made, Burgers(), 4)
    assert found["columns between"]["fine"] == pytest.approx((2 + 0.25) / 3.5, rel=1e-5)
    assert found["columns 28 to 31"]["fine"] == pytest.approx(0, abs=1e-5)
    assert found["everything"]["fine"] == pytest.approx(28 / 32 * 2.25 / 3.5, rel=1e-5)
    assert "fine" not in found["rows between"]
    assert "fine" not in script["figures"](torch.zeros(2, 1, 32, 32), x, Burgers(), 4)["everything"]


def test_the_parts_cover_the_image_once_each_way(script):
    seen = {True: torch.zeros(16, 24), False: torch.zeros(16, 24)}
    for name, part in list(script["parts"](16, 24, 3).items())[1:]:
        seen[name.startswith("columns")][part] += 1
    assert (seen[True] == 1).all()
    assert (seen[False] == 1).all()


@pytest.fixture
def brightness(script, monkeypatch):
    """The only feature that KID sees."""

    class Brightness(torch.nn.Module):
        def forward(self, pictures):
            return pictures.mean((1, 2, 3))[:, None].expand(-1, 8)

    names = script["kids"].__globals__
    monkeypatch.setitem(names, "Extractor", partial(names["Extractor"], network=Brightness()))


def test_kid_is_of_the_part_that_is_wrong(script, brightness):
    x = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(0)) / 2
    made = x.clone()
    made[..., :2] += 0.5
    found = script["kids"](x, made, Burgers(), 2)
    assert found["columns 0 to 1"] == found["everything"] > 1e-3
    assert found["columns between"] == found["columns 6 to 7"] == 0


def test_kid_of_a_change_leaves_out_pairs_of_the_same_image(script):
    """Against the kernel of KID, pair by pair."""
    before, after = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def mean(a, b):
        return np.mean([(float(a[i] @ b[j]) / 3 + 1) ** 3 for i in range(5) for j in range(5) if i != j])

    expected = mean(before, before) + mean(after, after) - mean(before, after) - mean(after, before)
    assert script["moved"](before, after) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("shift", [0.0, 1e-3, 0.3, 1.0])
def test_kid_of_a_change_is_that_of_its_moments(script, shift):
    """Of one feature a the kernel (ab + 1)³ compares the means of a, a² and a³; here a is normal, and then shifted."""
    n = 4000
    before = torch.special.ndtri((torch.arange(n, dtype=torch.float64) + 0.5) / n)[:, None]
    exact = (shift**3 + 3 * shift) ** 2 + 3 * shift**4 + 3 * shift**2
    assert script["moved"](before, before + shift) == pytest.approx(exact, rel=0.02, abs=1e-12)


def test_a_run_through_the_command(script, brightness, whole_run, tmp_path, capsys):
    pipeline, file = tmp_path / "pipeline", tmp_path / "edges.json"
    assert namm(["export", str(whole_run), "-o", str(pipeline)]) == 0
    images = whole_run / "data" / "images.h5"
    options = ["--n", "4", "--width", "2", "--draw", "3", "--json", str(file)]
    assert script["main"]([str(pipeline), str(images), *options]) == 0
    assert "columns between" in capsys.readouterr().out
    with open_store(images) as store, torch.no_grad():
        x = torch.as_tensor(store["test"][:4])
        mirror = Trained.load(whole_run).mirror("finetune")
        made = mirror.f(mirror.g(x))
        error = (made - x).square().mean().sqrt()
    found = json.loads(file.read_text())
    assert found["images"] == 4
    assert found["parts"]["everything"]["error"] == pytest.approx(float(error), rel=1e-3)
    assert "kid" not in found["parts"]["everything"]
    samples = NAMMPipeline.from_pretrained(pipeline)(3, num_inference_steps=50, generator=0)
    assert found["parts"]["everything"]["samples"] == pytest.approx(float(samples.distances.mean()), rel=1e-3)
    assert 0 < found["parts"]["columns between"]["smooth_samples"] < 1
    assert script["main"]([str(pipeline), str(images), *options[:4], "--kid", "--json", str(file)]) == 0
    before, after = (each.clamp(0, 1).mean((1, 2, 3))[:, None].expand(-1, 8).double() for each in (x, made))
    kid = json.loads(file.read_text())["parts"]["everything"]["kid"]
    assert kid == pytest.approx(script["moved"](before, after), rel=1e-2, abs=1e-9)
    assert kid != 0


def test_what_cannot_be_measured_is_told(script, whole_run, tmp_path, capsys):
    images = str(whole_run / "data" / "images.h5")
    for model in ("dm", "mdm"):
        assert namm(["export", str(whole_run), "-o", str(tmp_path / model), "--model", model]) == 0
    for model, options, said in (
        ("dm", [], "without maps"),
        ("mdm", ["--width", "100"], "nothing between"),
        ("mdm", ["--draw", "-1"], "no number of samples"),
        ("mdm", ["--n", "1", "--kid"], "two images"),
    ):
        with pytest.raises(SystemExit):
            script["main"]([str(tmp_path / model), images, *options])
        assert said in capsys.readouterr().err
