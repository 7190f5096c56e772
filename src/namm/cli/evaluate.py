"""`namm evaluate`: the rows of a run's evaluation, of several runs together, or of any images against data."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from namm.cli.data import DATASETS
from namm.cli.options import HELP, parse, pick
from namm.cli.rules import RULES, named_rule, recipe, rule_settings
from namm.cli.status import find_run
from namm.errors import UsageError
from namm.experiments.data_settings import Rule

if TYPE_CHECKING:
    from namm.datasets.batches import Images
    from namm.evaluation import Scores

Row = Mapping[str, Any]
"""Scores as JSON has them."""

TITLES = ("ℓ", "median", "worst", "√MMD²", "total variation", "spread")


@dataclass(frozen=True)
class Files:
    """Compare images with data: how well they keep a rule, and how much they resemble the data."""

    file: Path
    """Samples: a file of `namm sample`, HDF5, NPY or NPZ, or a folder of PNGs."""
    key: str | None = None
    """Name of the array in FILE; `images` in a file of samples."""
    layout: Literal["NCHW", "NHWC"] | None = None
    """Order of the axes of FILE; our own files and PNGs know theirs."""
    against_key: str | None = None
    """The same for the data; `test`, or else `train`, in a file of `namm data`."""
    against_layout: Literal["NCHW", "NHWC"] | None = None
    """The same for the data."""
    subsets: int = 50
    """Random subsets that √MMD² is a mean over."""
    subset_size: int | None = None
    """Images in a subset: 1000, or as many as there are, by default; compare √MMD² of equal sizes only."""
    seed: int = 0
    """Decides which images are in the subsets."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Where the figures go as JSON."""
    rule: Rule = field(default_factory=Rule)
    """The rule's numbers; a rule of the user's own has none that we know."""


def usage() -> str:
    """The help text that needs no rule."""
    return "\n".join(
        [
            "usage: namm evaluate RUN [RUN ...]",
            "       namm evaluate FILE --against FILE [--constraint CONSTRAINT] [-o metrics.json] [--PARAMETER VALUE]",
            "",
            "The first form runs the stage `evaluate` of a run (its folder, or its name in `runs`) with the run's own",
            "settings, unless it is done, and shows its rows; of several runs, mean ± standard deviation over them.",
            "",
            "The second compares any images with data:",
            "  FILE          samples of `namm sample`, HDF5, NPY or NPZ file, or a folder of PNGs",
            "  --against     the data, the same way; best such that no training has seen",
            f"  --constraint  {', '.join(RULES)}, or module:name of your own;",
            "                not needed where the data are a file of `namm data`",
            "  --PARAMETER   the rule's numbers and more: `namm evaluate FILE --against FILE --help`",
            "",
            "Columns: ℓ over the images; √MMD² to the data over random subsets; total variation and spread (of a pixel",
            "over the images), as ratios to the data's. The row `data` is what other real images score.",
        ]
    )


def main(arguments: list[str]) -> int:
    """Evaluate runs, or a file."""
    own, rest = pick(arguments, ("against", "constraint"))
    if not arguments or (set(rest) & set(HELP) and not own):
        print(usage())
        return 0 if arguments else 2
    if own:
        return _files(own, rest)
    if unknown := [argument for argument in rest if argument.startswith("-")]:
        raise UsageError(
            f"a run is evaluated with its own settings, without {unknown[0]}; a file needs --against FILE."
        )
    runs = [find_run(name) for name in rest]
    _require_alike(runs)
    rows = [_run_rows(run) for run in runs]
    if len(rows) == 1:
        _show(_single(rows[0]), rest[0])
    else:
        _show(_several(rows), f"mean ± std over {len(rows)} runs")
    return 0


# Runs


def _require_alike(runs: Sequence[Path]) -> None:
    """Refuse to average over runs whose figures mean different things."""
    from dataclasses import replace

    from namm.experiments.folder import SETTINGS
    from namm.experiments.plain import read_yaml

    chosen = [read_yaml(run / SETTINGS) for run in runs]
    kinds = {(each.experiment, replace(each.settings.evaluate, seed=0)) for each in chosen}
    if len(kinds) > 1:
        raise UsageError(
            f"{', '.join(map(str, runs))} are not of one experiment with one way of evaluating, seeds aside: evaluate "
            "them one by one."
        )


def _run_rows(run: Path) -> dict[str, Row]:
    """The rows of a run in order; makes the stage, but trains nothing."""
    import json

    from namm.experiments.evaluate_stage import METRICS, ROWS
    from namm.experiments.folder import SETTINGS
    from namm.experiments.plain import read_yaml
    from namm.experiments.run import run as run_stages
    from namm.experiments.stages import STAGES
    from namm.experiments.trained import complete_stage

    for stage in STAGES["evaluate"].needs:
        complete_stage(run, stage)
    run_stages(read_yaml(run / SETTINGS), run, until="evaluate", tell=_tell)
    found = json.loads((run / "evaluate" / METRICS).read_text())["rows"]
    return {name: found[name] for name in ROWS if name in found}


