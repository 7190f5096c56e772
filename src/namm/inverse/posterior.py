"""What posterior sampling returns."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Posterior:
    """n samples for each of M measurements. Samples that failed are NaN in every entry, and in their place.

    Attributes:
        samples: x = f(y): (M, n, C, H, W).
        mirror_samples: y, in mirror space (data space, if the map is the identity): (M, n, C, H, W).
        chi2: χ² of each sample: (M, n). That of the truth is about `measured`.
        distance: ℓ of each sample, if a constraint was given: (M, n).
        redrawn: How often each sample diverged and was drawn again with a smaller step: (M, n), whole numbers.
        failed: True where it diverged at the smallest step too: (M, n).
        measured: Number of values in a measurement.
    """

    samples: Tensor
    mirror_samples: Tensor
    chi2: Tensor
    distance: Tensor | None
    redrawn: Tensor
    failed: Tensor
    measured: int

    def __str__(self) -> str:
        m, n = self.failed.shape
        lines = [
            f"{n} samples for each of {m} measurements of {self.measured} values",
            f"  χ² per value  mean {_mean(self.chi2) / self.measured:.3g}",
        ]
        if self.distance is not None:
            lines.append(f"  ℓ             mean {_mean(self.distance):.3g}")
        lines.append(f"  diverged      {int((self.redrawn > 0).sum())} redrawn, {int(self.failed.sum())} failed")
        return "\n".join(lines)


def _mean(values: Tensor) -> float:
    return float(values.nanmean())
