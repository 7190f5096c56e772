"""The evaluation against direct computation from the files that it leaves."""

import json
import shutil
from dataclasses import replace

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from namm.datasets import load, store
from namm.errors import DataError, UsageError
from namm.evaluation import Clipped, Extractor, fid, kid, mmd
from namm.experiments.engine.folder import read_record
from namm.experiments.engine.run import run
from namm.experiments.engine.run_parts import RunParts
from namm.experiments.engine.settings import FewSettings
from namm.experiments.engine.stages.evaluate import POLISHED, ROWS


@pytest.fixture(scope="module")
def metrics(whole_run):
    return json.loads((whole_run / "evaluate" / "metrics.json").read_text())


@pytest.fixture(scope="module")
def images(whole_run):
    """The images of every row, computed here from the stored samples, the maps and the data."""
    trained, data = RunParts.load(whole_run), whole_run / "data" / "images.h5"
    before, after, rule = trained.mirror("map"), trained.mirror("finetune"), trained.rule()
    with h5py.File(whole_run / "evaluate" / "mdm.h5") as ours, h5py.File(whole_run / "evaluate" / "dm.h5") as plain:
        y, x, dm = (torch.from_numpy(a[:]) for a in (ours["mirror_images"], ours["images"], plain["images"]))
    with h5py.File(whole_run / "evaluate" / "repair.h5") as file:
        shorter = torch.from_numpy(file["images"][:])
    with torch.no_grad():
        return {
            "data": load(data, "train")[:64],
            "mdm": before.to_data(y),
            "finetuned": x,
            "dm": dm,
            "projected": rule.project(dm),
            "repaired": after.to_data(after.to_mirror(dm)),
            "repair": trained.mirror("repair").repair(shorter),
        }


UNPOLISHED = [row for row in ROWS if row not in POLISHED and row != "few"]


def test_every_row_is_there(metrics):
    assert set(metrics["rows"]) == set(UNPOLISHED)
    assert metrics["certificates"] == {}


def test_a_few_step_model_has_a_row_where_it_is_asked_for(whole_run, tiny_preset, tmp_path):
    shutil.copytree(whole_run, tmp_path / "run")
    settings, folder = tiny_preset.settings, tmp_path / "run"
    few = FewSettings(steps=2, grid=4, train=replace(settings.mdm.train, budget="3 steps"))
    evaluate = replace(settings.evaluate, milestone_samples=0)
    chosen = replace(tiny_preset, settings=replace(settings, few=few, evaluate=evaluate))
    done = run(chosen, folder, until="evaluate", log=lambda line: None, progress=False, force=True)
    assert done["mdm"].attempts == done["dm"].attempts == 1
    assert done["few"].results["steps"] == 3
    found, trained = json.loads((folder / "evaluate" / "metrics.json").read_text()), RunParts.load(folder)
    assert set(found["rows"]) == {*UNPOLISHED, "few"}
    assert set(found["verdicts"]) >= {"few"}
    assert found["compute_seconds"]["few"] == done["few"].compute_seconds
    student, teacher = trained.model("few"), trained.model("mdm")
    for name, tensor in teacher.state_dict().items():
        assert torch.equal(student.teacher.state_dict()[name], tensor)
    drawn = student.sample(settings.evaluate.n, steps=2, generator=settings.evaluate.seed, progress=False)
    with h5py.File(folder / "evaluate" / "few.h5") as file, torch.no_grad():
        assert torch.allclose(torch.from_numpy(file["mirror_images"][:]), drawn, atol=1e-5)
        x = torch.from_numpy(file["images"][:])
        assert torch.allclose(x, trained.mirror("finetune").to_data(drawn), atol=1e-5)
        assert found["rows"]["few"]["distance"]["mean"] == pytest.approx(float(trained.rule()(x).mean()), rel=1e-4)


def test_polished_rows_are_there_where_they_are_asked_for(whole_run, tiny_preset, images, tmp_path):
    shutil.copytree(whole_run, tmp_path / "run")
    settings = tiny_preset.settings
    settings = replace(settings, evaluate=replace(settings.evaluate, polish=True))
    run(replace(tiny_preset, settings=settings), tmp_path / "run", until="evaluate", log=lambda line: None, force=True)
    metrics = json.loads((tmp_path / "run" / "evaluate" / "metrics.json").read_text())
    assert set(metrics["rows"]) == {*UNPOLISHED, *POLISHED}
    rule = RunParts.load(whole_run).rule()
    for row, source in POLISHED.items():
        certificate = metrics["certificates"][row]
        assert (certificate["reached"], certificate["images"]) == (64, 64)
        before = float(rule(images[source]).double().mean())
        assert certificate["before_mean"] == pytest.approx(before, rel=1e-3, abs=1e-6)
        assert metrics["rows"][row]["distance"]["mean"] < 1e-3 * before


