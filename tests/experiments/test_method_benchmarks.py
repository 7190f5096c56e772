"""The benchmarks of the method at a size of seconds: what they print is what the runs measured."""

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from namm.experiments.burgers import BurgersData
from namm.experiments.engine.settings import ForwardSettings, NetworkSettings, SamplerSettings, VAESettings, with_seed
from namm.experiments.presets import preset

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def tiny():
    """Burgers' equation on 8 × 8 images, a few steps of everything."""
    base = preset("burgers")
    s = base.settings

    def short(part):
        return replace(part, train=replace(part.train, budget="4 steps", batch_size=4))

    f, sampler = replace(s.map.f, filters=4, blocks=1, downsamplings=1), SamplerSettings("dpm-solver", 3)
    network = NetworkSettings(filters=8, multipliers=(1,), blocks=1, attention=(), dropout=0.0, unshuffle=2)
    settings = replace(
        s,
        data=BurgersData(40, 10, 40, size=8),
        map=short(replace(s.map, g=ForwardSettings(1, 4), f=f)),
        mdm=short(replace(s.mdm, network=network)),
        samples=replace(s.samples, n=16, n_val=8, sampler=sampler),
        finetune=short(s.finetune),
        dm=short(s.dm),
        evaluate=replace(s.evaluate, n=32, subset=16, mmd_subsets=2, sampler=sampler),
        vae=short(VAESettings(latent=4, features=4)),
    )
    return replace(base, settings=settings)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("seeds")


def test_few_steps(tiny, out, capsys, tmp_path):
    module = runpy.run_path(str(BENCHMARKS / "few_steps.py"))
    seeded = replace(tiny, settings=with_seed(tiny.settings, 0))
    where = [
        "--run",
        str(out / "burgers-demo-1-0"),
        "--json",
        str(tmp_path / "f.json"),
        "--figure",
        str(tmp_path / "f.png"),
    ]
    code = module["main"]([*where, "--n", "12", "--reference-steps", "5"], seeded)
    found = json.loads((tmp_path / "f.json").read_text())
    assert len(found) == 2 * (1 + len(module["SAMPLERS"]))
    assert (tmp_path / "f.png").stat().st_size > 10_000
    for model in ("MDM + f", "DM"):
        own = [row for row in found if row["model"] == model]
        assert [row["distance_ratio"] for row in own] == pytest.approx(
            [row["distance"] / own[0]["distance"] for row in own]
        )
    judged = [row for row in found if row["sampler"] == module["JUDGED"]]
    agree = [abs(row["mmd2"]) <= 3 * row["standard_error"] and 0.9 <= row["distance_ratio"] <= 1.1 for row in judged]
    assert len(judged) == 2
    assert code == (0 if all(agree) else 1)
    assert capsys.readouterr().out.count("times faster") == 2


def test_the_mirrored_autoencoder(tiny, out, capsys):
    module = runpy.run_path(str(BENCHMARKS / "mirror_vae.py"))
    code = module["main"](["--seeds", "0", "1", "--n", "32", "--subset", "16", "--out", str(out)], tiny)
    printed = capsys.readouterr().out
    ratios = [float(value) for value in re.search(r"MVAE / VAE: (.*)", printed)[1].split(", ")]
    table = [float(value) for value in re.findall(r"│ M?VAE +│ (\S+)", printed)]
    assert ratios == pytest.approx([table[1] / table[0], table[3] / table[2]], rel=0.02)
    excess, error = map(float, re.search(r"MVAE − VAE: ([+-]\S+) ± (\S+)", printed).groups())
    assert code == (0 if max(ratios) <= 0.7 and excess <= error else 1)


def test_the_autoencoders_train_as_long_as_asked():
    demo = runpy.run_path(str(BENCHMARKS / "mirror_vae.py"))["demo"]("flux", 2.5, 1.25, 0.5)
    ours, usual = demo.settings, preset("flux", "demo").settings
    assert (demo.experiment, ours.vae.train.budget, ours.map.train.budget) == ("flux", "2.5 minutes", "1.25 minutes")
    assert ours.map.weights == replace(usual.map.weights, constraint=usual.map.weights.constraint / 2)
