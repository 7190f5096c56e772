"""What a run has trained, by the name of the stage that trained it: for later stages, and for whoever uses a run."""

from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from shlex import quote
from typing import Self

from namm.constraints import Constraint
from namm.errors import RunFolderError
from namm.experiments.engine import build
from namm.experiments.engine.build import device
from namm.experiments.engine.folder import SETTINGS
from namm.experiments.engine.settings import SamplerSettings, Settings
from namm.experiments.engine.settings_file import read_yaml
from namm.experiments.engine.stages import Work
from namm.experiments.engine.stages.map import TRAINING, mirror_folder
from namm.experiments.engine.status import stage_states
from namm.generative import VAE, Diffusion
from namm.generative.mirrored import Mirrored
from namm.maps import IdentityMap, MirrorMap
from namm.training.checkpoint import weights_digest
from namm.training.train_model import load_model

__all__ = ["Trained", "complete_stage", "describe_samples", "device", "is_complete", "untrained"]

Shape = tuple[int, int, int]

AUTOENCODERS, IN_MIRROR_SPACE = ("mvae", "vae"), ("mdm", "mvae")
"""Which of the models mdm, dm, mvae and vae are no diffusion models, and which are of mirror images."""


class Trained:
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

    def model(self, stage: str) -> Diffusion | VAE:
        """The model that `stage` trained."""
        folder = self.folder(stage)
        model = untrained(stage, self.settings, self.shape)
        load_model(model, folder / TRAINING)
        return model.to(device())

    def source(self, stage: str, mirror: MirrorMap | IdentityMap) -> Mirrored:
        """Samples of that model through `mirror`."""
        return Mirrored(self.model(stage), mirror).to(device())


def untrained(stage: str, settings: Settings, shape: Shape) -> Diffusion | VAE:
    """The model of `stage` with its first weights."""
    if stage in AUTOENCODERS:
        return build.vae(settings.vae, shape)
    seed = (settings.dm if stage == "dm" else settings.mdm).train.seed
    return build.diffusion(settings.mdm.network, settings.mdm.diffusion, shape, seed)


def complete_stage(run: Path, stage: str) -> Path:
    """The folder of a stage that is complete for the run's own settings; refused where it is not."""
    state = next(row.state for row in stage_states(run) if row.folder == stage)
    if state != "complete":
        reason = {"partial": "was cut short", "stale": "was made with other settings"}.get(state, "has not been run")
        raise RunFolderError(
            f"the stage {stage!r} of {run} {reason}: "
            f"`namm run --config {quote(str(run / SETTINGS))} --out {quote(str(run))} --until {stage}` completes it."
        )
    return run / stage


def is_complete(run: Path, stage: str) -> bool:
    """Whether that stage is complete for the run's own settings."""
    return any(row.folder == stage and row.state == "complete" for row in stage_states(run))


def describe_samples(source: Mirrored, sampler: SamplerSettings | None) -> dict[str, bool | int | float | str]:
    """What a file of samples was made with; an autoencoder has no sampler."""
    how = {} if sampler is None else {"sampler": sampler.method, "steps": sampler.steps}
    return {"weights": weights_digest(source), **how}
