"""A trained model, its maps and its rule as one pipeline of diffusers, which a folder keeps.

    y ~ model of `network` and `scheduler`,    x = f(y),    ℓ(x) by `constraint`

The folder is laid out as diffusers has it: g, f and the network each with a config and safetensors, the scheduler, and
`model_index.json`. The index also holds what no component knows (standardisation, schedule, rule) and the SHA-256 of
every file, so that a damaged folder is refused before anything is built from it.
"""

import copy
import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from diffusers import DiffusionPipeline, DPMSolverMultistepScheduler, ModelMixin
from diffusers.utils import BaseOutput
from PIL.Image import Image, fromarray
from torch import Tensor, nn

# diffusers finds the class of a component only in modules that are already imported
import namm.generative.networks.dit
import namm.generative.networks.ncsnpp.network
import namm.generative.networks.unet
import namm.maps.icnn
import namm.maps.resnet
import namm.maps.rulenet  # noqa: F401
from namm.constraints.base import Constraint, as_rule
from namm.constraints.description import describe, rebuild
from namm.digests import digests_of, sha256
from namm.errors import CheckpointError, NammError, NammWarning, UsageError
from namm.evaluation.verdict import Verdict
from namm.exact import polish as polish_images
from namm.exact.certificate import sentence
from namm.files import settle, write_atomically, write_json
from namm.generative.base import GenerativeModel, Seeds, channel_statistics, evaluating
from namm.generative.diffusion import DiffusersNetwork, Diffusion
from namm.generative.mirrored import Mirrored
from namm.generative.repair import FEW, another_range
from namm.generative.samplers import DPMSolver, Sampler, UniPC
from namm.generative.schedules import VPSDE, Epsilon, Flow, Prediction, Schedule, Straight, Velocity
from namm.maps import IdentityMap, MirrorMap
from namm.maps.mirror import forget_origin
from namm.numerics import generator as seeded
from namm.reading import load_json
from namm.weights_file import require_finite

INDEX = "model_index.json"
PREDICTIONS: dict[str, Prediction] = {  # diffusers' names
    "epsilon": Epsilon(),
    "v_prediction": Velocity(),
    "flow_prediction": Flow(),
}
SCHEDULES: dict[str, type[VPSDE | Straight]] = {"vp": VPSDE, "straight": Straight}
MOVED = {"namm.generative.ncsnpp": "namm.generative.networks.ncsnpp.network"}
"""Modules that pipelines of version 0.1 name in their index, and where their classes are now."""
PICTURES = (1, 3)
"""Channels of pictures, in grey and in colours."""
CUT_OFF = 0.01
"""Share of pixels beyond black and white that is told of."""
SHIM = "pipeline"
"""Module of a saved folder in which diffusers alone finds the class, where it may run code of the folder."""
SHIM_TEXT = """from namm.pipeline import NAMMPipeline as NAMMPipeline\n"""
PROBES = 4
"""Images of noise whose g says what mirror images are like."""
SCHEDULERS = ("DPMSolverMultistepScheduler", "UniPCMultistepScheduler")


@dataclass
class NAMMPipelineOutput(BaseOutput):
    """Samples: `images` x and the `mirror_images` y they come from, (B, C, H, W), and `distances` ℓ(x), (B,)."""

    images: Tensor | np.ndarray | list[Image]
    mirror_images: Tensor | np.ndarray
    distances: Tensor | np.ndarray


