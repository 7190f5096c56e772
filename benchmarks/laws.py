"""The law of images after polishing, repairing and conditioning, on sets where all of these are known.

    python benchmarks/laws.py [--only ellipse] [--n 10000] [--steps 1500] [--seed 0]

Images of two or three pixels obey a rule: they lie on an ellipse, a parabola or a sphere, with a law of their own. A
model's density p is that law with Gaussian errors. Samples of p are then brought onto the set. Which law they should
have there, a user may mean in two ways, and these differ:

    data         the law of the images on the set, before the errors
    p | r = 0    p restricted to the set with the weight 1/|∇r| (the co-area formula): what is left of p where
                 |r| < ε, ε → 0. It depends on how r is written: shown for r₁ and for r₂ = r₁ · exp(last pixel), which
                 vanish on the same set.

Neither is what `polish` gives. The nearest point does not depend on how r is written, and brings to each point of the
set what p holds along the normal there,

    polished(u) = ∫ p(c(u) + n ν(u)) J(u, n) dn,      J the volume between neighbouring normals,

over the n from which c(u) is nearest. All of these are integrals over one parameter u, computed here in float64.
Samples: as drawn; polished; repaired by a map that was trained on the data; repaired and polished; those with
|r₁| < ε and those with |r₂| < ε. Shown is the Wasserstein-1 distance W₁ along the set from their law to each known one,
over the errors' standard deviation σ, beside that of as many samples of the law itself.

Asked: polished samples are at the floor of their integral, and those near the set at that of their p | r = 0. The
exit code is 1 where they are further than three floors.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.special
import torch
import tyro
from numpy.typing import NDArray
from torch import Tensor, nn

import namm
from namm.formatting import format_number, print_table
from namm.maps import ICNN

Values = NDArray[np.float64]

FIBRE, REACH = 64, 8.0
"""Nodes along a normal, and standard deviations of the errors after which p is none."""
SHELL = 0.02
"""ε of |r| < ε."""
REPEATS = 8
"""Sets of samples whose mean distance to their own law is the floor."""


@dataclass(frozen=True)
class Options:
    """Which sets, how many samples, how long the map is trained."""

    only: tuple[str, ...] = ("ellipse", "parabola", "sphere")
    n: int = 10_000
    steps: int = 1500
    seed: int = 0


@dataclass(frozen=True)
class Toy:
    """A set c(u) with a law on it, and what is known of both.

    Attributes:
        u: Parameters, evenly spaced (K,).
        law: Density of the data in u (K,), up to a factor.
        curve: u → points (K, D), float64, differentiable.
        residual: r₁: images (B, D, 1, 1) → (B, 1).
        parameter: Points (N, D) → u (N,), of any point of space.
        inside: u → how far along the normal −∇r₁ a point still has c(u) as its nearest one.
        closed: Whether u goes round.
        turned: Whether the set is the curve turned about the last axis; p is then a mean over angles.
    """

    u: Values
    law: Values
    curve: Callable[[Tensor], Tensor]
    residual: Callable[[Tensor], Tensor]
    parameter: Callable[[Values], Values]
    inside: Callable[[Values], Values]
    sigma: float
    closed: bool = False
    turned: bool = False

    def rule(self, written: str = "r₁") -> namm.Constraint:
        """The rule, as r₁ or as r₂."""

        def residual(x: Tensor) -> Tensor:
            r = self.residual(x)
            return r if written == "r₁" else r * x[:, -1].flatten(1).exp()

        return namm.constraint(lambda x: residual(x).abs().mean(1), residual=residual, name=written)

    # Known laws: densities in u, (K,)

    @cached_property
    def points(self) -> Values:
        """c(u), (K, D), of the curve that is turned where one is: (distance from the axis, height)."""
        return self.curve(torch.from_numpy(self.u)).numpy()

    @cached_property
    def speed(self) -> Values:
        """|c'(u)|, (K,)."""
        u = torch.from_numpy(self.u)
        tangent: Tensor = torch.func.jvp(self.curve, (u,), (torch.ones_like(u),))[1]
        found: Values = tangent.norm(dim=1).numpy()
        return found

    def slope(self, written: str) -> Values:
        """∇r at c(u), (K, D) of the curve's plane."""
        flat = torch.from_numpy(self.points).requires_grad_()
        images = torch.cat([torch.zeros_like(flat[:, :1]), flat], 1) if self.turned else flat
        rule = self.rule(written)
        (gradient,) = torch.autograd.grad(rule.residual(images[:, :, None, None]).sum(), flat)
        return gradient.numpy()

    def density(self, points: Values) -> Values:
        """p at points of the curve's plane, (…, D) → (…)."""
        weights = normalised(self.law)
        square = sum(np.subtract.outer(points[..., d], self.points[:, d]) ** 2 for d in range(2))
        kernel = np.exp(-square / (2 * self.sigma**2)) / (2 * np.pi * self.sigma**2)
        if self.turned:  # the mean over angles of a Gaussian about the axis is a Bessel function
            product = np.multiply.outer(points[..., 0], self.points[:, 0]) / self.sigma**2
            kernel *= scipy.special.i0e(product) / np.sqrt(2 * np.pi) / self.sigma
        found: Values = kernel @ weights
        return found

    def conditioned(self, written: str) -> Values:
        """p | r = 0: p · (area of the set) / |∇r|."""
        around = self.points[:, 0] if self.turned else 1.0
        return self.density(self.points) * self.speed * around / np.linalg.norm(self.slope(written), axis=1)

    def polished(self) -> Values:
        """What p holds along each normal; not normalised: its integral over u is 1 if the normals fill space."""
        gradient = self.slope("r₁")
        normal = gradient / np.linalg.norm(gradient, axis=1, keepdims=True)
        reach = REACH * self.sigma
        nodes, weights = np.polynomial.legendre.leggauss(FIBRE)
        low = -np.minimum(self.inside(self.u), reach)
        n = low[:, None] + (reach - low[:, None]) * (nodes + 1) / 2  # (K, nodes)
        points = self.points[:, None] + n[..., None] * normal[:, None]
        turning = np.gradient(normal, self.u, axis=0, edge_order=2)  # ν'(u): how neighbouring normals spread
        tangent = np.gradient(self.points, self.u, axis=0, edge_order=2)
        curvature = (turning * tangent).sum(1) / (tangent**2).sum(1)
        volume = self.speed[:, None] * np.abs(1 + n * curvature[:, None])
        if self.turned:
            volume = volume * 2 * np.pi * np.abs(points[..., 0])
        found: Values = (self.density(points) * volume * weights).sum(1) * (reach - low) / 2
        return found

    # Samples

    def on_the_set(self, n: int, rng: np.random.Generator, law: Values | None = None) -> Tensor:
        """n images of a law on the set, of the data's by default: (n, D, 1, 1)."""
        u = torch.from_numpy(draw(self.u, self.law if law is None else law, n, rng))
        points = self.curve(u)
        if self.turned:
            angle = torch.from_numpy(rng.uniform(0, 2 * np.pi, n))
            points = torch.stack([points[:, 0] * angle.cos(), points[:, 0] * angle.sin(), points[:, 1]], 1)
        return points[:, :, None, None]

    def drawn(self, n: int, rng: np.random.Generator) -> Tensor:
        """n images of p."""
        x = self.on_the_set(n, rng)
        return x + self.sigma * torch.from_numpy(rng.standard_normal(x.shape))

    def near(self, written: str, n: int, rng: np.random.Generator) -> Tensor:
        """n images of p with |r| < ε."""
        rule, found = self.rule(written), self.drawn(0, rng)
        while len(found) < n:
            x = self.drawn(10 * n, rng)
            found = torch.cat([found, x[rule(x) < SHELL]])
        return found[:n]

    def apart(self, images: Tensor, law: Values) -> float:
        """Wasserstein-1 distance along the set, in standard deviations of the errors, of images to a law."""
        u = np.sort(self.parameter(images.detach().flatten(1).double().numpy()))
        return self.between(np.searchsorted(u, self.u, side="right") / len(u), cumulative(law))

    def between(self, one: Values, other: Values) -> float:
        """The same of two distribution functions at u: ∫ |F − G − m| ds, m the median where u goes round."""
        ds = self.speed * np.gradient(self.u)
        gap = one - other
        if self.closed:
            order = np.argsort(gap)
            gap = gap - gap[order][np.searchsorted(np.cumsum(ds[order]), ds.sum() / 2)]
        return float((np.abs(gap) * ds).sum() / self.sigma)

    def floor(self, law: Values, n: int, rng: np.random.Generator) -> float:
        """Mean distance of n samples of a law to it."""
        return float(np.mean([self.apart(self.on_the_set(n, rng, law), law) for _ in range(REPEATS)]))


