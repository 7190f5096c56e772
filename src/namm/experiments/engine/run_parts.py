"""What a run has trained: its parts by the stage that trained them, and a run as an object, `namm.Run`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from namm.constraints import Constraint
from namm.datasets import Store, open_store
from namm.datasets.batches import Images, to_tensor
from namm.evaluation import distance_summary
from namm.evaluation.verdict import Verdict
from namm.exact import Polished, polish
from namm.experiments.engine import build, build_models
from namm.experiments.engine.build import device
from namm.experiments.engine.folder import SETTINGS, TRAINING, complete_stage, describe_run, find_run, is_complete
from namm.experiments.engine.settings import SamplerSettings, Settings
from namm.experiments.engine.settings_file import read_yaml
from namm.experiments.engine.stages import Work
from namm.experiments.engine.stages.data import images_file
from namm.experiments.engine.stages.map import mirror_folder
from namm.formatting import html_table
from namm.generative import VAE, Consistency, Diffusion
from namm.generative.base import channel_statistics
from namm.generative.mirrored import Mirrored
from namm.maps import IdentityMap, MirrorMap
from namm.training.checkpoint import weights_digest
from namm.training.train_model import load_model

__all__ = ["Run", "RunParts", "describe_samples", "device", "untrained"]

Shape = tuple[int, int, int]
Model = Diffusion | Consistency | VAE

FLOOR_IMAGES = 1000
"""Images whose mean ℓ is the data's floor, and whose spread is the unit of moves."""
AUTOENCODERS, IN_MIRROR_SPACE = ("mvae", "vae"), ("mdm", "mvae")
"""Which of the models mdm, dm, mvae and vae are no diffusion models, and which are of mirror images."""


class RunParts:
    """The trained parts of a run, each loaded when it is asked for and put where models run.

    Args:
        settings: Of the run.
        folder: Gives the folder of a stage by its name.
    """

    def __init__(self, settings: Settings, folder: Callable[[str], Path]) -> None:
        self.settings, self.folder = settings, folder

    @classmethod
    def of(cls, work: Work) -> Self:
        """What a stage builds on."""
        return cls(work.settings, work.needs.__getitem__)

    @classmethod
    def load(cls, run: Path) -> Self:
        """What the run in that folder has; asked for a stage that is not complete, it says how to complete it."""
        return cls(read_yaml(run / SETTINGS).settings, partial(complete_stage, run))

    @cached_property
    def shape(self) -> Shape:
        """(C, H, W) of an image."""
        return build.dataset(self.settings.data).shape

    def rule(self) -> Constraint:
        """ℓ."""
        return build.rule_of(self.settings.data, self.folder)

    def mirror(self, stage: str) -> MirrorMap:
        """g and f as `map` or `finetune` left them."""
        return MirrorMap.load(mirror_folder(self.folder(stage))).to(device())

    def model(self, stage: str) -> Model:
        """The model that `stage` trained."""
        folder = self.folder(stage)
        model = untrained(stage, self.settings, self.shape)
        load_model(model, folder / TRAINING)
        return model.to(device())

    def polisher(self, rule: Constraint) -> "Polisher":
        """`polish` as the run's data ask for: moves in standard deviations of a channel, the images' ℓ as floor."""
        with open_store(images_file(self.folder("data"))) as store:
            images = to_tensor(store["test" if store.sizes["test"] else "train"][:FLOOR_IMAGES])
        _, spread = channel_statistics(images, self.shape)
        scale = torch.where(spread > 0, spread, 1.0)  # a channel that never varies
        floor = distance_summary(rule, images, device=device()).mean
        return Polisher(rule, scale, floor)

    def source(self, stage: str, mirror: MirrorMap | IdentityMap) -> Mirrored:
        """Samples of that model through `mirror`."""
        return Mirrored(self.model(stage), mirror).to(device())


@dataclass(frozen=True, eq=False)
class Polisher:
    """`polish` with a run's numbers: the scale of each channel (C,) and mean ℓ of its data."""

    rule: Constraint
    scale: Tensor
    floor: float

    def __call__(self, x: Images, *, progress: bool = False) -> Polished:
        """The nearest images on the rule, where models run."""
        return polish(x, self.rule, scale=self.scale, floor=self.floor, device=device(), progress=progress)


def untrained(stage: str, settings: Settings, shape: Shape) -> Model:
    """The model of `stage` with its first weights."""
    if stage in AUTOENCODERS:
        return build_models.vae(settings.vae, shape)
    if stage == "few":
        teacher = build_models.diffusion(settings.mdm.network, settings.mdm.diffusion, shape, settings.mdm.train.seed)
        return Consistency(teacher, grid=settings.few.grid)
    seed = (settings.dm if stage == "dm" else settings.mdm).train.seed
    return build_models.diffusion(settings.mdm.network, settings.mdm.diffusion, shape, seed)


def describe_samples(source: Mirrored, sampler: SamplerSettings | None) -> dict[str, bool | int | float | str]:
    """What a file of samples was made with; an autoencoder has no sampler."""
    how = {} if sampler is None else {"sampler": sampler.method, "steps": sampler.steps}
    return {"weights": weights_digest(source), **how}


class Run:
    """A run that `namm run` made; each part is read when it is first asked for.

    A stage that is not complete is refused with the command that completes it.

    Args:
        folder: The run's folder, or its name in `runs`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = find_run(folder)
        self._parts = RunParts.load(self.folder)

    @property
    def settings(self) -> Settings:
        """The settings of the run's last call."""
        return self._parts.settings

    @cached_property
    def rule(self) -> Constraint:
        """ℓ, where models run."""
        return self._parts.rule()

    @cached_property
    def mirror(self) -> MirrorMap:
        """g and f; f as finetuning left it, where that is complete."""
        return self._parts.mirror(self._stage_of_f)

    @cached_property
    def model(self) -> Mirrored:
        """The mirrored diffusion model: y from the model in mirror space, x = f(y)."""
        return self._parts.source("mdm", self.mirror)

    def sample(self, n: int, *, seed: int = 0, **options: Any) -> Tensor:
        """Draw images (n, C, H, W), with the sampler that the run is evaluated by unless `sampler` is given."""
        how = build_models.sampling(self.settings.evaluate.sampler) | options
        with torch.no_grad():
            return self.model.sample(n, generator=seed, **how)

    @cached_property
    def metrics(self) -> Mapping[str, Any]:
        """What the stage `evaluate` measured: the contents of its metrics.json."""
        from namm.experiments.engine.stages.evaluate import read_metrics

        found: Mapping[str, Any] = read_metrics(complete_stage(self.folder, "evaluate"))
        return found

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on the samples, or on the map while there are none; None before that."""
        from namm.experiments.engine.stages.evaluate import run_verdict

        return run_verdict(self.folder, self._stage_of_f)

    @cached_property
    def images(self) -> Store:
        """The run's data: `run.images["test"][:4]` reads four images (4, C, H, W)."""
        return open_store(images_file(complete_stage(self.folder, "data")))

    @property
    def _stage_of_f(self) -> str:
        return "finetune" if is_complete(self.folder, "finetune") else "map"

    def __repr__(self) -> str:
        about = describe_run(self.folder)
        return f"Run({str(self.folder)!r}: {about.experiment}, preset {about.preset}, done: {', '.join(about.done)})"

    def _repr_html_(self) -> str:
        about, verdict = describe_run(self.folder), self.verdict
        rows = [("experiment", about.experiment), ("preset", about.preset), ("stages", ", ".join(about.done))]
        return html_table(
            str(self.folder), [*rows, ("verdict", "not judged yet" if verdict is None else verdict.headline)]
        )
