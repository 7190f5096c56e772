"""Where in the image f is wrong: at an edge that it treats as something else, or everywhere.

Takes a pipeline that `namm export` wrote and the images of its run, `data/images.h5`, and prints for f(g(x)), on images
that no training has seen, by parts of the image (the first and last K columns and rows, and what is between them),

    rms error       of f(g(x)) against x
    fine            share of x that f(g(x)) keeps in the upper half of each column's wave numbers
    residual        mean |residual| of the rule, where it has one as large as the image but for a row or a column
    smooth          share of the residual's power in the lowest eighth of the wave numbers of columns; of noise 11 %
    KID             between x and x with that part alone taken from f(g(x))

    python benchmarks/edges.py PIPELINE IMAGES [--n 500] [--width 4] [--draw N] [--kid] [--json FILE]

With `--draw N` it prints the residual of N samples, too. KID needs the Inception weights; it and samples take minutes
on a CPU.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from namm import NAMMPipeline
from namm.constraints import Constraint
from namm.datasets import open_store
from namm.datasets.batches import map_images
from namm.evaluation import Extractor, picture_for
from namm.files import write_json

FORMATS = {
    "error": ".2e",
    "fine": ".3f",
    "residual": ".2e",
    "smooth": ".0%",
    "kid": ".1e",
    "samples": ".2e",
    "smooth_samples": ".0%",
}
STEPS, SEED = 50, 0
"""Of the samples."""


def parts(height: int, width: int, k: int) -> dict[str, tuple[slice, slice]]:
    """Slices of rows and columns by name: the whole, then the columns in three parts, then the rows."""
    everything, first, last = slice(None), slice(0, k), slice(-k, None)
    return {
        "everything": (everything, everything),
        f"columns 0 to {k - 1}": (everything, first),
        "columns between": (everything, slice(k, width - k)),
        f"columns {width - k} to {width - 1}": (everything, last),
        f"rows 0 to {k - 1}": (first, everything),
        "rows between": (slice(k, height - k), everything),
        f"rows {height - k} to {height - 1}": (last, everything),
    }


def figures(x: Tensor, made: Tensor, rule: Constraint, k: int) -> dict[str, dict[str, float]]:
    """Error and residual of `made`, f(g(x)), by part, and of whole columns what is left of their detail."""
    found = residuals(made, rule, k)
    for name, (rows, columns) in parts(x.shape[-2], x.shape[-1], k).items():
        was, now = (images[..., rows, columns] for images in (x, made))
        found[name]["error"] = float((now - was).square().mean().sqrt())
        if was.shape[-2] == x.shape[-2] and not math.isnan(kept := fine(was, now)):
            found[name]["fine"] = kept
    return found


def fine(x: Tensor, made: Tensor) -> float:
    """⟨x, made⟩ / ⟨x, x⟩ over the upper half of the wave numbers of columns; NaN where x has nothing there."""
    upper = torch.fft.fftfreq(x.shape[-2]).abs() >= 1 / 4
    was, now = (torch.fft.fft(images, dim=-2)[..., upper, :] for images in (x, made))
    return float((was.conj() * now).real.sum() / was.abs().square().sum())


def residuals(x: Tensor, rule: Constraint, k: int) -> dict[str, dict[str, float]]:
    """Mean |residual| of images by part, of whole columns also how much is smooth; nothing where there is no such."""
    found: dict[str, dict[str, float]] = {name: {} for name in parts(x.shape[-2], x.shape[-1], k)}
    if not rule.has_residual:
        return found
    residual = rule.residual(x)
    height, width = residual.shape[-2:]
    if height < x.shape[-2] - 1 or width < x.shape[-1] - 1:
        return found
    for each, (rows, columns) in zip(found.values(), parts(height, width, k).values(), strict=True):
        part = residual[..., rows, columns]
        each["residual"] = float(part.abs().mean())
        if part.shape[-2] == height and part.any():
            each["smooth"] = smooth(part)
    return found


def smooth(part: Tensor) -> float:
    """Share of the power that is in the lowest eighth of the wave numbers of columns."""
    power = torch.fft.fft(part, dim=-2).abs().square()
    low = torch.fft.fftfreq(part.shape[-2]).abs() < 1 / 16
    return float(power[..., low, :].sum() / power.sum())


def kids(x: Tensor, made: Tensor, rule: Constraint, k: int) -> dict[str, float]:
    """KID between x and x with one part of it replaced."""
    extractor, found = Extractor(picture_for(rule)), {}
    before = features(extractor, x)
    for name, (rows, columns) in parts(x.shape[-2], x.shape[-1], k).items():
        mixed = x.clone()
        mixed[..., rows, columns] = made[..., rows, columns]
        found[name] = moved(before, features(extractor, mixed))
    return found


def features(extractor: Extractor, images: Tensor) -> Tensor:
    """(N, F) in float64."""
    return torch.cat(list(extractor.chunks(images))).double()


def moved(before: Tensor, after: Tensor) -> float:
    """KID between features (N, F) of the same images before and after a change, from pairs of different images alone.

    Chance moves both sets alike and cancels, so that unlike a difference of two KIDs it tells small changes.
    """
    n, size = before.shape

    def mean(a: Tensor, b: Tensor) -> Tensor:
        kernel = (a @ b.T / size + 1) ** 3
        return (kernel.sum() - kernel.diagonal().sum()) / (n * (n - 1))

    return float(mean(before, before) + mean(after, after) - 2 * mean(before, after))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("--n", type=int, default=500)
    parser.add_argument("--width", type=int, default=4, metavar="K")
    parser.add_argument("--draw", type=int, default=0, metavar="N")
    parser.add_argument("--kid", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    pipe = NAMMPipeline.from_pretrained(options.pipeline)
    if pipe.g is None or pipe.f is None:
        parser.error(f"{options.pipeline} holds a model of plain images, without maps.")
    with open_store(options.images) as store:
        x = torch.as_tensor(store["test"][: options.n])
    if options.kid and len(x) < 2:
        parser.error("KID needs at least two images.")
    if options.draw < 0:
        parser.error(f"--draw {options.draw} is no number of samples.")
    if not 0 < 2 * options.width < min(x.shape[-2:]):
        parser.error(f"--width {options.width} leaves nothing between the edges of images {tuple(x.shape[-2:])}.")
    made = torch.from_numpy(map_images(nn.Sequential(pipe.g, pipe.f).eval(), x, x.device, "f∘g"))
    found = figures(x, made, pipe.constraint, options.width)
    if options.kid:
        for name, apart in kids(x, made, pipe.constraint, options.width).items():
            found[name]["kid"] = apart
    if options.draw:
        samples, _ = pipe.mirrored.sample_pairs(options.draw, sampler=pipe.sampler(STEPS), generator=SEED)
        for name, each in residuals(samples, pipe.constraint, options.width).items():
            found[name] |= {"samples" if key == "residual" else f"{key}_samples": value for key, value in each.items()}
    table = Table("part", "rms error", "fine", "residual", "of it smooth", "KID", "of samples", "of it smooth")
    for name, each in found.items():
        shown = (f"{value:{how}}" if (value := each.get(key)) is not None else "–" for key, how in FORMATS.items())
        table.add_row(name, *shown)
    Console(width=120).print(table)
    if options.json:
        write_json(options.json, {"images": len(x), "samples": options.draw, "parts": found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
