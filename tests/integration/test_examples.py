"""Every example runs and shows what it says."""

import ast
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread

import namm
from namm.datasets import BurgersTrajectories, KolmogorovFlow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_own_constraint_is_short_and_lowers_the_distance():
    torch.manual_seed(0)
    direct, mirrored = runpy.run_path(str(EXAMPLES / "own_constraint.py"))["main"]()
    assert mirrored < direct / 2


def test_own_operator_narrows_the_prior():
    torch.manual_seed(0)
    of_prior, of_posterior = runpy.run_path(str(EXAMPLES / "own_operator.py"))["main"]()
    assert of_posterior < 0.85 * of_prior


def test_own_constraint_fits_in_25_lines_of_code():
    tree = ast.parse((EXAMPLES / "own_constraint.py").read_text())
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings |= set(range(node.lineno, node.end_lineno + 1))
    lines = (EXAMPLES / "own_constraint.py").read_text().splitlines()
    code = [n for n, line in enumerate(lines, 1) if line.strip() and n not in docstrings]
    assert len(code) <= 25


def test_samples_of_a_diffusers_model_are_repaired_and_judged(capsys):
    torch.manual_seed(0)
    short = namm.TrainSettings(budget="2 steps", batch_size=8)
    options = {"settings": short, "noise": namm.ModelErrors(0.1), "weights": namm.Weights(1.0), "progress": False}
    verdict = runpy.run_path(str(EXAMPLES / "repair_diffusers.py"))["main"](steps=2, n=24, draw_steps=5, **options)
    assert not verdict.works  # two steps teach nothing, and the verdict says so
    assert "\n".join(verdict.lines()) in capsys.readouterr().out


def test_minimal_trains_both_models_and_prints_what_it_measured(capsys):
    module = runpy.run_path(str(EXAMPLES / "minimal.py"))
    scores = module["main"](steps=2, samples=16)
    assert list(scores) == ["data", "plain model", "ours"]
    assert scores["data"].distance.mean < 1e-6
    assert min(scores["plain model"].distance.mean, scores["ours"].distance.mean) > 1e-3  # two steps teach nothing
    rows = capsys.readouterr().out.splitlines()[-3:]
    for row, (name, score) in zip(rows, scores.items(), strict=True):
        assert row.startswith(name)
        figures = [score.distance.mean, score.mmd.mean, score.total_variation, score.spread]
        np.testing.assert_allclose([float(word) for word in row.removeprefix(name).split()], figures, atol=0.005)


def test_the_rule_of_minimal_is_the_divergence():
    module = runpy.run_path(str(EXAMPLES / "minimal.py"))
    generator = torch.Generator().manual_seed(0)
    flows, noise = module["flows"](4, generator), torch.randn(4, 2, 16, 16, generator=generator)
    for x, obeyed in ((flows, True), (noise, False)):
        padded = np.pad(x.double().numpy(), ((0, 0), (0, 0), (1, 1), (1, 1)), mode="wrap")
        along, down = np.gradient(padded[:, 0], axis=2), np.gradient(padded[:, 1], axis=1)
        expected = np.abs(along + down)[:, 1:-1, 1:-1].mean((1, 2))
        np.testing.assert_allclose(module["divergence"](x).numpy(), expected, rtol=1e-4, atol=1e-6)
        assert (expected < 1e-6).all() == obeyed


def test_minimal_is_one_page_of_public_names():
    source = (EXAMPLES / "minimal.py").read_text()
    assert len(source.splitlines()) <= 120
    imported = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    assert {name for name in imported if name.startswith("namm")} <= {
        *("namm.evaluation", "namm.generative", "namm.maps")
    }


@pytest.mark.parametrize(
    ("dataset", "colours", "zero"),
    [
        (BurgersTrajectories(size=16), "gray", None),
        (KolmogorovFlow(size=16, rows=1, columns=1, start=0.0), "gray", 0.5),
    ],
)
def test_the_gallery_shows_the_images_that_the_dataset_draws(dataset, colours, zero, tmp_path):
    module = runpy.run_path(str(EXAMPLES / "gallery.py"))
    (path,) = module["main"](tmp_path, {"it": (dataset, colours)})
    picture = imread(path)[..., 0]
    tile = 2 * 16 + 2 * module["GAP"]
    assert picture.shape == (2 * tile, 4 * tile)
    inner = picture[tile + 4 : 2 * tile - 4 : 2, 2 * tile + 4 : 3 * tile - 4 : 2]  # row 1, column 2: image 6
    image = dataset.images(0, "test", 6, 7)[0, 0].numpy()
    if zero is None:
        expected = (image - image.min()) / (image.max() - image.min())
        np.testing.assert_allclose(inner, expected, atol=1 / 128)
    else:
        assert abs(inner.mean() - zero) < 0.01  # vorticity has no mean, and the middle of the colours is zero
        assert inner.std() > 0.1
