"""`namm sweep`: an experiment with every combination of some settings' values, and one table of what came out."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rich.table import Column
from rich.text import Text

from namm.cli import HELP
from namm.cli.help_text import format_usage
from namm.cli.options import (
    answer,
    asks_for_help,
    log,
    pick,
    pick_name,
    read_jobs,
    refuse_near_misses,
    whole_number,
)
from namm.cli.run import OPTIONS as RUN_OPTIONS
from namm.cli.run import choose
from namm.errors import UsageError
from namm.experiments.engine.processes import is_main
from namm.experiments.engine.stages import MAIN_LINE, STAGES
from namm.experiments.presets import EXPERIMENTS, require_name
from namm.experiments.sweeps.cell import Where
from namm.formatting import ABSENT, format_number, print_table

if TYPE_CHECKING:
    from namm.experiments.sweeps.sweep import Row

SINGLE = (*(name for name in RUN_OPTIONS if name != "seed"), "on", "jobs")
SEVERAL = ("vary", "seeds", "slurm")
TITLES = {
    "distance_ours": "ℓ ours",
    "distance_baseline": "ℓ baseline",
    "mmd_ours": "√MMD² ours",
    "mmd_baseline": "√MMD² baseline",
}


def usage() -> str:
    """The help text that needs no experiment."""
    return format_usage(
        "namm sweep NAME --vary SETTING=V1,V2,... [--vary ...] [--seeds S1 S2 ...]\n"
        "           [--on here|local|slurm] [--retry] [--out DIR] [options and settings of `namm run`]",
        "Run an experiment with every combination of values, each in a folder of its own, and gather one table. What "
        "is complete is not run again; a cell that fails is reported and the others stand. All options that are not "
        "here are as for `namm run` (`namm run --help`) and the same for all cells; `namm sweep NAME --help-all` lists "
        "every setting.",
        {
            "NAME": ", ".join(EXPERIMENTS),
            "--vary": "a setting and its values, as in --vary map.sigma_max=0.05,0.1,0.2; of several such, the "
            "product; a value that is a list is written [1, 2]",
            "--seeds": "seeds of data, trainings and samples; one more factor of the product",
            "--on": "here: one after the other, in this process (the default); local: as processes of this machine, "
            "one per GPU or per two cores; slurm: as jobs of Slurm",
            "--jobs N": "with --on local, N at once; with --on slurm, at most N at once",
            "--slurm": "what Slurm is asked for, as submitit names it: --slurm partition=gpu gpus_per_node=1 "
            "timeout_min=600; with tasks_per_node=4 a cell's training is shared by 4 processes",
            "--retry": "try cells again that failed before",
            "--out DIR": "folder of the cells, sweep.json and sweep.csv (default: sweeps/NAME)",
            "--until STAGE": f"the last stage of each cell: {', '.join(STAGES)} (default: {MAIN_LINE})",
            "--trust": "run a rule that --config FILE names and that you have not run before: it is Python code",
        },
    )


def main(arguments: list[str]) -> int:
    """Run a sweep; 1 if a cell failed."""
    picked, rest = pick(arguments, SINGLE, several=SEVERAL, flags=("retry",))
    name, rest = pick_name(rest)
    if not arguments or set(rest) & set(HELP) or (asks_for_help(rest) and name is None):
        answer(usage(), arguments)
    if asks_for_help(rest):
        print(f"{usage()}\n")
        choose("namm sweep", name, picked, rest)  # which prints all settings
    refuse_near_misses(rest, (*SINGLE, *SEVERAL, "retry"))
    until = picked.get("until")
    require_name(until or MAIN_LINE, STAGES, "stage")
    on: Any = require_name(picked.get("on", "here"), get_args(Where), "place called")
    jobs = read_jobs(picked.get("jobs"), picked["slurm"], on)

    from namm.experiments.sweeps.sweep import combinations, gather, make_cell, read_values, require_sweep, write_table

    varied: dict[str, list[Any]] = {}
    for setting, choices in map(read_values, picked["vary"]):
        if setting in varied:
            raise UsageError(f"{setting} is varied twice: give all its values at once.")
        varied[setting] = choices
    seeds = [whole_number("seeds", text, 0) for text in picked["seeds"]]
    if not varied and not seeds:
        raise UsageError("what is varied? namm sweep NAME --vary map.sigma_max=0.05,0.1,0.2, or --seeds 0 1 2.")
    base = choose("namm sweep", name, picked, rest)
    values = combinations(varied, seeds)
    cells = [make_cell(base, each, until) for each in values]
    out = Path(picked.get("out", Path("sweeps") / base.experiment))
    require_sweep(out)

    from namm.experiments.sweeps.cell import run_sharing

    log(f"{base.experiment}, preset {base.name}, {len(cells)} cell{'s' * (len(cells) > 1)} in {out}, on {on}")
    outcomes = run_sharing(cells, out, on=on, retry=picked["retry"], log=log, jobs=jobs)
    rows = gather(outcomes, values)
    if is_main():
        write_table(out, base, rows)
    _show(rows, out)
    return 1 if any(row.error for row in rows) else 0


def _show(rows: "Sequence[Row]", out: Path) -> None:
    """The table, and why cells failed."""
    from namm.experiments.sweeps.sweep import CSV, JSON, result_names

    varied, results = list(rows[0].values), result_names(rows)
    last_parts = [name.rpartition(".")[2] for name in varied]
    titles = last_parts if len(set(last_parts)) == len(varied) else varied
    result_titles = (TITLES.get(name, name).replace("distance", "ℓ").replace("_", " ") for name in results)
    columns = [Column(Text(title), no_wrap=True) for title in (*titles, "status")]
    columns += [Column(Text(title), overflow="fold") for title in result_titles]
    cells: Iterator[tuple[str | Text, ...]] = (
        (
            *(str(row.values[name]) for name in varied),
            Text(row.status, "green" if row.error is None else "red"),
            *(_figure(row.results.get(name)) for name in results),
        )
        for row in rows
    )
    print_table(columns, cells, title=str(out))
    failed = [row for row in rows if row.error]
    for row in failed:
        print(f"{row.cell} failed: {row.error}")
    if failed:
        print(f"{len(failed)} of {len(rows)} cells failed; the same command with --retry tries them again")
    print(f"the table is in {out / CSV} and {out / JSON}; `namm status {out}/CELL` shows a cell")


def _figure(value: Any) -> str:
    return format_number(value) if isinstance(value, float) else ABSENT if value is None else str(value)