def _tell(line: str) -> None:
    """What concerns the evaluation; that earlier stages are done is known."""
    if line.startswith("evaluate"):
        print(line, flush=True)


# Files


def _files(own: dict[str, str], arguments: list[str]) -> int:
    if "against" not in own:
        raise UsageError("which data? namm evaluate FILE --against FILE.")
    against = Path(own["against"])
    name = own.get("constraint") or _rule_of(against)
    options = parse(
        Files,
        arguments,
        prog="namm evaluate",
        usage=usage(),
        default=Files(file=tyro.MISSING, rule=rule_settings(name, against if against.is_file() else None)),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.PositionalRequiredArgs),
    )
    if isinstance(options, int):
        return options

    from namm.files import write_json

    rows = {row: asdict(scores) for row, scores in _compare(options, against, name).items()}
    _show(_single(rows), f"{options.file} against {against}, {name}")
    if options.out is not None:
        write_json(options.out, {"rows": rows, "file": str(options.file), "against": str(against), "rule": name})
        print(f"the figures are in {options.out}")
    return 0


def _rule_of(data: Path) -> str:
    """The rule that a file of `namm data` obeys."""
    dataset = recipe(data).get("dataset") if data.is_file() else None
    if dataset not in DATASETS:
        raise UsageError(
            f"which rule? {data} is not a file of `namm data`: add --constraint {'|'.join(RULES)}, or module:name."
        )
    return next(name for name, kind in DATASETS.items() if kind is DATASETS[dataset] and name in RULES)


def _compare(options: Files, against: Path, name: str) -> "dict[str, Scores]":
    """The data's floor and the samples."""
    import torch

    from namm.evaluation import compare, floor

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rule = named_rule(name, options.rule).to(device)
    with ExitStack() as stack:
        samples = _open(options.file, options.key, options.layout, stack)
        data = _open(against, options.against_key, options.against_layout, stack)
        size = options.subset_size or min(1000, samples.shape[0], data.shape[0] // 2)
        how: dict[str, Any] = {"subsets": options.subsets, "size": size, "seed": options.seed, "device": device}
        print(f"√MMD² over {options.subsets} subsets of {size} images", flush=True)
        return {"data": floor(data, rule, **how), "samples": compare(samples, data, rule, **how)}


def _open(path: Path, key: str | None, layout: str | None, stack: ExitStack) -> "Images":
    """The images; those of an HDF5 file stay there until they are read."""
    from namm.datasets import open_images, read_images
    from namm.datasets.readers import HDF5_SUFFIXES

    if path.is_dir() or path.suffix.lower() not in HDF5_SUFFIXES:
        return read_images(path, key=key, layout=layout)
    said = recipe(path)
    if key is None and "samples" in said:
        key = "images"
    if key is None and "dataset" in said:
        key = "test" if said["n_test"] else "train"
    return stack.enter_context(open_images(path, key=key, layout=layout))


# The table


def _single(rows: Mapping[str, Row]) -> Iterable[tuple[str, ...]]:
    """Cells of one set of rows: mean ± std over images, and over subsets."""
    for name, row in rows.items():
        mean, std, median, worst, mmd, mmd_std, variation, spread = _figures(row)
        yield (
            name,
            f"{mean:.3g} ± {std:.2g}",
            f"{median:.3g}",
            f"{worst:.3g}",
            f"{mmd:.4f} ± {mmd_std:.4f}",
            f"{variation:.3f}",
            f"{spread:.3f}",
        )


def _several(runs: Sequence[Mapping[str, Row]]) -> Iterable[tuple[str, ...]]:
    """Cells of several runs: mean ± standard deviation over those that have the row."""
    import numpy as np

    for name in dict.fromkeys(name for rows in runs for name in rows):
        figures = np.array([_figures(rows[name]) for rows in runs if name in rows])
        mean, std = figures.mean(0), figures.std(0, ddof=1) if len(figures) > 1 else np.zeros(figures.shape[1])
        yield (name, *(f"{mean[k]:.3g} ± {std[k]:.2g}" for k in (0, 2, 3, 4, 6, 7)))


def _figures(row: Row) -> tuple[float, ...]:
    """Mean, deviation, median and largest ℓ; √MMD² and its deviation; total variation; spread."""
    distance = row["distance"]
    ell = distance["mean"], distance["std"], distance["quantiles"][2], distance["max"]
    return (*ell, *row["mmd"], row["total_variation"], row["spread"])


def _show(rows: Iterable[tuple[str, ...]], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", *TITLES, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
