"""The method against the same diffusion model on plain data, at equal compute, over seeds.

Brings a run of each seed, data, trainings and samples all drawn anew, to its evaluation and report, in
OUT/EXPERIMENT-PRESET-TIMES-SEED, prints the tables, and judges them. Of the preset `demo`, with 640 samples of each
model:

    CD of the MDM and of the finetuned MDM at least 50 % below the DM's, finetuning no worse
    √MMD² at most 1.25 times the DM's, total variation at least 0.85 times the data's
    as much compute for the DM, a step at one price

Of the others:

    CD of the finetuned MDM at least 75 % below the DM's (better still: 91 %), its KID below the DM's
    √MMD² and total variation as above
    map, mdm, samples and finetune within 480 s of compute, the DM in the same time to within a step or 2 %
    images per second of the DM's training within 5 % of the MDM's

    python benchmarks/against_baseline.py [--experiment burgers] [--preset demo] [--seeds 0 1 2] [--times 1]
                                          [--out runs/seeds] [--results DIR] [--keep] [--until STAGE]
                                          [--inception FILE] [--n N] [--kid-subsets N] [--n-fid N]

A call that was cut short goes on when it is repeated, and what is complete is not run again. Trainings take --times the
preset's minutes, on both sides. Once all seeds are evaluated, RESULTS, if it is named, holds metrics.json, tables.md,
samples.png and, where milestones were measured, training.png. With --keep the figures of other seeds that metrics.json
holds, such as those of another machine, stay in it. Without Inception weights KID and FID are left out. The exit code
is 1 if something falls short and 2 if a run could not be brought to its end.
"""

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from namm.cli import spin_briefly
from namm.errors import DataError, NammError, RunFolderError
from namm.experiments.engine.folder import is_done, read_record, stages_aside
from namm.experiments.engine.run import run
from namm.experiments.engine.settings import Settings, with_seed
from namm.experiments.engine.settings_file import plain
from namm.experiments.engine.stages import MAIN_LINE, STAGES, stage_keys
from namm.experiments.paper.make import NOT_THE_PAPERS
from namm.experiments.paper.output import Table, Value
from namm.experiments.presets import EXPERIMENTS, PRESETS, Preset, preset
from namm.experiments.sweeps.cell import Cell, CellOutcome
from namm.files import write_atomically, write_json
from namm.formatting import format_number
from shared import TIMES, folder_name, lengthened

if TYPE_CHECKING:
    from namm.report.contents import Contents
    from namm.report.figures.samples import Method

Found = dict[str, Any]
DEMO_SAMPLES = 640
"""Samples of each model to judge the demo by, at most: three seeds are then through in 25 minutes on 2 cores."""
SECONDS = 480
"""Compute of map, mdm, samples and finetune together, but for the demo's."""
LABELS = {
    "data": "data (floor)",
    "mdm": "MDM + f",
    "finetuned": "MDM + f finetuned",
    "dm": "DM",
    "projected": "DM + project",
    "repaired": "DM repaired, f∘g",
}


# What is run


def settings_of(options: argparse.Namespace, given: Settings | None, seed: int, folder: Path) -> Preset:
    """The preset with its seed and with what is asked of the evaluation; without KID and FID where they cannot be."""
    chosen = preset(options.experiment, options.preset)
    settings = lengthened(with_seed(given or chosen.settings, seed), options.times)
    if options.preset == "demo":  # nothing here looks at milestones
        n, subset = (min(asked, DEMO_SAMPLES) for asked in (settings.evaluate.n, settings.evaluate.subset))
        settings = replace(settings, evaluate=replace(settings.evaluate, n=n, subset=subset, milestone_samples=0))
    asked = {name: getattr(options, name) for name in ("n", "kid_subsets", "n_fid")}
    asked = {name: value for name, value in asked.items() if value is not None}
    settings = replace(settings, evaluate=replace(settings.evaluate, **asked))
    key, evaluations = stage_keys(settings)["evaluate"], (folder / "evaluate", *stages_aside(folder, "evaluate"))
    features = settings.evaluate.kid_subsets or settings.evaluate.n_fid
    if features and not any(is_done(each, key) for each in evaluations):
        from namm.evaluation.inception import find_weights

        try:
            find_weights()
        except DataError as error:
            print(f"seed {seed}: KID and FID are left out, {error}", flush=True)
            settings = replace(settings, evaluate=replace(settings.evaluate, kid_subsets=0, n_fid=0))
    return replace(chosen, settings=settings)


