"""Darcy flow: the pressure p that drives a fluid through a medium of permeability K, and the nearest such pair.

On the points x = i/(n − 1) of the unit square, rows along x and columns along y,

    −∇·(K∇p) = s,    no flux through the walls,    ∫p = 0,

with s = +10 where both coordinates of the cell centre (i + ½)/n are at most 1/8, −10 where both are at least 7/8.
Differences are of second order, central inside and one-sided at the walls, and there is more asked than p has values:

    equation    r = A(K)p − s,    A(K)p = −K p_xx − K_x p_x − K p_yy − K_y p_y,    at all n² points
    walls       −p_x, +p_x on the first and last row,    −p_y, +p_y on the first and last column

so that p is the least-squares solution and the residual has a floor. Constants are free; the trapezium rule fixes them.

**Solving for p.** The normal equations N p = A(K)ᵀs, N = A(K)ᵀA(K) + WᵀW with the walls W, couple a row of the grid
with the two before and the two after it, and the four rows next to a wall with each other. Rows taken in pairs make N
block tridiagonal, and block Cholesky takes O(n⁴) where a dense one takes O(n⁶), for many fields at once. N squares A's
condition number: refinement with A itself gives back what that costs, but for the last two or three digits.

**Differentiating.** A is linear in K, too, so that the derivative G of p*(K) in the direction k solves

    N Gk = −A(K)ᵀ A(k)p − A(k)ᵀ r,

whose second term is there because the least-squares residual r is not zero.

**The nearest pair** minimises D(K) = ‖(p*(K) − p⁰)/s_p‖² + ‖(K − K⁰)/s_K‖² over K. A Gauss–Newton step k from K
minimises what the linearised p*(K) + Gk makes of it, and μ‖k/K‖² besides: where K is small, p* soon bends. It solves

    (H + GᵀG/s_p²) k = g,    H = 1/s_K² + μ/K²,    g = (K⁰ − K)/s_K² + Gᵀ(p⁰ − p*(K))/s_p²,    μ = D(K)/(n TRUST)²,

where −2g is the gradient of D, by conjugate gradients preconditioned with the diagonal H: G smooths, so that tens of
iterations are enough, each of two solutions with N's factors. Wherever they are stopped, k leads downhill.

**The permeability** is log-normal, log K = Σₖ √λₖ zₖ φₖ, zₖ ~ N(0, 1), with the leading eigenpairs of the n² × n²
matrix exp(−r/correlation), r the distance of two points and φₖ unit vectors.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from namm.errors import DataError, UsageError

SMALLEST = 8
"""Points along a side that a grid has at least."""
STRENGTH = 10.0
"""|s| in the two corners."""
MIN_PERMEABILITY = 0.01
"""What `nearest`, and the rule's projection, keep K at or above: half of the least that 10 000 fields at 64×64 have."""
HALVINGS = 4
"""Lengths 1, ½, ¼, … of a Gauss–Newton step that are tried before K is left as it is."""
TRUST = 0.1
"""Relative change of K whose cost is that of the distance which is left. Between 0.05 and 0.3 little depends on it."""
ITERATIONS = 40
"""Most iterations of conjugate gradients in a Gauss–Newton step."""
TOLERANCE = 1e-2
"""Residual, of what it is at first, at which conjugate gradients stop: the next step makes up for the rest."""

Signs = tuple[int, int, int | None]
"""What a function is multiplied by when x is reflected, when y is, and when the two are exchanged (None: no number)."""


def first_derivative(u: Tensor, dim: int) -> Tensor:
    """u' along axis `dim` of n ≥ 3 points on [0, 1]: central, (−3, 4, −1)/2h at the ends."""
    u = u.movedim(dim, -1)
    first = -3 * u[..., :1] + 4 * u[..., 1:2] - u[..., 2:3]
    last = 3 * u[..., -1:] - 4 * u[..., -2:-1] + u[..., -3:-2]
    differences = torch.cat([first, u[..., 2:] - u[..., :-2], last], dim=-1)
    return (differences * ((u.shape[-1] - 1) / 2)).movedim(-1, dim)


def second_derivative(u: Tensor, dim: int) -> Tensor:
    """u'' along axis `dim` of n ≥ 4 points on [0, 1]: central, (2, −5, 4, −1)/h² at the ends."""
    u = u.movedim(dim, -1)
    first = 2 * u[..., :1] - 5 * u[..., 1:2] + 4 * u[..., 2:3] - u[..., 3:4]
    last = 2 * u[..., -1:] - 5 * u[..., -2:-1] + 4 * u[..., -3:-2] - u[..., -4:-3]
    differences = torch.cat([first, u[..., 2:] - 2 * u[..., 1:-1] + u[..., :-2], last], dim=-1)
    return (differences * (u.shape[-1] - 1) ** 2).movedim(-1, dim)