def normalised(law: Values) -> Values:
    """A density's weights at evenly spaced points."""
    return law / law.sum()


def cumulative(law: Values) -> Values:
    """The distribution function at the points themselves."""
    weights = normalised(law)
    total: Values = np.cumsum(weights) - weights / 2
    return total


def draw(u: Values, law: Values, n: int, rng: np.random.Generator) -> Values:
    """n parameters of a law, by its inverse distribution function."""
    step = u[1] - u[0]
    edges = np.append(u - step / 2, u[-1] + step / 2)
    return np.interp(rng.random(n), np.append(0.0, np.cumsum(normalised(law))), edges)


# The sets


def ellipse(sigma: float = 0.2, a: float = 2.0, b: float = 1.0, k: int = 720) -> Toy:
    """(x/a)² + (y/b)² = 1, with two bumps of unequal height."""
    u = (np.arange(k) + 0.5) * 2 * np.pi / k
    return Toy(
        u=u,
        law=np.exp(3 * np.cos(2 * (u - 0.6)) + 0.5 * np.cos(u)),
        curve=lambda u: torch.stack([a * u.cos(), b * u.sin()], 1),
        residual=lambda x: ((x[:, 0] / a).square() + (x[:, 1] / b).square() - 1).flatten(1),
        parameter=lambda x: np.arctan2(x[:, 1] / b, x[:, 0] / a) % (2 * np.pi),
        inside=lambda u: b**2 * np.hypot(np.cos(u) / a, np.sin(u) / b),  # to the long axis
        sigma=sigma,
        closed=True,
    )


