"""How many steps of the sampler quality needs: both models of a run against held-out images, by several numbers.

    python benchmarks/sampler_steps.py RUN [--steps 25 50 100] [--n 10000] [--kid] [--json FILE]

RUN has its stages up to `finetune` and `dm`. Prints mean ℓ, √MMD² and the total variation over the data's for the run's
own kind of sampler, and KID with --kid, which needs the Inception weights. Then what the steps alone do: the variance
of samples over the data's where the network is perfect, for Gaussian data of several variances.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from namm.datasets import open_store
from namm.evaluation import Extractor, compare, kid, picture_for
from namm.evaluation.rows import held
from namm.experiments import build
from namm.experiments.data_stage import images_file
from namm.experiments.settings import SamplerSettings
from namm.experiments.trained import Trained, device
from namm.files import write_json
from namm.generative import Mirrored
from namm.generative.samplers import Sampler
from namm.generative.schedules import VPSDE
from namm.maps import IdentityMap
from namm.numerics import arithmetic

VARIANCES = (0.01, 0.1, 1.0, 10.0, 100.0)
BATCH = 256


@dataclass(frozen=True)
class Row:
    """What one model reaches by one number of steps."""

    model: str
    steps: int
    distance: float
    mmd: float
    total_variation: float
    kid: float | None


@dataclass(frozen=True)
class Gaussian:
    """A process whose data are N(0, variance), with its exact denoiser."""

    variance: float
    t_min: float
    sde: VPSDE

    def denoise(self, y_t: Tensor, t: Tensor) -> Tensor:
        """E[y(0) | y(t)] = v m y(t) / (v m² + s²)."""
        m, s = self.sde.marginal(t)
        return self.variance * m / (self.variance * m.square() + s.square()) * y_t

    def score(self, y_t: Tensor, t: Tensor) -> Tensor:
        """−y(t) / (v m² + s²)."""
        m, s = self.sde.marginal(t)
        return -y_t / (self.variance * m.square() + s.square())


def variance_left(sampler: Sampler, process: Gaussian) -> float:
    """Variance of the samples over the data's, exactly: a sample is linear in the noises of its steps."""
    noises = torch.eye(sampler.steps + 1, dtype=torch.double)
    each: Any = lambda step: noises[step].reshape(-1, 1, 1, 1).clone()  # noqa: E731
    weights = sampler(process, each)
    return float(weights.square().sum() / process.variance)


def study(parts: Trained, samplers: Sequence[SamplerSettings], n: int, extractor: Extractor | None) -> Iterator[Row]:
    """Every number of steps for both models."""
    settings, rule = parts.settings.evaluate, parts.rule()
    how: dict[str, Any] = {"size": min(settings.subset, n), "seed": settings.seed}
    sources = {"MDM + f": parts.source("mdm", parts.mirror("finetune")), "DM": parts.source("dm", IdentityMap())}
    with open_store(images_file(parts.folder("data"))) as store:
        reference = held(store[settings.reference])
        for chosen in samplers:
            for name, source in sources.items():
                x = draw(source, n, chosen, settings.seed, parts)
                found = compare(x, reference, rule, subsets=settings.mmd_subsets, device=device(), **how)
                apart = kid(reference, x, extractor, subsets=settings.kid_subsets, **how)[0] if extractor else None
                yield Row(name, chosen.steps, found.distance.mean, found.mmd[0], found.total_variation, apart)


def draw(source: Mirrored, n: int, chosen: SamplerSettings, seed: int, parts: Trained) -> Tensor:
    """Samples, on the CPU, computed as the run computes its own."""
    with arithmetic(parts.settings.mdm.train.precision, device()):
        options: dict[str, Any] = build.sampling(chosen)
        return source.sample(n, generator=seed, batch_size=BATCH, progress=False, **options).cpu()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, nargs="+", default=[25, 50, 100])
    parser.add_argument("--n", type=int, default=10_000)
    parser.add_argument("--kid", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    parts = Trained.load(options.run)
    samplers = [replace(parts.settings.evaluate.sampler, steps=steps) for steps in options.steps]
    rows: list[Row] = []
    with TemporaryDirectory() as folder:  # keeps the features of the reference
        extractor = Extractor(picture_for(parts.rule()), cache=folder, device=device()) if options.kid else None
        for row in study(parts, samplers, options.n, extractor):
            rows.append(row)
            print(row, flush=True)
    table = Table("model", "steps", "mean ℓ", "√MMD²", "total variation", "KID · 10⁴")
    for row in rows:
        apart = "–" if row.kid is None else f"{1e4 * row.kid:.2f}"
        table.add_row(
            row.model, str(row.steps), f"{row.distance:.3e}", f"{row.mmd:.4f}", f"{row.total_variation:.4f}", apart
        )
    Console(width=100).print(table)
    process = parts.settings.mdm.diffusion
    sde = VPSDE(process.beta_min, process.beta_max)
    left = {
        chosen.steps: [variance_left(build.sampler(chosen), Gaussian(v, process.t_min, sde)) for v in VARIANCES]
        for chosen in samplers
    }
    table = Table("steps", *(f"variance {v:g}" for v in VARIANCES))
    for steps, values in left.items():
        table.add_row(str(steps), *(f"{value:.4f}" for value in values))
    Console(width=100).print(table)
    if options.json:
        write_json(options.json, {"rows": [asdict(row) for row in rows], "variances": VARIANCES, "left": left})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
