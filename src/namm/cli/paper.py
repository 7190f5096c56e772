"""`namm paper`: the paper's tables and figures, made from runs that are run where they are missing."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from namm.cli.options import HELP, parse, take_name
from namm.cli.run import tell
from namm.cli.sweep import read_jobs, take_several
from namm.errors import UsageError
from namm.experiments.paper.items import FIVE, ITEMS, Item
from namm.experiments.presets import PRESETS, preset, require_name


@dataclass(frozen=True)
class Options:
    """Which runs, and where."""

    preset: str = "demo"
    """demo, gpu or paper."""
    experiments: tuple[str, ...] = ()
    """flux, burgers, divergence, periodic, count; those that the paper shows it for by default."""
    seeds: tuple[int, ...] = (0,)
    """One run of everything for each; with several, tables have mean ± standard deviation."""
    out: Path | None = None
    """Folder of all runs, runs/paper-PRESET by default; tables and figures go to OUT/ITEM."""
    on: Literal["here", "local", "slurm"] = "here"
    """Where runs run: one after the other in this process, as processes of this machine, as jobs of Slurm."""
    jobs: int | None = None
    """How many at once: local, one for each GPU or for every two cores by default; slurm, as many as it allows."""
    slurm: tuple[str, ...] = ()
    """What Slurm is asked for, KEY=VALUE as submitit names it: partition=gpu gpus_per_node=1 timeout_min=600."""
    retry: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Try runs again that failed before."""


def usage() -> str:
    """The help text that needs no item."""
    width = max(map(len, ITEMS))
    return "\n".join(
        [
            "usage: namm paper ITEM [--preset PRESET] [--experiments NAME ...] [--seeds N ...] [--out DIR]",
            "                       [--on here|local|slurm] [--jobs N] [--slurm KEY=VALUE ...] [--retry]",
            "",
            "Run what is missing of a table or figure of the paper, and write it: tables as Markdown, CSV and JSON,",
            "figures as PNG and PDF, with a caption that says what was run. Items in one folder share their runs.",
            "",
            *(f"  {name:<{width}}  {item.shows}" for name, item in ITEMS.items()),
        ]
    )


def main(arguments: list[str]) -> int:
    """Make an item; 1 if a run that it needs failed."""
    name, rest = take_name(arguments)
    if name is None:
        if not arguments or set(arguments) & set(HELP):
            print(usage())
            return 0 if arguments else 2
        raise UsageError(f"which table or figure? Its name comes first: namm paper {'|'.join(ITEMS)}.")
    item = ITEMS[require_name(name, ITEMS, "table or figure")]
    asked, rest = take_several(rest, ["slurm"])  # as in `namm sweep`, also where it is given several times
    rest = [*rest, "--slurm", *asked["slurm"]]
    options = parse(Options, rest, prog=f"namm paper {name}", description=f"{name}: {item.shows}.")
    return options if isinstance(options, int) else _make(item, options)


def _make(item: Item, options: Options) -> int:
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
        tell=tell,
        jobs=jobs,
    )
    print(f"\n{item.name}: {item.shows}\n\n{made.shown.table.markdown()}\n")
    for line in (*made.shown.words, *made.shown.notes):
        print(line)
    for outcome in made.failed:
        print(f"{outcome.cell.name} is missing: {outcome.error}")
    if made.failed:
        print(f"{len(made.failed)} of {len(made.outcomes)} runs failed; the same command with --retry tries them again")
    print(f"everything is in {out / item.name}: {', '.join(path.name for path in made.files)}")
    return 1 if made.failed else 0
