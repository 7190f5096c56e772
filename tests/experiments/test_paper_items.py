"""The paper's tables and figures at a size of seconds: every number in them is one of the runs' own."""

import csv
import json
import shutil
from dataclasses import replace

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from namm.errors import DataError, UsageError
from namm.evaluation import Clipped, Extractor, fid, kid, mmd
from namm.experiments.assimilation.assimilate import Setting
from namm.experiments.count import CountData
from namm.experiments.divergence import DivergenceData
from namm.experiments.engine import build
from namm.experiments.paper import fig5_fig11 as assimilation_paper
from namm.experiments.paper import make as making
from namm.experiments.paper.items import (
    FIVE,
    ITEMS,
    SIGMAS,
    WEIGHTS,
    base_cells,
    cross_cells,
    grid_weights,
    sweep_cells,
)
from namm.experiments.paper.make import make
from namm.experiments.paper.table2_fig6 import REPORTED
from namm.experiments.periodic import PeriodicData
from namm.experiments.presets import PRESETS, preset
from namm.experiments.sweeps.cell import Cell, CellOutcome, share
from namm.files import owned
from namm.formatting import format_number
from namm.maps import MirrorMap


@pytest.fixture(scope="session")
def tiny(tiny_preset):
    """Any of three experiments, a few steps of everything."""
    s = tiny_preset.settings

    def brief(part, milestones=0):
        return replace(part, train=replace(part.train, budget="4 steps", milestones=milestones))

    settings = replace(
        s,
        map=brief(s.map),
        mdm=brief(s.mdm, 2),
        finetune=brief(s.finetune, 2),
        dm=brief(s.dm, 2),
        samples=replace(s.samples, n=12, n_val=10),
        evaluate=replace(s.evaluate, n=40, subset=32, milestone_samples=8),
        vae=brief(s.vae),
    )
    data = {
        "burgers": replace(s.data, n_train=40, n_val=8, n_test=36),
        "periodic": PeriodicData(40, 8, 36, size=8),
        "divergence": DivergenceData(40, 8, 36, size=8, rows=1, columns=2, inner_steps=2, start=0.1),
    }

    def chosen(experiment):
        return replace(preset(experiment), settings=replace(settings, data=data[experiment]))

    return chosen


@pytest.fixture(scope="session")
def out(tmp_path_factory):
    """One folder for all items, as the command has it."""
    return tmp_path_factory.mktemp("paper")


@pytest.fixture(scope="session")
def made(tiny, out, unwatched):
    """Make an item, running what other items have not run yet."""

    def call(*asked, **options):
        with unwatched():
            return making(*asked, **options)

    def making(name, *experiments, seeds=(0,), base=tiny):
        result = make(
            ITEMS[name],
            base,
            out,
            experiments=experiments,
            seeds=seeds,
            log=lambda line: None,
            progress=False,
        )
        assert [outcome.error for outcome in result.failed] == []
        return result

    return call


def content(out, name):
    return json.loads((out / name / f"{name}.json").read_text())


def row(out, item, **wanted):
    (found,) = [r for r in content(out, item)["rows"] if all(r[title] == value for title, value in wanted.items())]
    return found


def metrics(out, run):
    return json.loads((out / run / "evaluate" / "metrics.json").read_text())


def read(path, name):
    with h5py.File(path) as file:
        return torch.from_numpy(file[name][:])


def rule(tiny, experiment="burgers"):
    return build.constraint(tiny(experiment).settings.data.rule)


def is_picture(path):
    return len(np.unique(np.asarray(Image.open(path))[..., :3])) > 10


# Table 1


