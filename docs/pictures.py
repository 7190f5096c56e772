"""The pictures of the pages on concepts, drawn by the package itself.

    python docs/pictures.py [--out docs/images/concepts] [--steps 2000] [--seed 0]

Images of two pixels obey a rule: they lie on an ellipse in the plane, with a law that has two bumps. A map, a diffusion
model of mirror images and a plain one are trained on them (a minute on one CPU core), and the plane shows what each of
them does. The verdict's picture is drawn by `namm.judge`, that of equal compute from results/burgers/metrics.json.
"""

import argparse
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from torch import Tensor, nn

import namm
from namm.evaluation import Figures
from namm.generative import DPMSolver, Velocity
from namm.maps import ICNN
from namm.training.objectives import identity_regulariser as near_identity

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs/images/concepts"
LONG, SHORT, TILT = 1.6, 0.7, math.radians(25)
"""The ellipse: half axes, and the angle of the long one."""
SIGMA = 0.25
"""σ_max of the map's training, as large as what models err by."""
BLUE, ORANGE, GREY, GREEN = "#3f6fb5", "#d1701b", "#9a9a9a", "#3a8f4d"
VERDICTS = {"works": GREEN, "no gain": "#e3c24f", "collapsed": "#c0504d"}
FRAME = (2.3, 2.0)
"""Half the width and height of a panel around the ellipse."""
STYLE = {"font.size": 9, "axes.titlesize": 10, "font.family": "sans-serif"}


def turned(x: Tensor, angle: float) -> Tensor:
    """Points (N, 2) turned about the origin."""
    c, s = math.cos(angle), math.sin(angle)
    return x @ torch.tensor([[c, s], [-s, c]], dtype=x.dtype)


def residual(x: Tensor) -> Tensor:
    """(u/a)² + (v/b)² − 1 along the ellipse's axes: (B, 2, 1, 1) → (B, 1)."""
    axes = turned(x.flatten(1), -TILT) / torch.tensor([LONG, SHORT], dtype=x.dtype, device=x.device)
    return axes.square().sum(1, keepdim=True) - 1


RULE = namm.constraint(lambda x: residual(x).abs().mean(1), residual=residual, name="ellipse")


def on_the_ellipse(angle: Tensor) -> Tensor:
    """Images (N, 2, 1, 1) at these angles."""
    points = torch.stack([LONG * angle.cos(), SHORT * angle.sin()], 1)
    return turned(points, TILT)[:, :, None, None]


def data(n: int) -> Tensor:
    """Images of two bumps on the ellipse."""
    bump = torch.where(torch.rand(n) < 0.6, 0.9, 3.9)
    return on_the_ellipse(bump + 0.45 * torch.randn(n))


def layers(channels: int, width: int = 64) -> nn.Sequential:
    """A network of each image by itself: (B, channels, 1, 1) → (B, 2, 1, 1)."""
    parts = [nn.Conv2d(channels, width, 1), nn.SiLU(), nn.Conv2d(width, width, 1), nn.SiLU(), nn.Conv2d(width, 2, 1)]
    return nn.Sequential(*parts)


class Inverse(nn.Module):
    """f: the image plus hidden layers of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(2)

    def forward(self, y: Tensor) -> Tensor:
        """(B, 2, 1, 1) → (B, 2, 1, 1)."""
        return y + self.layers(y)


class Score(nn.Module):
    """The network of a diffusion model of two pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(5)

    def forward(self, y_t: Tensor, t: Tensor) -> Tensor:
        """(B, 2, 1, 1) and (B,) → (B, 2, 1, 1)."""
        time = t.reshape(-1, 1, 1, 1).expand(len(y_t), 1, 1, 1)
        return self.layers(torch.cat([y_t, time, (3 * time).sin(), (9 * time).sin()], 1))


