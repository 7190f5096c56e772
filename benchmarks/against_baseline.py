"""The method against the same diffusion model on plain data, at equal compute, over seeds.

Runs the demo-size experiment to its evaluation once per seed, data, trainings and samples all drawn anew, and compares
with what is asked of it: mean ℓ at least 50 % below the baseline's, finetuning no worse, √MMD² at most 1.25 times the
baseline's, total variation at least 0.85 times the data's.

    python benchmarks/against_baseline.py [--experiment burgers] [--preset demo] [--seeds 0 1 2] [--times 1]
                                          [--out runs/seeds]

Each model is judged by 640 samples, or as many as the preset asks for if these are fewer. Trainings take --times the
preset's minutes, on both sides. What is complete in --out is not run again. The exit code is 1 if a seed falls short.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from namm.cli import spin_briefly
from namm.experiments.engine.settings import Settings, with_seed
from namm.experiments.presets import EXPERIMENTS, PRESETS, preset
from run_lengths import TIMES, folder_name, lengthened

Rows = dict[str, Any]
SAMPLES = 640
"""Samples of each model to judge by, at most: three seeds of the demo are then through in 25 minutes on 2 cores."""
LABELS = {
    "data": "data (floor)",
    "mdm": "MDM + f",
    "finetuned": "MDM + f finetuned",
    "dm": "DM",
    "projected": "DM + project",
    "repaired": "DM repaired, f∘g",
}


def evaluate(
    experiment: str, name: str, seed: int, out: Path, settings: Settings | None = None, times: float = TIMES
) -> Rows:
    """What metrics.json says of one seed."""
    from namm.experiments.engine.run import run

    chosen = preset(experiment, name)
    seeded = lengthened(with_seed(settings or chosen.settings, seed), times)
    n, subset = (min(asked, SAMPLES) for asked in (seeded.evaluate.n, seeded.evaluate.subset))
    fewer = replace(seeded.evaluate, n=n, subset=subset, milestone_samples=0)  # nothing here looks at milestones
    seeded = replace(seeded, evaluate=fewer)
    chosen = replace(chosen, settings=seeded)
    folder = out / folder_name(experiment, name, times, seed)
    run(chosen, folder, until="evaluate", force=True)
    metrics: Rows = json.loads((folder / "evaluate" / "metrics.json").read_text())
    return metrics


def verdict(metrics: Rows) -> dict[str, tuple[float, bool]]:
    """Every figure that something is asked of, and whether it is met."""
    rows = metrics["rows"]
    distance = {row: scores["distance"]["mean"] for row, scores in rows.items()}
    ours, mmd = rows["finetuned"], {row: scores["mmd"][0] for row, scores in rows.items()}
    ratios = {
        "ℓ of MDM + f / DM": (distance["mdm"] / distance["dm"], 0.5),
        "ℓ finetuned / DM": (distance["finetuned"] / distance["dm"], 0.5),
        "ℓ finetuned / MDM + f": (distance["finetuned"] / distance["mdm"], 1.0),
        "√MMD² finetuned / DM": (mmd["finetuned"] / mmd["dm"], 1.25),
    }
    found = {name: (value, value <= limit) for name, (value, limit) in ratios.items()}
    price = metrics["compute_seconds"]["mdm"] / metrics["steps"]["mdm"]
    least = {
        "total variation / data": (ours["total_variation"], 0.85),
        "compute of DM / ours, a step at one price": (
            price * metrics["steps"]["dm"] / metrics["compute_seconds_ours"],
            0.99,
        ),
    }
    seconds = metrics["compute_seconds_baseline"] / metrics["compute_seconds_ours"]
    found |= {name: (value, value >= limit) for name, (value, limit) in least.items()}
    return found | {"compute of DM / ours, on the clock": (seconds, True)}


def show(seed: int, metrics: Rows, console: Console) -> None:
    """The table of one seed."""
    seconds = {name: f"{value:.0f}" for name, value in metrics["compute_seconds"].items()}
    title = f"seed {seed}; compute seconds {', '.join(f'{name} {value}' for name, value in seconds.items())}"
    table = Table("", "mean ℓ", "std ℓ", "√MMD²", "total variation", "spread", title=title, title_justify="left")
    for row, label in LABELS.items():
        if row in metrics["rows"]:
            scores = metrics["rows"][row]
            table.add_row(
                label,
                f"{scores['distance']['mean']:.2e}",
                f"{scores['distance']['std']:.1e}",
                "{:.4f} ± {:.4f}".format(*scores["mmd"]),
                f"{scores['total_variation']:.3f}",
                f"{scores['spread']:.3f}",
            )
    console.print(table)


def main(arguments: Sequence[str] | None = None, settings: Settings | None = None) -> int:
    """Run what is missing, print the tables and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", choices=EXPERIMENTS, default="burgers")
    parser.add_argument("--preset", choices=PRESETS, default="demo")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--times", type=float, default=TIMES, help="of the preset's minutes")
    parser.add_argument("--out", type=Path, default=Path("runs/seeds"))
    options = parser.parse_args(arguments)
    spin_briefly()
    console, verdicts = Console(width=110), {}
    for seed in options.seeds:
        metrics = evaluate(options.experiment, options.preset, seed, options.out, settings, options.times)
        show(seed, metrics, console)
        verdicts[seed] = verdict(metrics)
    table = Table("", *(f"seed {seed}" for seed in verdicts), title="ratios", title_justify="left")
    for name in next(iter(verdicts.values())):
        cells = [f"{value:.3f}{'' if met else ' (short)'}" for value, met in (v[name] for v in verdicts.values())]
        table.add_row(name, *cells)
    console.print(table)
    return 0 if all(met for found in verdicts.values() for _, met in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
