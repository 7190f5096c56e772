"""The method against the same diffusion model on plain data at full size, written down.

Brings a run of each seed to its evaluation and report, in OUT/EXPERIMENT-PRESET-SEED, and judges it:

    CD of the finetuned MDM at least 75 % below the DM's (better still: 91 %), its KID below the DM's
    √MMD² at most 1.25 times the DM's, total variation at least 0.85 times the data's
    map, mdm, samples and finetune within 480 s of compute, the DM in the same time to within a step or 2 %
    images per second of the DM's training within 5 % of the MDM's

    python benchmarks/full_size.py [--experiment burgers] [--preset gpu] [--seeds 0] [--out runs/full-size]
                                   [--results results/EXPERIMENT] [--keep] [--until STAGE] [--inception FILE]
                                   [--n N] [--kid-subsets N] [--n-fid N]

A call that was cut short goes on when it is repeated, and what is complete is not run again. Once all seeds are
evaluated, RESULTS holds metrics.json, tables.md (which is printed too), samples.png and, where milestones were
measured, training.png. With --keep the figures of other seeds that metrics.json holds, such as those of another
machine, stay in it. Without Inception weights KID and FID are left out. The exit code is 1 if something falls short and
2 if a run could not be brought to its end.
"""

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from full_size_tables import Found, judge, page, spread
from namm.cli import spin_briefly
from namm.errors import DataError, NammError, RunFolderError
from namm.experiments.engine.folder import is_done, read_record, stages_aside
from namm.experiments.engine.run import run
from namm.experiments.engine.settings import Settings, with_seed
from namm.experiments.engine.settings_file import plain
from namm.experiments.engine.stages import MAIN_LINE, STAGES, stage_keys
from namm.experiments.presets import EXPERIMENTS, PRESETS, Preset, preset
from namm.experiments.sweeps.cell import Cell, CellOutcome
from namm.files import write_atomically, write_json

if TYPE_CHECKING:
    from namm.report.contents import Contents, Row
    from namm.report.figures.samples import Method


# What is run


def settings_of(options: argparse.Namespace, given: Settings | None, seed: int, folder: Path) -> Preset:
    """The preset with its seed and with what is asked of the evaluation; without KID and FID where they cannot be."""
    chosen = preset(options.experiment, options.preset)
    settings = with_seed(given or chosen.settings, seed)
    asked = {name: getattr(options, name) for name in ("n", "kid_subsets", "n_fid")}
    asked = {name: value for name, value in asked.items() if value is not None}
    settings = replace(settings, evaluate=replace(settings.evaluate, **asked))
    if (settings.evaluate.kid_subsets or settings.evaluate.n_fid) and not _evaluated(folder, settings):
        from namm.evaluation.inception import find_weights

        try:
            find_weights()
        except DataError as error:
            print(f"seed {seed}: KID and FID are left out, {error}", flush=True)
            settings = replace(settings, evaluate=replace(settings.evaluate, kid_subsets=0, n_fid=0))
    return replace(chosen, settings=settings)


def _evaluated(folder: Path, settings: Settings) -> bool:
    key = stage_keys(settings)["evaluate"]
    return any(is_done(each, key) for each in (folder / "evaluate", *stages_aside(folder, "evaluate")))


def bring(cell: CellOutcome) -> None:
    """Run what is missing of a run, and remember on which machines that was; writing its report does not count."""
    measured = replace(cell.cell, until="evaluate") if cell.cell.last == MAIN_LINE else cell.cell
    if not measured.is_complete(cell.folder):
        import torch

        here = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU with {os.cpu_count()} cores"
        write_json(_machines_file(cell.folder), sorted({*_machines(cell.folder), f"{platform.machine()}, {here}"}))
    run(cell.cell.preset, cell.folder, until=cell.cell.until, tell=partial(print, flush=True), force=True)


def _machines(folder: Path) -> list[str]:
    path = _machines_file(folder)
    return list(json.loads(path.read_text())) if path.exists() else []


def _machines_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.machines.json")


# What was found


def read(cell: CellOutcome, contents: "Contents") -> Found:
    """All figures of one seed."""
    from namm.evaluation.milestone import half_way

    def costs(name: str) -> Found:
        record = read_record(cell.folder / name)
        images, seconds = record.results.get("images", record.results.get("samples")), record.compute_seconds
        return {
            "compute_seconds": seconds,
            "steps": record.results.get("steps"),
            "images": images,
            "images_per_second": images / seconds if images and seconds else None,
            "wall_seconds": record.seconds,
            "finished": record.finished,
            "namm": record.version,
        }

    along, reported = contents.milestones.get("dm", ()), cell.cell.preset.reported
    ends = {"half": half_way(along), "full": along[-1] if along else None}
    found: Found = {
        "rows": {row.name: _figures(row) for row in contents.rows},
        "stages": {cost.stage: costs(cost.stage) for cost in (*contents.ours, *contents.baseline)},
        "compute_seconds_ours": sum(cost.seconds for cost in contents.ours),
        "compute_seconds_baseline": sum(cost.seconds for cost in contents.baseline),
        "dm_along": {name: asdict(end) | {"cd": reported.cd(end.mean)} for name, end in ends.items() if end},
        "evaluation": plain(cell.cell.preset.settings.evaluate),
        "changed": [list(change) for change in contents.changed],
        "machines": _machines(cell.folder),
    }
    rates = {name: found["stages"][name]["images_per_second"] for name in ("mdm", "dm")}
    return found | {"images_per_second_dm_over_mdm": rates["dm"] / rates["mdm"]}


def _figures(row: "Row") -> Found:
    return {name: value for name, value in asdict(row).items() if name not in ("name", "paper")}


# What is written