def test_table1_is_what_the_evaluations_measured(made, out):
    result = made("table1", "burgers", seeds=(0, 1))
    both = [metrics(out, f"burgers-seed{seed}")["rows"] for seed in (0, 1)]
    for method, name in {"mdm": "ours, not finetuned", "finetuned": "ours", "dm": "baseline", "data": "data"}.items():
        found = row(out, "table1", experiment="burgers", method=name)
        distances = [rows[method]["distance"]["mean"] for rows in both]
        assert found["seeds"] == 2
        assert found["ℓ"]["values"] == distances
        assert found["CD"]["mean"] == pytest.approx(100 * np.mean(distances))  # λ of Burgers' is 1 in the paper
        assert found["CD"]["std"] == pytest.approx(100 * np.std(distances, ddof=1))
        assert found["√MMD²"]["mean"] == pytest.approx(np.mean([rows[method]["mmd"][0] for rows in both]))
        assert found["KID"] is None
    ours = row(out, "table1", experiment="burgers", method="ours")
    assert (ours["CD, paper"], ours["√MMD², paper"], ours["KID, paper"]) == (0.04, 0.1291, 0.0022)
    assert row(out, "table1", experiment="burgers", method="baseline repaired")["CD, paper"] is None
    page = (out / "table1" / "table1.md").read_text()
    assert f"{format_number(ours['CD']['mean'])} ± {format_number(ours['CD']['std'])}" in page
    assert result.output.table.markdown() in page
    change = 100 * (ours["ℓ"]["mean"] / row(out, "table1", experiment="burgers", method="baseline")["ℓ"]["mean"] - 1)
    assert abs(change) > 1
    said = f"{abs(change):.0f} % {'below' if change < 0 else 'above'} the baseline's (paper: 91 % below)"
    assert f"burgers: CD of ours is {said}" in page
    assert "seeds 0, 1; 2 of 2 runs complete" in (out / "table1" / "table1.caption.txt").read_text()
    with (out / "table1" / "table1.csv").open() as file:
        lines = {(line["experiment"], line["method"]): line for line in csv.DictReader(file)}
    assert float(lines["burgers", "ours"]["CD"]) == ours["CD"]["mean"]
    assert float(lines["burgers", "ours"]["CD std"]) == ours["CD"]["std"]


def test_a_cell_that_fails_is_absent_with_a_note(made, tiny, out):
    made("table1", "burgers")

    def base(experiment):
        chosen = tiny(experiment)
        few = replace(chosen.settings.evaluate, n=5)
        return replace(chosen, settings=replace(chosen.settings, evaluate=few)) if experiment == "periodic" else chosen

    result = make(
        ITEMS["table1"], base, out, experiments=("burgers", "periodic"), log=lambda line: None, progress=False
    )
    assert [outcome.cell.name for outcome in result.failed] == ["periodic-seed0"]
    found = row(out, "table1", experiment="periodic", method="ours")
    assert (found["seeds"], found["ℓ"], found["CD"], found["√MMD²"]) == (0, None, None, None)
    assert found["CD, paper"] == 0.04
    assert row(out, "table1", experiment="burgers", method="ours")["seeds"] == 1
    assert any("periodic-seed0 is missing: evaluate.n is 5" in note for note in content(out, "table1")["notes"])
    line = next(line for line in result.output.table.markdown().splitlines() if "periodic" in line and "ours " in line)
    assert line.count("–") >= 5


# Figures of the same runs


def test_fig3_shows_the_evaluations_samples_and_reruns_nothing(made, out):
    made("table1", "burgers")
    before = (out / "burgers-seed0" / "evaluate" / "stage.json").stat().st_mtime_ns
    result = made("fig3", "burgers")
    assert (out / "burgers-seed0" / "evaluate" / "stage.json").stat().st_mtime_ns == before
    drawn = content(out, "fig3")["drawn"]["fig3-burgers"]
    for name, file in {"ours": "mdm.h5", "baseline": "dm.h5"}.items():
        expected = read(out / "burgers-seed0" / "evaluate" / file, "distances")[:128]
        assert drawn[name]["distances"] == pytest.approx(expected.tolist())
    (below,) = [axes for axes in result.output.figures["fig3-burgers"].axes if axes.get_ylabel() == "samples"]
    assert sum(patch.get_height() for patch in below.patches) == 2 * 40
    assert is_picture(out / "fig3" / "fig3-burgers.png")
    assert (out / "fig3" / "fig3-burgers.pdf").read_bytes().startswith(b"%PDF")


