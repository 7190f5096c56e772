"""How few network evaluations do: few-step samplers against the paper's 1000 steps of Euler–Maruyama.

Trains a small experiment (Burgers' equation on 16 × 16 images), or takes a run that is trained already, draws samples
of both models (the mirror diffusion model, mapped back by the finetuned f, and the plain one) with every sampler, and
compares them with the reference, 1000 steps of Euler–Maruyama, drawn from another seed:

    unbiased MMD² to the reference, in standard errors of its value for equal distributions; mean ℓ over the reference's

    python benchmarks/few_steps.py [--run DIR] [--n 5000] [--reference-steps 1000] [--figure FILE] [--json FILE]

The exit code is 1 if 25 steps of SDE-DPM-Solver++, the stochastic form, differ: MMD² beyond 3 standard errors, or ℓ by
more than 10 %.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch import Tensor

from namm.constraints import Constraint
from namm.evaluation import distance_summary, mmd2_null
from namm.experiments.burgers import BurgersData
from namm.experiments.engine.run import run
from namm.experiments.engine.run_parts import RunParts, device
from namm.experiments.engine.settings import NetworkSettings
from namm.experiments.engine.settings_file import read_yaml
from namm.experiments.presets import Preset, preset
from namm.generative import DDIM, DPMSolver, EulerMaruyama, Mirrored, UniPC
from namm.generative.samplers import Sampler
from namm.maps import IdentityMap

REFERENCE_SEED, SEED = 100, 101
SAMPLERS: dict[str, Sampler] = {
    **{f"SDE-DPM-Solver++ {n}": DPMSolver(n, stochastic=True) for n in (10, 15, 25, 50, 100)},
    **{f"DPM-Solver++ {n}": DPMSolver(n) for n in (5, 10, 15, 25, 50)},
    **{f"UniPC {n}": UniPC(n) for n in (10, 25)},
    **{f"DDIM {n}": DDIM(n) for n in (25, 100)},
}
REFERENCE, JUDGED = "Euler–Maruyama", "SDE-DPM-Solver++ 25"
NETWORK = NetworkSettings(filters=32, multipliers=(1,), blocks=2, attention=(), dropout=0.0, unshuffle=4)
BUDGET = "3000 steps"


@dataclass(frozen=True)
class Outcome:
    """One sampler against the reference, for one model."""

    model: str
    sampler: str
    steps: int
    seconds: float
    distance: float
    distance_ratio: float
    mmd2: float
    standard_error: float

    @property
    def errors(self) -> float:
        """MMD² in standard errors."""
        return self.mmd2 / self.standard_error

    @property
    def agrees(self) -> bool:
        """Whether it cannot be told from the reference by MMD² and its ℓ is within 10 %."""
        return abs(self.errors) <= 3 and abs(self.distance_ratio - 1) <= 0.1


def study(sources: dict[str, Mirrored], rule: Constraint, n: int, reference_steps: int) -> list[Outcome]:
    """Every sampler for every model."""
    found: list[Outcome] = []
    for name, source in sources.items():
        slow = EulerMaruyama(reference_steps)
        reference, seconds = draw(source, n, slow, REFERENCE_SEED)
        distance = distance_summary(rule, reference).mean
        found.append(Outcome(name, REFERENCE, reference_steps, seconds, distance, 1.0, 0.0, 1.0))
        print(found[-1], flush=True)
        for label, sampler in SAMPLERS.items():
            samples, seconds = draw(source, n, sampler, SEED)
            null, own = mmd2_null(reference, samples), distance_summary(rule, samples).mean
            figures = (seconds, own, own / distance, null.mmd2, null.standard_error)
            found.append(Outcome(name, label, sampler.steps, *figures))
            print(found[-1], flush=True)
    return found


def draw(source: Mirrored, n: int, sampler: Sampler, seed: int) -> tuple[Tensor, float]:
    """Samples, on the CPU, and the seconds they took."""
    start, batch = time.perf_counter(), 2500 if device().type == "cuda" else 500
    x = source.sample(n, sampler=sampler, generator=seed, batch_size=batch, progress=False).cpu()
    return x, time.perf_counter() - start


def small() -> Preset:
    """The demo of Burgers' equation with a quarter of its pixels and a network that is quick to evaluate."""
    base = preset("burgers", "demo")
    s = base.settings
    return replace(
        base,
        settings=replace(
            s,
            data=BurgersData(2000, 256, 1024, size=16, dt=0.1),
            map=replace(s.map, train=replace(s.map.train, budget="1000 steps")),
            mdm=replace(s.mdm, network=NETWORK, train=replace(s.mdm.train, budget=BUDGET)),
            finetune=replace(s.finetune, train=replace(s.finetune.train, budget="300 steps")),
            dm=replace(s.dm, equal_compute=False, train=replace(s.dm.train, budget=BUDGET)),
        ),
    )