def complete(cell: CellOutcome) -> None:
    """Run what is missing of a run, and remember on which machines that was; writing its report does not count."""
    measured = replace(cell.cell, until="evaluate") if cell.cell.last == MAIN_LINE else cell.cell
    if not measured.is_complete(cell.folder):
        import torch

        here = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU with {os.cpu_count()} cores"
        write_json(_machines(cell.folder), sorted({*read_machines(cell.folder), f"{platform.machine()}, {here}"}))
    run(cell.cell.preset, cell.folder, until=cell.cell.until, log=partial(print, flush=True), force=True)


def _machines(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.machines.json")


def read_machines(folder: Path) -> list[str]:
    """The machines that a run was made on."""
    return list(json.loads(_machines(folder).read_text())) if _machines(folder).exists() else []


# What was found


def read(cell: CellOutcome, contents: "Contents") -> Found:
    """All figures of one seed."""
    from namm.evaluation.scores import half_way

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
        "rows": {
            row.name: {name: value for name, value in asdict(row).items() if name not in ("name", "paper")}
            for row in contents.rows
        },
        "stages": {cost.stage: costs(cost.stage) for cost in (*contents.ours, *contents.baseline)},
        "compute_seconds_ours": sum(cost.seconds for cost in contents.ours),
        "compute_seconds_baseline": sum(cost.seconds for cost in contents.baseline),
        "dm_along": {name: asdict(end) | {"cd": reported.cd(end.mean)} for name, end in ends.items() if end},
        "evaluation": plain(cell.cell.preset.settings.evaluate),
        "changed": [list(change) for change in contents.changed],
        "machines": read_machines(cell.folder),
    }
    rates = {name: found["stages"][name]["images_per_second"] for name in ("mdm", "dm")}
    return found | {"images_per_second_dm_over_mdm": rates["dm"] / rates["mdm"]}


# What is asked


@dataclass(frozen=True)
class Line:
    """A figure, what is asked of it and whether that is met; None where it was not measured.

    One that is a `stretch` would be better still, and does not count.
    """

    name: str
    asked: str
    figure: float | None
    met: bool | None
    shown: str = ""
    stretch: bool = False

    @property
    def verdict(self) -> str:
        """In words."""
        return "not computed" if self.met is None else f"{self.shown}, {'met' if self.met else 'short'}"


def judge(found: Found, preset: str) -> list[Line]:
    """Every figure of one seed that something is asked of."""

    def at_least(least: float, name: str, method: str, other: str = "dm", stretch: bool = False) -> Line:
        gain, asked = 1 - rows[method]["cd"] / rows[other]["cd"], f"≥ {least:.0%}".replace("%", " %")
        asked += " (stretch)" if stretch else ""
        return Line(f"CD of {name}'s by", asked, gain, gain >= least, f"{100 * gain:.1f} %", stretch)

    rows, stages = found["rows"], found["stages"]
    ours, base, spent = rows["finetuned"], rows["dm"], found["compute_seconds_ours"]
    mmd, variation = ours["mmd"][0] / base["mmd"][0], ours["total_variation"]
    closer = "MDM + f finetuned, below DM"
    alike = [
        Line("√MMD² of MDM + f finetuned / DM's", "≤ 1.25", mmd, mmd <= 1.25, f"{mmd:.3f}"),
        Line("total variation / data's", "≥ 0.85", variation, variation >= 0.85, f"{variation:.3f}"),
    ]
    if preset == "demo":
        price = stages["mdm"]["compute_seconds"] / stages["mdm"]["steps"]
        compute = price * stages["dm"]["steps"] / spent
        name = "compute of DM / ours, a step at one price"
        closer_too = at_least(0.5, "MDM + f, below DM", "mdm"), at_least(0.5, closer, "finetuned")
        finetuned = at_least(0.0, "MDM + f finetuned, below MDM + f", "finetuned", "mdm")
        return [*closer_too, finetuned, *alike, Line(name, "≥ 0.99", compute, compute >= 0.99, f"{compute:.3f}")]
    kid = Line("10⁴ · KID of MDM + f finetuned − DM's", "< 0", None, None)
    if ours["kid"] is not None and base["kid"] is not None:
        gain = 1e4 * (ours["kid"][0] - base["kid"][0])
        kid = replace(kid, figure=gain, met=gain < 0, shown=f"{gain:.2f}")
    rate, equal = found["images_per_second_dm_over_mdm"], found["compute_seconds_baseline"] / spent
    allowed = max(0.02, found["compute_seconds_baseline"] / stages["dm"]["steps"] / spent)
    return [
        at_least(0.75, closer, "finetuned"),
        at_least(0.91, closer, "finetuned", stretch=True),
        kid,
        *alike,
        Line("images/s of DM / MDM's", "within 5 %", rate, abs(rate - 1) <= 0.05, f"{rate:.3f}"),
        Line("compute seconds of ours", f"≤ {SECONDS}", spent, spent <= SECONDS, f"{spent:.1f}"),
        Line("compute of DM / ours", "within a step or 2 %", equal, abs(equal - 1) <= allowed, f"{equal:.3f}"),
    ]


