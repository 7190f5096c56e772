"""The evaluation against direct computation from the files that it leaves."""

import json
import shutil

import h5py
import numpy as np
import pytest
import torch

from namm.datasets import load, partial
from namm.evaluation import mmd
from namm.experiments.evaluate_stage import ROWS
from namm.experiments.folder import read_record
from namm.experiments.run import run
from namm.experiments.trained import Trained


@pytest.fixture(scope="module")
def metrics(whole_run):
    return json.loads((whole_run / "evaluate" / "metrics.json").read_text())


@pytest.fixture(scope="module")
def images(whole_run):
    """The images of every row, computed here from the stored samples, the maps and the data."""
    trained, data = Trained.load(whole_run), whole_run / "data" / "images.h5"
    before, after, rule = trained.mirror("map"), trained.mirror("finetune"), trained.rule()
    with h5py.File(whole_run / "evaluate" / "mdm.h5") as ours, h5py.File(whole_run / "evaluate" / "dm.h5") as plain:
        y, x, dm = (torch.from_numpy(a[:]) for a in (ours["mirror_images"], ours["images"], plain["images"]))
    with torch.no_grad():
        return {
            "data": load(data, "train")[:64],
            "mdm": before.to_data(y),
            "finetuned": x,
            "dm": dm,
            "projected": rule.project(dm),
            "repaired": after.to_data(after.to_mirror(dm)),
        }


def test_every_row_is_there(metrics):
    assert set(metrics["rows"]) == set(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_what_its_images_say(row, metrics, images, whole_run):
    found, x = metrics["rows"][row], images[row]
    rule, test = Trained.load(whole_run).rule(), load(whole_run / "data" / "images.h5", "test")
    with torch.no_grad():
        distances = rule(x).double().numpy()
    close = {"rel": 1e-3, "abs": 1e-6}
    assert found["distance"]["n"] == len(x) == 64
    assert found["distance"]["mean"] == pytest.approx(distances.mean(), **close)
    assert found["distance"]["std"] == pytest.approx(distances.std(ddof=1), **close)
    assert found["distance"]["quantiles"][2] == pytest.approx(np.median(distances), **close)
    assert found["distance"]["max"] == pytest.approx(distances.max(), **close)
    assert found["mmd"] == pytest.approx(list(mmd(test, x, subsets=2, size=32, seed=2)), rel=1e-3)
    x, test = x.double().numpy(), test.double().numpy()

    def variation(a):
        return np.abs(np.diff(a, axis=-1)).mean() + np.abs(np.diff(a, axis=-2)).mean()

    assert found["total_variation"] == pytest.approx(variation(x) / variation(test), rel=1e-4)
    spread = x.std(0, ddof=1).mean() / test.std(0, ddof=1).mean()
    assert found["spread"] == pytest.approx(spread, rel=1e-4)


def test_the_stored_distances_are_those_of_the_rows(metrics, whole_run):
    for row, name in (("finetuned", "mdm.h5"), ("dm", "dm.h5")):
        with h5py.File(whole_run / "evaluate" / name) as file:
            assert metrics["rows"][row]["distance"]["mean"] == pytest.approx(file["distances"][:].mean(), rel=1e-4)


def test_our_samples_went_through_the_finetuned_f(images, whole_run):
    trained = Trained.load(whole_run)
    with h5py.File(whole_run / "evaluate" / "mdm.h5") as file, torch.no_grad():
        y = torch.from_numpy(file["mirror_images"][:])
        torch.testing.assert_close(images["finetuned"], trained.mirror("finetune").to_data(y), atol=1e-5, rtol=1e-4)
        assert not torch.allclose(images["finetuned"], images["mdm"], atol=1e-5, rtol=1e-4)


def test_costs_are_those_of_the_stages(metrics, whole_run):
    ours = ("map", "mdm", "samples", "finetune")
    records = {name: read_record(whole_run / name) for name in (*ours, "dm")}
    assert metrics["compute_seconds"] == {name: record.compute_seconds for name, record in records.items()}
    assert metrics["compute_seconds_ours"] == pytest.approx(sum(records[name].compute_seconds for name in ours))
    assert metrics["compute_seconds_baseline"] == records["dm"].compute_seconds
    assert metrics["steps"]["dm"] == records["dm"].results["steps"]


def test_the_record_shows_the_comparison(metrics, whole_run):
    results, rows = read_record(whole_run / "evaluate").results, metrics["rows"]
    assert results["distance_ours"] == rows["finetuned"]["distance"]["mean"]
    assert results["distance_baseline"] == rows["dm"]["distance"]["mean"]
    assert (results["mmd_ours"], results["mmd_baseline"]) == (rows["finetuned"]["mmd"][0], rows["dm"]["mmd"][0])
    assert results["mmd_data"] == rows["data"]["mmd"][0]


def test_an_interrupted_evaluation_keeps_its_samples(whole_run, tiny_preset, tmp_path, monkeypatch, metrics):
    folder = shutil.copytree(whole_run, tmp_path / "run")
    shutil.rmtree(folder / "evaluate")
    write_block, blocks = partial.write_block, []

    def failing(*arguments):
        blocks.append(1)
        if len(blocks) == 6:
            raise KeyboardInterrupt
        write_block(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(partial, "write_block", failing)
        with pytest.raises(KeyboardInterrupt):
            run(tiny_preset, folder, until="evaluate", tell=lambda line: None, progress=False)
    ours = folder / "evaluate" / "mdm.h5"
    assert sorted(path.name for path in (folder / "evaluate").glob("*.h5*")) == ["dm.h5.partial", "mdm.h5"]
    before = ours.stat().st_mtime_ns
    run(tiny_preset, folder, until="evaluate", tell=lambda line: None, progress=False)
    assert ours.stat().st_mtime_ns == before
    assert json.loads((folder / "evaluate" / "metrics.json").read_text()) == metrics