def trained(chosen: Preset, folder: Path) -> tuple[dict[str, Mirrored], Constraint]:
    """Both models of a run, trained first where they are not."""
    for stage in ("finetune", "dm"):
        run(chosen, folder, until=stage, force=True)
    parts = RunParts.load(folder)
    sources = {"MDM + f": parts.source("mdm", parts.mirror("finetune")), "DM": parts.source("dm", IdentityMap())}
    return sources, parts.rule().cpu()


def figure(found: list[Outcome], path: Path) -> None:
    """ℓ and MMD² against network evaluations, one line per sampler, one column per model."""
    from namm.report.figures import new_figure

    models = list(dict.fromkeys(outcome.model for outcome in found))
    drawing = new_figure(6.4, 4.2 * len(models))
    axes = drawing.subplots(2, len(models), squeeze=False, sharex=True)
    for column, model in enumerate(models):
        upper, lower = axes[:, column]
        upper.axhspan(0.9, 1.1, color="0.9")
        lower.axhspan(-3, 3, color="0.9")
        for kind in dict.fromkeys(label.split()[0] for label in SAMPLERS):
            own = sorted((o for o in found if o.model == model and o.sampler.startswith(kind)), key=lambda o: o.steps)
            upper.plot([o.steps for o in own], [o.distance_ratio for o in own], "o-", label=kind)
            lower.plot([o.steps for o in own], [o.errors for o in own], "o-", label=kind)
        upper.set(title=model, xscale="log", ylabel="mean ℓ / reference's", ylim=(0.5, 2))
        lower.set(xlabel="network evaluations", ylabel="MMD² / standard error", yscale="symlog")
    axes[0, 0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None, chosen: Preset | None = None) -> int:
    """Study, table, figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a run with its stages up to dm; trained here by default")
    parser.add_argument("--n", type=int, default=5000)
    parser.add_argument("--reference-steps", type=int, default=1000)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    folder = options.run or Path("runs/few_steps")
    if chosen is None:
        settings = folder / "settings.yaml"
        if options.run and not settings.exists():
            parser.error(f"{folder} is not a run: it has no settings.yaml")
        chosen = read_yaml(settings) if settings.exists() else small()
    found = study(*trained(chosen, folder), options.n, options.reference_steps)
    table = Table("model", "sampler", "steps", "seconds", "mean ℓ", "ℓ / reference's", "MMD²", "in standard errors")
    for o in found:
        table.add_row(
            *(o.model, o.sampler, str(o.steps), f"{o.seconds:.1f}", f"{o.distance:.3e}", f"{o.distance_ratio:.3f}"),
            *(f"{o.mmd2:+.1e}", f"{o.errors:+.1f}"),
        )
    Console(width=110).print(table)
    if options.json:
        options.json.write_text(json.dumps([asdict(o) | {"errors": o.errors} for o in found], indent=2))
    if options.figure:
        figure(found, options.figure)
    judged = [o for o in found if o.sampler == JUDGED]
    for o in judged:
        slow = next(other for other in found if other.model == o.model)
        faster = slow.seconds / o.seconds
        print(f"{o.model}: {JUDGED} is {faster:.0f} times faster than {slow.sampler}, agrees: {o.agrees}")
    return 0 if all(o.agrees for o in judged) else 1


if __name__ == "__main__":
    raise SystemExit(main())
