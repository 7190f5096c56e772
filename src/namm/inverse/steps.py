"""The steps of a reverse diffusion as tables of numbers, so that guidance can be added to any of them.

    y ← a D + b y + c z,      D = E[y(0) | y(t)],   z ~ N(0, I)

Everything is standardised, as in `namm.generative.diffusion`. Adding g to the score moves D by (s²/m) g (Tweedie) and
so the new state by a (s²/m) g: `Step.of_score` is this factor.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from namm.errors import UsageError
from namm.generative.samplers import Process, even_in_noise, even_in_time


@dataclass(frozen=True)
class Step:
    """One step down from time t.

    Attributes:
        t: The time at which D is evaluated.
        mean: m(t).
        std: s(t).
        denoised: a, the factor of D.
        state: b, the factor of y(t).
        noise: c, the standard deviation of the fresh noise.
    """

    t: float
    mean: float
    std: float
    denoised: float
    state: float
    noise: float

    @property
    def of_score(self) -> float:
        """a s²/m, the factor of whatever is added to the score."""
        return self.denoised * self.std**2 / self.mean


class Steps(Protocol):
    """A way down from t = 1 to t = 0."""

    @property
    def steps(self) -> int:
        """How many."""

    def table(self, process: Process) -> list[Step]:
        """The steps in order, for this process."""


@dataclass(frozen=True)
class DDIMSteps:
    """Song, Meng and Ermon 2021, even in log noise: for few steps. `eta` 1 is ancestral, 0 adds no noise."""

    steps: int = 100
    eta: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.eta <= 1:
            raise UsageError(f"DDIMSteps: eta must lie between 0 and 1, not {self.eta}.")

    def table(self, process: Process) -> list[Step]:
        """y(s) = m(s) D + √(s(s)² − ς²) ε + ς z with ς = η times the ancestral standard deviation."""
        return _table(process, even_in_noise(process, self.steps), self.eta)


@dataclass(frozen=True)
class AncestralSteps:
    """DDPM (Ho et al. 2020) with the marginals of the continuous diffusion, even in time; the last adds no noise."""

    steps: int = 1000

    def table(self, process: Process) -> list[Step]:
        """y(s) is drawn from q(y(s) | y(t), y(0) = D)."""
        return _table(process, even_in_time(process, self.steps), 1.0)


def _table(process: Process, times: torch.Tensor, eta: float) -> list[Step]:
    """DDIM's coefficients at these times, in float64; with η = 1 they are the ancestral ones."""
    sde, table = process.sde, []
    for t, s in pairwise(times):
        mean, std, left = sde.mean(t), sde.std(t), sde.std(s)
        fresh = eta * (-torch.expm1(2 * (sde.log_mean(t) - sde.log_mean(s)))).sqrt() * left / std
        kept = (left.square() - fresh.square()).clamp(min=0).sqrt() / std
        numbers = (t, mean, std, sde.mean(s) - kept * mean, kept, fresh)
        table.append(Step(*(float(number) for number in numbers)))
    return table


@dataclass(frozen=True)
class OfficialSteps:
    """The official code's: DDPM with betas linear in the index, D from the continuous marginals.

        a = β √ᾱ₋ / (1 − ᾱ),   b = (1 − ᾱ₋) √α / (1 − ᾱ),   c² = β;   ᾱ₋ is ᾱ one index below, 1 below the first

    At index 0, where the true variance is 0, c² is that of index 1, β₁ (1 − ᾱ₀)/(1 − ᾱ₁): the last step adds noise too.
    """

    steps: int = 1000

    def table(self, process: Process) -> list[Step]:
        """Step i is at the i-th of even times from 1 to t_min, with the coefficients of index steps − 1 − i."""
        sde, times = process.sde, even_in_time(process, self.steps)[:-1]
        ends = sde.beta_min / self.steps, sde.beta_max / self.steps
        if ends[1] >= 1:
            raise UsageError(f"OfficialSteps needs more than beta_max = {sde.beta_max:g} steps, not {self.steps}.")
        betas = torch.linspace(*ends, self.steps, dtype=torch.double)
        kept = (1 - betas).cumprod(0)
        before = torch.cat([kept.new_ones(1), kept[:-1]])
        denoised = betas * before.sqrt() / (1 - kept)
        state = (1 - before) * (1 - betas).sqrt() / (1 - kept)
        variances = betas.clone()
        variances[0] = betas[1] * (1 - before[1]) / (1 - kept[1])
        down = (column.flip(0) for column in (denoised, state, variances.sqrt()))
        columns = (times, sde.mean(times), sde.std(times), *down)
        return [Step(*row) for row in torch.stack(columns, 1).tolist()]
