"""GPU memory of posterior samples at the paper's largest size: 32 of 128×256×2, by mirror DPS.

The score network and the maps are those of the divergence-free experiment, untrained: what they hold does not depend on
what they have learned. The first and the last state of each image are measured, as in the paper.

    python benchmarks/posterior_memory.py [--n 32] [--batch-size N ...] [--steps 3] [--json FILE] [--quick]

Prints the peak for the batch size that `namm assimilate` takes by itself and for those asked for, in bf16 and in plain
float32, and the seconds of a step. The exit code is 1 if the first, in the default precision, needs more than 40 GiB.
`--quick` runs it in miniature, without a GPU, where memory is not counted.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from namm.experiments import build
from namm.experiments.assimilation import Sampling
from namm.experiments.assimilation_tasks import named_operator, papers_observation
from namm.experiments.data_settings import DivergenceData
from namm.experiments.presets import preset
from namm.experiments.settings import Settings
from namm.generative import Mirrored
from namm.inverse import DDIMSteps, DPSGuidance, GaussianNoise, sample_posterior
from namm.numerics import arithmetic
from namm.precision import Precision

LIMIT = 40.0  # GiB


@dataclass(frozen=True)
class Found:
    """What n samples took."""

    batch_size: int
    precision: str
    gib: float | None
    seconds_per_step: float
    finite: bool


def experiment(quick: bool) -> Settings:
    """The divergence-free experiment of the paper, or a miniature of it."""
    s = preset("divergence", "paper").settings
    if not quick:
        return s
    data = DivergenceData(size=8, rows=1, columns=2)
    network = replace(s.mdm.network, filters=4, multipliers=(1, 2), blocks=1, attention=())
    maps = replace(s.map, f=replace(s.map.f, filters=4, blocks=1), g=replace(s.map.g, filters=4))
    return replace(s, data=data, map=maps, mdm=replace(s.mdm, network=network))


def measure(s: Settings, n: int, batch_size: int, steps: int, precision: Precision, device: torch.device) -> Found:
    """Draw n samples by a few steps."""
    shape = build.dataset(s.data).shape
    model = build.diffusion(s.mdm.network, s.mdm.diffusion, shape, seed=0)
    prior = Mirrored(model, build.mirror(s.map, shape[0])).to(device)
    operator = named_operator(papers_observation(s.data), s.data, shape)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    with arithmetic(precision, device):
        found = sample_posterior(
            prior,
            operator(torch.zeros(1, *shape)).to(device),
            operator,
            GaussianNoise(std=0.2),
            n=n,
            guidance=DPSGuidance(1e-3),
            steps=DDIMSteps(steps),
            batch_size=batch_size,
            generator=0,
            progress=False,
        )
        finite = bool(found.samples.isfinite().all())
    seconds = (time.perf_counter() - start) / steps
    gib = torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else None
    return Found(batch_size, precision, gib, seconds, finite)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=32)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[32])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() and not options.quick:
        parser.error("there is no GPU here; --quick runs it in miniature")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    s = experiment(options.quick)
    default = Sampling().together(build.dataset(s.data).shape)
    rows = []
    for size in dict.fromkeys([default, *options.batch_size]):
        for precision in ("auto", "fp32"):
            rows.append(measure(s, options.n, size, options.steps, precision, device))
            row = rows[-1]
            memory = "not counted" if row.gib is None else f"{row.gib:.1f} GiB"
            print(f"{options.n} samples, {size} together, {precision}: {memory}, {row.seconds_per_step:.2f} s a step")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))
    return 0 if rows[0].gib is None or rows[0].gib <= LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main())