def test_fig4_draws_the_milestones(made, out):
    result = made("fig4", "burgers")
    measured = metrics(out, "burgers-seed0")["milestones"]
    assert content(out, "fig4")["drawn"]["fig4-burgers"]["burgers-seed0"] == measured
    (axes,) = result.output.figures["fig4-burgers"].axes
    lines = [container[0] for container in axes.containers]
    for line, stage in zip(lines, ("mdm", "finetune", "dm"), strict=True):
        points = [(point["compute_seconds"], point["mean"]) for point in measured[stage]]
        np.testing.assert_allclose(np.column_stack([line.get_xdata(), line.get_ydata()]), points)
    last = row(out, "fig4", method="baseline", step=measured["dm"][-1]["step"])
    assert last["mean ℓ"]["mean"] == measured["dm"][-1]["mean"]
    assert last["samples"] == 8


def test_fig4_pools_seeds(made, out):
    result = made("fig4", "burgers", seeds=(0, 1))
    runs = [metrics(out, f"burgers-seed{seed}")["milestones"]["mdm"] for seed in (0, 1)]
    line = result.output.figures["fig4-burgers"].axes[0].lines[0]
    np.testing.assert_allclose(line.get_ydata(), [np.mean([a["mean"], b["mean"]]) for a, b in zip(*runs, strict=True)])


def test_fig9_shows_nine_of_each(made, out):
    result = made("fig9", "burgers")
    titles = [axes.get_title() for axes in result.output.figures["fig9-burgers"].axes if axes.get_title()]
    assert titles == ["data", "ours, not finetuned", "ours", "baseline"]
    drawn = content(out, "fig9")["drawn"]["fig9-burgers"]
    images = read(out / "burgers-seed0" / "evaluate" / "dm.h5", "images")[:9]
    assert drawn["baseline"]["mean"] == pytest.approx(float(images.mean()), rel=1e-5)
    assert is_picture(out / "fig9" / "fig9-burgers.png")


# Table 5


class Mixture(nn.Module):
    """In place of Inception: eight fixed mixtures of the pixels."""

    def forward(self, pictures):
        mixing = torch.randn(pictures[0].numel(), 8, generator=torch.Generator().manual_seed(0))
        return pictures.flatten(1) @ mixing


def test_table5_measures_fid_on_the_evaluations_samples(made, out, monkeypatch):
    monkeypatch.setattr("namm.evaluation.features.load_inception", Mixture)
    monkeypatch.setattr("namm.evaluation.inception.load_inception", Mixture)
    made("table5", "burgers")
    run = out / "burgers-seed0"
    real = read(run / "data" / "images.h5", "test")
    ours = read(run / "evaluate" / "mdm.h5", "mirror_images")
    samples = {
        "ours, not finetuned": MirrorMap.load(run / "map" / "training" / "mirror").to_data(ours).detach(),
        "ours": read(run / "evaluate" / "mdm.h5", "images"),
        "baseline": read(run / "evaluate" / "dm.h5", "images"),
        "data": read(run / "data" / "images.h5", "train"),
    }
    for name, images in samples.items():
        found = row(out, "table5", method=name)
        assert found["images"] == 36
        assert found["FID"]["mean"] == pytest.approx(fid(real, images[:36], Extractor(Clipped(), Mixture())), rel=1e-3)
    assert row(out, "table5", method="baseline")["FID, paper"] == 140.70


def test_table5_takes_what_the_evaluation_measured(made, tiny, out, rewrite, tmp_path):
    made("table1", "burgers")
    (cell,) = base_cells(tiny, ["burgers"], [0])
    asked = replace(cell.preset.settings.evaluate, n_fid=30)
    cell = replace(cell, preset=replace(cell.preset, settings=replace(cell.preset.settings, evaluate=asked)))
    shutil.copytree(out / "burgers-seed0" / "evaluate", tmp_path / "evaluate")
    found = metrics(out, "burgers-seed0")
    found["rows"]["dm"]["fid"] = 12.5
    rewrite(tmp_path / "evaluate" / "metrics.json", found)
    rows = ITEMS["table5"].show([CellOutcome(cell, tmp_path, None)]).table.plain()
    assert [(r["method"], r["images"], r["FID"] and r["FID"]["mean"]) for r in rows] == [
        ("ours, not finetuned", 30, None),
        ("ours", 30, None),
        ("baseline", 30, 12.5),
    ]


