"""Which part of f learns which rule? Maps of one budget, with one part of the inverse map left out at a time.

    python benchmarks/inverse_maps.py [--only burgers ink] [--seed 2] [--out runs/inverse_maps]

For every rule of `every_rule.py` the stage `map` of its preset `demo` is trained with

    paper       the paper's f (`ResNet`) with 32 filters and a linear end
    local       `RuleNet` without its spectral and global parts
    spectral    local and spectral
    global      local and global
    rulenet     all three: the default
    informed    `RuleNet`, whose estimate is then corrected by ∇ℓ and ℓ there: an f that is shown the rule

g, noise, σ_max, λ, steps and images are the same for all. Printed: what f leaves of the ℓ that errors of σ_max add,
ℓ(f(g(x))) over ℓ of those errors, cycle error, total variation over the data's, seconds. A cell that is there is not
trained again.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor, nn

import every_rule
from every_rule import DIGITS, FIVE, settings_of
from namm.clock import clock
from namm.constraints import Constraint
from namm.datasets import open_store
from namm.experiments.engine import build, build_models
from namm.experiments.engine.run import run
from namm.experiments.engine.settings import MapSettings
from namm.experiments.engine.stages.data import images_file
from namm.experiments.engine.stages.map import choose_numbers, measure
from namm.formatting import format_number, print_table
from namm.maps import MirrorMap, ResNet, RuleNet
from namm.training.train_map import train_map
from namm.training.tune import calibrate

VARIANTS = ("paper", "local", "spectral", "global", "rulenet", "informed")


@dataclass(frozen=True)
class Options:
    """Which rules, kinds of f and seed."""

    only: tuple[str, ...] = (*FIVE, *DIGITS, "darcy")
    variants: tuple[str, ...] = VARIANTS
    seed: int = 2
    out: Path = Path("runs/inverse_maps")
    quick: bool = False
    """A few steps and images: only to see that everything runs."""


class Informed(nn.Module):
    """x̂ = RuleNet(y), then x̂ + tail(SiLU(head(x̂, ∇ℓ(x̂)))) + a ℓ ∇ℓ / ‖∇ℓ‖², ∇ℓ in units of its size on the data."""

    size: Tensor

    def __init__(self, f: RuleNet, mirror: MirrorMap, rule: Constraint, filters: int = 24) -> None:
        super().__init__()
        self.f = f
        self.outside = (mirror, rule)  # in a tuple: neither is a part of this network
        channels = f.channels
        self.head = nn.Conv2d(2 * channels, filters, 3, padding=1)
        self.tail = nn.Conv2d(filters, channels, 3, padding=1)
        self.step = nn.Parameter(torch.zeros(()))
        self.register_buffer("size", torch.ones(()))
        for parameter in self.tail.parameters():
            nn.init.zeros_(parameter)

    def distance_and_gradient(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """ℓ (B,) and ∇ℓ (B, C, H, W) at u, taken as they are: nothing is differentiated through them."""
        mirror, rule = self.outside
        with torch.enable_grad():
            u = u.detach().requires_grad_()
            distance = rule(mirror.unstandardise(u))
            (gradient,) = torch.autograd.grad(distance.sum(), u)
        return distance.detach(), gradient

    def forward(self, y: Tensor) -> Tensor:
        """(B, C, H, W) -> the same shape."""
        estimate = self.f(y)
        distance, gradient = self.distance_and_gradient(estimate)
        polyak = distance / gradient.square().sum((1, 2, 3)).clamp_min(1e-30)
        seen = torch.cat([estimate, gradient / self.size], dim=1)
        update: Tensor = self.tail(nn.functional.silu(self.head(seen)))
        return estimate + update - self.step * polyak[:, None, None, None] * gradient


def without(f: RuleNet, *, spectral: bool = False, whole: bool = False) -> None:
    """Leave parts out: their last weights are zero and stay so."""
    parts: list[nn.Parameter] = []
    if spectral:
        parts += [parameter for name, parameter in f.named_parameters() if name.endswith("spectrum")]
    if whole:
        parts += list(f.whole.last.parameters())
    for parameter in parts:
        nn.init.zeros_(parameter)
        parameter.requires_grad_(False)


def learn(variant: str, name: str, options: Options) -> dict[str, Any]:
    """The figures of one kind of f on one rule."""
    run_options = every_rule.Options(out=options.out, quick=options.quick)
    chosen = settings_of(name, options.seed, run_options)
    folder = options.out / f"{name}-{options.seed}"
    run(chosen, folder, until="data", log=lambda line: None)
    rule = build.rule_of(chosen.settings.data, folder.joinpath)
    settings: MapSettings = chosen.settings.map
    with open_store(images_file(folder / "data")) as store:
        data = store["train"]
        mirror = build_models.mirror(settings, data).to(build.device())
        assert isinstance(mirror.f, RuleNet)
        numbers = choose_numbers(replace(settings, tune=False), mirror, data, rule)
        noise = numbers.noise(settings)
        if variant == "paper":
            torch.manual_seed(options.seed)
            boundary = mirror.f.config["boundary"]
            mirror.f = ResNet(mirror.f.channels, filters=32, activation="none", boundary=boundary).to(mirror.mean)
        elif variant == "informed":
            calibrate(mirror, data, rule, noise, settings.train.seed)
            torch.manual_seed(options.seed)
            informed = Informed(mirror.f, mirror, rule)
            _, gradient = informed.distance_and_gradient(mirror.standardise(torch.as_tensor(data[:256])))
            informed.size.copy_(gradient.square().mean().sqrt())
            mirror.f = informed.to(mirror.mean)
        else:
            without(mirror.f, spectral=variant in ("local", "global"), whole=variant in ("local", "spectral"))
        start = clock(build.device())
        trained = train_map(
            data,
            rule,
            mirror,
            noise=noise,
            weights=build_models.weights(settings.weights, numbers.unit),
            regulariser=build_models.regulariser(settings),
            settings=settings.train,
            progress=False,
        )
        seconds = clock(build.device()) - start
        figures = measure(mirror, rule, store["val"], noise, settings.train.seed)
    weights = sum(parameter.numel() for parameter in mirror.f.parameters() if parameter.requires_grad)
    return {**figures, "seconds": seconds, "steps": trained.steps, "parameters": weights}


def cell(variant: str, name: str, options: Options) -> dict[str, Any]:
    """The figures, as they were kept or measured now."""
    path = options.out / f"{name}-{options.seed}-{variant}.json"
    if not path.exists():
        figures = learn(variant, name, options)
        path.write_text(json.dumps(figures, indent=1))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def main(arguments: Sequence[str]) -> int:
    """Train, measure, print."""
    options = tyro.cli(Options, args=list(arguments))
    options.out.mkdir(parents=True, exist_ok=True)
    table = []
    for name in options.only:
        for variant in options.variants:
            print(f"{name}, {variant}", flush=True)
            found = cell(variant, name, options)
            added = found["distance_noise"] - found["distance_data"]
            left = (found["distance_map"] - found["distance_data"]) / added
            cycle = (found["distance_cycle"] - found["distance_data"]) / added
            figures = (left, cycle, found["cycle_error"], found["total_variation"])
            cells = [format_number(value, ".3g") for value in figures]
            table.append((name, variant, *cells, f"{found['parameters']}", f"{found['seconds']:.0f}"))
    titles = ["rule", "f", "ℓ left of σ_max", "ℓ(f(g(x)))", "cycle error", "TV", "parameters", "s"]
    print_table(titles, table, width=120)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
