"""What the page of a studio can do with a run, without the page: plain methods with plain results.

    draw        x̂ = f(ŷ) with ŷ of the model in mirror space, and samples of the baseline
    perturb     x, g(x), g(x) + σ z, f(g(x) + σ z), and x with the same errors
    curve       ℓ of the last two as σ grows
    posterior   samples of the images behind noisy, partial observations of x (mirror DPS)
    polish      any of these images, moved to the nearest ones that obey the rule

Everything is computed with the run's own networks and by the functions that its commands use. What a stage of the run
lacks is answered with the command that completes it; what is asked beyond `namm.studio.limits` is refused.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from namm.constraints import Constraint
from namm.datasets import Store, open_store
from namm.datasets.readers import LazyImages
from namm.errors import DataError, RunFolderError, UsageError
from namm.evaluation.scores import Measured, measure_images
from namm.exact import polish
from namm.experiments.assimilation.assimilate import Sampling, Setting, assimilate
from namm.experiments.assimilation.tasks import Task
from namm.experiments.engine import build, build_models
from namm.experiments.engine.folder import is_complete, read_record
from namm.experiments.engine.rule_facts import RuleFacts, facts_of
from namm.experiments.engine.run_parts import FLOOR_IMAGES, Polisher, RunParts
from namm.experiments.engine.settings import SamplerSettings
from namm.experiments.engine.stages.data import images_file
from namm.experiments.engine.stages.map import Numbers
from namm.generative import Diffusion, Mirrored
from namm.inverse import DDIMSteps, GaussianNoise, Mask
from namm.inverse.polishing import observed_scale
from namm.maps import IdentityMap, MirrorMap
from namm.numerics import arithmetic, generator
from namm.report.figures import Array
from namm.report.figures.base import residual_pictures
from namm.studio.limits import (
    LARGEST_SEED,
    LEAST_NOISE,
    LEAST_STEPS,
    MOST_NOISE,
    MOST_POSTERIOR,
    MOST_SAMPLES,
    MOST_STEPS,
    REACH,
    real,
    whole,
)
from namm.studio.work import Work, ticking
from namm.training.objectives import Noise, UniformNoise, perturb

FEW_STEPS = SamplerSettings("dpm-solver", 25)
"""How samples are drawn where the run's own sampler takes more than `MOST_STEPS`."""
POSTERIOR_STEPS = 50
KEPT = 8
"""Sets of images of each kind that can still be polished; older ones are forgotten."""
CURVE = 21
"""Values of σ along a curve."""


@dataclass(frozen=True, eq=False)
class Shown:
    """Images on the page.

    Attributes:
        images: (N, C, H, W), on the CPU.
        distances: ℓ of each, (N,).
        residuals: Pictures of where each breaks the rule, (N, H', W'), for a rule that has such.
        problem: Why there are none of these images, where the rule has such of others.
        key: By which `polish` knows them; empty where they are not for that.
    """

    images: Tensor
    distances: Tensor
    residuals: Array | None
    problem: str = ""
    key: str = ""


@dataclass(frozen=True, eq=False)
class Drawn:
    """Samples of the method and, where the run has one, of the baseline.

    Attributes:
        ours: x̂ = f(ŷ).
        mirror_images: ŷ, (N, C, H, W).
        baseline: Samples of the model of plain images.
        variation: Mean total variation over that of the data, by the names `ours` and `baseline`.
    """

    ours: Shown
    mirror_images: Tensor
    baseline: Shown | None
    variation: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class Perturbed:
    """An image x on its way through mirror space and back.

    Attributes:
        original: x.
        mirror: g(x), (1, C, H, W).
        moved: g(x) + σ z, (1, C, H, W).
        returned: f of that.
        untouched: x with the same errors, which no map has seen.
        errors: Root mean square over pixels of `returned` − x, and of `untouched` − x.
    """

    original: Shown
    mirror: Tensor
    moved: Tensor
    returned: Shown
    untouched: Shown
    errors: tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """ℓ of f(g(x) + σ z) and of x with the same errors, for each σ."""

    sigmas: tuple[float, ...]
    returned: tuple[float, ...]
    untouched: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Behind:
    """Posterior samples behind one observation.

    Attributes:
        truth: What was observed.
        observed: The measurement as an image, NaN where nothing was seen, (1, C, H, W).
        samples: Those that did not diverge.
        mean, spread: Over the samples, (1, C, H, W).
        chi2: χ² of each sample per observed value, and of the truth in the end.
        measured: Observed values.
        error: Root mean square over pixels of mean − truth.
        failed: Samples that diverged.
    """

    truth: Shown
    observed: Tensor
    samples: Shown
    mean: Tensor
    spread: Tensor
    chi2: tuple[float, ...]
    measured: int
    error: float
    failed: int