def test_what_needs_inception_is_refused_before_anything_is_run(tiny, tmp_path, monkeypatch):
    def absent():
        raise DataError("no Inception weights are here.")

    def refused(item, base, experiment):
        with pytest.raises(UsageError, match="no Inception weights"):
            make(ITEMS[item], base, tmp_path / "out", experiments=(experiment,))
        assert not (tmp_path / "out").exists()  # no network that counts either

    monkeypatch.setattr("namm.evaluation.inception.load_inception", absent)
    refused("table5", tiny, "burgers")
    for item in ("table1", "table2", "fig3", "fig4", "fig5", "fig7", "fig8", "fig9", "fig11"):
        refused(item, lambda name: preset(name, "gpu"), "count")

    def with_fid(name):
        chosen = tiny(name)
        evaluate = replace(chosen.settings.evaluate, n_fid=30)
        return replace(chosen, settings=replace(chosen.settings, evaluate=evaluate))

    refused("table1", with_fid, "burgers")


def test_what_is_evaluated_is_shown_without_inception(tiny, tmp_path, monkeypatch):
    def asking(name):
        chosen = tiny(name)
        evaluate = replace(chosen.settings.evaluate, kid_subsets=2)
        return replace(chosen, settings=replace(chosen.settings, evaluate=evaluate))

    def absent():
        raise DataError("no Inception weights are here.")

    def show():
        return make(ITEMS["table1"], asking, tmp_path, experiments=("burgers",), log=lambda line: None, progress=False)

    with monkeypatch.context() as here:
        here.setattr("namm.evaluation.features.load_inception", Mixture)
        here.setattr("namm.evaluation.inception.load_inception", Mixture)
        before = show()
    monkeypatch.setattr("namm.evaluation.inception.load_inception", absent)
    assert show().output.table.plain() == before.output.table.plain()
    assert all(row["KID"] is not None for row in before.output.table.plain())


def test_torchrun_is_refused(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="without torchrun"):
        make(ITEMS["table1"], tiny, tmp_path / "out", experiments=("burgers",))


# The sweep


@pytest.fixture(scope="session")
def swept(made):
    made("table1", "burgers")
    return made("table2", "burgers")


def test_table2_has_nine_settings_and_their_scores(swept, out, tiny):
    rows = content(out, "table2")["rows"]
    assert [(r["λ_constr"], r["σ_max"]) for r in rows] == [(w, s) for w in (0.1, 1, 10) for s in (0.001, 0.1, 0.5)]
    run = out / "burgers-sigma0.5-lambda1-seed0"
    images, real = read(run / "samples" / "train.h5", "images"), read(run / "data" / "images.h5", "test")
    found = row(out, "table2", **{"λ_constr": 1, "σ_max": 0.5})
    assert len(images) == 40
    assert found["ℓ"]["mean"] == pytest.approx(float(rule(tiny)(images).mean()), rel=1e-4)
    assert found["CD"]["mean"] == pytest.approx(100 * found["ℓ"]["mean"])
    assert found["√MMD²"]["mean"] == pytest.approx(mmd(real, images, subsets=2, size=32, seed=2).mean, rel=1e-4)
    assert (found["CD, paper"], found["√MMD², paper"], found["KID, paper"]) == (0.18, 0.1069, 0.0499)
    assert len({r["ℓ"]["mean"] for r in rows}) == 9
    top = swept.output.figures["table2-burgers"].axes[0]
    means = [row(out, "table2", **{"λ_constr": 10, "σ_max": s})["CD"]["mean"] for s in (0.001, 0.1, 0.5)]
    np.testing.assert_allclose(top.lines[0].get_ydata(), means)


