"""A model of one to four evaluations: a diffusion distilled into jumps to the end of its trajectories.

The reverse ODE of `samplers.py` leads every y(t) to one clean image y(0). A consistency model (Song et al. 2023) learns

    F(y(t), t) = y(0) for all points of a trajectory,      F(y, t) = m y − s v(y, t),      so that F(y, 0) = y

whatever the network says, since m(0) = 1 and s(0) = 0. For a network that predicts ε, F is (y − s ε) / m: the student
has the form of its teacher's D in `schedules.py` and begins as a copy of it. That is right where t is small, and from
there it learns upwards, since F at t must agree with F one step of the teacher further down,

    loss = E (F(y(t), t) − F°(y', t'))²,      F° without a gradient;      the mean over pixels,

with y(t) = m u + s ε of an image u, and t, t' neighbours on a grid from 1 to t_min that is even in log(s/m) and ends
with t' = 0. y' depends on y(t) alone, so there is no noise in the target that a robust distance would have to bear. The
teacher's step is Heun's for the ODE in the form d(y/s) = D d(m/s),

    y' = m' D̄ + (s'/s) (y − m D̄),      D̄ = D for a first y', then ½ (D(y, t) + D(y', t')),      y' = D where t' = 0

The first y' is DDIM's. Along 32 of these steps the spread of Gaussian data is missed by 1 %, by DDIM's alone 7 %.

To sample, F jumps from noise at t = 1, or at the schedule's `t_max`. What it got wrong there can be set right: noise is
added again, and F jumps from an earlier time. With K evaluations these times are at s/m = tan(½ π (1 − k/K)),
k = 1 … K − 1: (m, s) turns by equal angles from one to the next, and in the middle s/m = 1, where data and noise are
equally strong.
"""

import copy
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor, nn

from namm.datasets.batches import Images
from namm.errors import DataError, UsageError
from namm.generative.base import channel_statistics, check_shape
from namm.generative.diffusion import Diffusion
from namm.generative.samplers import Process, Step, Steps, even_in_noise
from namm.numerics import at_least_float32


