"""What the page is told: results of a `Studio` as plain JSON values, and its questions as calls of methods.

A picture is (N, H, W) float32 in base64, so that the page can colour it and tell the value of a pixel. Images, and
mirror images, have one scale of colours for the whole run; residuals and spreads have one in each answer.
"""

import base64
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import torch
from torch import Tensor

from namm.errors import UsageError
from namm.experiments.engine.folder import describe_run, is_complete
from namm.experiments.engine.stages.evaluate import read_metrics, run_verdict
from namm.report.contents import ROWS
from namm.report.figures import Array
from namm.report.figures.base import DEVIATIONS, VALUES, limits
from namm.studio.limits import (
    LARGEST_SEED,
    LEAST_STEPS,
    MOST_POSTERIOR,
    MOST_SAMPLES,
    MOST_STEPS,
    REACH,
)
from namm.studio.studio import POSTERIOR_STEPS, Behind, Curve, Drawn, Perturbed, PolishedImages, Shown, Studio
from namm.training.objectives import ModelErrors

Json = dict[str, Any]

SCALED_BY = 64
"""Held-out images whose pixels set the ends of the colours."""
SHADES = 256
"""Colours of a map."""
ROWS_SHOWN = ("finetuned", "mdm", "dm", "data")
"""Rows of the evaluation that the page shows, where there are such."""
NEEDS = {"draw": "mdm", "perturb": "map", "posterior": "mdm"}
"""The stage that each part of the page cannot do without."""


# The run


def about(studio: Studio) -> Json:
    """What the page says of the run, and what it can do with it."""
    run, shape = describe_run(studio.run), studio.trained.shape
    lacking = {tool: studio.lacking("map") or studio.lacking(stage) for tool, stage in NEEDS.items()}
    notes = [studio.residual_problem] if studio.residual_problem else []
    if not lacking["draw"] and (no_baseline := studio.lacking("dm")):
        notes.append(f"No baseline to compare with: {no_baseline}")
    if not lacking["perturb"] and studio.stage_of_f == "map":
        notes.append(f"f is the map's, not finetuned: {studio.lacking('finetune')}")
    mapped = {} if lacking["perturb"] else _about_map(studio)
    return {
        "name": studio.run.resolve().name,
        "experiment": run.experiment,
        "preset": run.preset,
        "shape": list(shape),
        "rule": studio.rule.name,
        "floor": _number(studio.measured_data.distances.mean()),
        "held_out": studio.held_out.shape[0],
        "split": studio.split,
        "lacking": lacking,
        "notes": notes,
        "verdict": _verdict(studio),
        "measured": _measured(studio),
        "sampler": {"method": studio.sampler.method, "steps": studio.sampler.steps},
        "posterior": {"steps": POSTERIOR_STEPS, "noise": _noise(studio)},
        "seed": studio.fresh_seed,
        "limits": {
            "samples": MOST_SAMPLES,
            "posterior": MOST_POSTERIOR,
            "steps": [LEAST_STEPS, MOST_STEPS],
            "seed": LARGEST_SEED,
            "reach": REACH,
        },
        "view": {"label": studio.facts.view.label, **_scale(_seen(studio, _first(studio)), studio.facts.view.signed)},
        "colours": {"values": _colours(VALUES), "deviations": _colours(DEVIATIONS)},
        **mapped,
    }


def _about_map(studio: Studio) -> Json:
    x = _first(studio)
    with torch.no_grad():
        y = torch.cat([studio.mirror.to_mirror(part) for part in x.to(studio.device).split(16)])
    return {
        "stage_of_f": studio.stage_of_f,
        "sigma_max": studio.numbers.sigma_max,
        "model_errors": isinstance(studio.numbers.noise(studio.settings.map), ModelErrors),
        "mirror_view": _scale(_seen(studio, y), studio.facts.view.signed),
    }


def _first(studio: Studio) -> Tensor:
    return studio.held_out[:SCALED_BY]


