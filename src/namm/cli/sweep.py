"""`namm sweep`: an experiment with every combination of some settings' values, and one table of what came out."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from namm.cli.options import HELP, pick, refuse_near_misses, take_name
from namm.cli.run import OPTIONS as OF_RUN
from namm.cli.run import choose, tell
from namm.errors import UsageError
from namm.experiments.engine.stages import MAIN_LINE, STAGES
from namm.experiments.presets import EXPERIMENTS, require_name
from namm.experiments.sweeps.cell import Jobs, Where

if TYPE_CHECKING:
    from namm.experiments.sweeps.sweep import Row

SINGLE = (*OF_RUN, "on", "jobs")
SEVERAL = ("vary", "seeds", "slurm")
TITLES = {
    "distance_ours": "ℓ ours",
    "distance_baseline": "ℓ baseline",
    "mmd_ours": "√MMD² ours",
    "mmd_baseline": "√MMD² baseline",
}


def usage() -> str:
    """The help text that needs no experiment."""
    return "\n".join(
        [
            "usage: namm sweep NAME --vary SETTING=V1,V2,... [--vary ...] [--seeds S1 S2 ...] [--on here|local|slurm]",
            "                  [--retry] [--out DIR] [options and settings of `namm run`]",
            "",
            "Run an experiment with every combination of values, each in a folder of its own, and gather one table.",
            "What is complete is not run again; a cell that fails is reported and the others stand.",
            "",
            f"  NAME           {', '.join(EXPERIMENTS)}",
            "  --vary         a setting and its values, as in --vary map.sigma_max=0.05,0.1,0.2; of several such, the",
            "                 product; a value that is a list is written [1, 2]",
            "  --seeds        seeds of data, trainings and samples; one more factor of the product",
            "  --on           here: one after the other, in this process (the default)",
            "                 local: as processes of this machine, one per GPU or per two cores; --jobs N: N at once",
            "                 slurm: as jobs of Slurm; --jobs N: at most N at once",
            "  --slurm        what Slurm is asked for, as submitit names it: --slurm partition=gpu gpus_per_node=1",
            "                 timeout_min=600; with tasks_per_node=4 a cell's training is shared by 4 processes",
            "  --retry        try cells again that failed before",
            "  --out DIR      folder of the cells, sweep.json and sweep.csv (default: sweeps/NAME)",
            f"  --until STAGE  the last stage of each cell: {', '.join(STAGES)} (default: {MAIN_LINE})",
            "  --trust        run a rule that --config FILE names and that you have not run before: it is Python code",
            "",
            "All else is as for `namm run` (`namm run --help`) and the same for all cells.",
        ]
    )


def main(arguments: list[str]) -> int:
    """Run a sweep."""
    several, rest = take_several(arguments, SEVERAL)
    retry = "--retry" in rest
    own, rest = pick([argument for argument in rest if argument != "--retry"], SINGLE)
    name, rest = take_name(rest)
    if not arguments or set(rest) & set(HELP):
        print(usage())
        return 0 if arguments else 2
    refuse_near_misses(rest, (*SINGLE, *SEVERAL, "retry"))
    until = own.get("until")
    require_name(until or MAIN_LINE, STAGES, "stage")
    on: Any = require_name(own.get("on", "here"), get_args(Where), "place called")
    jobs = read_jobs(own.get("jobs"), several["slurm"], on)

    from namm.experiments.sweeps.sweep import combinations, make_cell, read_values, require_sweep

    varied = _once(read_values(text) for text in several["vary"])
    seeds = [_number("seeds", text, 0) for text in several["seeds"]]
    if not varied and not seeds:
        raise UsageError("what is varied? namm sweep NAME --vary map.sigma_max=0.05,0.1,0.2, or --seeds 0 1 2.")
    base = choose("namm sweep", name, own, rest, usage())
    if isinstance(base, int):
        return base
    values = combinations(varied, seeds)
    cells = [make_cell(base, each, until) for each in values]
    out = Path(own.get("out", Path("sweeps") / base.experiment))
    require_sweep(out)

    from namm.experiments.engine.processes import is_main
    from namm.experiments.sweeps.link_stages import run_sharing
    from namm.experiments.sweeps.sweep import gather, write_table

    tell(f"{base.experiment}, preset {base.name}, {len(cells)} cell{'s' * (len(cells) > 1)} in {out}, on {on}")
    outcomes = run_sharing(cells, out, on=on, retry=retry, tell=tell, jobs=jobs)
    rows = gather(outcomes, values)
    if is_main():
        write_table(out, base, rows)
    _show(rows, out)
    return 1 if any(row.error for row in rows) else 0


def take_several(arguments: Sequence[str], names: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Values of options that take several, or are given several times, and all other arguments."""
    found: dict[str, list[str]] = {name: [] for name in names}
    rest: list[str] = []
    into = rest
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if argument.startswith("--"):
            into = found.get(option.removeprefix("--"), rest)
            if into is rest:
                rest.append(argument)
            elif equals:
                into.append(value)
        else:
            into.append(argument)
    return found, rest


def _once(pairs: Any) -> dict[str, list[Any]]:
    """What is varied, by name."""
    varied: dict[str, list[Any]] = {}
    for name, values in pairs:
        if name in varied:
            raise UsageError(f"{name} is varied twice: give all its values at once.")
        varied[name] = values
    return varied


def _number(option: str, text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise UsageError(f"--{option} takes whole numbers of {least} or more, not {text!r}.")
    return int(text)


def read_jobs(at_once: str | None, slurm: Sequence[str], on: str) -> Jobs:
    """What --jobs and --slurm say of cells that run `on`."""
    number = None if at_once is None else _number("jobs", at_once, 1)
    if number is not None and on == "here":
        raise UsageError("--jobs is for cells that run at once: add --on local or --on slurm.")
    return Jobs(number, _slurm(slurm, on))


def _slurm(texts: Sequence[str], on: str) -> dict[str, Any]:
    """What Slurm is asked for."""
    import yaml

    if texts and on != "slurm":
        raise UsageError("--slurm is for cells that run there: add --on slurm.")
    asked: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--slurm takes KEY=VALUE, such as partition=gpu, not {text!r}.")
        asked[key] = yaml.safe_load(value)
    return asked


def _show(rows: "Sequence[Row]", out: Path) -> None:
    """The table, and why cells failed."""
    from rich.console import Console
    from rich.table import Table

    from namm.experiments.sweeps.sweep import CSV, JSON, result_names

    varied, results = list(rows[0].values), result_names(rows)
    table = Table(title=str(out), title_justify="left")
    for title in (*_short(varied), "status"):
        table.add_column(title, no_wrap=True)
    for name in results:
        table.add_column(TITLES.get(name, name).replace("distance", "ℓ").replace("_", " "), overflow="fold")
    for row in rows:
        status = f"[{'green' if row.error is None else 'red'}]{row.status}[/]"
        figures = (_figure(row.results.get(name)) for name in results)
        table.add_row(*(str(row.values[name]) for name in varied), status, *figures)
    Console().print(table)
    failed = [row for row in rows if row.error]
    for row in failed:
        print(f"{row.cell} failed: {row.error}")
    if failed:
        print(f"{len(failed)} of {len(rows)} cells failed; the same command with --retry tries them again")
    print(f"the table is in {out / CSV} and {out / JSON}; `namm status {out}/CELL` shows a cell")


def _short(names: Sequence[str]) -> list[str]:
    """The last parts of the names, where they tell them apart."""
    last = [name.rpartition(".")[2] for name in names]
    return last if len(set(last)) == len(last) else list(names)


def _figure(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