class Consistency(nn.Module):
    """A few-step model of mirror images, learned from a trained diffusion model by `namm.train_model`.

    Args:
        teacher: A trained `Diffusion`, copied. Take one that predicts `Velocity()`: errors of ε are multiplied by 150
            at t = 1, where jumps begin.
        grid: Steps of the teacher from t = 1 to 0. More of them follow its trajectories more closely and take longer to
            learn from.
    """

    times: Tensor

    def __init__(self, teacher: Diffusion, *, grid: int = 32) -> None:
        super().__init__()
        self.teacher, self.student = _copy(teacher).requires_grad_(False), _copy(teacher).requires_grad_(True)
        self.register_buffer("times", even_in_noise(teacher, grid), persistent=False)
        self.eval()

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        return self.teacher.sample_shape

    @property
    def has_kernels(self) -> bool:
        """Whether the networks have kernels for a recording; the loss adds nothing that could not be recorded."""
        return self.teacher.has_kernels

    def extra_repr(self) -> str:
        """What makes this model differ from another with the same networks."""
        return f"{self.teacher.extra_repr()}, grid={len(self.times) - 1}"

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode: with dropout the two sides of the loss would be those of different networks."""
        return super().train(False)

    # Learning

    def fit_statistics(self, y: Images) -> None:
        """Keep the teacher's mean and scale; images y (N, C, H, W) far from them are refused."""
        mean, deviation = channel_statistics(y, self.sample_shape)
        scale = self.teacher.scale.flatten().cpu().double()
        shift = (mean - self.teacher.mean.flatten().cpu()) / scale
        ratio = torch.where(deviation > 0, deviation, 1.0) / scale
        if shift.abs().max() > 1 or ratio.max() > 2 or ratio.min() < 0.5:
            raise DataError(
                f"the images have channel means {mean.tolist()} and deviations {deviation.tolist()}, and the teacher "
                f"was trained on others, of {self.teacher.mean.flatten().tolist()} and {scale.tolist()}: give the data "
                "and the mirror that it was trained with."
            )

    def draw(self, y: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """t and t' (B,), neighbours on the grid, and ε of y's shape."""
        index = torch.randint(len(self.times) - 1, (len(y),), generator=generator, device=y.device)
        times = self.times.to(y)
        return times[index], times[index + 1], torch.randn(y.shape, generator=generator, device=y.device, dtype=y.dtype)

    def loss(self, y: Tensor, *draws: Tensor) -> Tensor:
        """Mean squared disagreement on images y (B, C, H, W); `draws` are t, t' and ε, drawn here if not given."""
        check_shape(y, self.sample_shape)
        t, below, epsilon = (draw.to(at_least_float32(self.teacher.mean).dtype) for draw in draws or self.draw(y))
        marginal = self.teacher.sde.marginal(t)
        y_t = marginal.mean * self.teacher.standardise(y) + marginal.std * epsilon
        with torch.no_grad():
            target = self.end(self.follow(y_t, t, below), below)
        return (self.end(y_t, t) - target).square().mean()

    # Everything here is standardised

    def end(self, y_t: Tensor, t: Tensor) -> Tensor:
        """F: the end of the trajectory through y_t (B, C, H, W) at t (B,), in [t_min, 1] or 0."""
        jumped = self.student.denoise(y_t, t.clamp(min=self.student.t_min))  # networks may know no t = 0
        return torch.where(t.reshape(-1, 1, 1, 1) > 0, jumped, y_t)

    @torch.no_grad()
    def follow(self, y_t: Tensor, t: Tensor, below: Tensor) -> Tensor:
        """y' at time `below` (B,), by one step of the teacher from y_t (B, C, H, W) at t (B,)."""
        (mean, std), (mean_below, std_below) = (self.teacher.sde.marginal(time) for time in (t, below))

        def step(denoised: Tensor) -> Tensor:
            return mean_below * denoised + std_below / std * (y_t - mean * denoised)

        denoised = self.teacher.denoise(y_t, t)
        later = self.teacher.denoise(step(denoised), below.clamp(min=self.teacher.t_min))
        return step(torch.where(below.reshape(-1, 1, 1, 1) > 0, (denoised + later) / 2, denoised))

    def sample(
        self,
        n: int,
        *,
        steps: int = 1,
        batch_size: int = 64,
        generator: torch.Generator | int | None = None,
        first: int = 0,
        compile: bool = False,
        progress: bool = True,
    ) -> Tensor:
        """`n` samples in mirror space, (n, C, H, W), by `steps` evaluations each; the rest is as in `Diffusion.sample`.

        Steps 1, 2 and 4 of a seed start from the same noise.
        """
        return self.student.sample(
            n,
            sampler=Jumps(steps),
            batch_size=batch_size,
            generator=generator,
            first=first,
            compile=compile,
            progress=progress,
        )


@dataclass(frozen=True)
class Jumps(Steps):
    """F at t_max, then noise and F again at the times above: y ← m(t') F + s(t') z, t' the next time and 0 the last."""

    steps: int = 1

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"a sample needs at least 1 evaluation, not {self.steps}.")

    def table(self, process: Process) -> list[Step]:
        """No step keeps anything of its state."""
        sde = process.sde
        angles = math.pi / 2 * torch.arange(self.steps - 1, 0, -1, dtype=torch.double) / self.steps
        times = torch.cat([angles.new_full((1,), sde.t_max), sde.time_of(angles.tan()), angles.new_zeros(1)])
        columns = torch.stack([times, sde.mean(times), sde.std(times)], 1).tolist()
        return [Step(t, m, s, m_next, 0.0, s_next) for (t, m, s), (_, m_next, s_next) in pairwise(columns)]


def _copy(model: Diffusion) -> Diffusion:
    """A model with weights of its own, without what was compiled or recorded for the old ones."""
    shallow = copy.copy(model)
    shallow._compiled = None
    return copy.deepcopy(shallow)