def spread(judged: Mapping[str, Sequence[Line]], seeds: Mapping[str, Found]) -> dict[str, dict[str, float]]:
    """Least, mean and largest over seeds of the figures that are judged, and of CD itself."""
    values = {
        f"CD of {LABELS[row]}": [found["rows"][row]["cd"] for found in seeds.values()] for row in ("finetuned", "dm")
    }
    for lines in zip(*judged.values(), strict=True):
        if not lines[0].stretch:
            values[lines[0].name] = [line.figure for line in lines if line.figure is not None]
    return {
        name: {"min": min(each), "mean": sum(each) / len(each), "max": max(each)}
        for name, each in values.items()
        if each
    }


# Tables


def page(report: Found) -> str:
    """The tables as Markdown, with what they are of."""
    seeds = report["seeds"]
    judged = {seed: judge(found, report["preset"]) for seed, found in seeds.items()}
    first = next(iter(seeds.values()))
    changed = ", ".join(f"{name} {after}" for name, _, after in first["changed"] if not name.endswith("seed"))
    about = (
        f"Experiment `{report['experiment']}`, preset `{report['preset']}`{f', with {changed}' if changed else ''}; "
        f"{first['rows']['finetuned']['n']} samples. "
        f"Run on: {'; '.join(sorted({each for found in seeds.values() for each in found['machines']}))}. "
        f"{report['made']['by']}, {report['made']['made (UTC)']} UTC. Written by `{report['command']}`."
    )
    scale = f"± is the standard deviation over subsets; CD = 100·λ·ℓ, λ = {report['paper']['weight']:g}."
    note = scale if report["preset"] == "paper" else f"{scale} {NOT_THE_PAPERS}"
    parts = ["## Quality", quality(report), note, "## Cost", costs_of(seeds)]
    if any(found["dm_along"] for found in seeds.values()):
        parts += ["The baseline half-way through its training and at its end:", along_of(seeds)]
    parts += ["## Acceptance", acceptance(judged)]
    if len(seeds) > 1:
        over: list[list[Value]] = [[name, *each.values()] for name, each in spread(judged, seeds).items()]
        parts.append(Table({"over seeds": "", "min": ".4g", "mean": ".4g", "max": ".4g"}, over).markdown())
    return "\n\n".join([about, *parts]) + "\n"


def quality(report: Found) -> str:
    """A row for each way to a sample, and the paper's."""
    formats = {"seed": "", "row": "", "mean ℓ": ".3g", "CD": ".3g", "√MMD²": ".4f", "KID · 10⁴": ".2f", "FID": ".4g"}
    formats |= {"total variation": ".3f", "spread": ".3f"}
    rows: list[list[Value]] = []
    for seed, found in report["seeds"].items():
        for name, label in LABELS.items():
            if row := found["rows"].get(name):
                mmd = "{:.4f} ± {:.4f}".format(*row["mmd"])
                kid = "{:.2f} ± {:.2f}".format(*(1e4 * each for each in row["kid"])) if row["kid"] else None
                rest = (row["fid"], row["total_variation"], row["spread"])
                rows.append([seed, label, row["distance"], row["cd"], mmd, kid, *rest])
    for name, label in LABELS.items():
        if row := report["paper"].get(name):
            cd, fid = (format_number(row[key], "g") for key in ("cd", "fid"))
            rows.append(["paper", label, None, cd, row["mmd"], 1e4 * row["kid"], fid, None, None])
    return Table(formats, rows).markdown()


