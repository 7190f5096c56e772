"""Data assimilation with a run's models (paper Sec. 4.2, App. D.3): images behind the measurements of held-out truths.

    dps           the plain model, pulled by the measurement
    cg-dps        the same, pulled by the rule too
    mirror-dps    the model of mirror images, seen through the finetuned f

ζ is the paper's: in the units of the data, and for a thousand steps. With fewer steps each is longer in proportion.
With guidance by the likelihood (`namm.inverse.guidance`) it is the factor of the log-likelihood, and 1 the likelihood
itself.

Of posterior samples x̂ of a truth x, measured with noise of which Γ is the covariance:

    ℓ           of each sample
    χ²          ‖m − A(x̂)‖_Γ² per measured value; its expectation is 1 for the truth and for samples of the posterior
    error       root mean square over pixels of the samples' mean − x
    coverage    share of the pixels of x inside the central 90 % of the samples; 0.9 if their spread can be believed
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from namm.constraints import Constraint
from namm.errors import UsageError
from namm.exact.certificate import Certificate
from namm.experiments.assimilation.tasks import Task
from namm.experiments.engine.run_parts import RunParts
from namm.generative import Diffusion, Mirrored
from namm.inverse import (
    AncestralSteps,
    DPSGuidance,
    Guidance,
    LikelihoodGuidance,
    Posterior,
    Steps,
    coverage,
    polish_posterior,
    sample_posterior,
)
from namm.maps import IdentityMap
from namm.numerics import arithmetic
from namm.precision import Precision

METHODS, GUIDANCES = ("dps", "cg-dps", "mirror-dps"), ("dps", "likelihood")
TITLES = {"dps": "DPS", "cg-dps": "CG-DPS", "mirror-dps": "mirror DPS"}
PAPER_ZETA, PAPER_WEIGHT, PAPER_SAMPLES, PAPER_STEPS = 0.1, 200.0, 32, 1000
DEFAULTS = {"dps": (PAPER_ZETA, PAPER_WEIGHT), "likelihood": (1.0, 2000.0)}
"""ζ and w, by guidance."""
LEVEL, FEWEST = 0.9, 19
"""Level of the coverage, and the fewest samples that have such an interval."""
PIXELS, MOST = 2**19, 256
"""Pixels of the images made together when no batch size is given: a gradient needs several times a sample's memory."""


@dataclass(frozen=True)
class Setting:
    """A method, one of `METHODS`, with its numbers; `guidance` is one of `GUIDANCES`."""

    method: str
    zeta: float = PAPER_ZETA
    """ζ, in the paper's units, or the strength of the likelihood."""
    weight: float = 0.0
    """w of ℓ, where the rule guides."""
    guidance: str = "dps"

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UsageError(f"there is no method {self.method!r}; there are {', '.join(METHODS)}.")
        if self.guidance not in GUIDANCES:
            raise UsageError(f"there is no guidance {self.guidance!r}; there are {', '.join(GUIDANCES)}.")

    @property
    def title(self) -> str:
        """Name of the method as the paper has it: "CG-DPS-50"."""
        return TITLES[self.method] + (f"-{self.weight:g}" if self.method == "cg-dps" else "")


@dataclass(frozen=True)
class Polishing:
    """Samples are moved onto the rule in the end (`polish_posterior`)."""

    spread: tuple[float, ...]
    """Standard deviation of each channel of the data."""
    floor: float
    """Mean ℓ of the data."""

    @classmethod
    def of(cls, trained: RunParts) -> "Polishing":
        """Spread and floor of the run's own data."""
        polisher = trained.polisher(trained.rule())
        return cls(tuple(polisher.scale.tolist()), polisher.floor)