def source(n: int, *, dtype: torch.dtype = torch.float64, device: torch.device | None = None) -> Tensor:
    """s: (n, n)."""
    eighths = 8 * torch.arange(n, device=device) + 4  # of the cell centres, times n: no rounding decides
    inlet, outlet = eighths <= n, eighths >= 7 * n
    return STRENGTH * ((inlet[:, None] & inlet).to(dtype) - (outlet[:, None] & outlet).to(dtype))


def transport(p: Tensor, K: Tensor) -> Tensor:
    """A(K)p = −K p_xx − K_x p_x − K p_yy − K_y p_y, linear in p and in K: (..., n, n)."""
    along_x = K * second_derivative(p, -2) + first_derivative(K, -2) * first_derivative(p, -2)
    along_y = K * second_derivative(p, -1) + first_derivative(K, -1) * first_derivative(p, -1)
    return -along_x - along_y


def residual(p: Tensor, K: Tensor) -> Tensor:
    """The equation at all points, ±p_x on the first and last row, ±p_y on the first and last column: (..., 3, n, n)."""
    n = p.shape[-1]
    outward = p.new_zeros(n)
    outward[0], outward[-1] = -1, 1
    walls = outward[:, None] * first_derivative(p, -2), outward * first_derivative(p, -1)
    return torch.stack([_equation(p, K), *walls], dim=-3)


def _equation(p: Tensor, K: Tensor) -> Tensor:
    """The first of the three planes, r = A(K)p − s."""
    return transport(p, K) - source(p.shape[-1], dtype=p.dtype, device=p.device)


def zero_mean(p: Tensor) -> Tensor:
    """p with ∫p = 0 by the trapezium rule: (..., n, n)."""
    weights = _trapezium(p)
    return p - (p * weights).sum((-2, -1), keepdim=True)


def log_permeability(z: Tensor, n: int = 64, correlation: float = 0.1) -> Tensor:
    """log K = Σₖ √λₖ zₖ φₖ of the standard normal z (..., terms): float64, (..., n, n), on its device."""
    eigenvalues, fields = eigenpairs(n, correlation, z.shape[-1])
    return torch.tensordot(z.double() * eigenvalues.sqrt().to(z.device), fields.to(z.device), dims=1)


def solve(K: Tensor) -> Tensor:
    """p*(K), the least-squares solution with ∫p = 0: K > 0 (B, n, n) → float64, (B, n, n). Differentiable.

    A field whose equations cannot be solved, because it holds NaN or spans too many decades, has NaN for its pressure.
    """
    _require_fields(K)
    return torch.cat([_Pressure.apply(piece) for piece in K.double().split(_at_once(K))])


def nearest(
    p: Tensor, K: Tensor, scale_p: float | Tensor = 1.0, scale_K: float | Tensor = 1.0, *, steps: int = 4
) -> tuple[Tensor, Tensor]:
    """The pair (p*(K), K) nearest to p and K: float64, (B, n, n) each, with K at `MIN_PERMEABILITY` or above.

    Steps begin at K itself, and none increases the distance: what comes back is never farther than (p*(K), K).

    Args:
        p: Pressures (B, n, n); their own mean counts.
        K: Permeabilities (B, n, n) of any sign.
        scale_p: s_p > 0, a number or one for each field (B,), in which distances of p are measured.
        scale_K: s_K > 0, the same for K.
        steps: Gauss–Newton steps, 1 or more.
    """
    _require_fields(K)
    if p.shape != K.shape or steps < 1:
        raise UsageError(
            f"nearest needs p and K of one shape and steps >= 1, got {tuple(p.shape)}, {tuple(K.shape)} and {steps}."
        )
    scales = [torch.as_tensor(s, dtype=torch.float64, device=K.device).expand(len(K)) for s in (scale_p, scale_K)]
    if not all((scale > 0).all() for scale in scales):
        raise UsageError(f"nearest measures in scales > 0, got {scale_p} for p and {scale_K} for K.")
    pieces = zip(*(part.double().split(_at_once(K)) for part in (p, K, *scales)), strict=True)
    with torch.no_grad():
        pairs = [_nearest(p0, K0, s_p, s_K, steps) for p0, K0, s_p, s_K in pieces]
    pressures, permeabilities = zip(*pairs, strict=True)
    return torch.cat(pressures), torch.cat(permeabilities)


# The random field