class NAMMPipeline(DiffusionPipeline):
    """Samples that obey a rule; `from_parts` makes one of what was trained, `from_pretrained` reads a saved one.

    Args:
        g: Data to mirror space; sampling does not need it, so it may be None.
        f: Mirror space to data; None for a model of plain images.
        network: The score network: `NCSNpp`, `DiT`, `UNet` or a model of diffusers.
        scheduler: Decides the sampler: a `DPMSolverMultistepScheduler` or a `UniPCMultistepScheduler`.
        diffusion: The rest of the model, as `from_parts` writes it.
        constraint: The rule: a `Constraint`, a function ℓ: (B, C, H, W) → (B,), or what `describe` says of a rule.
        verdict: The judgement on the samples, as `Verdict.as_json` writes it, where they were judged.
        standardisation: Mean and scale of each channel that the maps see images with; empty where they see them as
            they are.
        certificate: How near to the rule polished samples were, as `Certificate.summary` has it, where any were.
    """

    _optional_components = ["g", "f"]  # noqa: RUF012

    def __init__(
        self,
        g: ModelMixin | None,
        f: ModelMixin | None,
        network: ModelMixin,
        scheduler: Any,
        diffusion: dict[str, Any] | None = None,
        constraint: Constraint | dict[str, Any] | None = None,
        verdict: dict[str, Any] | None = None,
        standardisation: dict[str, list[float]] | None = None,
        certificate: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.register_modules(g=g, f=f, network=network, scheduler=scheduler)
        self._constraint = _as_rule(constraint)
        self.register_to_config(
            diffusion=dict(diffusion or {}),
            constraint=describe(self._constraint),
            verdict=verdict,
            standardisation=dict(standardisation or {}),
            certificate=certificate,
        )
        _ = self.diffusion  # refuses settings that make no model
        self._refuse_another_range()

    @classmethod
    def from_parts(
        cls,
        model: Diffusion,
        mirror: MirrorMap | IdentityMap,
        constraint: Constraint,
        verdict: Verdict | None = None,
        certificate: Mapping[str, Any] | None = None,
    ) -> Self:
        """A pipeline of a trained model, its maps and the rule; shares weights, copies standardisation.

        The model card states the `verdict` on the samples, and the `certificate` (its `summary`) of polished ones.
        """
        if not isinstance(mirror, MirrorMap | IdentityMap):
            raise UsageError(f"the maps must be a MirrorMap or the IdentityMap, not a {type(mirror).__name__}.")
        g, f = (mirror.g, mirror.f) if isinstance(mirror, MirrorMap) else (None, None)
        network = model.network.model if isinstance(model.network, DiffusersNetwork) else model.network
        for name, part in {"g": g, "f": f, "network": network}.items():
            if part is not None and not isinstance(part, ModelMixin):
                kind = type(part).__name__
                raise UsageError(f"{name} is a {kind}; a pipeline can save a ModelMixin of diffusers, such as NCSNpp.")
        settings = _diffusion_settings(model)
        scheduler = DPMSolverMultistepScheduler(prediction_type=settings["prediction"], **_noise_levels(model.sde))
        seen = mirror.standardisation if isinstance(mirror, MirrorMap) else {}
        judged = None if verdict is None else verdict.as_json()
        certified = None if certificate is None else dict(certificate)
        return cls(g, f, network, scheduler, settings, constraint, judged, seen, certified)

    @property
    def constraint(self) -> Constraint:
        """The rule that `distances` are measured by."""
        return self._constraint

    @property
    def verdict(self) -> Verdict | None:
        """The judgement on the samples; None where they were not judged."""
        values = self.config.get("verdict")
        return None if values is None else Verdict.from_json(values)

    @property
    def has_own_rule(self) -> bool:
        """Whether the rule is a user's own, which no folder holds: `from_pretrained` must be given it."""
        return "own" in self.config.constraint

    @property
    def diffusion(self) -> Diffusion:
        """The model of mirror images y."""
        return _build_diffusion(self.config.diffusion, self.network)

    @property
    def mirrored(self) -> Mirrored:
        """The same model for the rest of the package: `pipe.mirrored.sample(8, sampler=EulerMaruyama(1000))`."""
        mirror = IdentityMap() if self.f is None else MirrorMap(self.g, self.f, **self.config.standardisation)
        return Mirrored(cast(GenerativeModel, self.diffusion), mirror)

    def sampler(self, steps: int) -> Sampler:
        """The sampler that goes with the scheduler."""
        name, config = type(self.scheduler).__name__, self.scheduler.config
        if name not in SCHEDULERS:
            raise UsageError(f"a {name} cannot drive this pipeline; take a {' or a '.join(SCHEDULERS)}.")
        levels = _noise_levels(self.diffusion.sde)
        if {option: config.get(option) for option in levels} != levels:
            raise UsageError(
                f"this {name} has other noise levels than the network: make it from pipe.scheduler.config."
            )
        if name == "DPMSolverMultistepScheduler":
            return DPMSolver(steps, config.solver_order, stochastic=config.algorithm_type.startswith("sde-"))
        return UniPC(steps, config.solver_order)

    @torch.no_grad()
    def __call__(
        self,
        batch_size: int = 1,
        num_inference_steps: int = 50,
        generator: Seeds = None,
        output_type: str = "pt",
        return_dict: bool = True,
        polish: bool = False,
    ) -> NAMMPipelineOutput | tuple[Any, ...]:
        """Draw samples and measure how well they obey the rule.

        Args:
            batch_size: How many; they are made 64 at a time.
            num_inference_steps: Evaluations of the network, at least 2.
            generator: A seed, or a generator to draw it from; None draws it from torch's own. A list gives every image
                one of its own, on which it depends alone.
            output_type: `pt` for tensors (B, C, H, W), `np` for arrays (B, H, W, C), `pil` for a list of pictures, on
                which 0 is black and 1 is white; mirror images and distances are tensors then.
            return_dict: False gives the plain tuple (images, mirror_images, distances).
            polish: Move every sample to the nearest image on the rule (`namm.polish`), in standard deviations of the
                data where the maps know them.
        """
        if output_type not in ("pt", "np", "pil"):
            raise UsageError(f"output_type must be 'pt', 'np' or 'pil', not {output_type!r}.")
        channels = self.diffusion.sample_shape[0]
        if output_type == "pil" and channels not in PICTURES:
            raise UsageError(
                f"images of {channels} channels are no pictures, which have 1 or 3: take output_type 'pt' or 'np'."
            )
        if isinstance(generator, list | tuple) and len(generator) != batch_size:
            raise UsageError(f"{len(generator)} generators for a batch_size of {batch_size}: give one for every image.")
        for each in generator if isinstance(generator, list | tuple) else [generator]:
            if not isinstance(each, torch.Generator | int | None):
                raise UsageError(
                    f"generator must be a torch.Generator or a seed, or a list, not a {type(each).__name__}."
                )
        parts = {name: part for name, part in self.components.items() if isinstance(part, nn.Module)}
        if narrow := [name for name, part in parts.items() if part.dtype not in (torch.float32, torch.float64)]:
            raise UsageError(f"{narrow} must keep float32 weights; for speed, call the pipeline under torch.autocast.")
        quiet = getattr(self, "_progress_bar_config", {}).get("disable", False)
        x, y = self.mirrored.sample_pairs(
            batch_size, sampler=self.sampler(num_inference_steps), generator=generator, progress=not quiet
        )
        self._warn_of_another_range(x)
        if polish:
            x = polish_images(x, self.constraint, scale=self.config.standardisation.get("scale")).images
        outputs: tuple[Any, ...] = (x, y, self.constraint(x))
        if output_type == "pil":
            outputs = (_pictures(x), *outputs[1:])
        if output_type == "np":
            outputs = tuple((part.movedim(1, -1) if part.ndim > 1 else part).cpu().numpy() for part in outputs)
        return NAMMPipelineOutput(*outputs) if return_dict else outputs

    # Ranges

    def _refuse_another_range(self) -> None:
        """Refuse a model whose statistics are not those of mirror images, as g makes them of standardised noise."""
        if self.g is None or not self.config.standardisation:
            return
        model = self.diffusion
        noise = torch.randn((PROBES, *model.sample_shape), generator=seeded(0, "range")).to(self.g.device)
        with torch.no_grad(), evaluating(self.g):
            centre, scale = channel_statistics(self.g(noise), model.sample_shape)
        mean, deviation = (each.double().flatten().cpu() for each in (model.mean, model.scale))
        if (mean == 0).all() and (deviation == 1).all():  # not fitted yet
            return
        names = ("what the model draws", "the mirror images of g")
        if (difference := another_range(names, (mean, deviation), (centre, scale))) is not None:
            raise UsageError(f"{difference}: this model was trained on images, or in another range. {TWO_WAYS}")

    def _warn_of_another_range(self, x: Tensor) -> None:
        """Warn of samples that are far from the data of the maps, where these know them."""
        if self.f is None or not (known := self.config.standardisation) or not torch.isfinite(x).all():
            return
        centre, scale = (torch.tensor(known[name], dtype=torch.float64) for name in ("mean", "scale"))
        names, found = ("these samples", "the maps' data"), channel_statistics(x, self.diffusion.sample_shape)
        difference = another_range(names, found, (centre, scale), slack=1 if len(x) >= FEW else 2)
        if difference is not None:
            warnings.warn(
                f"{difference}: the model has learned too little, or "
                f"it was not trained on mirror images, or in another range. {TWO_WAYS}",
                NammWarning,
                stacklevel=3,
            )

    # Folders

    def save_pretrained(self, save_directory: str | Path, *, half: bool = False, **options: Any) -> None:
        """Write the pipeline and a model card into a folder; of diffusers' options, `max_shard_size` is honoured.

        With `half` the network's weights are written as float16, and are float32 again when they are read. f and g are
        written as they are: rounded weights would show in ℓ.
        """
        unsupported = {"safe_serialization": True, "variant": None, "push_to_hub": False, "use_flashpack": False}
        if changed := [name for name, default in unsupported.items() if options.get(name, default) != default]:
            raise UsageError(f"save_pretrained writes safetensors into a local folder; {changed[0]} cannot be changed.")
        folder = Path(save_directory)
        network: ModelMixin = self.components["network"]
        try:
            self.network = copy.deepcopy(network).half() if half else network
            super().save_pretrained(folder, **options)
        finally:
            self.network = network
        files = [path for name in self.components for path in _files(folder / name)]
        for path in (*(path for path in files if path.suffix == ".json"), folder / INDEX):
            forget_origin(path)
        write_atomically(folder / "README.md", self.model_card())
        write_atomically(folder / f"{SHIM}.py", SHIM_TEXT)
        settle([*files, folder / INDEX])
        index = json.loads((folder / INDEX).read_text())
        index["_class_name"] = [SHIM, NAMMPipeline.__name__]
        index["_files"] = digests_of(folder, files)
        write_json(folder / INDEX, index | {"_sha256": _index_sha256(index)})

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> Self:
        """Read what `save_pretrained` wrote; `constraint=rule` hands in a rule of your own, which no folder holds."""
        folder = Path(pretrained_model_name_or_path)
        index = _verified_index(folder)
        options = options | {"use_safetensors": True, "local_files_only": True}
        try:
            options["constraint"] = _as_rule(options.get("constraint", index["constraint"]))
            pipeline = cast(Self, super().from_pretrained(str(folder), **options))
            for name, part in pipeline.components.items():
                if isinstance(part, nn.Module):
                    require_finite(part, str(folder / name))
            return pipeline
        except NammError:
            raise
        except (OSError, ValueError, RuntimeError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"the pipeline in {folder} cannot be built: {error}") from error

    @classmethod
    def load_config(cls, *arguments: Any, **options: Any) -> Any:
        """The index of a folder, as diffusers reads it, with the present modules of components that have moved."""
        loaded = super().load_config(*arguments, **options)
        index = loaded[0] if isinstance(loaded, tuple) else loaded
        index["_class_name"] = cls.__name__
        for name, entry in index.items():
            if isinstance(entry, list | tuple) and len(entry) == 2:
                index[name] = [MOVED.get(entry[0], entry[0]), entry[1]]
        return loaded

    def model_card(self) -> str:
        """README.md for the folder."""
        parts = [
            f"{name}, {type(part).__name__} of {sum(weight.numel() for weight in part.parameters()):,} numbers"
            for name, part in self.components.items()
            if isinstance(part, nn.Module)
        ]
        option = ", constraint=rule" if self.has_own_rule else ""
        verdict = "Verdict: not judged."
        if self.verdict is not None:
            first, *others = self.verdict.lines()
            verdict = "\n".join([f"**{first.capitalize()}**", "", *(f"- {line.strip()}" for line in others)])
        about = {"rule": repr(self.constraint), "option": option, "parts": "; ".join(parts), "verdict": verdict}
        certificate = self.config.get("certificate")
        about["polished"] = "" if certificate is None else f"\nPolished, `pipe(polish=True)`: {sentence(certificate)}\n"
        return CARD.format(**about, **self.config.diffusion)


def _pictures(x: Tensor) -> list[Image]:
    """Images (B, C, H, W) of one or three channels as pictures of 8 bits; what is not in [0, 1] is cut off and told."""
    if (beyond := float(((x < 0) | (x > 1)).float().mean())) > CUT_OFF:
        warnings.warn(
            f"{100 * beyond:.0f} % of the pixels are not between 0, black, and 1, white, and were cut off: "
            "output_type 'pt' or 'np' gives them as they are.",
            NammWarning,
            stacklevel=4,
        )
    pixels = (255 * x.clamp(0, 1)).round().byte().movedim(1, -1).cpu().numpy()
    return [fromarray(each[..., 0] if each.shape[-1] == 1 else each) for each in pixels]


TWO_WAYS = (
    "Train it on mirror images, by namm.train_model(model, data, mirror); or leave a model of images as it is, with "
    "IdentityMap() for the maps, and mend what it draws, in the units of the data, by namm.repair(images, mirror)."
)
"""What to do with a model that does not belong to the maps."""


CARD = """---
library_name: namm
tags: [namm, diffusers, unconditional-image-generation]
---
# Images that obey a rule

The rule is `{rule}`. A diffusion model draws y in mirror space, x = f(y) is the image, and `distances` says how far
each image is from the rule: ℓ(x) ≥ 0, zero where it holds. (C, H, W) = {sample_shape}; prediction: `{prediction}`.

{verdict}
{polished}
```python
from namm import NAMMPipeline

pipe = NAMMPipeline.from_pretrained("path/to/this/folder"{option})
out = pipe(batch_size=8, num_inference_steps=50, generator=0)
out.images, out.mirror_images, out.distances
```

With diffusers alone, which then runs this folder's `pipeline.py`, an import of namm:
`DiffusionPipeline.from_pretrained("path/to/this/folder", trust_remote_code=True{option})`.

The parts: {parts}.
"""


# The diffusion model as JSON


def _diffusion_settings(model: Diffusion) -> dict[str, Any]:
    """What makes `model` of its network; `indexed_time` says whether that takes diffusers' index 1000 t − 1, not t."""
    kinds = [name for name, kind in PREDICTIONS.items() if kind == model.prediction]
    if not kinds:
        raise UsageError(f"a pipeline can save Epsilon(), Velocity() and Flow(), not {model.prediction}.")
    schedules = [name for name, kind in SCHEDULES.items() if type(model.sde) is kind]
    if not schedules:
        raise UsageError(f"a pipeline can save the schedules VPSDE() and Straight(), not {model.sde}.")
    return {
        "sample_shape": list(model.sample_shape),
        "mean": model.mean.flatten().tolist(),
        "scale": model.scale.flatten().tolist(),
        "prediction": kinds[0],
        "t_min": model.t_min,
        "schedule": schedules[0],
        "sde": asdict(cast(VPSDE | Straight, model.sde)),
        "indexed_time": isinstance(model.network, DiffusersNetwork),
    }


def _build_diffusion(settings: Mapping[str, Any], network: ModelMixin) -> Diffusion:
    """The inverse of `_diffusion_settings`, on the network's device."""
    try:
        wrapped = DiffusersNetwork(network) if settings["indexed_time"] else network
        prediction = PREDICTIONS[settings["prediction"]]
        sde = SCHEDULES[settings.get("schedule", "vp")](**settings["sde"])  # version 0.1 had no other
        shape = tuple(settings["sample_shape"])
        model = Diffusion(wrapped, shape, prediction=prediction, t_min=settings["t_min"], sde=sde)
        like: Any = {"dtype": torch.promote_types(network.dtype, torch.float32), "device": network.device}
        for name in ("mean", "scale"):
            setattr(model, name, torch.tensor(settings[name], **like).reshape(shape[0], 1, 1))
    except (KeyError, TypeError, RuntimeError) as error:
        raise UsageError(f"diffusion={dict(settings)} describes no diffusion model: {error!r}.") from error
    return model


def _noise_levels(sde: Schedule) -> dict[str, Any]:
    """What a scheduler of diffusers must be told to have the noise levels of this schedule."""
    return {"trained_betas": sde.discrete_betas().tolist()} if isinstance(sde, VPSDE) else {"use_flow_sigmas": True}


def _as_rule(rule: Any) -> Constraint:
    if isinstance(rule, Mapping):
        return rebuild(rule)
    return as_rule(rule)


# Whole folders only


def _files(folder: Path) -> list[Path]:
    """What a component consists of; hidden files are not ours."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))


def _index_sha256(index: Mapping[str, Any]) -> str:
    content = json.dumps({key: index[key] for key in index if key != "_sha256"}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _verified_index(folder: Path) -> dict[str, Any]:
    """The index of a folder in which every file is there, as it was written, and no other beside it."""
    path = folder / INDEX
    try:
        index: dict[str, Any] = load_json(path)
        if index["_sha256"] != _index_sha256(index):
            raise CheckpointError(f"{path} has been changed since it was saved: save or copy the pipeline again.")
        known, _ = dict(index["_files"]), index["constraint"]
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror or error}): {folder} holds no saved pipeline."
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} was not finished by NAMMPipeline.save_pretrained ({error!r}).") from error
    parts = [part for part in index if part.isidentifier()]  # others may lead out of the folder
    there = {file.relative_to(folder).as_posix() for part in parts for file in _files(folder / part)}
    problems = {
        "missing": known.keys() - there,
        "changed": {name for name in known.keys() & there if sha256(folder / name) != known[name]},
        "foreign": there - known.keys(),
    }
    if listed := "; ".join(f"{kind}: {', '.join(sorted(names))}" for kind, names in problems.items() if names):
        raise CheckpointError(f"{folder} is not as it was saved ({listed}): save or copy the pipeline again.")
    return index