@dataclass(frozen=True)
class Sampling:
    """How `n` posterior samples of each truth are drawn."""

    n: int = PAPER_SAMPLES
    steps: Steps = field(default_factory=lambda: AncestralSteps(PAPER_STEPS))
    batch_size: int | None = None
    """Samples made together; chosen automatically when None."""
    seed: int = 0
    retries: int = 3
    """How often a sample that diverged is drawn again."""
    precision: Precision = "auto"
    """How the networks compute on a GPU, by its name in `namm.numerics`."""
    polish: Polishing | None = None
    """Move each sample onto the rule in the end; left as they are when None."""

    def together(self, shape: Sequence[int]) -> int:
        """Samples of `shape` (C, H, W) that are made together."""
        if self.batch_size is not None:
            return self.batch_size
        return max(1, min(MOST, PIXELS // (shape[-2] * shape[-1])))


@dataclass(frozen=True, eq=False)
class PosteriorSummary:
    """n posterior samples of each of M truths, on the CPU; samples that failed are NaN.

    Attributes:
        setting: How they were made.
        samples: (M, n, C, H, W).
        distance, chi2: ℓ, and χ² per measured value, (M, n).
        redrawn, failed: How often each was drawn again, and whether it diverged each time, (M, n).
        mean, spread: Mean and standard deviation of the samples, (M, C, H, W).
        error: Of the mean, (M,).
        coverage: (M,), NaN where there are too few samples for it.
        seconds: Time that all of it took.
        residuals: The rule's residual of each sample, (M, n, …), where it has one.
        certificate: Of the samples that did not fail, in their order, where they were polished.
    """

    setting: Setting
    samples: Tensor
    distance: Tensor
    chi2: Tensor
    redrawn: Tensor
    failed: Tensor
    mean: Tensor
    spread: Tensor
    error: Tensor
    coverage: Tensor
    seconds: float
    residuals: Tensor | None = None
    certificate: Certificate | None = None


def priors(trained: RunParts, methods: Sequence[str]) -> dict[str, Mirrored]:
    """The prior of each method; a stage that is missing is answered with the command that makes it."""

    @cache  # of the plain model, which two methods have in common
    def prior(stage: str) -> Mirrored:
        return trained.source(stage, trained.mirror("finetune") if stage == "mdm" else IdentityMap())

    return {method: prior("mdm" if method == "mirror-dps" else "dm") for method in methods}


def guidance(setting: Setting, prior: Mirrored, rule: Constraint, steps: Steps) -> Guidance:
    """The pull of a measurement with ζ in the units of the sampler."""
    assert isinstance(prior.model, Diffusion)
    guiding = rule if setting.method == "cg-dps" else None
    if setting.guidance == "likelihood":
        return LikelihoodGuidance.of(prior.model, setting.zeta, constraint=guiding, weight=setting.weight)
    zeta = setting.zeta * PAPER_STEPS / steps.steps
    return DPSGuidance.of_paper(zeta, prior.model, constraint=guiding, weight=setting.weight)


def assimilate(
    prior: Mirrored,
    task: Task,
    setting: Setting,
    rule: Constraint,
    sampling: Sampling,
    *,
    rows: range | None = None,
    progress: bool = False,
) -> PosteriorSummary:
    """Posterior samples of the task's truths, or of those in `rows`, which are the same whoever asks for them.

    Sample i of truth j depends on (model, task, setting, steps, seed, j, i) alone, j counting from the task's first.
    """
    rows = range(len(task.truth)) if rows is None else rows
    among = slice(rows.start, rows.stop)
    start = time.perf_counter()
    with arithmetic(sampling.precision, prior.device):
        posterior = sample_posterior(
            prior,
            task.measurement[among],
            task.operator,
            task.noise,
            n=sampling.n,
            guidance=guidance(setting, prior, rule, sampling.steps),
            steps=sampling.steps,
            constraint=rule,
            retries=sampling.retries,
            batch_size=sampling.together(task.truth.shape[1:]),
            generator=sampling.seed,
            first=rows.start * sampling.n,
            progress=progress,
        )
    if sampling.polish is not None:
        posterior = polish_posterior(
            posterior, rule, task.measurement[among], task.operator, task.noise, **vars(sampling.polish)
        )
    return _outcome(setting, posterior, task.truth[among], rule, start)


@torch.no_grad()
def _outcome(setting: Setting, posterior: Posterior, truth: Tensor, rule: Constraint, start: float) -> PosteriorSummary:
    assert posterior.distance is not None
    x, failed = posterior.samples, posterior.failed.cpu()
    residuals = torch.stack([rule.residual(each) for each in x]).cpu() if rule.has_residual else None
    samples = x.cpu()
    good = (~failed).reshape(*failed.shape, 1, 1, 1)
    count = good.sum(1)
    mean = samples.nan_to_num().sum(1) / count  # NaN where every sample failed
    variance = torch.where(good, (samples - mean[:, None]).square(), 0.0).sum(1) / (count - 1).clamp(min=1)
    return PosteriorSummary(
        setting=setting,
        samples=samples,
        distance=posterior.distance.cpu(),
        chi2=posterior.chi2.cpu() / posterior.measured,
        redrawn=posterior.redrawn.cpu(),
        failed=failed,
        mean=mean,
        spread=variance.sqrt(),
        error=(mean - truth).square().mean((1, 2, 3)).sqrt(),
        coverage=torch.tensor([_coverage(*each) for each in zip(samples, failed, truth, strict=True)]),
        seconds=time.perf_counter() - start,
        residuals=residuals,
        certificate=posterior.certificate,
    )


def _coverage(samples: Tensor, failed: Tensor, truth: Tensor) -> float:
    """Share of a truth's pixels inside the central interval of the samples that did not fail."""
    kept = samples[~failed]
    return float(coverage(kept[None], truth[None], LEVEL).mean()) if len(kept) >= FEWEST else torch.nan


# In figures


@dataclass(frozen=True)
class Score:
    """One line of a table: means over all samples that did not fail, or over truths.

    Attributes:
        setting: The method and its numbers.
        truths, samples: How many truths, and samples of each.
        distance, distance_std: Mean and standard deviation of ℓ over samples.
        chi2: Mean χ² per measured value.
        error, error_std: Mean and standard deviation of the error over truths; 0 of one.
        spread: Root mean square over truths and pixels.
        coverage: Mean over truths; None with too few samples.
        redrawn, failed: Samples that were drawn again, and that diverged at the smallest step too.
        seconds: Time that all of it took.
    """

    setting: Setting
    truths: int
    samples: int
    distance: float
    distance_std: float
    chi2: float
    error: float
    error_std: float
    spread: float
    coverage: float | None
    redrawn: int
    failed: int
    seconds: float

    @classmethod
    def of(cls, setting: Setting, arrays: Mapping[str, Tensor], seconds: float) -> "Score":
        """From arrays by the names of `PosteriorSummary`'s."""
        distance = arrays["distance"].double()
        good = ~arrays["failed"].bool()
        kept, errors, covered = distance[good], arrays["error"].double(), arrays["coverage"].double()
        return cls(
            setting=setting,
            truths=len(errors),
            samples=distance.shape[1],
            distance=float(kept.mean()),
            distance_std=float(kept.std(correction=0)) if len(kept) else torch.nan,
            chi2=float(arrays["chi2"].double()[good].mean()),
            error=float(errors.mean()),
            error_std=float(errors.std()) if len(errors) > 1 else 0.0,
            spread=float(arrays["spread"].double().square().mean().sqrt()),
            coverage=None if covered.isnan().any() else float(covered.mean()),
            redrawn=int((arrays["redrawn"] > 0).sum()),
            failed=int((~good).sum()),
            seconds=seconds,
        )


def score(outcome: PosteriorSummary) -> Score:
    """The figures of an outcome."""
    return Score.of(outcome.setting, vars(outcome), outcome.seconds)