@lru_cache(maxsize=8)
def eigenpairs(n: int, correlation: float = 0.1, terms: int = 64) -> tuple[Tensor, Tensor]:
    """The `terms` largest eigenvalues of exp(−r/correlation) and their unit vectors: float64, (terms,), (terms, n, n).

    The kernel has the symmetries of the square, and so do its eigenvectors: five small problems take the place of one
    large. A pair that shares an eigenvalue is odd along one axis and even along the other, and each is the other's
    transpose, so that which vectors span it is no accident of a library; nor are their signs.
    """
    if not (correlation > 0 and 1 <= terms <= n * n):
        raise UsageError(
            f"a log-permeability on {n}×{n} points needs correlation > 0 and 1 to {n * n} terms, "
            f"got correlation={correlation} and terms={terms}."
        )
    unpaired: list[Signs] = [(1, 1, 1), (1, 1, -1), (-1, -1, 1), (-1, -1, -1)]
    sectors = [_sector(n, correlation, signs) for signs in unpaired]
    paired, fields = _sector(n, correlation, (-1, 1, None))
    sectors += [(paired, fields), (paired, fields.mT)]
    eigenvalues, vectors = (torch.cat(parts) for parts in zip(*sectors, strict=True))
    order = eigenvalues.argsort(descending=True, stable=True)[:terms]
    return eigenvalues[order], vectors[order].contiguous()