def draw(cells: Sequence[CellOutcome], contents: "Contents", results: Path) -> None:
    """Samples of the first seed beside data; ℓ against compute over all seeds, where there are milestones."""
    from namm.experiments.paper.fig4 import fig4
    from namm.report.figures import look, save
    from namm.report.figures.samples import samples_figure

    with look("light"):
        ours, base = contents.methods
        methods = [_real(cells[0], contents, ours), replace(ours, name="MDM + f"), replace(base, name="DM")]
        save(samples_figure(methods, view=contents.view, with_distances=False), results / "samples.png")
        for figure in fig4(cells).figures.values():
            save(figure, results / "training.png")


def _real(cell: CellOutcome, contents: "Contents", beside: "Method") -> "Method":
    """Real images, as many as the samples beside them, with residuals where those have some."""
    import torch

    from namm.experiments.engine import build

    images = torch.from_numpy(contents.grids["data"][: len(beside.images)])
    rule = build.rule_of(cell.cell.preset.settings.data, cell.folder.joinpath, "cpu")
    with torch.no_grad():
        distances = rule(images).numpy()
        residuals = None if beside.residuals is None else rule.residual(images).numpy()
    return replace(beside, name="data", images=images.numpy(), shown_distances=distances, residuals=residuals)


def written(results: Path, chosen: Preset) -> dict[str, Found]:
    """The seeds of the same experiment and preset in the results that are there."""
    path = results / "metrics.json"
    try:
        report = json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise RunFolderError(f"{path} cannot be read, so nothing of it can be kept: mend or remove it.") from error
    same = (report.get("experiment"), report.get("preset")) == (chosen.experiment, chosen.name)
    return dict(report["seeds"]) if same else {}


def write(cells: Mapping[str, CellOutcome], command: str, results: Path, *, keep: bool) -> bool:
    """Write and print everything; whether nothing falls short."""
    from namm.experiments.engine.stages.report import RESIDUAL, collect

    contents = {seed: collect(cell.folder) for seed, cell in cells.items()}
    said = [problem for each in contents.values() for problem in each.problems]
    if problems := [problem for problem in said if not problem.startswith(RESIDUAL)]:
        raise RunFolderError(f"the results cannot be written. {' '.join(problems)}")
    first, chosen = next(iter(contents.values())), next(iter(cells.values())).cell.preset
    own = {seed: read(cell, contents[seed]) for seed, cell in cells.items()}
    seeds = written(results, chosen) | own if keep else own
    judged = {seed: judge(found) for seed, found in seeds.items()}
    report: Found = {
        "experiment": chosen.experiment,
        "preset": chosen.name,
        "command": command,
        "made": dict(first.made),
        "paper": {"weight": chosen.reported.weight} | {row.name: asdict(row.paper) for row in first.rows if row.paper},
        "seeds": {seed: found | {"judged": list(map(asdict, judged[seed]))} for seed, found in seeds.items()},
    }
    if len(seeds) > 1:
        report["over_seeds"] = spread(judged, seeds)
    tables = page(report)
    write_json(results / "metrics.json", report)
    write_atomically(results / "tables.md", tables)
    draw(list(cells.values()), first, results)
    print(tables)
    for seed, lines in judged.items():
        for line in lines:
            print(f"seed {seed}: {line.name}, asked {line.asked}: {line.verdict}")
    return all(line.met is not False for lines in judged.values() for line in lines if not line.stretch)


def _without_folder(argument: str) -> str:
    """An argument for the record: of an absolute path the name alone, since the folder is this machine's."""
    option, equals, value = argument.rpartition("=")
    return f"{option}{equals}{Path(value).name}" if Path(value).is_absolute() else argument


def main(arguments: Sequence[str] | None = None, settings: Settings | None = None) -> int:
    """Run what is missing and, if that is all of it, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", choices=EXPERIMENTS, default="burgers")
    parser.add_argument("--preset", choices=PRESETS, default="gpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=Path("runs/full-size"))
    parser.add_argument("--results", type=Path, help="results/EXPERIMENT by default")
    parser.add_argument("--keep", action="store_true", help="other seeds that the results hold stay in them")
    parser.add_argument("--until", choices=STAGES, metavar="STAGE", help="stop after this stage of every seed")
    parser.add_argument("--inception", type=Path, metavar="FILE", help="weights for KID and FID")
    parser.add_argument("--n", type=int, help="samples for ℓ, √MMD² and KID; the preset's by default")
    parser.add_argument("--kid-subsets", type=int, help="0 leaves KID out")
    parser.add_argument("--n-fid", type=int, help="samples for FID; 0 leaves it out")
    options = parser.parse_args(arguments)
    spin_briefly()
    if options.inception:
        if not options.inception.is_file():
            parser.error(f"there is no file {options.inception}")
        os.environ["NAMM_INCEPTION"] = str(options.inception)
    given = sys.argv[1:] if arguments is None else arguments
    cells: dict[str, CellOutcome] = {}
    try:
        for seed in options.seeds:
            name = f"{options.experiment}-{options.preset}-{seed}"
            chosen = settings_of(options, settings, seed, options.out / name)
            cells[str(seed)] = CellOutcome(Cell(name, chosen, options.until), options.out / name, None)
            bring(cells[str(seed)])
        if not all(
            is_done(each.folder / "evaluate", stage_keys(each.cell.preset.settings)["evaluate"])
            for each in cells.values()
        ):
            print(f"stopped after {options.until}: without an evaluation of every seed nothing is written.")
            return 0
        command = shlex.join(["python", "benchmarks/full_size.py", *map(_without_folder, given)])
        results = options.results or Path("results") / options.experiment
        return 0 if write(cells, command, results, keep=options.keep) else 1
    except NammError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
