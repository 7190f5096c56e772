"""Posterior samples moved onto the rule, each pixel as freely as the measurement leaves it.

    min Σ ((x' − x) / s)²   such that x' obeys the rule,       s = σ where a pixel was observed, else the data's spread

A pixel that was seen with noise of standard deviation σ is known to within σ, so that it moves in units of it, and of
the data's spread where that is less: samples that agree with their measurement still do. Values that an instrument
computes from many pixels, of a blur or of means over blocks, say of no pixel alone how well it is known: then all move
in units of the data's spread, and the certificate has a note of it. χ² is measured again in either case.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from namm.constraints import Constraint
from namm.errors import UsageError
from namm.exact.polish import pixel_scale, polish
from namm.inverse.guidance import Evidence
from namm.inverse.noise import GaussianNoise
from namm.inverse.operators import Operator
from namm.inverse.posterior import Posterior

NOT_PIXELS = (
    "The measurement is of no single pixels: all pixels moved in units of the data's spread, without regard to the "
    "noise. Compare χ² with that of the samples before."
)


def observed_scale(
    operator: Operator, noise: GaussianNoise, spread: float | Sequence[float] | Tensor, shape: tuple[int, int, int]
) -> Tensor:
    """The `scale` of `polish` for samples behind a measurement, (C, H, W) in float64.

    Args:
        operator: A. `Mask`, `Columns`, `States` and compositions of these observe pixels; for others the scale is that
            of the data.
        noise: Its standard deviations σ are the scale of pixels that were observed, where they are below the spread.
        spread: Standard deviation of the data: a number, one per channel, or a tensor that broadcasts to an image.
        shape: (C, H, W).
    """
    scale = pixel_scale(spread, None, shape)[0]
    if (pixels := operator.pixels(shape)) is None:
        return scale
    flat = scale.flatten()
    known = noise.deviations(tuple(pixels.shape)).to(flat).flatten()
    flat[pixels.flatten()] = torch.minimum(known, flat[pixels.flatten()])
    return flat.reshape(shape)


def polish_posterior(
    posterior: Posterior,
    rule: Constraint,
    measurement: Tensor,
    operator: Operator,
    noise: GaussianNoise,
    *,
    spread: float | Sequence[float] | Tensor = 1.0,
    floor: float = 0.0,
) -> Posterior:
    """Move the samples of `sample_posterior` to the nearest images on the rule, by `observed_scale`.

    The result has the polished `samples`, their χ² and ℓ, and the certificate of those that did not fail, in their
    order. The mirror images are those of the samples before.

    Args:
        posterior: What `sample_posterior` drew.
        rule: ℓ, as for `namm.polish`.
        measurement: What was passed to `sample_posterior`.
        operator: The same.
        noise: The same.
        spread: Standard deviation of the data: a number, one per channel, or a tensor that broadcasts to an image.
        floor: Mean ℓ of the data.
    """
    x, good = posterior.samples, ~posterior.failed
    if len(measurement) != len(x):
        raise UsageError(f"{len(measurement)} measurements were given with the samples of {len(x)}.")
    if not good.any():
        return posterior
    c, h, w = x.shape[2:]
    polished = polish(x[good], rule, scale=observed_scale(operator, noise, spread, (c, h, w)), floor=floor)
    certificate = polished.certificate
    if operator.pixels((c, h, w)) is None:
        certificate = replace(certificate, notes=(*certificate.notes, NOT_PIXELS))
    samples, chi2, distance = x.clone(), posterior.chi2.clone(), torch.full_like(posterior.chi2, torch.nan)
    samples[good] = polished.images
    distance[good] = torch.from_numpy(certificate.after).to(distance)
    evidence = Evidence(measurement.to(x), operator.to(x.device), noise)
    with torch.no_grad():
        for k, kept in enumerate(good):
            numbers = torch.full((int(kept.sum()),), k, device=x.device)
            chi2[k, kept] = evidence.rows(numbers).chi2(samples[k, kept])
    return replace(posterior, samples=samples, chi2=chi2, distance=distance, certificate=certificate)