@dataclass(frozen=True, eq=False)
class PolishedImages:
    """Images on the rule.

    Attributes:
        after: The images.
        before: ℓ of each before, in float64, as `after.distances`, (N,).
        moved: Root mean square of each image's move, in standard deviations of the data or of the noise, (N,).
        reached: Which obey the rule as well as the data or their own rounding do, (N,).
        notes: What could not be done, in sentences.
        chi2: χ² of posterior samples per observed value.
    """

    after: Shown
    before: Tensor
    moved: Tensor
    reached: tuple[bool, ...]
    notes: tuple[str, ...]
    chi2: tuple[float, ...] | None = None


@dataclass(frozen=True, eq=False)
class Kept:
    """What it takes to polish images: in which scale they move, and what was observed of them."""

    images: Tensor
    scale: Tensor
    task: Task | None = None


class Studio:
    """A run to play with. One method at a time may be called.

    Args:
        run: The run's folder.
        work: Counts the steps of what takes long, and stops it.
    """

    def __init__(self, run: Path, work: Work | None = None) -> None:
        self.run, self.work = run, work or Work()
        self.trained = RunParts.load(run)
        self.settings = self.trained.settings
        self.rule: Constraint = self.trained.rule()
        self._kept: defaultdict[str, OrderedDict[str, Kept]] = defaultdict(OrderedDict)
        self._numbers = count()

    # Parts of the run, each read when it is first needed

    @cached_property
    def _store(self) -> Store:
        return open_store(images_file(self.trained.folder("data")))

    def close(self) -> None:
        """Stop what is being computed, and close the file of images."""
        self.work.close()
        if "_store" in self.__dict__:
            self._store.close()

    @cached_property
    def split(self) -> str:
        """Where held-out images are taken from: `test`, or `train` in a run that has none."""
        return "test" if self._store.sizes["test"] else "train"

    @property
    def held_out(self) -> LazyImages:
        """Images that no training has seen."""
        return self._store[self.split]

    @cached_property
    def measured_data(self) -> Measured:
        """ℓ and total variation of held-out images."""
        return measure_images(self.held_out[:FLOOR_IMAGES], self.rule, device=self.device)

    @property
    def device(self) -> torch.device:
        """Where models run."""
        return build.device()

    @cached_property
    def stage_of_f(self) -> str:
        """The stage whose f is used: that of `finetune` where it is complete."""
        return "finetune" if is_complete(self.run, "finetune") else "map"

    @cached_property
    def mirror(self) -> MirrorMap:
        """g and f."""
        return self.trained.mirror(self.stage_of_f)

    @cached_property
    def ours(self) -> Mirrored:
        """The model in mirror space, seen through f."""
        return self.trained.source("mdm", self.mirror)

    @cached_property
    def baseline(self) -> Mirrored:
        """The same model, trained on the images."""
        return self.trained.source("dm", IdentityMap())

    @cached_property
    def polisher(self) -> Polisher:
        """`polish` with the run's numbers."""
        return self.trained.polisher(self.rule)

    @cached_property
    def numbers(self) -> Numbers:
        """What the map was trained with."""
        return Numbers.from_results(read_record(self.trained.folder("map")).results, self.settings.map)

    @cached_property
    def facts(self) -> RuleFacts:
        """How images under this rule are looked at."""
        return facts_of(self.rule)

    @cached_property
    def residual_problem(self) -> str:
        """Why there are no pictures of the residual, where that of the data cannot be shown."""
        return self._residuals(self.image(0))[1]

    @property
    def sampler(self) -> SamplerSettings:
        """The sampler of the run's evaluation, or one of few steps in its place."""
        own = self.settings.evaluate.sampler
        return own if own.steps <= MOST_STEPS else FEW_STEPS

    @property
    def fresh_seed(self) -> int:
        """A seed that neither the finetuning nor the evaluation has used."""
        used = self.settings.samples.seed, self.settings.evaluate.seed
        return next(k for k in count() if k not in used)

    def lacking(self, stage: str) -> str:
        """Why a stage cannot be used and what completes it; empty where it can."""
        try:
            self.trained.folder(stage)
        except RunFolderError as error:
            return str(error)
        return ""

    def image(self, index: int) -> Tensor:
        """The held-out image of that number, (1, C, H, W), where models run."""
        index = whole("index", index, 0, self.held_out.shape[0] - 1)
        return self.held_out[index : index + 1].to(self.device)

    # What the page can do

    @torch.no_grad()
    def draw(self, seed: int = 0, steps: int = FEW_STEPS.steps, n: int = 4) -> Drawn:
        """Samples of both models from the same noise."""
        seed, n = whole("seed", seed, 0, LARGEST_SEED), whole("n", n, 1, MOST_SAMPLES)
        sampler = replace(self.sampler, steps=whole("steps", steps, LEAST_STEPS, MOST_STEPS))
        sources = {"ours": self.ours}
        if not self.lacking("dm"):
            sources["baseline"] = self.baseline
        self.work.expect(sampler.steps * len(sources))
        pairs = {name: self._sample(source, seed, sampler, n) for name, source in sources.items()}
        data = self.measured_data
        return Drawn(
            ours=self._polishable("draw", pairs["ours"][0]),
            mirror_images=pairs["ours"][1].cpu(),
            baseline=self._polishable("draw", pairs["baseline"][0]) if "baseline" in pairs else None,
            variation={name: measure_images(x).against(data)[0] for name, (x, _) in pairs.items()},
        )

    @torch.no_grad()
    def perturb(self, index: int = 0, sigma: float = 0.0, seed: int = 0, white: bool = False) -> Perturbed:
        """A held-out image x, moved by σ z in mirror space and brought back by f.

        z are errors of the kind that the map was trained with, or white noise.
        """
        x, sigma = self.image(index), self._sigma(sigma)
        errors = self._errors(x, index, seed, white)
        with arithmetic("fp32", self.device):
            y = self.mirror.to_mirror(x)
            moved, untouched = self._moved(x, y, y.new_full((1, 1, 1, 1), sigma), errors)
            returned = self.mirror.to_data(moved)
        rms = tuple(float((each - x).double().square().mean().sqrt()) for each in (returned, untouched))
        return Perturbed(
            original=self._shown(x),
            mirror=y.cpu(),
            moved=moved.cpu(),
            returned=self._polishable("perturb", returned),
            untouched=self._polishable("perturb", untouched),
            errors=(rms[0], rms[1]),
        )

    @torch.no_grad()
    def curve(self, index: int = 0, seed: int = 0, white: bool = False) -> Curve:
        """ℓ of f(g(x) + σ z) and of x with the same errors, from σ = 0 to the largest, for the z of `perturb`."""
        x = self.image(index)
        errors = self._errors(x, index, seed, white)
        sigmas = np.linspace(0.0, REACH * self.numbers.sigma_max, CURVE)
        with arithmetic("fp32", self.device):
            y = self.mirror.to_mirror(x)
            column = torch.as_tensor(sigmas, dtype=y.dtype, device=y.device).reshape(-1, 1, 1, 1)
            moved, untouched = self._moved(x, y, column, errors)
            returned = self.mirror.to_data(moved)
        distances = (tuple(self.rule(images).double().cpu().tolist()) for images in (returned, untouched))
        return Curve(tuple(sigmas.tolist()), *distances)

    def posterior(
        self,
        index: int,
        mask: Tensor,
        noise: float,
        n: int = 4,
        steps: int = POSTERIOR_STEPS,
        seed: int = 0,
    ) -> Behind:
        """Posterior samples (mirror DPS) of a held-out image whose pixels under `mask` (H, W) are seen with noise.

        The measurement pulls by its likelihood, which needs no tuning.
        """
        seed, n = whole("seed", seed, 0, LARGEST_SEED), whole("n", n, 1, MOST_POSTERIOR)
        steps = whole("steps", steps, LEAST_STEPS, MOST_STEPS)
        x, std = self.image(index).cpu(), real("noise", noise, LEAST_NOISE, MOST_NOISE)
        operator = self._operator(mask)
        like, model = operator(x), self.ours.model
        assert isinstance(model, Diffusion)
        measurement = like + GaussianNoise(std).sample(like, generator(seed, "measurement", index))
        task = Task("a mask", operator, GaussianNoise(std), range(index, index + 1), x, measurement)
        self.work.expect(steps)
        with ticking(model.network, self.work):
            sampling = Sampling(n, DDIMSteps(steps), seed=seed)
            found = assimilate(self.ours, task, Setting("mirror-dps", 1.0, guidance="likelihood"), self.rule, sampling)
        good = ~found.failed[0]
        if not good.any():
            raise DataError("every sample diverged: take more steps or more noise.")
        samples = found.samples[0, good]
        scale = observed_scale(operator.cpu(), task.noise, self.polisher.scale, self.trained.shape)
        return Behind(
            truth=self._shown(x),
            observed=operator.cpu().fill(measurement, self.trained.shape),
            samples=self._polishable("posterior", samples, scale, task),
            mean=found.mean,
            spread=found.spread,
            chi2=(*found.chi2[0, good].tolist(), task.truth_chi2),
            measured=task.measured,
            error=float(found.error),
            failed=int((~good).sum()),
        )

    def polish(self, key: str) -> PolishedImages:
        """The images shown under `key`, moved to the nearest ones that obey the rule."""
        kept = next((sets[str(key)] for sets in self._kept.values() if str(key) in sets), None)
        if kept is None:
            raise UsageError("these images are no longer kept: draw them again, and polish them then.")
        polished = polish(kept.images, self.rule, scale=kept.scale, floor=self.polisher.floor, device=self.device)
        certificate, chi2 = polished.certificate, None
        if kept.task is not None:
            residual = kept.task.measurement - kept.task.operator.cpu()(polished.images)
            chi2 = tuple((kept.task.noise.chi2(residual) / kept.task.measured).tolist())
        shown = self._shown(polished.images)
        return PolishedImages(
            after=replace(shown, distances=torch.from_numpy(certificate.after)),
            before=torch.from_numpy(certificate.before),
            moved=torch.from_numpy(certificate.moved),
            reached=tuple(certificate.reached.tolist()),
            notes=certificate.notes,
            chi2=chi2,
        )

    # Inside

    def _sample(self, source: Mirrored, seed: int, sampler: SamplerSettings, n: int) -> tuple[Tensor, Tensor]:
        """x and y, as `namm sample` makes them; refused where they are not finite."""
        assert isinstance(source.model, Diffusion)
        with ticking(source.model.network, self.work), arithmetic("auto", self.device):
            how = {"sampler": build_models.sampler(sampler), "batch_size": n, "progress": False}
            x, y = source.sample_pairs(n, generator=seed, **how)
        if not torch.isfinite(x).all():
            raise DataError(f"samples of {sampler.steps} steps are not finite: take more steps, or train longer.")
        return x, y

    def _sigma(self, sigma: float) -> float:
        return real("sigma", sigma, 0.0, REACH * self.numbers.sigma_max * (1 + 1e-6))

    def _errors(self, x: Tensor, index: int, seed: int, white: bool) -> list[Tensor]:
        """z, and a gain where the map's noise has one, drawn on the CPU: the same everywhere."""
        noise: Noise = UniformNoise() if white else self.numbers.noise(self.settings.map)
        rng = generator(whole("seed", seed, 0, LARGEST_SEED), "studio", index)
        return [each.to(x) for each in noise.errors(x.cpu(), rng)]

    def _moved(self, x: Tensor, y: Tensor, sigma: Tensor, errors: list[Tensor]) -> tuple[Tensor, Tensor]:
        """g(x) + σ z, and x with the same errors, both for every σ of a column (S, 1, 1, 1): (S, C, H, W)."""
        plain = self.mirror.unstandardise(perturb(self.mirror.standardise(x), sigma, *errors))
        return perturb(y, sigma, *errors), plain

    def _operator(self, mask: Tensor) -> Mask:
        _, height, width = self.trained.shape
        if tuple(mask.shape) != (height, width) or mask.dtype != torch.bool:
            raise UsageError(f"mask must have a yes or no for each of {height}×{width} pixels.")
        if not mask.any():
            raise UsageError("nothing is observed: paint some pixels first.")
        return Mask(mask)

    def _shown(self, images: Tensor) -> Shown:
        """Images with what is measured of them."""
        images = images.detach()
        distances = measure_images(images, self.rule, device=self.device).distances
        residuals, problem = (None, "") if self.residual_problem else self._residuals(images)
        return Shown(images.cpu(), distances, residuals, problem)

    def _polishable(self, kind: str, images: Tensor, scale: Tensor | None = None, task: Task | None = None) -> Shown:
        """The same, kept under a key by which `polish` knows them."""
        key, kept = f"{kind}-{next(self._numbers)}", self._kept[kind]
        kept[key] = Kept(images.detach(), self.polisher.scale if scale is None else scale, task)
        while len(kept) > KEPT:
            kept.popitem(last=False)
        return replace(self._shown(images), key=key)

    def _residuals(self, images: Tensor) -> tuple[Array | None, str]:
        """Pictures of where images break the rule, for a rule that has such, and why they could not be made."""
        try:
            found = self.facts.residual_pictures("", images.to(self.device))
            return residual_pictures(found, images.cpu().numpy(), "the residual"), ""
        except Exception as error:  # a user's code may raise anything
            return None, f"the rule's residual cannot be shown: {type(error).__name__}: {error}"
