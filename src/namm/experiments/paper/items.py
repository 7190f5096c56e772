"""The paper's tables and figures by name, and the runs that each needs. Imports no torch: they are listed at once.

An item asks for runs (`cells`), may measure something on each finished one that no stage does (`measure`), and turns
the outcomes into a table and figures (`show`). The last two read and write the runs' folders and nothing else, so an
item made anew from the same runs is the same.

A cell's name says what it is, and cells of the same name are the same run whichever item asks for it: one base run of
an experiment and a seed serves Tables 1 and 5 and Figs. 3, 4, 5 and 7 to 11, one sweep serves Table 2 and Fig. 6.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from namm.experiments.engine.settings import (
    BaselineSettings,
    FinetuneSettings,
    ModelSettings,
    SamplesSettings,
    Settings,
    with_seed,
)
from namm.experiments.presets import Preset, preset
from namm.experiments.sweeps.cell import Cell, CellOutcome

if TYPE_CHECKING:
    from namm.experiments.paper.output import ItemOutput

FIVE = ("flux", "burgers", "divergence", "periodic", "count")
"""The paper's experiments, in its order."""
SHOWS = {
    "table1": "CD, √MMD² and KID of ours before and after finetuning and of the baseline",
    "table2": "CD, √MMD² and KID for three σ_max and three λ_constr, without finetuning",
    "table5": "FID of ours before and after finetuning and of the baseline",
    "fig3": "samples of ours and of the baseline, their residuals and distances",
    "fig4": "training efficiency: ℓ of samples at milestones of the trainings against compute time",
    "fig5": "data assimilation: mirror DPS against DPS and CG-DPS from noisy, partial observations",
    "fig6": "mirror images and distances for three σ_max and three λ_constr",
    "fig7": "g as the gradient of a convex network against g as a ResNet",
    "fig8": "a variational autoencoder in mirror space against the same one on the data",
    "fig9": "nine samples of every distribution",
    "fig10": "σ drawn from [0, σ_max] against σ = σ_max always, before and after finetuning",
    "fig11": "data assimilation for several ζ and weights of the rule",
}
SIGMAS = (0.001, 0.1, 0.5)
"""σ_max of the paper's sweep."""
WEIGHTS = (0.01, 0.1, 1.0)
"""λ_constr of the paper's sweep, in its own units: see `grid_weights`."""
MILESTONES = 4
"""Points of Fig. 4 where a preset asks for none."""

Base = Callable[[str], Preset]
"""The settings that an experiment is run with, by its name."""
Part = TypeVar("Part", ModelSettings, FinetuneSettings, BaselineSettings)


# The runs


def base_cells(base: Base, experiments: Sequence[str], seeds: Sequence[int], until: str = "evaluate") -> list[Cell]:
    """The experiments themselves, up to the stage `until`."""
    return [Cell(f"{name}-seed{seed}", _based(base(name), seed), until) for name in experiments for seed in seeds]