def settings(steps: int) -> namm.TrainSettings:
    """Adam, its rate falling to zero."""
    return namm.TrainSettings(f"{steps} steps", 256, 3e-3, (0.9, 0.999), "cosine", warmup_steps=20, ema_decay=0.99)


class Trained:
    """What the pictures show: data, maps, and models of mirror images and of plain ones."""

    def __init__(self, steps: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.x = data(4096)
        self.mirror = namm.MirrorMap(ICNN(2, layers=2, filters=32, kernel_size=1, strong_convexity=0.3), Inverse())
        options = {"noise": namm.UniformNoise(SIGMA), "settings": settings(steps)}
        weights = namm.Weights(constraint=1.0, regulariser=0.1)
        namm.train_map(self.x, RULE, self.mirror, weights=weights, regulariser=near_identity, progress=False, **options)
        short = settings(max(2, steps // 2))  # models of so few steps err visibly
        self.model, self.plain = (namm.Diffusion(Score(), (2, 1, 1), prediction=Velocity()) for _ in range(2))
        namm.train_model(self.model, self.x, self.mirror, settings=short, progress=False)
        namm.train_model(self.plain, self.x, namm.IdentityMap(), settings=short, progress=False)
        self.y = self.model.sample(2048, sampler=DPMSolver(20), generator=seed, progress=False).cpu()
        self.drawn = self.plain.sample(2048, sampler=DPMSolver(20), generator=seed, progress=False).cpu()
        self.before = self.to_data(self.y)
        self.repaired = torch.as_tensor(namm.repair(self.drawn, self.mirror).images)
        namm.finetune_map(self.mirror, self.x, self.y, RULE, weights=namm.Weights(1.0), progress=False, **options)
        self.after = self.to_data(self.y)

    @torch.no_grad()
    def to_data(self, y: Tensor) -> Tensor:
        """f."""
        return self.mirror.cpu().to_data(y)

    @torch.no_grad()
    def to_mirror(self, x: Tensor) -> Tensor:
        """g."""
        return self.mirror.cpu().to_mirror(x)


# What panels are made of


def panels(*titles: str) -> tuple[Figure, list[Axes]]:
    """Planes of equal scale side by side."""
    figure, axes = plt.subplots(1, len(titles), figsize=(2.5 * len(titles), 2.5), layout="constrained")
    for axis, title in zip(np.atleast_1d(axes), titles, strict=True):
        axis.set(title=title, xticks=[], yticks=[], aspect="equal")
    return figure, list(np.atleast_1d(axes))


def points(axis: Axes, x: Tensor, colour: str = BLUE, n: int = 250, size: float = 5) -> None:
    """The first n images as dots."""
    axis.scatter(*x[:n].flatten(1).T.numpy(), s=size, c=colour, alpha=0.7, linewidths=0)


def curve(axis: Axes, change: Callable[[Tensor], Tensor] = lambda x: x) -> None:
    """The rule, as a line, or what a map makes of it."""
    line = change(on_the_ellipse(torch.linspace(0, 2 * math.pi, 200))).flatten(1).T
    axis.plot(*line.numpy(), c=GREY, lw=1, zorder=0)
    wide = max(1.0, 1.6 * float((line.abs().amax(1) / torch.tensor(FRAME)).max()))
    axis.set(xlim=(-wide * FRAME[0], wide * FRAME[0]), ylim=(-wide * FRAME[1], wide * FRAME[1]))


def arrows(axis: Axes, start: Tensor, end: Tensor, n: int = 60, colour: str = ORANGE) -> None:
    """From where images were to where they go."""
    a, b = start[:n].flatten(1).T.numpy(), end[:n].flatten(1).T.numpy()
    axis.quiver(*a, *(b - a), angles="xy", scale_units="xy", scale=1, width=0.006, color=colour)


def distance(axis: Axes, x: Tensor) -> None:
    """Mean ℓ, below a panel."""
    axis.set_xlabel(f"mean ℓ {float(RULE(x).mean()):.2g}")


def grid(axis: Axes, change: Callable[[Tensor], Tensor] = lambda x: x) -> None:
    """A net of lines, or what a map makes of it."""
    line = torch.linspace(-2, 2, 60)
    for at in torch.linspace(-2, 2, 13):
        for pair in ((line, at.expand_as(line)), (at.expand_as(line), line)):
            moved = change(torch.stack(pair, 1)[:, :, None, None]).flatten(1).T
            axis.plot(*moved.numpy(), c="#dcdcdc", lw=0.7, zorder=-1)


# The pictures


def overview(at: Trained) -> Figure:
    """The method in four panels."""
    figure, (one, two, three, four) = panels(
        "data x obey a rule", "a model learns y = g(x)", "its samples through f", "the plain model's"
    )
    for axis in (one, three, four):
        curve(axis)
    curve(two, at.to_mirror)
    points(one, at.x)
    points(two, at.to_mirror(at.x), GREY)
    points(two, at.y, GREEN)
    two.set_xlabel("grey: g(x), green: samples ỹ")
    points(three, at.after, GREEN)
    points(four, at.drawn, ORANGE)
    for axis, x in ((one, at.x), (three, at.after), (four, at.drawn)):
        distance(axis, x)
    return figure


def maps(at: Trained) -> Figure:
    """What g does to the plane: g bends the plane, f bends it back."""
    figure, (one, two, three) = panels("x", "y = g(x)", "f(g(x))")
    grid(one)
    grid(two, at.to_mirror)
    for axis, x, change in (
        (one, at.x, lambda x: x),
        (two, at.to_mirror(at.x), at.to_mirror),
        (three, at.to_data(at.to_mirror(at.x)), lambda x: x),
    ):
        curve(axis, change)
        points(axis, x)
    distance(one, at.x)
    distance(three, at.to_data(at.to_mirror(at.x)))
    return figure


def noise(at: Trained) -> Figure:
    """Images, noise added to them in mirror space, and what f makes of it."""
    figure, (one, two, three) = panels("y = g(x)", "g(x) + σz", "f(g(x) + σz)")
    y = at.to_mirror(at.x)
    noisy = y + SIGMA * torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    curve(one, at.to_mirror)
    curve(two, at.to_mirror)
    curve(three)
    points(one, y)
    points(two, noisy, ORANGE)
    points(three, at.to_data(noisy), GREEN)
    two.set_xlabel(f"σ = {SIGMA}")
    distance(three, at.to_data(noisy))
    return figure


def finetuning(at: Trained) -> Figure:
    """A model's samples through f, before and after f has seen such samples."""
    figure, (one, two, three) = panels("the model's samples ỹ", "f(ỹ), map", "f(ỹ), finetuned")
    curve(one, at.to_mirror)
    points(one, at.y)
    for axis, x, colour in ((two, at.before, ORANGE), (three, at.after, GREEN)):
        curve(axis)
        points(axis, x, colour)
        distance(axis, x)
    return figure


def repair(at: Trained) -> Figure:
    """Samples of a plain model, moved by f∘g."""
    return moved(at.drawn, at.repaired, "a plain model's samples x", "x → f(g(x))", "f(g(x))")


def polish(at: Trained) -> Figure:
    """The same samples, moved to the nearest points of the rule."""
    return moved(at.drawn, namm.polish(at.drawn, RULE).images, "samples x", "x → nearest on the rule", "polished")


def moved(x: Tensor, after: Tensor, *titles: str) -> Figure:
    """Images before, on their way, and after."""
    figure, axes = panels(*titles)
    for axis in axes:
        curve(axis)
    points(axes[0], x, ORANGE)
    arrows(axes[1], x, after)
    points(axes[2], after, GREEN)
    distance(axes[0], x)
    distance(axes[2], after)
    return figure


def outcomes(x: str, xs: np.ndarray, y: str, ys: np.ndarray) -> np.ndarray:
    """What `namm.judge` says of sound images with two figures changed: indices of `VERDICTS`, (len(ys), len(xs))."""
    sound = {"distance": 0.5, "mmd": 1.0, "total_variation": 1.0, "spread": 1.0, "mmd_error": 0.02}
    baseline, data_ = Figures(1.0, 1.0, 1.0, 1.0, mmd_error=0.02), Figures(0.0, 0.7, 1.0, 1.0)
    found = [[namm.judge(Figures(**(sound | {x: a, y: b})), baseline, data_).outcome for a in xs] for b in ys]
    return np.array([[list(VERDICTS).index(outcome) for outcome in row] for row in found])


def verdict() -> Figure:
    """What `namm.judge` says, by the two pairs of figures that it looks at."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.5, 3), layout="constrained")
    colours = ListedColormap(list(VERDICTS.values()))
    for axis, x, wide, y in ((left, "distance", 1.4, "mmd"), (right, "spread", 1.6, "total_variation")):
        xs, ys = np.linspace(0.01, wide, 80), np.linspace(0.01, 2.5, 80)
        axis.pcolormesh(xs, ys, outcomes(x, xs, y, ys), cmap=colours, vmin=0, vmax=2)
    left.set(xlabel="ℓ′ over the baseline's", ylabel="√MMD² over the baseline's")
    right.set(xlabel="spread over the data's", ylabel="total variation over the data's")
    patches = [mpl.patches.Patch(color=colour) for colour in VERDICTS.values()]
    figure.legend(patches, VERDICTS, loc="outside upper center", ncols=3, frameon=False)
    return figure


def equal_compute() -> Figure:
    """Compute seconds of both sides of the run of RESULTS.md."""
    stages = json.loads((ROOT / "results/burgers/metrics.json").read_text())["seeds"]["0"]["stages"]
    figure, axis = plt.subplots(figsize=(7.5, 1.9), layout="constrained")
    names = {"map": "map", "mdm": "model of g(x)", "samples": "", "finetune": "finetuning", "dm": "the same model of x"}
    left = 0.0
    for (name, label), colour in zip(names.items(), (BLUE, GREEN, GREY, "#7a5ea8", ORANGE), strict=True):
        seconds = stages[name]["compute_seconds"]
        row, start = (0, 0.0) if name == "dm" else (1, left)
        axis.barh(row, seconds, left=start, color=colour, height=0.6)
        axis.text(start + seconds / 2, row, label, ha="center", va="center", color="white")
        left += seconds
    axis.set(yticks=[0, 1], yticklabels=["baseline", "namm"], xlabel="compute seconds", ylim=(-0.5, 1.5))
    axis.spines[["top", "right"]].set_visible(False)
    return figure


SHOWN = {
    "overview": overview,
    "maps": maps,
    "noise": noise,
    "finetuning": finetuning,
    "repair": repair,
    "polish": polish,
}
"""Pictures of what was trained."""
OTHERS = {"verdict": verdict, "equal-compute": equal_compute}


def main(out: Path = PICTURES, steps: int = 2000, seed: int = 0) -> list[Path]:
    """Train, draw every picture, and write each as PNG."""
    out.mkdir(parents=True, exist_ok=True)
    at, paths = Trained(steps, seed), []
    for name, draw in ({name: partial(draw, at) for name, draw in SHOWN.items()} | OTHERS).items():
        with mpl.rc_context(STYLE):
            figure = draw()
            paths.append(out / f"{name}.png")
            figure.savefig(paths[-1], metadata={"Software": None}, dpi=130)
            plt.close(figure)
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw the pictures of the pages on concepts.")
    parser.add_argument("--out", type=Path, default=PICTURES)
    parser.add_argument("--steps", type=int, default=2000, help="of the map's training")
    parser.add_argument("--seed", type=int, default=0)
    for path in main(**vars(parser.parse_args())):
        print(path)