def test_table2_has_kid_where_it_is_asked_for(swept, monkeypatch):
    looked = []

    class Watched(Mixture):
        def forward(self, pictures):
            looked.append(len(pictures))
            return super().forward(pictures)

    monkeypatch.setattr("namm.evaluation.features.load_inception", Watched)

    def asking(outcome):
        s = outcome.cell.preset.settings
        s = replace(s, evaluate=replace(s.evaluate, kid_subsets=2))
        return replace(outcome, cell=replace(outcome.cell, preset=replace(outcome.cell.preset, settings=s)))

    outcomes = [asking(outcome) for outcome in swept.outcomes]
    for outcome in outcomes:
        ITEMS["table2"].measure(outcome, False)
    assert sorted(looked) == [36] + 9 * [40]  # all nine have the same real images
    shown = ITEMS["table2"].show(outcomes)
    assert not shown.notes
    assert swept.output.notes == ["KID was not measured for burgers: evaluate.kid_subsets is 0 in this preset."]
    folder, extractor = outcomes[4].folder, Extractor(Clipped(), Mixture())
    sets = read(folder / "data" / "images.h5", "test"), read(folder / "samples" / "train.h5", "images")
    expected = kid(*sets, extractor, subsets=2, size=32, seed=2).mean
    assert shown.table.plain()[4]["KID"]["mean"] == pytest.approx(expected, rel=1e-3)
    assert "KID" in [axes.get_ylabel() for axes in shown.figures["table2-burgers"].axes]


def test_runs_share_what_is_the_same_work(swept, out):
    def inode(run, file):
        return (out / run / file).stat().st_ino

    for run in ("burgers-sigma0.001-lambda10-seed0", "burgers-sigma0.5-lambda0.1-seed0"):
        assert inode(run, "data/images.h5") == inode("burgers-seed0", "data/images.h5")
    own = "burgers-sigma0.1-lambda10-seed0"  # the preset's own σ_max and λ
    assert inode(own, "map/training/mirror/f/config.json") == inode(
        "burgers-seed0", "map/training/mirror/f/config.json"
    )
    assert inode(own, "mdm/training/model.safetensors") == inode("burgers-seed0", "mdm/training/model.safetensors")
    other = "burgers-sigma0.1-lambda1-seed0"
    assert inode(other, "map/training/mirror/f/config.json") != inode(own, "map/training/mirror/f/config.json")


def test_a_stage_is_copied_where_it_cannot_be_linked(swept, out, tiny, tmp_path, monkeypatch):
    def refuse(*names):
        raise OSError("no links here")

    shutil.copytree(out / "burgers-seed0" / "data", tmp_path / "first" / "data")
    monkeypatch.setattr("namm.experiments.sweeps.cell.os.link", refuse)
    (cell,) = base_cells(tiny, ["burgers"], [0])
    share([replace(cell, name="second"), *base_cells(tiny, ["burgers"], [1])], tmp_path)
    first, second = (tmp_path / name / "data" / "images.h5" for name in ("first", "second"))
    assert second.read_bytes() == first.read_bytes()
    assert second.stat().st_ino != first.stat().st_ino
    assert replace(cell, until="data").is_complete(tmp_path / "second")
    assert not (tmp_path / "second" / "map").exists()
    assert not (tmp_path / "burgers-seed1").exists()  # another seed has other data


def test_a_run_that_cannot_be_given_anything_does_not_keep_others_from_it(swept, out, tiny, tmp_path):
    shutil.copytree(out / "burgers-seed0" / "data", tmp_path / "first" / "data")
    (tmp_path / "broken" / "data").mkdir(parents=True)
    (tmp_path / "broken" / "data" / "stage.json").write_text("{")
    (tmp_path / "file").write_text("no folder")
    (cell,) = base_cells(tiny, ["burgers"], [0])
    with owned(tmp_path / "busy"):
        share([replace(cell, name=name) for name in ("busy", "file", "free")], tmp_path)
    assert not (tmp_path / "busy" / "data").exists()
    assert replace(cell, until="data").is_complete(tmp_path / "free")


