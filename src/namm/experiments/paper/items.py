"""The tables and figures of the paper, by name. Imports no torch, so that they are listed at once.

An item asks for cells (`runs_needed`), may measure something on each finished one that no stage does (`measure`), and
turns the outcomes into tables and figures (`show`). The last two read and write the runs' folders and nothing else, so
an item made anew from the same runs is the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from namm.experiments.engine.settings import Settings
from namm.experiments.paper import runs_needed
from namm.experiments.paper.runs_needed import Base
from namm.experiments.sweeps.cell import Cell, CellOutcome

if TYPE_CHECKING:
    from namm.experiments.paper.output import Shown

FIVE = ("flux", "burgers", "divergence", "periodic", "count")
"""The paper's experiments, in its order."""


@dataclass(frozen=True)
class Item:
    """One table or figure.

    Attributes:
        name: as the command takes it, and as its files are called.
        shows: what it shows, in a line.
        experiments: those that the paper shows it for.
        cells: the runs it needs, for a base, experiments and seeds.
        show: the outcomes of these cells as tables and figures.
        measure: what is to be done in the folder of a finished cell before that, with or without progress bars; does
            nothing a second time.
        needs_inception: whether measuring takes Inception features, under these settings; what the stages of its
            cells take is known from these.
    """

    name: str
    shows: str
    experiments: tuple[str, ...]
    cells: Callable[[Base, Sequence[str], Sequence[int]], list[Cell]]
    show: Callable[[Sequence[CellOutcome]], "Shown"]
    measure: Callable[[CellOutcome, bool], None] | None = None
    needs_inception: Callable[[Settings], bool] = lambda settings: False


def lazily(module: str, function: str) -> Callable[..., Any]:
    """A function of a module of `namm.experiments.paper`, which is imported, with all it needs, when it is called."""

    def call(*arguments: Any) -> Any:
        return getattr(import_module(f"namm.experiments.paper.{module}"), function)(*arguments)

    return call


def _asks_for_kid(settings: Settings) -> bool:
    return settings.evaluate.kid_subsets > 0


def _always(settings: Settings) -> bool:
    return True


ITEMS = {
    item.name: item
    for item in (
        Item(
            "table1",
            "CD, MMD and KID of ours before and after finetuning and of the baseline",
            FIVE,
            runs_needed.base_cells,
            lazily("table1", "table1"),
        ),
        Item(
            "table2",
            "CD, MMD and KID for three σ_max and three λ_constr, without finetuning",
            FIVE,
            runs_needed.sweep_cells,
            lazily("table2_fig6", "table2"),
            lazily("table2_fig6", "measure"),
            _asks_for_kid,
        ),
        Item(
            "table5",
            "FID of ours before and after finetuning and of the baseline",
            FIVE,
            runs_needed.base_cells,
            lazily("table5", "table5"),
            lazily("table5", "measure"),
            _always,
        ),
        Item(
            "fig3",
            "samples of ours and of the baseline, their residuals and distances",
            FIVE,
            runs_needed.base_cells,
            lazily("fig3_fig9", "fig3"),
        ),
        Item(
            "fig4",
            "training efficiency: ℓ of samples at milestones of the trainings against compute time",
            FIVE,
            runs_needed.base_cells,
            lazily("fig4", "fig4"),
        ),
        Item(
            "fig5",
            "data assimilation: mirror DPS against DPS and CG-DPS from noisy, partial observations",
            ("burgers", "divergence"),
            runs_needed.base_cells,
            lazily("fig5_fig11", "fig5"),
            lazily("fig5_fig11", "measure5"),
        ),
        Item(
            "fig6",
            "mirror images and distances for three σ_max and three λ_constr",
            ("burgers",),
            runs_needed.cross_cells,
            lazily("table2_fig6", "fig6"),
        ),
        Item(
            "fig7",
            "g as the gradient of a convex network against g as a ResNet",
            FIVE,
            runs_needed.base_cells,
            lazily("fig7", "fig7"),
            lazily("fig7", "measure"),
        ),
        Item(
            "fig8",
            "a variational autoencoder in mirror space against the same one on the data",
            ("divergence",),
            runs_needed.autoencoder_cells,
            lazily("fig8", "fig8"),
            lazily("fig8", "measure"),
            _asks_for_kid,
        ),
        Item(
            "fig9",
            "nine samples of every distribution",
            FIVE,
            runs_needed.base_cells,
            lazily("fig3_fig9", "fig9"),
        ),
        Item(
            "fig10",
            "σ drawn from [0, σ_max] against σ = σ_max always, before and after finetuning",
            ("burgers",),
            runs_needed.noise_cells,
            lazily("fig10", "fig10"),
        ),
        Item(
            "fig11",
            "data assimilation for several ζ and weights of the rule",
            ("burgers", "divergence"),
            runs_needed.base_cells,
            lazily("fig5_fig11", "fig11"),
            lazily("fig5_fig11", "measure11"),
        ),
    )
}