def noise_cells(base: Base, experiments: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """Up to finetuning, with σ drawn from [0, σ_max] and with σ = σ_max."""

    def fixed(cell: Cell) -> Cell:
        s = cell.preset.settings
        noise: Literal["fixed", "model-fixed"] = "model-fixed" if s.map.noise == "model" else "fixed"
        preset = replace(cell.preset, settings=replace(s, map=replace(s.map, noise=noise)))
        return replace(cell, name=cell.name.replace("-seed", "-fixed-seed"), preset=preset)

    drawn = base_cells(base, experiments, seeds, "finetune")
    return [*drawn, *map(fixed, drawn)]


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
    """Those of the sweep with the σ_max that the paper chose, which need not be the preset's, or the preset's λ."""

    def chosen(cell: Cell) -> bool:
        own, name = cell.preset.settings.map, cell.preset.experiment
        has_sigma = own.sigma_max == preset(name, "paper").settings.map.sigma_max
        return has_sigma or _same(own.weights.constraint, base(name).settings.map.weights.constraint)

    return [cell for cell in sweep_cells(base, experiments, seeds) if chosen(cell)]


def grid_weights(preset: Preset) -> tuple[float, ...]:
    """The paper's λ, scaled as the preset scales the one that the paper chose for this experiment."""
    scale = preset.settings.map.weights.constraint / preset.reported.weight
    return tuple(float(f"{scale * weight:.6g}") for weight in WEIGHTS)


def _same(weight: float, own: float) -> bool:
    """Whether two λ are the same but for the rounding of `grid_weights`."""
    return abs(weight / own - 1) < 1e-5


def _based(preset: Preset, seed: int) -> Preset:
    """The preset with that seed, and with the milestones that Fig. 4 shows."""

    def watched(part: Part) -> Part:
        return part if part.train.milestones else replace(part, train=replace(part.train, milestones=MILESTONES))

    s = with_seed(preset.settings, seed)
    return replace(preset, settings=replace(s, mdm=watched(s.mdm), finetune=watched(s.finetune), dm=watched(s.dm)))


def _swept(preset: Preset, seed: int, sigma: float, weight: float) -> Cell:
    """One cell of the sweep: as many samples as an evaluation takes, none to finetune on."""
    based = _based(preset, seed)
    s = based.settings
    own = s.map.weights.constraint
    weights = replace(s.map.weights, constraint=own if _same(weight, own) else weight)
    samples = SamplesSettings(s.evaluate.n, 0, s.evaluate.sampler, s.samples.seed)
    settings = replace(s, map=replace(s.map, sigma_max=sigma, weights=weights), samples=samples)
    name = f"{preset.experiment}-sigma{sigma:g}-lambda{weight:g}-seed{seed}"
    return Cell(name, replace(based, settings=settings), "samples")


# The items


def _always(settings: Settings) -> bool:
    return True


def _for_kid(settings: Settings) -> bool:
    return settings.evaluate.kid_subsets > 0


@dataclass(frozen=True)
class Item:
    """One table or figure.

    Attributes:
        name: As the command takes it, and as its files and the function that shows it are called.
        experiments: Those that the paper shows it for.
        cells: The runs it needs, for a base, experiments and seeds.
        module: The module of this package that makes it, imported when it is needed.
        measurement: Its function that measures, in the folder of a finished run, what no stage does, and does nothing a
            second time; none if the stages measure all.
        needs_inception: Whether this measurement takes Inception features under these settings; what the stages of its
            cells take is known from these.
    """

    name: str
    experiments: tuple[str, ...]
    cells: Callable[[Base, Sequence[str], Sequence[int]], list[Cell]]
    module: str
    measurement: str | None = None
    needs_inception: Callable[[Settings], bool] = lambda settings: False

    @property
    def shows(self) -> str:
        """What it shows, in a line."""
        return SHOWS[self.name]

    def measure(self, outcome: CellOutcome, progress: bool) -> None:
        """Measure on a finished run what no stage does, with or without progress bars."""
        from namm.experiments.paper.measurements import FinishedRun

        if self.measurement is not None:
            self._function(self.measurement)(FinishedRun(outcome), progress)

    def show(self, outcomes: Sequence[CellOutcome]) -> "ItemOutput":
        """The table and the figures of these runs."""
        from namm.experiments.paper.output import show_all

        return show_all(self.name, self._function(self.name), outcomes)

    def _function(self, name: str) -> Callable[..., Any]:
        return getattr(import_module(f"namm.experiments.paper.{self.module}"), name)


_FLOWS = ("burgers", "divergence")
_ITEMS = (
    Item("table1", FIVE, base_cells, "table1"),
    Item("table2", FIVE, sweep_cells, "table2_fig6", "measure", _for_kid),
    Item("table5", FIVE, base_cells, "table5", "measure", _always),
    Item("fig3", FIVE, base_cells, "fig3_fig9"),
    Item("fig4", FIVE, base_cells, "fig4"),
    Item("fig5", _FLOWS, base_cells, "fig5_fig11", "measure5"),
    Item("fig6", ("burgers",), cross_cells, "table2_fig6"),
    Item("fig7", FIVE, base_cells, "fig7", "measure"),
    Item("fig8", ("divergence",), partial(base_cells, until="vae"), "fig8", "measure", _for_kid),
    Item("fig9", FIVE, base_cells, "fig3_fig9"),
    Item("fig10", ("burgers",), noise_cells, "fig10"),
    Item("fig11", _FLOWS, base_cells, "fig5_fig11", "measure11"),
)
ITEMS = {item.name: item for item in _ITEMS}
