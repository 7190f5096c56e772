"""The presets' numbers, against tables written down again here and against the objects they describe."""

import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from namm.datasets import BlackHoles, BurgersTrajectories, DarcyFlow, Dataset, Galaxies, KolmogorovFlow, UnitCells
from namm.errors import UsageError
from namm.experiments.burgers import BurgersData
from namm.experiments.count import CountData
from namm.experiments.darcy import DarcyData
from namm.experiments.divergence import DivergenceData
from namm.experiments.engine import build, build_models
from namm.experiments.flux import FluxData
from namm.experiments.periodic import PeriodicData
from namm.experiments.presets import EXPERIMENTS, preset

# The paper's Tables 3 and 4: σ_max, λ, rate, epochs of NAMM, MDM, finetuning and DM, images to train on and to validate
TABLE = {
    "flux": (0.1, 0.01, 2e-4, 30, 200, 1000, 450, 100_000, 100),
    "burgers": (0.1, 1, 2e-4, 100, 300, 700, 1500, 10_000, 1000),
    "divergence": (0.5, 1, 1e-3, 100, 700, 500, 2000, 10_000, 1000),
    "periodic": (0.1, 1, 2e-4, 50, 300, 1000, 1000, 30_000, 300),
    "count": (0.1, 0.01, 2e-4, 50, 300, 700, 1500, 10_000, 1000),
}
# Channels, parameters of g and of f, f residual, f's last activation
NETWORKS = {
    "flux": (1, 30_368, 7_832_577, True, "softplus"),
    "burgers": (1, 30_368, 7_832_577, True, "softplus"),
    "divergence": (2, 22_560, 7_838_850, False, "none"),
    "periodic": (1, 30_368, 7_832_577, True, "softplus"),
    "count": (1, 20_544, 7_832_577, False, "softplus"),
}


@pytest.mark.parametrize("experiment", TABLE)
def test_paper_preset_has_the_papers_numbers(experiment):
    s = preset(experiment, "paper").settings
    assert TABLE[experiment] == (
        s.map.sigma_max,
        s.map.weights.constraint,
        s.map.train.learning_rate,
        *(int(part.train.budget.removesuffix(" epochs")) for part in (s.map, s.mdm, s.finetune, s.dm)),
        s.data.n_train,
        s.data.n_val,
    )
    assert (s.map.weights.cycle, s.map.weights.regulariser, s.map.regulariser) == (0.5, 1e-3, "gradient")
    assert (s.map.f.dropout, s.map.f.normalisation, s.map.f.skip) == (0.5, "instance", False)
    train = s.map.train
    assert (train.batch_size, train.betas[0], train.ema_decay, train.schedule, train.clip) == (
        *(16, 0.5, 0.999),
        *("constant", None),
    )
    for score in (s.mdm.train, s.dm.train):
        assert (score.batch_size, score.betas[0], score.ema_decay, score.warmup_steps, score.clip) == (
            *(64, 0.9, 0.9999),
            *(5000, 1.0),
        )
        assert score.learning_rate == 2e-4
    assert (s.finetune.sigma_max, s.finetune.weights) == (s.map.sigma_max, s.map.weights)
    assert (s.samples.n, s.samples.n_val, s.samples.sampler.steps) == (12_800, 512, 1000)
    assert not s.dm.equal_compute


@pytest.mark.parametrize("experiment", NETWORKS)
def test_paper_networks_have_the_published_sizes(experiment):
    channels, g, f, residual, activation = NETWORKS[experiment]
    chosen = preset(experiment, "paper").settings.map
    mirror = build_models.mirror(chosen, torch.zeros(2, channels, 16, 16))
    assert [sum(p.numel() for p in network.parameters()) for network in (mirror.g, mirror.f)] == [g, f]
    assert (chosen.f.residual, chosen.f.activation) == (residual, activation)