def _noise(studio: Studio) -> float:
    """Half of the data's standard deviation, in one digit: the first noise to try."""
    return float(f"{0.5 * float(studio.polisher.scale.mean()):.1g}")


def _verdict(studio: Studio) -> Json | None:
    verdict = run_verdict(studio.run, studio.stage_of_f)
    return None if verdict is None else verdict.as_json()


def _measured(studio: Studio) -> list[Json]:
    """Rows of the run's own evaluation, of many samples."""
    if not is_complete(studio.run, "evaluate"):
        return []
    rows = read_metrics(studio.run / "evaluate")["rows"]
    return [
        {
            "row": name,
            "name": ROWS[name][0],
            "n": rows[name]["distance"]["n"],
            "distance": _number(rows[name]["distance"]["mean"]),
            "mmd": _number(rows[name]["mmd"][0]),
            "variation": _number(rows[name]["total_variation"]),
        }
        for name in ROWS_SHOWN
        if name in rows
    ]


# Results


def drawn(studio: Studio, result: Drawn) -> Json:
    """Samples of both models, with one scale of colours for the residuals of both."""
    shown = [each for each in (result.ours, result.baseline) if each is not None]
    answer: Json = {
        "mirror": _picture(studio, result.mirror_images),
        "residual_scale": _residual_scale(*shown),
        "variation": {name: _number(value) for name, value in result.variation.items()},
    }
    for name, each in (("ours", result.ours), ("baseline", result.baseline)):
        answer[name] = None if each is None else _images(studio, each)
    return answer


def perturbed(studio: Studio, result: Perturbed) -> Json:
    """An image on its way to mirror space and back."""
    names = ("original", "returned", "untouched")
    shown = {name: getattr(result, name) for name in names}
    return {
        **{name: _images(studio, each) for name, each in shown.items()},
        "mirror": _picture(studio, result.mirror),
        "moved": _picture(studio, result.moved),
        "errors": {"returned": _number(result.errors[0]), "untouched": _number(result.errors[1])},
        "residual_scale": _residual_scale(result.returned, result.untouched),
    }


def curved(studio: Studio, result: Curve) -> Json:
    """ℓ along σ."""
    return {name: list(map(_number, getattr(result, name))) for name in ("sigmas", "returned", "untouched")}


def behind(studio: Studio, result: Behind) -> Json:
    """Posterior samples, their mean and spread."""
    *chi2, truth_chi2 = result.chi2
    spread = np.abs(studio.facts.view.show(result.spread.numpy())) if not _is_derived(studio) else _rms(result.spread)
    return {
        "truth": _images(studio, result.truth),
        "observed": _packed(_observed(studio, result)),
        "samples": _images(studio, result.samples),
        "mean": _picture(studio, result.mean),
        "spread": _packed(spread),
        "spread_scale": {"low": 0.0, "high": float(spread.max()) or 1.0, "signed": False},
        "residual_scale": _residual_scale(result.samples),
        "chi2": list(map(_number, chi2)),
        "truth_chi2": _number(truth_chi2),
        "measured": result.measured,
        "error": _number(result.error),
        "failed": result.failed,
    }


def polished(studio: Studio, result: PolishedImages) -> Json:
    """Images on the rule, and what that took."""
    return {
        "images": _images(studio, result.after),
        "before": list(map(_number, result.before)),
        "moved": list(map(_number, result.moved)),
        "reached": list(result.reached),
        "notes": [*result.notes, *([result.after.problem] if result.after.problem else [])],
        "chi2": None if result.chi2 is None else list(map(_number, result.chi2)),
    }


def _images(studio: Studio, shown: Shown) -> Json:
    return {
        "key": shown.key,
        "pictures": _picture(studio, shown.images),
        "distances": list(map(_number, shown.distances)),
        "mean": _number(shown.distances.mean()),
        "residuals": None if shown.residuals is None else _packed(shown.residuals),
        "notes": [shown.problem] if shown.problem else [],
    }