def costs_of(seeds: Mapping[str, Found]) -> str:
    """What every stage cost, and all that the baseline is equal to."""
    rows: list[list[Value]] = []
    for seed, found in seeds.items():
        for name in (stage for stage in STAGES if stage in found["stages"]):  # read back, they are in another order
            each = found["stages"][name]
            if name == "dm":
                rows.append([seed, "ours together", None, None, found["compute_seconds_ours"], None])
            rows.append([seed, name, each["steps"], each["images"], each["compute_seconds"], each["images_per_second"]])
    formats = {"seed": "", "stage": "", "steps": "d", "images": "d", "compute seconds": ".2f", "images/s": ".4g"}
    return Table(formats, rows).markdown()


def along_of(seeds: Mapping[str, Found]) -> str:
    """The baseline at half and at full budget."""
    figures = ("step", "compute_seconds", "n", "mean", "cd")
    rows = [
        [seed, f"DM, {name} budget", *(point[figure] for figure in figures)]
        for seed, found in seeds.items()
        for name in ("half", "full")
        if (point := found["dm_along"].get(name))
    ]
    formats = {"seed": "", "": "", "steps": "d", "compute seconds": ".2f", "samples": "d", "mean ℓ": ".3g", "CD": ".3g"}
    return Table(formats, rows).markdown()


def acceptance(judged: Mapping[str, Sequence[Line]]) -> str:
    """A row for each figure that something is asked of."""
    same = list(zip(*judged.values(), strict=True))
    rows = [[lines[0].name, lines[0].asked, *(line.verdict for line in lines)] for lines in same]
    return Table({"figure": "", "asked": "", **{f"seed {seed}": "" for seed in judged}}, rows).markdown()


# What is written


def draw(cells: Sequence[CellOutcome], contents: "Contents", results: Path) -> None:
    """Samples of the first seed beside data; ℓ against compute over all seeds, where there are milestones."""
    from namm.experiments.paper.items import ITEMS
    from namm.report.figures import look, save
    from namm.report.figures.samples import samples_figure

    with look("light"):
        ours, base = contents.methods
        methods = [_real(cells[0], contents, ours), replace(ours, name="MDM + f"), replace(base, name="DM")]
        save(samples_figure(methods, view=contents.view, with_distances=False), results / "samples.png")
        for figure in ITEMS["fig4"].show(cells).figures.values():
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


def write(cells: Mapping[str, CellOutcome], command: str, results: Path | None, *, keep: bool) -> bool:
    """Print everything, and write it where `results` are wanted; whether nothing falls short."""
    from namm.experiments.engine.stages.report import RESIDUAL, collect

    contents = {seed: collect(cell.folder) for seed, cell in cells.items()}
    said = [problem for each in contents.values() for problem in each.problems]
    if problems := [problem for problem in said if not problem.startswith(RESIDUAL)]:
        raise RunFolderError(f"the results cannot be written. {' '.join(problems)}")
    first, chosen = next(iter(contents.values())), next(iter(cells.values())).cell.preset
    own = {seed: read(cell, contents[seed]) for seed, cell in cells.items()}
    seeds = written(results, chosen) | own if keep and results else own
    judged = {seed: judge(found, chosen.name) for seed, found in seeds.items()}
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
    if results:
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
    parser.add_argument("--preset", choices=PRESETS, default="demo")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--times", type=float, default=TIMES, help="of the preset's minutes")
    parser.add_argument("--out", type=Path, default=Path("runs/seeds"))
    parser.add_argument("--results", type=Path, help="folder to write tables, figures and pictures to")
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
            name = folder_name(options.experiment, options.preset, options.times, seed)
            chosen = settings_of(options, settings, seed, options.out / name)
            cells[str(seed)] = CellOutcome(Cell(name, chosen, options.until), options.out / name, None)
            complete(cells[str(seed)])
        if not all(replace(each.cell, until="evaluate").is_complete(each.folder) for each in cells.values()):
            print(f"stopped after {options.until}: without an evaluation of every seed nothing is written.")
            return 0
        command = shlex.join(["python", "benchmarks/against_baseline.py", *map(_without_folder, given)])
        return 0 if write(cells, command, options.results, keep=options.keep) else 1
    except NammError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