def test_fig6_shows_mirror_images_and_distances_along_either_setting(swept, made, out):
    result = made("fig6", "burgers")
    assert len(result.outcomes) == 5
    drawn = content(out, "fig6")["drawn"]["fig6-burgers"]
    assert set(drawn) == {"σ_max, with λ = 10", "λ, with σ_max = 0.1"}
    assert sorted(drawn["λ, with σ_max = 0.1"]) == ["0.1", "1", "10"]
    run = out / "burgers-sigma0.5-lambda10-seed0"
    distances = read(run / "samples" / "train.h5", "distances")
    assert drawn["σ_max, with λ = 10"]["0.5"] == pytest.approx(distances.tolist())
    x = read(run / "data" / "images.h5", "test")[:1]
    y = MirrorMap.load(run / "map" / "training" / "mirror").to_mirror(x).detach()[0, 0]
    shown = [axes for axes in result.output.figures["fig6-burgers"].axes if axes.get_title() == "0.5"]
    np.testing.assert_allclose(shown[0].get_images()[0].get_array(), y, rtol=1e-5)
    assert row(out, "fig6", **{"λ_constr": 10, "σ_max": 0.5})["mean |g(x)|"]["mean"] == pytest.approx(
        float(y.abs().mean())
    )


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("experiment", FIVE)
def test_fig6_has_both_lines_in_every_preset(experiment, name):
    """Also where the preset has a σ_max of its own, which the sweep has not."""
    cells = cross_cells(lambda each: preset(each, name), [experiment], [0])
    assert len(cells) == 5
    assert len({cell.preset.settings.map.weights.constraint for cell in cells}) == len(WEIGHTS)


def test_the_sweep_of_the_papers_preset_is_the_papers():
    for experiment in FIVE:
        base = preset(experiment, "paper")
        assert grid_weights(base) == (0.01, 0.1, 1.0)
        cells = sweep_cells(lambda name: preset(name, "paper"), [experiment], [0])
        assert [c.preset.settings.map for c in cells].count(base.settings.map) == 1
    for name, sigma, weight, scores in (
        ("count", 0.5, 0.1, (0.52, 0.0520, 0.0086)),
        ("periodic", 0.001, 0.01, (0.25, 0.2133, 0.0215)),
        ("flux", 0.1, 1.0, (0.03, 1.1722, 0.5191)),
    ):
        assert REPORTED[name][WEIGHTS.index(weight)][SIGMAS.index(sigma)] == scores


# Variants of the map


def test_fig7_trains_a_resnet_beside_the_runs_own_map(made, out, tiny):
    made("fig7", "burgers")
    run = out / "burgers-seed0"
    (folder,) = (run / "studies").glob("resnet-*")
    config = json.loads((folder / "map" / "training" / "mirror" / "g" / "config.json").read_text())
    assert config["_class_name"] == "RuleNet"  # the kind of this preset's f
    mirror = MirrorMap.load(folder / "map" / "training" / "mirror")
    y, ours = read(folder / "samples.h5", "mirror_images"), read(run / "evaluate" / "mdm.h5", "mirror_images")
    own = MirrorMap.load(run / "map" / "training" / "mirror")
    with torch.no_grad():
        expected = {
            "ResNet": rule(tiny)(mirror.to_data(y)),
            "ICNN": rule(tiny)(own.to_data(ours)),
            "baseline": rule(tiny)(read(run / "evaluate" / "dm.h5", "images")),
        }
    drawn = content(out, "fig7")["drawn"]["fig7-burgers"]
    for name, distances in expected.items():
        assert drawn[name] == pytest.approx(distances.tolist(), rel=1e-4)
        assert row(out, "fig7", g=name)["mean ℓ"]["mean"] == pytest.approx(float(distances.mean()), rel=1e-4)
    before = (folder / "samples.h5").stat().st_mtime_ns
    made("fig7", "burgers")
    assert (folder / "samples.h5").stat().st_mtime_ns == before


