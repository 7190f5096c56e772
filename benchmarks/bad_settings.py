"""What a run says of itself under deliberately bad settings: it may fail, but it may not praise a failure.

    python benchmarks/bad_settings.py --experiments burgers periodic

Each setting is spoiled in turn, the run is forced through all stages, and its verdict is compared with its figures by
the definition, written out here once more. The last line counts the runs whose words and figures disagree.
"""

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tyro

from namm.errors import TrainingError
from namm.experiments.engine.folder import read_record
from namm.experiments.engine.run import run
from namm.experiments.engine.settings import Settings
from namm.experiments.presets import preset


@dataclass(frozen=True)
class Options:
    """Which experiments, and how long each part is trained: enough to learn something, not to learn it well."""

    experiments: tuple[str, ...] = ("burgers", "periodic", "flux")
    map_steps: int = 400
    model_steps: int = 600
    finetune_steps: int = 100
    images: int = 1000
    """Images to train on; as many are held out."""
    only: tuple[str, ...] = ()
    """Names of the settings to try; all of them by default."""
    out: Path = Path("runs/bad_settings")
    """Folder of the runs; what is done is not done again."""


def weighed(s: Settings, part: Literal["map", "finetune"], factor: float) -> Settings:
    """`s` with `factor` times the rule's weight in a training of the map."""
    own = getattr(s, part)
    weights = replace(own.weights, constraint=factor * own.weights.constraint)
    return replace(s, **{part: replace(own, weights=weights)})


def budgeted(s: Settings, **steps: int) -> Settings:
    """`s` with that many steps of these trainings."""
    parts: dict[str, Any] = {name: getattr(s, name) for name in steps}
    return replace(
        s, **{name: replace(p, train=replace(p.train, budget=f"{steps[name]} steps")) for name, p in parts.items()}
    )


SPOILED: dict[str, Callable[[Settings], Settings]] = {
    "as it is": lambda s: s,
    "sigma_max x 30": lambda s: replace(s, map=replace(s.map, sigma_max=30 * s.map.sigma_max)),
    "lambda x 1000": lambda s: weighed(s, "map", 1000),
    "lambda = 0": lambda s: weighed(s, "map", 0),
    "map of 50 steps": lambda s: budgeted(s, map=50),
    "finetuning lambda x 1e6": lambda s: weighed(s, "finetune", 1e6),
}


def shortened(settings: Settings, options: Options) -> Settings:
    """The demo with budgets in steps and fewer images."""
    s = budgeted(settings, map=options.map_steps, mdm=options.model_steps, finetune=options.finetune_steps)
    n = options.images
    return replace(
        s,
        data=replace(s.data, n_train=n, n_val=min(n, s.data.n_val), n_test=n),
        samples=replace(s.samples, n=min(n, s.samples.n)),
        evaluate=replace(s.evaluate, n=n, subset=min(s.evaluate.subset, n), milestone_samples=0),
    )


def outcome_by_definition(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The verdict that the figures of the rows `finetuned`, `dm` and `data` call for."""
    ours, baseline = rows["finetuned"], rows["dm"]
    (mmd, error), (base, base_error) = ((row["mmd"][0], row["mmd_error"]) for row in (ours, baseline))
    excess, reference = (row["distance"]["mean"] - rows["data"]["distance"]["mean"] for row in (ours, baseline))
    lost = not (ours["spread"] >= 0.7 and 0.5 <= ours["total_variation"] <= 2)
    if lost or not mmd - 2 * base <= 2 * math.hypot(error, 2 * base_error):
        return "collapsed"
    looks = all(abs(ours[name] - 1) <= max(0.15, abs(baseline[name] - 1)) for name in ("total_variation", "spread"))
    resembles = mmd <= 1.25 * base or mmd - base <= 2 * math.hypot(error, base_error)
    return "works" if reference > 0 and excess <= 0.7 * reference and resembles and looks else "no gain"


def tried(name: str, how: str, options: Options) -> tuple[bool, str]:
    """One run: whether its words are those of its figures, and a line about it."""
    chosen = preset(name)
    settings = SPOILED[how](shortened(chosen.settings, options))
    folder = options.out / name / how.replace(" ", "_").replace("=", "is")
    try:
        run(replace(chosen, settings=settings), folder, until="report", log=lambda line: None, force=True)
    except TrainingError as error:
        return True, f"{name:<11}{how:<25}stopped by itself: {str(error).split('. ')[0]}"
    metrics = json.loads((folder / "evaluate" / "metrics.json").read_text())
    said, ours, base = metrics["verdict"]["outcome"], metrics["rows"]["finetuned"], metrics["rows"]["dm"]
    agrees = (
        said == outcome_by_definition(metrics["rows"])
        and f"verdict {said.replace(' ', '-')}" in (folder / "report" / "report.html").read_text()
    )
    learned, kept = (read_record(folder / stage).results for stage in ("map", "finetune"))
    return agrees, (
        f"{name:<11}{how:<25}map {learned['verdict']:<10}run {said:<10}"
        f"l {ours['distance']['mean']:.3g} ({base['distance']['mean']:.3g}), √MMD² {ours['mmd'][0]:.3f} "
        f"({base['mmd'][0]:.3f}), variation {ours['total_variation']:.2f}, spread {ours['spread']:.2f}; {kept['kept']}"
    )


def main() -> int:
    options = tyro.cli(Options, description=__doc__)
    found = []
    for name in options.experiments:
        for how in options.only or SPOILED:
            agrees, line = tried(name, how, options)
            found.append(agrees)
            print(line if agrees else f"{line}  <- WORDS AND FIGURES DISAGREE", flush=True)
    print(f"{found.count(True)} passed, {found.count(False)} failed")
    return int(not all(found))


if __name__ == "__main__":
    sys.exit(main())
