"""`namm paper`: the paper's tables and figures, made from runs that are run where they are missing."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff

from namm.cli.help_text import format_usage
from namm.cli.options import log, parse, pick, read_jobs, require_first
from namm.errors import UsageError
from namm.experiments.paper.items import FIVE, ITEMS
from namm.experiments.presets import PRESETS, preset, require_name
from namm.experiments.sweeps.cell import Where


@dataclass(frozen=True)
class Paper:
    """Which runs, and where."""

    preset: str = "demo"
    """demo, gpu or paper."""
    experiments: tuple[str, ...] = ()
    """flux, burgers, divergence, periodic, count; those that the paper shows it for by default."""
    seeds: tuple[int, ...] = (0,)
    """One run of everything for each; with several, tables have mean ± standard deviation."""
    out: Path | None = None
    """Folder of all runs, runs/paper-PRESET by default; tables and figures go to OUT/ITEM."""
    on: Where = "here"
    """Where runs run: one after the other in this process, as processes of this machine, as jobs of Slurm."""
    jobs: int | None = None
    """How many at once: local, one for each GPU or for every two cores by default; slurm, as many as it allows."""
    slurm: tuple[str, ...] = ()
    """What Slurm is asked for, KEY=VALUE as submitit names it: partition=gpu gpus_per_node=1 timeout_min=600."""
    retry: Annotated[bool, FlagCreatePairsOff] = False
    """Try runs again that failed before."""


def usage() -> str:
    """The help text that needs no item."""
    return format_usage(
        "namm paper ITEM [--preset PRESET] [--experiments NAME ...] [--seeds N ...] [--out DIR]\n"
        "           [--on here|local|slurm] [--jobs N] [--slurm KEY=VALUE ...] [--retry]",
        "Run what is missing of a table or figure of the paper, and write it: tables as Markdown, CSV and JSON, "
        "figures as PNG and PDF, with a caption that says what was run. Items in one folder share their runs.",
        {name: item.shows for name, item in ITEMS.items()},
    )


def main(arguments: list[str]) -> int:
    """Make an item; 1 if a run that it needs failed."""
    question = f"which table or figure? Its name comes first: namm paper {'|'.join(ITEMS)}."
    name, rest = require_first(arguments, usage(), question)
    item = ITEMS[require_name(name, ITEMS, "table or figure")]
    picked, rest = pick(rest, (), several=("slurm",))  # as in `namm sweep`, also where it is given several times
    rest += ["--slurm", *picked["slurm"]]
    options = parse(Paper, rest, f"namm paper {name}", description=f"{name}: {item.shows}.")
    require_name(options.preset, PRESETS, "preset")
    for name in options.experiments:
        require_name(name, FIVE, "experiment")
    if not options.seeds or len(set(options.seeds)) < len(options.seeds):
        raise UsageError(f"--seeds must be one or several numbers, each once, not {options.seeds}.")
    jobs = read_jobs(None if options.jobs is None else str(options.jobs), options.slurm, options.on)
    out = options.out or Path("runs") / f"paper-{options.preset}"

    from namm.experiments.paper.make import make

    made = make(
        item,
        lambda name: preset(name, options.preset),
        out,
        experiments=options.experiments,
        seeds=options.seeds,
        on=options.on,
        retry=options.retry,
        log=log,
        jobs=jobs,
    )
    print(f"\n{item.name}: {item.shows}\n\n{made.output.table.markdown()}\n")
    for line in (*made.output.findings, *made.output.notes):
        print(line)
    for outcome in made.failed:
        print(f"{outcome.cell.name} is missing: {outcome.error}")
    if made.failed:
        print(f"{len(made.failed)} of {len(made.outcomes)} runs failed; the same command with --retry tries them again")
    print(f"everything is in {out / item.name}: {', '.join(path.name for path in made.files)}")
    return 1 if made.failed else 0
