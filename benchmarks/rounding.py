"""What bfloat16 and TF32 inside f cost in ℓ, part by part.

f is evaluated on g(x) of validation images with some of its parts in bfloat16, as autocast would have them, its tail in
TF32 if that is one of them, and the others in float32. What that adds to the float32 output is rounding, δ; it breaks
the rule by ℓ(x + δ), which no training can undo.

    python benchmarks/rounding.py RUN [--n 64] [--json FILE]

RUN is a run with a trained map whose f has a skip, such as that of `make demo`. "Everything but the tail" is what the
network would do if autocast decided; "down, middle, up, tail" is what it does in a training on a GPU, and nothing is
rounded where it hands over images. TF32 is imitated: of features and weights 10 bits are kept.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from namm.datasets import open_store
from namm.errors import UsageError
from namm.experiments.data_stage import images_file
from namm.experiments.trained import Trained
from namm.files import write_json
from namm.maps.resnet import ResNet
from namm.numerics import at_least_float32

PARTS = ("head", "down", "middle", "up")
CASES = {
    "everything but the tail": PARTS,
    "head": PARTS[:1],
    "down, middle, up": PARTS[1:],
    "down, middle, up, tail": (*PARTS[1:], "tail"),
    "tail": ("tail",),
    "middle": ("middle",),
    "nothing": (),
}


def rounded(f: ResNet, y: Tensor, parts: Sequence[str]) -> Tensor:
    """f(y) with `parts` in bfloat16."""

    def through(name: str, h: Tensor) -> Tensor:
        with torch.autocast(y.device.type, torch.bfloat16, enabled=name in parts):
            return at_least_float32(f.get_submodule(name)(h))

    head = through("head", y)
    h = through("up", through("middle", through("down", head)))
    out = _tail_in_tf32(f, h + head) if "tail" in parts else f.tail(h + head)
    return f.activation(out + y if f.residual else out)


def _tail_in_tf32(f: ResNet, h: Tensor) -> Tensor:
    weights = dict(f.tail.named_parameters()) | {"weight": in_tf32(f.tail.weight)}
    out: Tensor = torch.func.functional_call(f.tail, weights, (in_tf32(h),))
    return out


def in_tf32(x: Tensor) -> Tensor:
    """`x` with the 10 bits after the first that products in TF32 keep, rounded to the nearest."""
    return ((x.detach().view(torch.int32) + 2**12) & -(2**13)).view(torch.float32)


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--n", type=int, default=64, help="validation images")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    trained = Trained.load(options.run)
    mirror, rule = trained.mirror("map").to("cpu"), trained.rule().to("cpu")
    if not (isinstance(mirror.f, ResNet) and mirror.f.skip):
        raise UsageError(f"the f of {options.run} has no skip: what its head rounds does not reach the tail.")
    with open_store(images_file(options.run / "data")) as store:
        x = torch.as_tensor(store["val"][: options.n])
    y = mirror.to_mirror(x)
    exact = mirror.to_data(y)
    found = {}
    table = Table("rounded", "rms of δ", "ℓ(x + δ)", "ℓ(f(g(x)))")
    for case, parts in CASES.items():
        ours = rounded(mirror.f, y, parts)
        delta = ours - exact
        figures = [float(delta.square().mean().sqrt()), *(float(rule(z).mean()) for z in (x + delta, ours))]
        found[case] = dict(zip(("rms", "noise", "distance"), figures, strict=True))
        table.add_row(case, *(f"{figure:.2e}" for figure in figures))
    Console(width=100).print(table)
    print(f"ℓ of the data themselves: {float(rule(x).mean()):.2e}; {len(x)} images")
    if options.json:
        write_json(options.json, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
