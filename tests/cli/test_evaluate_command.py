"""`namm evaluate` of runs and of files: the table against the figures it is made of."""

import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from namm import datasets
from namm.constraints import TotalFlux
from namm.datasets import load
from namm.evaluation import compare, floor
from namm.experiments.engine.run_parts import RunParts


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def table(said):
    """Cells by row, without their borders."""
    lines = [line.split("│")[1:-1] for line in said.splitlines() if line.startswith("│")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}


def numbers(cell):
    """What a cell shows: a number, or a mean and its deviation."""
    digits = cell.replace("·10", "e").translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789"))
    return [float(number) for number in digits.split(" ± ")]


def assert_shows(cells, row):
    """`cells` are the figures of a row of metrics.json, to the digits shown."""
    found = [number for cell in cells for number in numbers(cell)]
    distance = row["distance"]
    wanted = [distance["mean"], distance["std"], distance["quantiles"][2], distance["max"]]
    wanted += [*row["mmd"], row["total_variation"], row["spread"]]
    np.testing.assert_allclose(found[:4], wanted[:4], rtol=0.05, atol=1e-12)
    np.testing.assert_allclose(found[4:], wanted[4:], rtol=0.05, atol=5.1e-5)  # four decimals are shown
    np.testing.assert_allclose(found[0], wanted[0], rtol=0.006)


def rows_of(run):
    return json.loads((run / "evaluate" / "metrics.json").read_text())["rows"]


def test_the_rows_of_a_run(namm, whole_run):
    code, said = namm("evaluate", whole_run)
    assert code == 0
    shown, rows = table(said), rows_of(whole_run)
    assert list(shown) == ["data", "mdm", "finetuned", "dm", "projected", "repaired", "repair"]
    for name, cells in shown.items():
        assert_shows(cells, rows[name])
    assert "evaluate done before" in said
    assert "map      done" not in said


def test_the_stage_is_made_where_it_is_missing_but_nothing_is_trained(namm, whole_run, tmp_path):
    copy = shutil.copytree(whole_run, tmp_path / "runs" / "mine")
    shutil.rmtree(copy / "evaluate")
    code, said = namm("evaluate", "mine")
    assert code == 0
    assert "evaluate done in" in said
    assert rows_of(copy) == rows_of(whole_run)
    shutil.rmtree(copy / "dm")
    code, said = namm("evaluate", "mine")
    assert code == 1
    assert "`namm run --config runs/mine/settings.yaml --out runs/mine --until dm` completes it" in said
    assert not (copy / "dm").exists()


def test_several_runs_are_shown_as_mean_and_deviation(namm, whole_run, rewrite, tmp_path):
    runs = [whole_run]
    for k, factor in enumerate((2.0, 6.0)):
        runs.append(shutil.copytree(whole_run, tmp_path / str(k)))
        path = runs[-1] / "evaluate" / "metrics.json"
        content = json.loads(path.read_text())
        content["rows"]["dm"]["distance"]["mean"] *= factor
        content["rows"]["dm"]["mmd"][0] *= factor
        rewrite(path, content)
    code, said = namm("evaluate", *runs)
    assert code == 0
    assert "mean ± std over 3 runs" in said
    shown, row = table(said), rows_of(whole_run)["dm"]
    factors = np.array([1, 2, 6])
    for cell, value in ((0, row["distance"]["mean"]), (3, row["mmd"][0])):
        mean, std = numbers(shown["dm"][cell])
        assert mean == pytest.approx(3 * value, rel=0.006)
        assert std == pytest.approx(value * factors.std(ddof=1), rel=0.06)
    assert shown["dm"][5].endswith("± 0")
    assert len(shown) == 7


def test_kid_and_fid_are_shown_where_they_were_measured(namm, whole_run, rewrite, tmp_path):
    copies = [shutil.copytree(whole_run, tmp_path / str(k)) for k in range(2)]
    for k, copy in enumerate(copies):
        path = copy / "evaluate" / "metrics.json"
        content = json.loads(path.read_text())
        content["rows"]["dm"] |= {"kid": [0.0125 + k, 0.003], "fid": 20.0 + 2 * k}
        rewrite(path, content)
    code, said = namm("evaluate", copies[0])
    assert code == 0
    assert [title in said for title in ("KID", "FID")] == [True, True]
    shown = table(said)
    assert shown["dm"][4:6] == ["0.0125 ± 0.0030", "20.00"]
    assert shown["data"][4:6] == ["–", "–"]
    code, said = namm("evaluate", *copies)
    assert table(said)["dm"][5] == "21.0 ± 1.4"
    assert "FID" not in namm("evaluate", whole_run)[1]


class Mixture(nn.Module):
    """In place of Inception: eight fixed mixtures of the pixels."""

    def forward(self, pictures):
        mixing = torch.randn(pictures[0].numel(), 8, generator=torch.Generator().manual_seed(0))
        return pictures.flatten(1) @ mixing