def _sector(n: int, correlation: float, signs: Signs) -> tuple[Tensor, Tensor]:
    """Eigenpairs among the functions with these signs: (k,), (k, n, n).

    One point a stands for those that a symmetry g of the group G takes it to, with a sign χ(g). If S_a of the g leave
    it where it is, u_a = Σ_g χ(g) e_ga / √(|G| S_a) are orthonormal, and ⟨u_a, k u_b⟩ = Σ_g χ(g) k(a, gb) / √(S_a S_b).
    """
    flip_x, flip_y, exchange = signs
    swaps = (0,) if exchange is None else (0, 1)
    group = [(s, fx, fy) for s in swaps for fx in (0, 1) for fy in (0, 1)]
    characters = [(exchange or 1) ** s * flip_x**fx * flip_y**fy for s, fx, fy in group]

    def images(i: Tensor, j: Tensor) -> list[tuple[Tensor, Tensor]]:
        swapped = [(j, i) if s else (i, j) for s, _, _ in group]
        return [
            (n - 1 - a if fx else a, n - 1 - b if fy else b) for (a, b), (_, fx, fy) in zip(swapped, group, strict=True)
        ]

    i, j = torch.meshgrid(2 * [torch.arange((n + 1) // 2)], indexing="ij")
    i, j = (i.flatten(), j.flatten()) if exchange is None else (i[i <= j], j[i <= j])
    stays = torch.stack([(a == i) & (b == j) for a, b in images(i, j)]).double()
    stabiliser = stays.sum(0)
    # Where a symmetry of sign −1 leaves a point where it is, functions of this kind are zero.
    kept = torch.tensor(characters, dtype=torch.float64) @ stays == stabiliser
    i, j, stabiliser = i[kept], j[kept], stabiliser[kept]

    kernel = torch.zeros(len(i), len(i), dtype=torch.float64)
    for sign, (a, b) in zip(characters, images(i, j), strict=True):
        distance = torch.hypot((i[:, None] - a).double(), (j[:, None] - b).double()) / (n - 1)
        kernel += sign * torch.exp(-distance / correlation)
    eigenvalues, reduced = torch.linalg.eigh(kernel / torch.outer(stabiliser, stabiliser).sqrt())
    reduced = reduced * torch.where(reduced.amax(0) >= -reduced.amin(0), 1.0, -1.0)  # the largest entry is positive
    values = (reduced * (stabiliser / len(group)).sqrt()[:, None]).T
    fields = torch.zeros(len(eigenvalues), n, n, dtype=torch.float64)
    for sign, (a, b) in zip(characters, images(i, j), strict=True):
        fields[:, a, b] = sign * values
    return eigenvalues, fields


# The linear equations


@dataclass(frozen=True)
class _Factors:
    """N = LLᵀ, block by block: L's diagonal blocks, inverted, and the blocks below them, of groups of grid rows."""

    rows: list[slice]
    diagonal: list[Tensor]
    below: list[Tensor]

    def solve(self, b: Tensor) -> Tensor:
        """N⁻¹b for b ⟂ constants, up to a constant: (B, n, n)."""
        found: list[Tensor] = []
        for k, rows in enumerate(self.rows):
            right = b[:, rows].flatten(1)[..., None]
            found.append(self.diagonal[k] @ (right - self.below[k - 1] @ found[-1] if k else right))
        for k in reversed(range(len(self.rows))):
            right = found[k] - self.below[k].mT @ found[k + 1] if k + 1 < len(self.rows) else found[k]
            found[k] = self.diagonal[k].mT @ right
        return torch.cat(found, dim=1).reshape(b.shape)


def _factorised(K: Tensor) -> _Factors:
    """N of each field (B, n, n), factorised; NaN where it has no Cholesky factors."""
    n = K.shape[-1]
    first, second = _matrices(K)
    # A(K) takes a row of the grid to others point by point, and within itself by a matrix. With rows i, j, k and
    # columns l, m of the grid, its entry at (i, l), (j, m) is across[i, j, l] δ_lm + within[i, l, m] δ_ij.
    across = -(K[:, :, None] * second[:, :, None] + first_derivative(K, -2)[:, :, None] * first[:, :, None])
    within = -(K[..., None] * second + first_derivative(K, -1)[..., None] * first)
    by_column = across.permute(0, 3, 1, 2)
    across_twice = by_column.mT @ by_column + _walls(first)  # (B, l, j, k)
    within_twice = within.mT @ within + _walls(first)  # (B, j, l, m)

    def block(above: slice, left: slice) -> Tensor:
        """N between two groups of rows, j and k: (B, (j, l), (k, m))."""
        product = across[:, left, above].permute(0, 2, 3, 1)[..., None] * within[:, left].transpose(1, 2)[:, None]
        product = product + within[:, above].mT[:, :, :, None] * across[:, above, left][:, :, None]
        product.diagonal(dim1=2, dim2=4).add_(across_twice[:, :, above, left].permute(0, 2, 3, 1))
        if above == left:
            product.diagonal(dim1=1, dim2=3).add_(within_twice[:, above].permute(0, 2, 3, 1))
        return product.flatten(3, 4).flatten(1, 2)

    rows = [slice(k, k + 2 if k + 3 < n else n) for k in range(0, n - 1, 2)]
    factors = _Factors(rows, [], [])
    for k, group in enumerate(rows):
        own = block(group, group)
        if group.start <= n // 2 < group.stop:
            # N leaves constants free. A spring at one point costs nothing else: the solution is zero there.
            own.diagonal(dim1=1, dim2=2)[:, (n // 2 - group.start) * n + n // 2] += across_twice[:, 0, 0, 0]
        if k:
            below = block(group, rows[k - 1]) @ factors.diagonal[-1].mT
            factors.below.append(below)
            own = own - below @ below.mT
        lower, failed = torch.linalg.cholesky_ex(own)
        lower = torch.where(failed[:, None, None] == 0, lower, math.nan)
        unit = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand_as(lower)
        factors.diagonal.append(torch.linalg.solve_triangular(lower, unit, upper=False))
    return factors


@dataclass(frozen=True)
class _Solution:
    """p*(K) of permeabilities K (B, n, n), and its derivative G."""

    K: Tensor
    p: Tensor
    factors: _Factors

    @classmethod
    def of(cls, K: Tensor) -> "_Solution":
        """The solution for K."""
        factors, walls = _factorised(K), _walls(_matrices(K)[0])
        p = torch.zeros_like(K)
        for _ in range(3):  # the solution itself, and two refinements: the second is for K of many decades
            normal = _transport_adjoint(_equation(p, K), K) + walls @ p + p @ walls
            p = p - zero_mean(factors.solve(normal))
        return cls(K, zero_mean(p), factors)

    def change(self, k: Tensor) -> Tensor:
        """Gk: what p*(K) changes by in the direction k of K."""
        normal = -_transport_adjoint(transport(self.p, k), self.K) - _transport_adjoint(_equation(self.p, self.K), k)
        return zero_mean(self.factors.solve(normal))

    def change_adjoint(self, v: Tensor) -> Tensor:
        """Gᵀv."""
        w = self.factors.solve(v - _trapezium(v) * v.sum((-2, -1), keepdim=True))
        return -_field_adjoint(transport(w, self.K), self.p) - _field_adjoint(_equation(self.p, self.K), w)


class _Pressure(torch.autograd.Function):
    """K ↦ p*(K). The factors are made again for the gradient: kept, they would be hundreds of times the fields."""

    @staticmethod
    def forward(ctx: Any, K: Tensor) -> Tensor:
        solution = _Solution.of(K)
        ctx.save_for_backward(K, solution.p)
        return solution.p

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        K, p = ctx.saved_tensors
        return _Solution(K, p, _factorised(K)).change_adjoint(grad)


def _transport_adjoint(v: Tensor, K: Tensor) -> Tensor:
    """A(K)ᵀv."""
    first, second = _matrices(K)
    along_x = second.T @ (K * v) + first.T @ (first_derivative(K, -2) * v)
    along_y = (K * v) @ second + (first_derivative(K, -1) * v) @ first
    return -along_x - along_y


def _field_adjoint(v: Tensor, p: Tensor) -> Tensor:
    """Transpose, applied to v, of k ↦ A(k)p."""
    first, _ = _matrices(p)
    along_x = second_derivative(p, -2) * v + first.T @ (first_derivative(p, -2) * v)
    along_y = second_derivative(p, -1) * v + (first_derivative(p, -1) * v) @ first
    return -along_x - along_y


def _matrices(u: Tensor) -> tuple[Tensor, Tensor]:
    """First and second derivative on u's grid, as matrices (n, n)."""
    unit = torch.eye(u.shape[-1], dtype=u.dtype, device=u.device)
    return first_derivative(unit, 0), second_derivative(unit, 0)


def _walls(first: Tensor) -> Tensor:
    """WᵀW along one axis: the derivative at both ends, squared, as a matrix (n, n)."""
    return torch.outer(first[0], first[0]) + torch.outer(first[-1], first[-1])


def _trapezium(u: Tensor) -> Tensor:
    """Weights (n, n) of the trapezium rule on u's grid; they add up to 1."""
    n = u.shape[-1]
    weights = u.new_full((n,), 1 / (n - 1))
    weights[0] = weights[-1] = 0.5 / (n - 1)
    return torch.outer(weights, weights)


def _at_once(K: Tensor) -> int:
    """Fields that are factorised together: many enough to be quick, and few, since each takes some 8n³ numbers."""
    return max(1, 2 ** (25 if K.is_cuda else 20) // K.shape[-1] ** 3)


def _require_fields(K: Tensor) -> None:
    if K.ndim != 3 or K.shape[1] != K.shape[2] or K.shape[1] < SMALLEST:
        raise DataError(
            f"a Darcy flow needs square fields (B, n, n) of {SMALLEST}×{SMALLEST} points or more, got {tuple(K.shape)}."
        )


# The nearest pair


def _nearest(p: Tensor, K: Tensor, scale_p: Tensor, scale_K: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """`nearest` of one piece; scales are (B,)."""
    variance_p, variance_K = scale_p[:, None, None].square(), scale_K[:, None, None].square()

    def distance(found: _Solution) -> Tensor:
        change_p, change_K = found.p - p, found.K - K
        return _dot(change_p, change_p) / variance_p + _dot(change_K, change_K) / variance_K

    now = _Solution.of(K.clamp(min=MIN_PERMEABILITY))
    for _ in range(steps):
        before = distance(now)
        downhill = (K - now.K) / variance_K + now.change_adjoint(p - now.p) / variance_p
        weight = 1 / variance_K + before / (K.shape[-1] * TRUST) ** 2 / now.K.square()
        free = (now.K > MIN_PERMEABILITY) | (downhill > 0)
        step = _step(now, downhill, weight, free, variance_p)
        length = torch.ones_like(before)
        for _ in range(HALVINGS):
            trial = _Solution.of((now.K + length * step).clamp(min=MIN_PERMEABILITY))
            nearer = distance(trial) < before
            if nearer.all():
                break
            length = torch.where(nearer, length, length / 2)
        if not nearer.any():
            break
        now = trial if nearer.all() else _Solution.of(torch.where(nearer, trial.K, now.K))
    return now.p, now.K


def _step(at: _Solution, downhill: Tensor, weight: Tensor, free: Tensor, variance_p: Tensor) -> Tensor:
    """k with (H + GᵀG/s_p²)k = g where K is free and 0 elsewhere, each field (B, n, n) for itself.

    g is `downhill`, H's diagonal is `weight`.
    """
    k, r = torch.zeros_like(downhill), downhill
    preconditioned = free * r / weight
    direction, squared = preconditioned, _dot(r, preconditioned)
    target = TOLERANCE**2 * squared
    for _ in range(ITERATIONS):
        active = squared > target
        if not active.any():
            break
        image = weight * direction + at.change_adjoint(at.change(direction)) / variance_p
        length = torch.where(active, squared / _dot(direction, image), 0)
        k, r = k + length * direction, r - length * image
        preconditioned = free * r / weight
        before, squared = squared, torch.where(active, _dot(r, preconditioned), squared)
        direction = torch.where(active, preconditioned + squared / before * direction, direction)
    return k


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner products of fields (B, n, n): (B, 1, 1)."""
    return (a * b).sum((-2, -1), keepdim=True)