def test_reported_figures_give_the_papers_improvements():
    improvements = {"flux": 78, "burgers": 91, "divergence": 77, "periodic": 96, "count": 38}
    for experiment, percent in improvements.items():
        r = preset(experiment).reported
        assert 100 * (1 - r.with_finetuning.cd / r.baseline.cd) == pytest.approx(percent, abs=0.51)
        assert r.weight == TABLE[experiment][1]
    assert preset("burgers").reported.baseline.fid == 140.70
    assert preset("count").reported.without_finetuning.kid == 0.0367
    assert preset("divergence").reported.with_finetuning.mmd == 0.0781
    assert preset("flux").reported.cd(2.0) == pytest.approx(2.0)  # 100 · 0.01 · ℓ


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_one_recipe_serves_every_rule_in_the_demo(experiment):
    maps = preset(experiment, "demo").settings.map
    assert maps.standardise
    assert (maps.f.kind, maps.noise, maps.weights.relative) == ("rulenet", "model", True)


@settings(max_examples=10)
@given(
    dt=st.floats(0.01, 0.1),
    inner_steps=st.integers(1, 4),
    nu=st.floats(0.02, 0.2),
    length=st.floats(5, 20),
    flipped=st.booleans(),
)
def test_burgers_data_obey_the_rule_derived_from_them(dt, inner_steps, nu, length, flipped):
    data = BurgersData(size=16, dt=dt, inner_steps=inner_steps, nu=nu, length=length, flipped=flipped)
    x = build.dataset(data).draw(4, torch.Generator().manual_seed(0))
    assert build.constraint(data.rule)(x).max() < 1e-6
    other = replace(data.rule, dt=dt * 1.5)
    assert build.constraint(other)(x).min() > 1e-5


@pytest.mark.parametrize("tiles", [2, 4])
def test_unit_cells_obey_the_rule_derived_from_them(tiles):
    data = PeriodicData(size=16, tiles=tiles)
    x = build.dataset(data).draw(8, torch.Generator().manual_seed(0))
    assert build.constraint(data.rule)(x).max() == 0
    assert build.constraint(replace(data.rule, tiles=8))(x).max() > 0.1


@pytest.mark.parametrize(
    ("described", "recipe"),
    [
        (BurgersData, BurgersTrajectories),
        (CountData, Galaxies),
        (DarcyData, DarcyFlow),
        (DivergenceData, KolmogorovFlow),
        (FluxData, BlackHoles),
        (PeriodicData, UnitCells),
    ],
)
def test_data_settings_are_the_datasets_own_fields_and_defaults(described, recipe: type[Dataset]):
    assert described().recipe == {f.name: f.default for f in fields(recipe)}
    assert {k: n for k, n in described().sizes.items() if k != "test"} == {
        k: n for k, n in recipe.sizes.items() if k != "test"
    }


def test_what_does_not_exist_is_refused_with_what_does():
    with pytest.raises(UsageError, match="Did you mean 'burgers'"):
        preset("burgrs")
    with pytest.raises(UsageError, match="There are demo, gpu, paper"):
        preset("burgers", "xyz")
    with pytest.raises(UsageError, match="needs a network that counts"):
        build.constraint(preset("count").settings.data.rule)
    build_models.check(preset("count").settings)  # the run trains one


def test_presets_import_no_torch():
    code = "import sys, namm.experiments.presets, namm.experiments.engine.folder; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_first_weights_depend_on_the_seed_alone():
    chosen = preset("periodic").settings.map
    images = torch.rand(4, 1, 8, 8)
    before = torch.random.get_rng_state()
    a, b = build_models.mirror(chosen, images), build_models.mirror(chosen, images)
    c = build_models.mirror(replace(chosen, train=replace(chosen.train, seed=1)), images)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(1)
    assert torch.equal(a.f.head.weight, b.f.head.weight)
    assert torch.equal(a.g.quadratic, build_models.mirror(chosen, images).g.quadratic)
    assert not torch.equal(a.f.head.weight, c.f.head.weight)
