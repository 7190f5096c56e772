"""Periodic images: p × q copies of one unit cell.

Cut x into T = p·q tiles t₁ … t_T of size C × H/p × W/q. The distance compares x with the image that each tile
would give if it were the unit cell:

    ℓ(x) = Σₖ mean |x − tiling of tₖ| = (1/T) Σₖ Σⱼ mean |tⱼ − tₖ|

which is zero exactly when all tiles agree. The nearest periodic image in least squares repeats the mean tile.
"""

from collections.abc import Sequence
from operator import index

from torch import Tensor

from namm.constraints.base import Constraint
from namm.errors import DataError, UsageError
from namm.numerics import at_least_float32


class Periodic(Constraint):
    """ℓ(x) = Σ over tiles of mean |x − tiling of that tile|.

    Args:
        tiles: how often the unit cell repeats along rows and columns, (p, q); one number n means (n, n).
    """

    def __init__(self, tiles: int | Sequence[int] = (2, 2)) -> None:
        super().__init__()
        try:
            p, q = (index(n) for n in (tiles if isinstance(tiles, Sequence) else (tiles, tiles)))
        except (TypeError, ValueError):
            p = q = 0
        if p < 1 or q < 1 or p * q < 2:
            raise UsageError(
                "Periodic needs the repeats of the unit cell along rows and columns, two whole numbers with at "
                f"least two tiles in all, such as (2, 2); got {tiles!r}."
            )
        self.tiles = p, q

    def distance(self, x: Tensor) -> Tensor:
        """(1/T) Σₖ Σⱼ mean |tⱼ − tₖ|: (B, C, H, W) → (B,). Keeps all T² pairs, T times the memory of x."""
        t = self._cut(x)
        return (t[:, :, None] - t[:, None, :]).abs().mean(dim=(1, 3)).sum(dim=1)

    def residual(self, x: Tensor) -> Tensor:
        """The image minus P(x): (B, C, H, W) → (B, C, H, W), zero exactly where x is periodic."""
        x = at_least_float32(x)
        return x - self.project(x)

    def project(self, x: Tensor) -> Tensor:
        """P(x), the mean tile repeated: the nearest periodic image, (B, C, H, W) → (B, C, H, W)."""
        t = self._cut(at_least_float32(x))
        first = t[:, :1]
        # Averaged as differences, so that the mean of equal tiles is that tile to the last bit.
        cell = first + (t - first).mean(dim=1, keepdim=True)
        return self._join(cell.expand_as(t), x)

    def nearest(self, x: Tensor, scale: Tensor) -> Tensor:
        """The tiles' mean, weighted by 1 / scale², repeated: (B, C, H, W) → (B, C, H, W)."""
        t, weight = self._cut(x), self._cut(scale.expand_as(x)).square().reciprocal()
        first = t[:, :1]
        cell = first + ((t - first) * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True)
        return self._join(cell.expand_as(t), x)

    def _cut(self, x: Tensor) -> Tensor:
        """Tiles as rows: (B, C, H, W) → (B, T, C·H/p·W/q)."""
        (p, q), (b, c, height, width) = self.tiles, x.shape
        if height % p or width % q:
            raise DataError(
                f"Periodic(tiles={self.tiles}) cannot cut images of {height}×{width} pixels into {p}×{q} "
                "equal tiles; crop the images to a multiple of the tiling, or choose another tiling."
            )
        grid = x.reshape(b, c, p, height // p, q, width // q)
        return grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

    def _join(self, t: Tensor, x: Tensor) -> Tensor:
        """The inverse of `_cut`: (B, T, C·H/p·W/q) → (B, C, H, W), the shape of x."""
        (p, q), (b, c, height, width) = self.tiles, x.shape
        grid = t.reshape(b, p, q, c, height // p, width // q)
        return grid.permute(0, 3, 1, 4, 2, 5).reshape(x.shape)