def parabola(sigma: float = 0.2, k: int = 720) -> Toy:
    """y = x², with two bumps."""
    u = np.linspace(-3, 3, k)
    return Toy(
        u=u,
        law=0.6 * np.exp(-0.5 * ((u + 0.7) / 0.25) ** 2) / 0.25 + 0.4 * np.exp(-0.5 * ((u - 0.8) / 0.35) ** 2) / 0.35,
        curve=lambda u: torch.stack([u, u.square()], 1),
        residual=lambda x: (x[:, 0].square() - x[:, 1]).flatten(1),
        parameter=lambda x: x[:, 0],
        inside=lambda u: np.sqrt(1 + 4 * u**2) / 2,  # to the axis of symmetry
        sigma=sigma,
    )


def sphere(sigma: float = 0.2, k: int = 360) -> Toy:
    """x² + y² + z² = 1, with a band and a cap about the z axis; u is the angle from it."""
    u = (np.arange(k) + 0.5) * np.pi / k
    return Toy(
        u=u,
        law=np.sin(u) * (np.exp(12 * (np.cos(u) - 1)) + 0.4 * np.exp(-0.5 * ((u - 1.9) / 0.2) ** 2)),
        curve=lambda u: torch.stack([u.sin(), u.cos()], 1),
        residual=lambda x: (x.square().sum(1) - 1).flatten(1),
        parameter=lambda x: np.arctan2(np.hypot(x[:, 0], x[:, 1]), x[:, 2]),
        inside=np.ones_like,  # to the centre
        sigma=sigma,
        turned=True,
    )