# Pictures


def _seen(studio: Studio, images: Tensor) -> Array:
    """What people see of images (N, C, H, W): (N, H, W)."""
    return studio.facts.view.show(images.cpu().numpy())


def _is_derived(studio: Studio) -> bool:
    """Whether people see something that is computed from several pixels."""
    return studio.facts.shows == "vorticity"


def _rms(images: Tensor) -> Array:
    """Root mean square over channels, (N, C, H, W) → (N, H, W)."""
    found: Array = images.square().mean(1).sqrt().numpy()
    return found


def _observed(studio: Studio, result: Behind) -> Array:
    """The measurement as a picture, NaN where nothing was seen; what is derived from pixels is that of the truth."""
    if not _is_derived(studio):
        return _seen(studio, result.observed)
    unseen = result.observed.isnan().any(1).numpy()
    return np.where(unseen, np.nan, _seen(studio, result.truth.images))


def _picture(studio: Studio, images: Tensor) -> Json:
    return _packed(_seen(studio, images))


def _packed(pictures: Array) -> Json:
    values = np.ascontiguousarray(pictures, dtype="<f4")
    return {"shape": list(values.shape), "data": base64.b64encode(values.tobytes()).decode()}


def _scale(values: Array, signed: bool) -> Json:
    low, high = limits(values, signed)
    return {"low": low, "high": high, "signed": signed}


def _residual_scale(*shown: Shown) -> Json | None:
    found = [each.residuals for each in shown if each.residuals is not None]
    return _scale(np.concatenate([each.ravel() for each in found]), True) if found else None


def _colours(name: str) -> list[list[int]]:
    """A map of colours as red, green and blue from 0 to 255."""
    shades: list[list[int]] = mpl.colormaps[name](np.linspace(0, 1, SHADES), bytes=True)[:, :3].tolist()
    return shades


def _number(value: float | Tensor) -> float | None:
    """A number that JSON knows."""
    found = float(value)
    return found if math.isfinite(found) else None


# Questions


class Question(NamedTuple):
    """What is said while it is computed, the method that computes, and what makes JSON of its result."""

    doing: str
    method: Callable[..., Any]
    answer: Callable[[Studio, Any], Json]


def _itself(studio: Studio) -> Studio:
    return studio


QUESTIONS = {
    "about": Question("reading the run", _itself, lambda studio, _: about(studio)),
    "draw": Question("drawing samples", Studio.draw, drawn),
    "perturb": Question("mapping an image", Studio.perturb, perturbed),
    "curve": Question("mapping an image", Studio.curve, curved),
    "posterior": Question("drawing posterior samples", Studio.posterior, behind),
    "polish": Question("polishing", Studio.polish, polished),
}


def answer(studio: Studio, name: str, arguments: Mapping[str, Any]) -> Json:
    """The answer to a question with these arguments, as the page sent them."""
    question = QUESTIONS[name]
    if "mask" in arguments:
        arguments = {**arguments, "mask": read_mask(arguments["mask"], studio.trained.shape)}
    try:
        inspect.signature(question.method).bind(studio, **arguments)
    except TypeError as error:
        taken = ", ".join(list(inspect.signature(question.method).parameters)[1:])
        raise UsageError(f"{name} takes {taken}, and something else was asked ({error}).") from None
    with studio.work.doing(question.doing):
        return question.answer(studio, question.method(studio, **arguments))


def read_mask(text: object, shape: Sequence[int]) -> Tensor:
    """A mask (H, W) from a 0 or 1 for each pixel, row by row."""
    _, height, width = shape
    if not isinstance(text, str) or len(text) != height * width or set(text) - {"0", "1"}:
        raise UsageError(f"mask must be {height * width} characters 0 or 1, one for each of {height}×{width} pixels.")
    return torch.tensor(list(map(int, text)), dtype=torch.bool).reshape(height, width)