@pytest.mark.parametrize("row", UNPOLISHED)
def test_a_row_is_what_its_images_say(row, metrics, images, whole_run):
    found, x = metrics["rows"][row], images[row]
    rule, test = RunParts.load(whole_run).rule(), load(whole_run / "data" / "images.h5", "test")
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
    trained = RunParts.load(whole_run)
    with h5py.File(whole_run / "evaluate" / "mdm.h5") as file, torch.no_grad():
        y = torch.from_numpy(file["mirror_images"][:])
        torch.testing.assert_close(images["finetuned"], trained.mirror("finetune").to_data(y), atol=1e-5, rtol=1e-4)
        assert not torch.allclose(images["finetuned"], images["mdm"], atol=1e-5, rtol=1e-4)


def test_costs_are_those_of_the_stages(metrics, whole_run):
    ours = ("map", "mdm", "samples", "finetune")
    records = {name: read_record(whole_run / name) for name in (*ours, "dm", "repair")}
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
    write_block, blocks = store.write_block, []

    def failing(*arguments):
        blocks.append(1)
        if len(blocks) == 6:
            raise KeyboardInterrupt
        write_block(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_block", failing)
        with pytest.raises(KeyboardInterrupt):
            run(tiny_preset, folder, until="evaluate", log=lambda line: None, progress=False, force=True)
    ours = folder / "evaluate" / "mdm.h5"
    assert sorted(path.name for path in (folder / "evaluate").glob("*.h5*")) == ["dm.h5.partial", "mdm.h5"]
    before = ours.stat().st_mtime_ns
    run(tiny_preset, folder, until="evaluate", log=lambda line: None, progress=False, force=True)
    assert ours.stat().st_mtime_ns == before
    assert json.loads((folder / "evaluate" / "metrics.json").read_text()) == metrics


class Mixture(nn.Module):
    """In place of Inception: eight fixed mixtures of the pixels."""

    def forward(self, pictures):
        mixing = torch.randn(pictures[0].numel(), 8, generator=torch.Generator().manual_seed(0))
        return pictures.flatten(1) @ mixing


def with_inception(chosen, **changes):
    evaluate = replace(chosen.settings.evaluate, **changes)
    return replace(chosen, settings=replace(chosen.settings, evaluate=evaluate))


def test_kid_and_fid_where_they_are_asked_for(whole_run, tiny_preset, tmp_path, monkeypatch, images, metrics):
    monkeypatch.setattr("namm.evaluation.features.load_inception", Mixture)
    monkeypatch.setattr("namm.evaluation.inception.load_inception", Mixture)
    folder = shutil.copytree(whole_run, tmp_path / "run")
    asked = with_inception(tiny_preset, kid_subsets=3, n_fid=66)
    run(asked, folder, until="evaluate", log=lambda line: None, progress=False, force=True)
    rows = json.loads((folder / "evaluate" / "metrics.json").read_text())["rows"]
    test = load(folder / "data" / "images.h5", "test")
    extractor = Extractor(Clipped(), Mixture())
    for row in ("data", "dm", "repaired"):
        expected = kid(test, images[row], extractor, subsets=3, size=32, seed=2)
        assert rows[row]["kid"] == pytest.approx(list(expected), rel=1e-3, abs=1e-6)
        assert rows[row]["fid"] > 0
        for figure in ("mean", "std", "max", "n"):
            assert rows[row]["distance"][figure] == pytest.approx(metrics["rows"][row]["distance"][figure], rel=1e-3)
    more = load(folder / "data" / "images.h5", "train")[:66]
    assert rows["data"]["fid"] == pytest.approx(fid(test[:66], more, extractor), rel=1e-3)
    with h5py.File(folder / "evaluate" / "dm.h5") as file:
        assert len(file["images"]) == 66


def test_without_the_weights_nothing_is_computed(tiny_preset, tmp_path, monkeypatch):
    def absent():
        raise DataError("no Inception weights are here.")

    monkeypatch.setattr("namm.evaluation.inception.load_inception", absent)
    asked = with_inception(tiny_preset, kid_subsets=3)
    with pytest.raises(UsageError, match=r"no Inception weights.*--evaluate\.kid-subsets 0"):
        run(asked, tmp_path / "run", until="evaluate", log=lambda line: None, progress=False, force=True)
    assert not (tmp_path / "run").exists()
