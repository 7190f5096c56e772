"""`namm evaluate`: the rows of a run's evaluation, of several runs together, or of any images against data."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from namm.cli.help_text import format_usage
from namm.cli.options import (
    ImageFile,
    Layout,
    answer,
    asks_for_help,
    log,
    named_rule,
    open_file,
    parse_with_rule,
    pick,
    rule_of_data,
    rule_settings,
)
from namm.errors import RunFolderError, UsageError
from namm.experiments.engine.folder import SETTINGS, find_run
from namm.experiments.engine.settings_file import read_yaml
from namm.experiments.engine.stages import STAGES, needs, summary
from namm.experiments.presets import EXPERIMENTS
from namm.formatting import ABSENT, format_estimate, format_number, print_table
from namm.reading import REASON, damage_as

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
class Files(ImageFile):
    """Compare images with data: how well they keep a rule, and how much they resemble the data."""

    against_key: str | None = None
    """The same for the data; `test`, or else `train`, in a file of `namm data`."""
    against_layout: Layout | None = None
    """The same for the data."""
    subsets: int = 50
    """Random subsets that √MMD² is a mean over."""
    subset_size: int | None = None
    """Images in a subset: 1000, or as many as there are, by default; compare √MMD² of equal sizes only."""
    inception: bool = False
    """Also KID and FID, which need the weights of Inception (docs/guides/verdict.md) and take long without a GPU."""
    seed: int = 0
    """Decides which images are in the subsets."""


def usage() -> str:
    """The help text that needs no rule."""
    return format_usage(
        "namm evaluate RUN [RUN ...] [--trust]\n"
        "namm evaluate FILE --against FILE [--constraint RULE] [-o metrics.json] [--PARAMETER VALUE]",
        "The first form runs the stage `evaluate` of a run (its folder, or its name in `runs`) with the run's own "
        "settings, unless it is done, and shows its rows; of several runs, mean ± standard deviation over them. With "
        "--trust it runs a rule of the run's that you have not run before: it is Python code. The second compares any "
        "images with data.\n"
        "Columns: ℓ over the images; √MMD² to the data over random subsets; KID and FID where they were asked for; "
        "total variation and spread (of a pixel over the images), as ratios to the data's. The row `data` is what "
        "other real images score.",
        {
            "FILE": "samples of `namm sample`, HDF5, NPY or NPZ file, or a folder of PNGs",
            "--against": "the data, the same way; best such that no training has seen",
            "--constraint": f"{', '.join(EXPERIMENTS)}, or module:name of your own; not needed where the data are a "
            "file of `namm data`",
            "--PARAMETER": "the rule's numbers and more: `namm evaluate FILE --against FILE --help`",
        },
    )


def main(arguments: list[str]) -> None:
    """Evaluate runs, or a file."""
    picked, rest = pick(arguments, ("against", "constraint"))
    if not arguments or (asks_for_help(rest) and not picked):
        answer(usage(), arguments)
    if picked:
        _evaluate_file(picked, rest)
    elif unknown := [argument for argument in rest if argument.startswith("-")]:
        raise UsageError(
            f"a run is evaluated with its own settings, without {unknown[0]}; a file needs --against FILE."
        )
    else:
        _evaluate_runs([find_run(name) for name in rest], rest[0])


# Runs


def _evaluate_runs(runs: Sequence[Path], name: str) -> None:
    """Rows and verdicts; refuses to average over runs whose figures mean different things."""
    chosen = [read_yaml(run / SETTINGS) for run in runs]
    if len({(each.experiment, replace(each.settings.evaluate, seed=0)) for each in chosen}) > 1:
        raise UsageError(
            f"{', '.join(map(str, runs))} are not of one experiment with one way of evaluating, seeds aside: evaluate "
            "them one by one."
        )

    from namm.experiments.engine.stages.evaluate import run_verdict

    rows = [_run_rows(run) for run in runs]
    _show(rows, name if len(rows) == 1 else f"mean ± std over {len(rows)} runs")
    for run in runs:
        if (verdict := run_verdict(run)) is not None:
            print("\n".join(verdict.lines()) if len(runs) == 1 else f"{run}: {verdict.headline}")


def _run_rows(run: Path) -> dict[str, Row]:
    """The rows of a run in order; makes the stage, but trains nothing."""
    from namm.experiments.engine.folder import complete_stage, is_complete
    from namm.experiments.engine.run import run as run_stages
    from namm.experiments.engine.stages.evaluate import METRICS, ROWS, read_metrics

    stage, chosen = STAGES["evaluate"], read_yaml(run / SETTINGS)
    for needed in needs(stage, chosen.settings):
        complete_stage(run, needed)
    done_before = is_complete(run, stage.name)
    if not done_before:
        log("evaluate running")
    records = run_stages(chosen, run, until=stage.name, log=lambda line: None, force=True)
    record = records[stage.name]
    when = "before" if done_before else f"in {format_number(record.seconds, '.1f')} s"
    log(f"evaluate done {when}  {summary(stage, record.results)}")
    folder = complete_stage(run, stage.name)
    with damage_as(RunFolderError, f"{folder / METRICS} cannot be read ({REASON}): move it away; it is made anew."):
        rows = read_metrics(folder)["rows"]
        return {name: rows[name] for name in ROWS if name in rows}


# Files


def _evaluate_file(picked: dict[str, str], arguments: list[str]) -> None:
    if "against" not in picked:
        raise UsageError("which data? namm evaluate FILE --against FILE.")
    against = Path(picked["against"])
    name = picked.get("constraint") or rule_of_data(against)
    rule = rule_settings(name, against if against.is_file() else None)
    options = parse_with_rule(Files, arguments, "namm evaluate", rule, usage())

    from namm.files import write_json

    rows = _compare(options, against, name)
    _show([rows], f"{options.file} against {against}, {name}")
    if options.out is not None:
        write_json(options.out, {"rows": rows, "file": str(options.file), "against": str(against), "rule": name})
        print(f"the figures are in {options.out}")


def _compare(options: Files, against: Path, name: str) -> dict[str, dict[str, Any]]:
    """The data's floor and the samples."""
    from namm.evaluation import Extractor, compare, floor, picture_for
    from namm.experiments.engine.build import device

    rule = named_rule(name, options.rule)
    extractor = Extractor(picture_for(rule), device=device()) if options.inception else None
    with ExitStack() as stack:
        samples = open_file(options.file, options.key, options.layout, stack)
        data = open_file(against, options.against_key, options.against_layout, stack)
        size = options.subset_size or min(1000, samples.shape[0], data.shape[0] // 2)
        how: dict[str, Any] = {"subsets": options.subsets, "size": size, "seed": options.seed, "device": device()}
        log(f"√MMD² over {options.subsets} subsets of {size} images")
        rows = {"data": asdict(floor(data, rule, **how)), "samples": asdict(compare(samples, data, rule, **how))}
        if extractor is not None:
            _add_inception(rows, samples, data, extractor, size, options.seed)
        return rows


def _add_inception(
    rows: dict[str, dict[str, Any]], samples: "Images", data: "Images", extractor: "Extractor", size: int, seed: int
) -> None:
    """KID and FID to one half of the data, of the other half and of as many samples."""
    import numpy as np

    from namm.evaluation import fid, kid
    from namm.evaluation.mmd import Subset, random_rows

    half = data.shape[0] // 2
    n = min(samples.shape[0], half)
    mixed = random_rows(data.shape[0], half, seed, "inception")
    others = np.delete(np.arange(data.shape[0]), mixed)
    reference = Subset(data, mixed[:n])
    log(f"KID and FID of {n} images against {n}")
    for name, images in (("data", Subset(data, others[:n])), ("samples", Subset(samples, np.arange(n)))):
        rows[name]["kid"] = kid(reference, images, extractor, size=min(size, n), seed=seed)
        rows[name]["fid"] = fid(reference, images, extractor)


# The table


def _show(runs: Sequence[Mapping[str, Row]], title: str) -> None:
    """The rows of a run, or of several together, in all columns that anything was measured for."""
    names = list(dict.fromkeys(name for rows in runs for name in rows))
    cell = _mean_over_runs if len(runs) > 1 else _mean_over_images
    columns = {}
    for column, (read, spec) in COLUMNS.items():
        found = {name: [values for rows in runs if name in rows and (values := read(rows[name]))] for name in names}
        if any(found.values()):
            columns[column] = [cell(found[name], spec) if found[name] else ABSENT for name in names]
    print_table(["", *columns], zip(names, *columns.values(), strict=True), title=title)


def _mean_over_images(found: Sequence[Sequence[float]], spec: str) -> str:
    """Mean ± standard deviation over images or over subsets."""
    return " ± ".join(format_number(value, spec) for value in found[0])


def _mean_over_runs(found: Sequence[Sequence[float]], _: str) -> str:
    means = [values[0] for values in found]
    return format_estimate(fmean(means), stdev(means) if len(means) > 1 else 0.0)