TOYS: dict[str, Callable[[], Toy]] = {"ellipse": ellipse, "parabola": parabola, "sphere": sphere}


# A map for images of one pixel a channel


class Pointwise(nn.Module):
    """f: the image plus three hidden layers of it."""

    def __init__(self, channels: int, width: int = 64) -> None:
        super().__init__()
        sizes = (channels, width, width, width)
        hidden = [part for a, b in pairwise(sizes) for part in (nn.Conv2d(a, b, 1), nn.SiLU())]
        self.layers = nn.Sequential(*hidden, nn.Conv2d(width, channels, 1))

    def forward(self, y: Tensor) -> Tensor:
        """(B, C, 1, 1) → (B, C, 1, 1)."""
        return y + self.layers(y)


def trained(toy: Toy, options: Options, rng: np.random.Generator) -> namm.MirrorMap:
    """g and f, trained on images of the data's law and errors as large as the model's."""
    torch.manual_seed(options.seed)
    data = toy.on_the_set(options.n, rng).float()
    channels = data.shape[1]
    mirror = namm.MirrorMap(ICNN(channels, layers=2, filters=32, kernel_size=1), Pointwise(channels))
    settings = namm.TrainSettings(
        budget=f"{options.steps} steps",
        batch_size=256,
        learning_rate=3e-3,
        schedule="cosine",
        warmup_steps=20,
        clip=1.0,
        ema_decay=0.99,
        seed=options.seed,
    )
    noise = namm.UniformNoise(2 * toy.sigma)
    namm.train_map(mirror, data, toy.rule(), noise=noise, weights=namm.Weights(1.0), settings=settings, progress=False)
    return mirror


# The table


def measure(toy: Toy, options: Options) -> tuple[list[tuple[Any, ...]], list[str]]:
    """Rows of the table, and what was asked for and is not met."""
    rng = np.random.default_rng(options.seed)
    laws = {
        "data": toy.law,
        "p | r₁ = 0": toy.conditioned("r₁"),
        "p | r₂ = 0": toy.conditioned("r₂"),
        "polished": toy.polished(),
    }
    drawn = toy.drawn(options.n, rng)
    repaired = torch.as_tensor(namm.repair(drawn, trained(toy, options, rng)).images)
    samples = {
        "as drawn": drawn,
        "polished": namm.polish(drawn, toy.rule()).images,
        "repaired": repaired,
        "repaired, polished": namm.polish(repaired.double(), toy.rule()).images,
        "|r₁| < ε": toy.near("r₁", options.n, rng),
        "|r₂| < ε": toy.near("r₂", options.n, rng),
    }
    floors = {name: toy.floor(law, options.n, rng) for name, law in laws.items()}
    apart = {row: {name: toy.apart(x, law) for name, law in laws.items()} for row, x in samples.items()}
    rule, show = toy.rule(), lambda values: [f"{value:.2f}" for value in values]
    rows = [
        (row, format_number(float(rule(x).mean()), ".2g"), *show(apart[row].values())) for row, x in samples.items()
    ]
    rows.append(("as many of that law", "", *show(floors.values())))
    asked = {"polished": "polished", "|r₁| < ε": "p | r₁ = 0", "|r₂| < ε": "p | r₂ = 0"}
    missed = [
        f"{row} is {apart[row][law] / floors[law]:.1f} floors from {law}"
        for row, law in asked.items()
        if apart[row][law] > 3 * floors[law]
    ]
    return rows, missed


def main(arguments: Sequence[str]) -> int:
    """Measure, print a table for each set, judge."""
    options = tyro.cli(Options, args=list(arguments))
    missed = []
    for name in options.only:
        rows, misses = measure(TOYS[name](), options)
        titles = ["samples", "ℓ", "data", "p | r₁ = 0", "p | r₂ = 0", "polished (integral)"]
        print_table(titles, rows, title=f"{name}: W₁ / σ to the law", width=120)
        missed += [f"{name}: {miss}" for miss in misses]
    print("\n".join(f"missed: {miss}" for miss in missed) or "everything is as asked")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