def test_fig10_compares_held_out_samples_before_and_after_finetuning(made, out, tiny):
    result = made("fig10", "burgers")
    assert [outcome.cell.name for outcome in result.outcomes] == ["burgers-seed0", "burgers-fixed-seed0"]
    drawn = content(out, "fig10")["drawn"]["fig10-burgers"]
    for name, noise in (("burgers-seed0", "uniform"), ("burgers-fixed-seed0", "fixed")):
        y = read(out / name / "samples" / "held_out.h5", "mirror_images")
        for stage, folder in (("before", "map"), ("after", "finetune")):
            with torch.no_grad():
                expected = rule(tiny)(MirrorMap.load(out / name / folder / "training" / "mirror").to_data(y))
            assert drawn[stage][noise] == pytest.approx(expected.tolist(), rel=1e-4)
    assert drawn["before"]["uniform"] != drawn["before"]["fixed"]
    assert is_picture(out / "fig10" / "fig10-burgers.png")


def test_fig8_samples_both_autoencoders(made, out, tiny):
    made("fig8", "divergence")
    run = out / "divergence-seed0"
    (folder,) = (run / "studies").glob("autoencoders-*")
    real = read(run / "data" / "images.h5", "test")
    for name, file in (("MVAE", "mvae.h5"), ("VAE", "vae.h5")):
        images = read(folder / file, "images")
        found = row(out, "fig8", method=name)
        assert images.shape == (40, 2, 8, 16)
        assert found["ℓ"]["mean"] == pytest.approx(float(rule(tiny, "divergence")(images).mean()), rel=1e-4)
        assert found["√MMD²"]["mean"] == pytest.approx(mmd(real, images, subsets=2, size=32, seed=2).mean, rel=1e-3)
        assert content(out, "fig8")["drawn"]["fig8-divergence"][name] == pytest.approx(
            rule(tiny, "divergence")(images).tolist(), rel=1e-4
        )
    assert "CD, paper" not in row(out, "fig8", method="VAE")
    assert is_picture(out / "fig8" / "fig8-divergence.png")


# Data assimilation


def test_fig5_is_measured_on_the_base_run(made, out, monkeypatch):
    monkeypatch.setattr(assimilation_paper, "FEW_STEPS", 3)
    settings = [Setting(each.method, 1e-4, each.weight) for each in assimilation_paper.SETTINGS]
    monkeypatch.setattr(assimilation_paper, "SETTINGS", settings)
    result = made("fig5", "burgers")
    assert [outcome.cell.name for outcome in result.outcomes] == ["burgers-seed0"]
    (file,) = (out / "burgers-seed0" / "studies").glob("assimilation-*/*.h5")
    ours = read(file, "mirror-dps/distance")
    found = row(out, "fig5", method="mirror DPS")
    assert (found["samples"], found["steps"]) == (32, 3)
    assert found["mean ℓ"] == pytest.approx(float(ours.mean()), rel=1e-4)
    assert is_picture(out / "fig5" / "fig5-burgers.png")


# The rule that needs a network


def test_the_network_that_counts_is_trained_once(tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr(making, "make_counter", lambda data, path, progress: trained.append(path) or path.touch())
    cells = base_cells(preset, ["count", "flux"], [0, 1])
    found = [making._with_counter(cell, tmp_path) for cell in cells]
    assert trained == []
    for cell in found:
        making._require_counter(cell, tmp_path, lambda line: None, False)
    assert trained == [tmp_path / "counter.safetensors"]
    data = [cell.preset.settings.data for cell in found if isinstance(cell.preset.settings.data, CountData)]
    assert [each.counter for each in data] == [str(trained[0])] * 2
    assert found[2:] == cells[2:]
    given = Cell("own", replace(cells[0].preset, settings=found[0].preset.settings), None)
    assert making._with_counter(given, tmp_path / "other") is given
    trained[0].unlink()
    making._require_counter(given, tmp_path / "other", print, False)
    assert len(trained) == 1  # one of the user's own that is absent is reported, not made