def test_kid_and_fid_of_a_file(namm, monkeypatch, tmp_path):
    monkeypatch.setattr("namm.evaluation.features.load_inception", Mixture)
    rng = np.random.default_rng(0)
    np.save("data.npy", rng.random((120, 1, 8, 8), np.float32))
    np.save("good.npy", rng.random((60, 1, 8, 8), np.float32))
    np.save("bad.npy", 0.3 * rng.random((60, 1, 8, 8), np.float32))
    options = ["--layout", "NCHW", "--against", "data.npy", "--against-layout", "NCHW", "--constraint", "periodic"]
    options += ["--subsets", 2, "--subset-size", 50, "--tiles", 2, "-o", "found.json"]
    rows = {}
    for name in ("good", "bad"):
        code, said = namm("evaluate", f"{name}.npy", "--inception", *options)
        assert code == 0
        assert "KID and FID of 60 images against 60" in said
        rows[name] = json.loads(Path("found.json").read_text())["rows"]
        assert float(table(said)["samples"][5]) == pytest.approx(rows[name]["samples"]["fid"], abs=0.006)
    assert rows["good"]["data"] == rows["bad"]["data"]
    good, bad, floor_ = rows["good"]["samples"], rows["bad"]["samples"], rows["good"]["data"]
    assert bad["fid"] > 5 * good["fid"]
    assert abs(good["kid"][0] - floor_["kid"][0]) < 0.1 * bad["kid"][0]
    code, said = namm("evaluate", "good.npy", *options)
    assert "FID" not in said


def test_a_file_of_samples_against_the_data_of_a_run(namm, whole_run):
    samples, data = whole_run / "evaluate" / "mdm.h5", whole_run / "data" / "images.h5"
    options = ["--subsets", 3, "--subset-size", 30, "--seed", 4]
    code, said = namm("evaluate", samples, "--against", data, *options, "-o", "deep/m.json")
    assert code == 0
    written = json.loads(Path("deep/m.json").read_text())
    rule, test = RunParts.load(whole_run).rule(), load(data, "test")
    how = {"subsets": 3, "size": 30, "seed": 4}
    with h5py.File(samples) as file:
        ours = compare(file["images"][:], test, rule, **how)
    for name, scores in (("data", floor(test, rule, **how)), ("samples", ours)):
        row = written["rows"][name]
        assert row["distance"]["mean"] == pytest.approx(scores.distance.mean, rel=1e-6)
        assert row["distance"]["max"] == pytest.approx(scores.distance.max, rel=1e-6)
        assert row["mmd"] == pytest.approx(list(scores.mmd), rel=1e-6)
        assert (row["total_variation"], row["spread"]) == pytest.approx((scores.total_variation, scores.spread))
        assert_shows(table(said)[name], row)
    assert list(table(said)) == ["data", "samples"]


def test_any_images_by_any_rule(namm, tmp_path):
    rng = np.random.default_rng(0)
    np.save(tmp_path / "a.npy", rng.random((20, 4, 4, 1), np.float32))
    np.save(tmp_path / "b.npy", rng.random((30, 1, 4, 4), np.float32))
    (tmp_path / "rules_of_mine.py").write_text("def bright(x):\n    return (x.sum((1, 2, 3)) - 5).abs()\n")
    both = ["a.npy", "--against", "b.npy", "--layout", "NHWC", "--against-layout", "NCHW", "-o", "m.json"]
    means = []
    for rule in (["--constraint", "flux", "--total", "5"], ["--constraint=rules_of_mine:bright"]):
        code, said = namm("evaluate", *both, *rule)
        assert code == 0
        assert "subsets of 15 images" in said
        means.append(json.loads(Path("m.json").read_text())["rows"]["samples"]["distance"]["mean"])
    x = torch.from_numpy(np.load("a.npy")).movedim(-1, 1)
    assert means == pytest.approx([float(TotalFlux(5.0)(x).mean())] * 2, rel=1e-5)


def test_every_suffix_of_hdf5_is_read_where_it_lies(namm, monkeypatch):
    open_images, opened = datasets.open_images, []
    monkeypatch.setattr(datasets, "open_images", lambda path, **how: opened.append(path) or open_images(path, **how))
    with h5py.File("a.he5", "w") as file:
        file["x"] = np.random.default_rng(0).random((20, 1, 4, 4), np.float32)
    against = ["--against", "a.he5", "--layout", "NCHW", "--against-layout", "NCHW", "--constraint", "flux"]
    code, said = namm("evaluate", "a.he5", *against, "--key", "x", "--against-key", "x", "--subsets", 1)
    assert (code, opened) == (0, [Path("a.he5")] * 2), said


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere"], 2, "there is no run 'nowhere'"),
        (["a.npy", "--against", "b.npy"], 2, "which rule? b.npy is not a file of `namm data`: add --constraint"),
        (["a.npy", "--constraint", "flux"], 2, "which data?"),
        (["a.npy", "--against", "b.npy", "--constraint", "flxu"], 2, "Did you mean 'flux'?"),
        (["a.npy", "--against", "b.npy", "--constraint", "flux", "--totl", "3"], 2, "--total"),
        (["a.npy", "--against", "b.npy", "--constraint", "divergence", "--size", "8"], 1, "no file or folder a.npy"),
        (["a.npy", "--against", "b.npy", "--constraint", "flux"], 1, "There is no file or folder a.npy"),
        (["RUN", "--subsets", "3"], 2, "a run is evaluated with its own settings, without --subsets"),
        ([], 2, "usage: namm evaluate"),
    ],
)
def test_wrong_usage(namm, whole_run, arguments, code, message):
    found, said = namm("evaluate", *(whole_run if argument == "RUN" else argument for argument in arguments))
    assert found == code
    assert message in said


def test_runs_that_cannot_be_compared_are_not_averaged(namm, whole_run, tmp_path):
    other = shutil.copytree(whole_run, tmp_path / "other")
    text = (other / "settings.yaml").read_text()
    (other / "settings.yaml").write_text(text.replace("subset: 32", "subset: 31"))
    code, said = namm("evaluate", whole_run, other)
    assert code == 2
    assert "one by one" in said
