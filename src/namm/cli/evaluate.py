"""`namm evaluate`: the rows of a run's evaluation, of several runs together, or of any images against data."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from namm.cli.data import drawable
from namm.cli.options import HELP, parse, pick
from namm.cli.rules import named_rule, recipe, rule_settings
from namm.errors import RunFolderError, UsageError
from namm.experiments.engine.data_settings import Rule
from namm.experiments.engine.folder import find_run
from namm.experiments.presets import EXPERIMENTS

if TYPE_CHECKING:
    from namm.datasets.batches import Images
    from namm.evaluation import Extractor

Row = Mapping[str, Any]
"""Scores as JSON has them."""

COLUMNS: dict[str, tuple[Callable[[Row], Sequence[float] | None], str]] = {
    "ℓ": (lambda row: (row["distance"]["mean"], row["distance"]["std"]), ".3g"),
    "median": (lambda row: (row["distance"]["quantiles"][2],), ".3g"),
    "worst": (lambda row: (row["distance"]["max"],), ".3g"),
    "√MMD²": (lambda row: row["mmd"], ".4f"),
    "KID": (lambda row: row.get("kid"), ".4f"),
    "FID": (lambda row: (row["fid"],) if "fid" in row else None, ".2f"),
    "total variation": (lambda row: (row["total_variation"],), ".3f"),
    "spread": (lambda row: (row["spread"],), ".3f"),
}
"""Mean, and standard deviation where there is one, of what a column shows, and in which format; none: not measured."""


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
    inception: bool = False
    """Also KID and FID, which need the weights of Inception (docs/evaluation.md) and take long without a GPU."""
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
            "usage: namm evaluate RUN [RUN ...] [--trust]",
            "       namm evaluate FILE --against FILE [--constraint CONSTRAINT] [-o metrics.json] [--PARAMETER VALUE]",
            "",
            "The first form runs the stage `evaluate` of a run (its folder, or its name in `runs`) with the run's own",
            "settings, unless it is done, and shows its rows; of several runs, mean ± standard deviation over them.",
            "With --trust it runs a rule of the run's that you have not run before: it is Python code.",
            "",
            "The second compares any images with data:",
            "  FILE          samples of `namm sample`, HDF5, NPY or NPZ file, or a folder of PNGs",
            "  --against     the data, the same way; best such that no training has seen",
            f"  --constraint  {', '.join(EXPERIMENTS)}, or module:name of your own;",
            "                not needed where the data are a file of `namm data`",
            "  --PARAMETER   the rule's numbers and more: `namm evaluate FILE --against FILE --help`",
            "",
            "Columns: ℓ over the images; √MMD² to the data over random subsets; KID and FID where they were asked for;",
            "total variation and spread (of a pixel over the images), as ratios to the data's. The row `data` is what",
            "other real images score.",
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
    _show(rows, rest[0] if len(rows) == 1 else f"mean ± std over {len(rows)} runs")
    _show_verdicts(runs)
    return 0


def _show_verdicts(runs: Sequence[Path]) -> None:
    """The verdict on each run, in full where there is one run."""
    from namm.experiments.engine.judgement import run_verdict

    for run in runs:
        if (verdict := run_verdict(run)) is not None:
            print("\n".join(verdict.lines()) if len(runs) == 1 else f"{run}: {verdict.headline}")


# Runs


def _require_alike(runs: Sequence[Path]) -> None:
    """Refuse to average over runs whose figures mean different things."""
    from dataclasses import replace

    from namm.experiments.engine.folder import SETTINGS
    from namm.experiments.engine.settings_file import read_yaml

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

    from namm.experiments.engine.folder import SETTINGS
    from namm.experiments.engine.judgement import METRICS
    from namm.experiments.engine.run import run as run_stages
    from namm.experiments.engine.run_parts import complete_stage
    from namm.experiments.engine.settings_file import read_yaml
    from namm.experiments.engine.stages import STAGES
    from namm.experiments.engine.stages.evaluate import ROWS

    for stage in STAGES["evaluate"].needs:
        complete_stage(run, stage)
    run_stages(read_yaml(run / SETTINGS), run, until="evaluate", tell=_tell, force=True)
    file = run / "evaluate" / METRICS
    try:
        found = json.loads(file.read_text())["rows"]
    except (OSError, ValueError, KeyError) as error:
        raise RunFolderError(f"{file} cannot be read ({error}): move it away, and it is made anew.") from error
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

    rows = _compare(options, against, name)
    _show([rows], f"{options.file} against {against}, {name}")
    if options.out is not None:
        write_json(options.out, {"rows": rows, "file": str(options.file), "against": str(against), "rule": name})
        print(f"the figures are in {options.out}")
    return 0


def _rule_of(data: Path) -> str:
    """The rule that a file of `namm data` obeys."""
    dataset = recipe(data).get("dataset") if data.is_file() else None
    if dataset not in drawable():
        raise UsageError(
            f"which rule? {data} is not a file of `namm data`: add --constraint {'|'.join(EXPERIMENTS)}, or "
            "module:name."
        )
    return drawable()[dataset].name


def _compare(options: Files, against: Path, name: str) -> dict[str, dict[str, Any]]:
    """The data's floor and the samples."""
    from namm.evaluation import Extractor, compare, floor, picture_for
    from namm.experiments.engine.build import device

    rule = named_rule(name, options.rule)
    extractor = Extractor(picture_for(rule), device=device()) if options.inception else None
    with ExitStack() as stack:
        samples = _open(options.file, options.key, options.layout, stack)
        data = _open(against, options.against_key, options.against_layout, stack)
        size = options.subset_size or min(1000, samples.shape[0], data.shape[0] // 2)
        how: dict[str, Any] = {"subsets": options.subsets, "size": size, "seed": options.seed, "device": device()}
        print(f"√MMD² over {options.subsets} subsets of {size} images", flush=True)
        scores = {"data": floor(data, rule, **how), "samples": compare(samples, data, rule, **how)}
        rows = {row: asdict(each) for row, each in scores.items()}
        if extractor is not None:
            _add_inception(rows, samples, data, extractor, size, options.seed)
        return rows


def _add_inception(
    rows: dict[str, dict[str, Any]], samples: "Images", data: "Images", extractor: "Extractor", size: int, seed: int
) -> None:
    """KID and FID to one half of the data, of the other half and of as many samples."""
    import numpy as np

    from namm.evaluation import fid, kid
    from namm.evaluation.rows import View, random_rows

    n = min(samples.shape[0], data.shape[0] // 2)
    mixed = random_rows(data.shape[0], data.shape[0] // 2, seed, "inception")
    others = np.delete(np.arange(data.shape[0]), mixed)
    reference = View(data, mixed[:n])
    print(f"KID and FID of {n} images against {n}", flush=True)
    for name, images in (("data", View(data, others[:n])), ("samples", View(samples, np.arange(n)))):
        rows[name]["kid"] = kid(reference, images, extractor, size=min(size, n), seed=seed)
        rows[name]["fid"] = fid(reference, images, extractor)


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


def _show(runs: Sequence[Mapping[str, Row]], title: str) -> None:
    """The rows of a run, or of several together, in all columns that anything was measured for."""
    from rich.console import Console
    from rich.table import Table

    names = list(dict.fromkeys(name for rows in runs for name in rows))
    cell = _single if len(runs) == 1 else _several
    cells = {
        title: [cell([found for rows in runs if name in rows and (found := read(rows[name]))], form) for name in names]
        for title, (read, form) in COLUMNS.items()
    }
    shown = {title: column for title, column in cells.items() if any(column)}
    table = Table("", *shown, title=title, title_justify="left")
    for name, *row in zip(names, *shown.values(), strict=True):
        table.add_row(name, *(each or "–" for each in row))
    Console().print(table)


def _single(found: Sequence[Sequence[float]], form: str) -> str:
    """Mean ± std over images or over subsets."""
    return " ± ".join(f"{value:{form}}" for value in found[0]) if found else ""


def _several(found: Sequence[Sequence[float]], form: str) -> str:
    """Mean ± standard deviation over runs."""
    from statistics import fmean, stdev

    means = [each[0] for each in found]
    return f"{fmean(means):.3g} ± {stdev(means) if len(means) > 1 else 0:.2g}" if found else ""
