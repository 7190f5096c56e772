"""Light around a Kerr black hole, followed backwards from a camera at infinity. Lengths are in units of GM/c².

A photon of energy 1 is fixed by its angular momentum ξ and Carter's constant η. In Mino time λ, ds = Σ dλ with
Σ = r² + a²cos²θ, the inverse radius w = 1/r and the direction n = (sin θ cos φ̃, sin θ sin φ̃, cos θ) obey, each by
itself,

    ẇ² = W(w) = 1 + (a² − b²)w² + 2κw³ − a²ηw⁴        b² = ξ² + η,  κ = (ξ − a)² + η
    |ṅ|² = b² + a²n_z²,   (n × ṅ)_z = −ξ              (backwards: minus)
    ψ̇ = −aw(2 − aξw)/(1 − 2w + a²w²),   φ = φ̃ + ψ     (frame dragging)

Differentiated once more they lose their square roots, and with them the signs at turning points:

    ẅ = W′(w)/2 = (a² − b²)w + 3κw² − 2a²ηw³,    n̈ = a²n_z ẑ − (b² + 2a²n_z²)n.

Both right-hand sides are cubic polynomials of position alone: nothing is singular at the poles, at turning points, at
infinity (w = 0, where the camera is) or at the horizon, so that Nyström's fifth-order method takes even steps, and ψ is
Simpson's sum. The rules on ẇ and ṅ are not imposed: how well they still hold says how well a ray was integrated.

A pixel (α, β) of the camera at inclination i, α along the equator and β towards the spin axis, sees ξ = −α sin i and
η = β² + (α² − a²)cos²i, and its ray starts with n = (sin i, 0, cos i), w = 0, ẇ = 1 and ṅ = α e_φ − β e_θ.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from namm.errors import UsageError

TURNS = 1.2
"""Length of a ray in turns of 2π, enough for light that crosses the equator twice (the first photon ring)."""
SMALLEST_IMPACT = 2.5
"""Rays nearer the axis fall in without turning: they get the length of a ray of this impact parameter."""
EDGE = 0.999
"""A ray is captured where w passes this part of the horizon's 1/r₊."""
CROWD = 0.9
"""Rays that have ended are dropped once fewer than this part is still under way."""

Parts = tuple[Tensor, Tensor, Tensor, Tensor]
"""w, x, y, z or their velocities or accelerations: (R,) each."""


@dataclass(frozen=True)
class Camera:
    """A camera at infinity; the four broadcast against each other and give one ray per element.

    Args:
        spin: a within (−1, 1).
        inclination: i within [0, π], in radians.
        alpha: Coordinate on the picture along the equator, towards the side that recedes from us where a > 0.
        beta: Coordinate towards the spin axis.
    """

    spin: Tensor
    inclination: Tensor
    alpha: Tensor
    beta: Tensor

    def __post_init__(self) -> None:
        if not (fastest := self.spin.abs().max().item()) < 1:
            raise UsageError(f"A black hole's spin lies within (−1, 1), and {fastest} was given: it has no horizon.")

    @property
    def momentum(self) -> Tensor:
        """ξ."""
        return -self.alpha * self.inclination.sin()

    @property
    def carter(self) -> Tensor:
        """η."""
        return self.beta**2 + (self.alpha**2 - self.spin**2) * self.inclination.cos() ** 2

    def flat(self) -> "Camera":
        """The same rays in one row."""
        parts = torch.broadcast_tensors(self.spin, self.inclination, self.alpha, self.beta)
        return Camera(*(part.flatten() for part in parts))


@dataclass(frozen=True)
class Ray:
    """One point on each of R rays; every entry is (R,)."""

    index: Tensor
    """Which of the camera's rays, counted in its flat order."""
    live: Tensor
    """Whether the ray is still under way. One that is not has been captured (w > 0) or has left again."""
    step: Tensor
    """Mino time from point to point."""
    w: Tensor
    """Inverse radius 1/r."""
    x: Tensor
    """n, the direction seen from the hole: x, y and z."""
    y: Tensor
    z: Tensor
    dw: Tensor
    """Velocities dw/dλ and dn/dλ, times the step; dw is positive on the way in."""
    dx: Tensor
    dy: Tensor
    dz: Tensor
    psi: Tensor
    """Frame dragging: the azimuth is atan2(y, x) + ψ."""

    def some(self, which: Tensor) -> "Ray":
        """The rays that the mask `which` (R,) names."""
        numbers = which.nonzero()[:, 0]  # once: a mask would be searched again for every entry
        return Ray(*(part.index_select(0, numbers) for part in vars(self).values()))


def horizon(spin: Tensor) -> Tensor:
    """r₊ = 1 + √(1 − a²)."""
    return 1 + (1 - spin**2).sqrt()


def last_stable_orbit(spin: Tensor) -> Tensor:
    """Radius of the innermost stable circular orbit in the sense of growing φ (Bardeen, Press and Teukolsky 1972)."""
    z1 = 1 + (1 - spin**2) ** (1 / 3) * ((1 + spin) ** (1 / 3) + (1 - spin) ** (1 / 3))
    z2 = (3 * spin**2 + z1**2).sqrt()
    return 3 + z2 - spin.sign() * ((3 - z1) * (3 + z1 + 2 * z2)).clamp(min=0).sqrt()


