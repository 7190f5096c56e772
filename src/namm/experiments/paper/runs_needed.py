"""The runs that the paper's items need, as cells.

A cell's name says what it is, and cells of the same name are the same run whichever item asks for it: one base run of
an experiment and a seed serves Tables 1 and 5 and Figs. 3, 4, 5 and 7 to 11, one sweep serves Table 2 and Fig. 6.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from namm.experiments.engine.settings import (
    BaselineSettings,
    FinetuneSettings,
    ModelSettings,
    SamplesSettings,
    with_seed,
)
from namm.experiments.presets import Preset, preset
from namm.experiments.sweeps.cell import Cell

SIGMAS = (0.001, 0.1, 0.5)
"""σ_max of the paper's sweep."""
WEIGHTS = (0.01, 0.1, 1.0)
"""λ_constr of the paper's sweep, in its own units: see `grid_weights`."""
MILESTONES = 4
"""Points of Fig. 4 where a preset asks for none."""

Base = Callable[[str], Preset]
"""The settings that an experiment is run with, by its name."""
Part = TypeVar("Part", ModelSettings, FinetuneSettings, BaselineSettings)


def base_cells(base: Base, experiments: Sequence[str], seeds: Sequence[int], until: str = "evaluate") -> list[Cell]:
    """The experiments themselves, up to the stage `until`."""
    return [Cell(f"{name}-seed{seed}", _based(base(name), seed), until) for name in experiments for seed in seeds]


def autoencoder_cells(base: Base, experiments: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """The same runs, up to both autoencoders."""
    return base_cells(base, experiments, seeds, "vae")


def noise_cells(base: Base, experiments: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """Up to finetuning, with σ drawn from [0, σ_max] and with σ = σ_max."""
    fixed = []
    for cell in (drawn := base_cells(base, experiments, seeds, "finetune")):
        s = cell.preset.settings
        preset = replace(cell.preset, settings=replace(s, map=replace(s.map, noise="fixed")))
        fixed.append(Cell(cell.name.replace("-seed", "-fixed-seed"), preset, "finetune"))
    return [*drawn, *fixed]


def sweep_cells(base: Base, experiments: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """All of σ_max × λ_constr, up to samples of the model through f as the map's training left it."""
    return [
        _swept(base(name), seed, sigma, weight)
        for name in experiments
        for seed in seeds
        for weight in grid_weights(base(name))
        for sigma in SIGMAS
    ]


def cross_cells(base: Base, experiments: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """Those of the sweep in which one of the two is what the paper chose for the experiment."""
    return [
        cell
        for cell in sweep_cells(base, experiments, seeds)
        if has_chosen_sigma(cell.preset) or has_own_weight(cell.preset, base(cell.preset.experiment))
    ]


def grid_weights(preset: Preset) -> tuple[float, ...]:
    """The paper's λ, scaled as the preset scales the one that the paper chose for this experiment."""
    scale = preset.settings.map.weights.constraint / preset.reported.weight
    return tuple(float(f"{scale * weight:.6g}") for weight in WEIGHTS)


def has_chosen_sigma(cell: Preset) -> bool:
    """Whether the cell has the σ_max that the paper chose, which need not be that of the preset."""
    return cell.settings.map.sigma_max == preset(cell.experiment, "paper").settings.map.sigma_max


def has_own_weight(cell: Preset, base: Preset) -> bool:
    """Whether the cell has the experiment's own λ_constr."""
    ratio = cell.settings.map.weights.constraint / base.settings.map.weights.constraint
    return abs(ratio - 1) < 1e-5


def seed_of(cell: Cell) -> int:
    """The seed of a cell."""
    return cell.preset.settings.map.train.seed


def _based(preset: Preset, seed: int) -> Preset:
    """The preset with that seed, and with the milestones that Fig. 4 shows."""
    s = with_seed(preset.settings, seed)
    return replace(preset, settings=replace(s, mdm=_watched(s.mdm), finetune=_watched(s.finetune), dm=_watched(s.dm)))


def _watched(part: Part) -> Part:
    return part if part.train.milestones else replace(part, train=replace(part.train, milestones=MILESTONES))


def _swept(preset: Preset, seed: int, sigma: float, weight: float) -> Cell:
    """One cell of the sweep: as many samples as an evaluation takes, none to finetune on."""
    based = _based(preset, seed)
    s = based.settings
    own = s.map.weights.constraint
    weights = replace(s.map.weights, constraint=own if abs(weight / own - 1) < 1e-5 else weight)
    samples = SamplesSettings(s.evaluate.n, 0, s.evaluate.sampler, s.samples.seed)
    settings = replace(s, map=replace(s.map, sigma_max=sigma, weights=weights), samples=samples)
    name = f"{preset.experiment}-sigma{sigma:g}-lambda{weight:g}-seed{seed}"
    return Cell(name, replace(based, settings=settings), "samples")