def trace(camera: Camera, steps: int, turns: float = TURNS) -> Iterator[Ray]:
    """`steps` points of every ray from the camera on; a ray that has ended is given at least once, then dropped."""
    camera = camera.flat()
    impact = (camera.alpha**2 + camera.beta**2).sqrt()
    step = 2 * math.pi * turns / steps / impact.clamp(min=SMALLEST_IMPACT)
    sin, cos, zero = camera.inclination.sin(), camera.inclination.cos(), torch.zeros_like(step)
    index, live = torch.arange(len(step), device=step.device), torch.ones_like(step, dtype=torch.bool)
    velocity = step, -camera.beta * cos * step, camera.alpha * step, camera.beta * sin * step
    ray = Ray(index, live, step, zero, sin, zero, cos, *velocity, psi=zero)
    force = _Force.of(camera, step)
    for _ in range(steps):
        yield ray
        if ray.live.sum() < CROWD * len(ray.live):
            force, ray = force.some(ray.live), ray.some(ray.live)
        ray = _advance(ray, force)


def _advance(ray: Ray, force: "_Force") -> Ray:
    """One step of Nyström's method of order five for q″ = f(q), the step being the unit of time."""
    q, v = (ray.w, ray.x, ray.y, ray.z), (ray.dw, ray.dx, ray.dy, ray.dz)
    f1 = force(q)
    f2 = force(_sum(q, (1 / 5, v), (1 / 50, f1)))
    f3 = force(_sum(q, (2 / 3, v), (-1 / 27, f1), (7 / 27, f2)))
    f4 = force(_sum(q, (1, v), (3 / 10, f1), (-2 / 35, f2), (9 / 35, f3)))
    q = _sum(q, (1, v), (1 / 24, f1), (25 / 84, f2), (9 / 56, f3))
    v = _sum(v, (1 / 24, f1), (125 / 336, f2), (27 / 56, f3), (5 / 48, f4))
    live = ray.live & (q[0] > 0) & (q[0] < force.edge)
    between = (ray.w + q[0]) / 2 + (ray.dw - v[0]) / 8  # halfway, by the cubic through both ends
    psi = ray.psi + (force.dragging(ray.w) + 4 * force.dragging(between) + force.dragging(q[0])) / 6
    return Ray(ray.index, live, ray.step, *q, *v, psi=psi)


def _sum(q: Parts, *terms: tuple[float, Parts]) -> Parts:
    """q + Σ c·f, part by part."""
    (c, f), *others = terms
    w, x, y, z = (part.add(more, alpha=c) for part, more in zip(q, f, strict=True))
    for c, f in others:
        for part, more in zip((w, x, y, z), f, strict=True):
            part.add_(more, alpha=c)
    return w, x, y, z


def captured(camera: Camera, steps: int, turns: float = TURNS) -> Tensor:
    """Whether each ray ends in the hole, in the camera's shape; one still on its way after `turns` does not."""
    flat = camera.flat()
    inside, ended = (torch.zeros_like(flat.spin, dtype=torch.bool) for _ in range(2))
    for ray in trace(flat, steps, turns):
        end = ~ray.live & ~ended[ray.index]
        inside[ray.index[end]] = ray.w[end] > 0
        ended[ray.index[end]] = True
    return inside.reshape(torch.broadcast_shapes(*(part.shape for part in vars(camera).values())))


@dataclass(frozen=True)
class _Force:
    """Accelerations per squared step, and frame dragging per step; every entry is (R,)."""

    linear: Tensor  # h²(a² − b²)
    quadratic: Tensor  # 3h²κ
    cubic: Tensor  # −2h²a²η
    spring: Tensor  # −h²b²
    twist: Tensor  # h²a²
    drag: Tensor  # −2ha
    swing: Tensor  # ha²ξ
    spin2: Tensor  # a²
    edge: Tensor

    @staticmethod
    def of(camera: Camera, h: Tensor) -> "_Force":
        a, xi, eta = camera.spin, camera.momentum, camera.carter
        b2, kappa = xi**2 + eta, (xi - a) ** 2 + eta
        accelerations = (a**2 - b2) * h**2, 3 * kappa * h**2, -2 * a**2 * eta * h**2, -b2 * h**2, (a * h) ** 2
        return _Force(*accelerations, -2 * h * a, h * a**2 * xi, a**2, EDGE / horizon(a))

    def some(self, which: Tensor) -> "_Force":
        numbers = which.nonzero()[:, 0]
        return _Force(*(part.index_select(0, numbers) for part in vars(self).values()))

    # Time goes by the number of passes over all rays, hence the fused multiplications and additions.

    def __call__(self, q: Parts) -> Parts:
        """Accelerations of w and n."""
        w, x, y, z = q
        twist = self.twist * z
        pull = torch.addcmul(self.spring, twist, z, value=-2)
        slope = torch.addcmul(self.linear, w, torch.addcmul(self.quadratic, self.cubic, w))
        return w * slope, pull * x, pull * y, torch.addcmul(twist, pull, z)

    def dragging(self, w: Tensor) -> Tensor:
        """ψ̇: (R,)."""
        return torch.addcmul(self.drag, self.swing, w).mul_(w).div_(torch.mul(self.spin2, w).sub_(2).mul_(w).add_(1))
