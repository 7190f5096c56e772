"""Light of a hot, thin gas that falls into a Kerr black hole. Lengths are in units of GM/c².

**Where it shines.** Per unit volume, at cylindrical radius ρ = r sin θ and height z = r cos θ,

    j ∝ r^−q · exp(−z²/2(hρ)²) · exp(σδ − σ²/2) · ν^−1

with q the steepness, h the thickness, and δ a random field of variance 1 in (ln r, φ). Eddies live for a fixed part of
an orbit, so the differential rotation shears all of them by the same angle: δ is isotropic in (ln r, φ + s ln r), which
makes trailing logarithmic spirals whose arms lean by arctan s against the radius.

**How it moves.** Between falling freely from rest at infinity and Kepler's orbits (inside the last stable orbit:
plunging with that orbit's energy and angular momentum), mixed by the rotation β:

    Ω = βΩ_K + (1 − β)Ω_ff,    u^r = βu^r_K + (1 − β)u^r_ff,    u^t from g(u, u) = −1.

**What arrives.** Nothing is absorbed. With g = 1/(u^t − ξu^φ − p_r u^r), the ratio of observed to emitted frequency,
the intensity of a ray is ∫ g² j(ν/g) ds = ∫ g³ j Σ dλ, and the sum over even steps of Mino time is the integral: the
summand vanishes at both ends, at infinity and at the horizon.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from namm.simulators.kerr import Camera, Ray, last_stable_orbit, trace
from namm.simulators.random_fields import colour_periodic

STEPS = 80
"""Points on a ray: constants of motion drift by less than 1e-6; more change a pixel by less than 2 % of the peak."""
EDDIES = (96, 128)
"""Grid of the random field in ln r and φ."""
REACH = 4.0
"""The random field repeats after this many e-folds of r."""
FARTHEST = 50.0
"""Gas beyond this radius is left out."""
FAINTEST = 9.0
"""So is gas that the Gaussian profile dims by more than exp(−9)."""
RING, RING_WIDTH, FINE = 5.2, 0.7, 3
"""The photon ring is thinner than a pixel, so pixels nearer than this (and half a pixel) to a circle of this radius
around the shadow's middle are the mean of 3 × 3 rays. The ring hugs the shadow's edge from outside, and the edge of a
fast hole seen from the side comes as near as 4.5."""
GRAIN = 32_768
"""Elements from which on PyTorch splits an operation among threads."""


@dataclass(frozen=True)
class Flow:
    """A batch of black holes and their gas; every entry is (B,), angles in radians."""

    spin: Tensor
    """a in (−1, 1); negative where the gas turns against the hole."""
    inclination: Tensor
    """Angle between the line of sight and the gas's axis, 0 to π: above π/2 it turns clockwise."""
    position_angle: Tensor
    """Angle by which the picture is turned counter-clockwise."""
    thickness: Tensor
    """h = H/ρ."""
    steepness: Tensor
    """q."""
    rotation: Tensor
    """β: 1 orbits, 0 falls."""
    turbulence: Tensor
    """σ."""
    shear: Tensor
    """s."""

    def __getitem__(self, index: slice) -> "Flow":
        """Some of the batch."""
        return Flow(**{name: value[index] for name, value in vars(self).items()})


def stirred(white: Tensor, size: float = 0.8) -> Tensor:
    """Random fields δ of the plane with power density (1 + (k·size)²)^−11/6, from white noise, both (n, *EDDIES).

    At large k it is k^−11/3: Kolmogorov's density in three dimensions, which sums over columns keep. (A slice's falls
    as k^−8/3.)
    """
    rows, columns = EDDIES
    k_r = torch.fft.fftfreq(rows, REACH / rows, dtype=torch.float64) * 2 * math.pi
    k_phi = torch.fft.fftfreq(columns, 1 / columns, dtype=torch.float64)
    power = (1 + (k_r[:, None] ** 2 + k_phi**2) * size**2) ** (-11 / 6)
    return colour_periodic(white, (power / power.mean()).to(white.device))


def images(flow: Flow, delta: Tensor, size: int, field_of_view: float = 26.0, steps: int = STEPS) -> Tensor:
    """Brightness of B black holes with the random fields δ = `delta` (B, *EDDIES), arbitrary units: (B, size, size).

    `field_of_view` is the side of the picture, from edge to edge; rows run from top to bottom. A GPU takes all at once.
    On a CPU each thread takes a few at a time, so few that PyTorch's own threads, slow on small operations, stay out;
    of images so large that PyTorch's threads share in one, one is made at a time.
    """
    if flow.spin.is_cuda:
        return _images(flow, delta, size, field_of_view, steps)
    few = max(1, GRAIN // (2 * size**2))
    pieces = [slice(start, start + few) for start in range(0, len(flow.spin), few)]
    workers = 1 if size**2 >= GRAIN else torch.get_num_threads()
    with ThreadPoolExecutor(workers) as pool:
        return torch.cat(list(pool.map(lambda i: _images(flow[i], delta[i], size, field_of_view, steps), pieces)))


def _images(flow: Flow, delta: Tensor, size: int, field_of_view: float, steps: int) -> Tensor:
    x, y = (c.expand(len(flow.spin), -1) for c in _pixel_centres(size, field_of_view, flow.spin))
    near = _near_the_ring(flow, x, y, field_of_view / size)
    fine_x, fine_y = _pixel_centres(FINE, field_of_view / size, flow.spin)
    x = torch.cat([x[~near], (x[near][:, None] + fine_x).flatten()])
    y = torch.cat([y[~near], (y[near][:, None] + fine_y).flatten()])
    owner = torch.cat([(~near).nonzero()[:, 0], near.nonzero()[:, 0].repeat_interleave(FINE**2)])
    cos, sin = flow.position_angle.cos()[owner], flow.position_angle.sin()[owner]
    camera = Camera(flow.spin[owner], flow.inclination[owner], x * cos + y * sin, y * cos - x * sin)
    gas, light, xi = _Gas(flow, delta, owner), torch.zeros_like(x), camera.momentum
    for points in trace(camera, steps):  # ∫ g³ j Σ dλ along every ray
        ray = points.some(points.live & gas.shines(points))
        light[ray.index] += gas.glow(ray, xi[ray.index]) * ray.step
    image = torch.empty(near.shape, dtype=light.dtype, device=light.device)
    coarse = len(light) - int(near.sum()) * FINE**2
    image[~near], image[near] = light[:coarse], light[coarse:].reshape(-1, FINE**2).mean(1)
    return image.reshape(-1, size, size)


def _pixel_centres(size: int, width: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """x and y of a square's pixels, row by row from the top: (size²,)."""
    centres = ((torch.arange(size, dtype=like.dtype, device=like.device) + 0.5) / size - 0.5) * width
    return centres.repeat(size), -centres.repeat_interleave(size)


def _near_the_ring(flow: Flow, x: Tensor, y: Tensor, pixel: float) -> Tensor:
    """Where the photon ring may be: mask (B, size²)."""
    # The spin moves the shadow by about 2a sin i along the equator.
    shift = 2 * flow.spin * flow.inclination.sin()
    middle_x, middle_y = shift * flow.position_angle.cos(), shift * flow.position_angle.sin()
    distance = ((x - middle_x[:, None]) ** 2 + (y - middle_y[:, None]) ** 2).sqrt()
    return (distance - RING).abs() < RING_WIDTH + pixel / 2


def frequency_ratio(
    a: Tensor, beta: Tensor, last_orbit: Tensor, r: Tensor, z2: Tensor, xi: Tensor, dr: Tensor
) -> Tensor:
    """g = observed/emitted frequency of gas that moves as the module says; all arguments and the result are (R,).

    Spin a, rotation β and the radius of the last stable orbit say how the gas moves, r > r₊ and z2 = cos²θ where it is,
    ξ and dr = dr/dλ (positive where it leaves the hole) what light it sends.
    """
    round_, area, s2 = r.square() + a.square(), r.square() + a.square() * z2, 1 - z2
    delta = round_ - 2 * r
    big = round_.square() - a.square() * delta * s2
    dragged = 2 * a * r / big  # Ω of the frame, and of what falls from rest
    e_ms, l_ms = (1 - 2 / (3 * last_orbit)).sqrt(), 2 / math.sqrt(3) * (3 - 2 * a / last_orbit.sqrt())
    plunging = (2 * a * e_ms + (r - 2) * l_ms) / (e_ms * (r * round_ + 2 * a.square()) - 2 * a * l_ms)
    omega = torch.lerp(dragged, torch.where(r < last_orbit, plunging, 1 / (r * r.sqrt() + a)), beta)
    gap = (last_orbit / r - 1).clamp(min=0)
    inwards = torch.lerp((2 * r * round_).sqrt() / area, (2 / (3 * last_orbit)).sqrt() * gap * gap.sqrt(), beta)
    # −(g_tt + 2g_tφΩ + g_φφΩ²), written in the dragged frame
    lapse2 = delta * area / big - big * s2 / area * (omega - dragged).square()
    u_t = ((1 + area / delta * inwards.square()) / lapse2).sqrt()
    return 1 / (u_t * (1 - omega * xi) + dr / delta * inwards)


class _Gas:
    """Brightness and motion of a batch of flows at points of rays; `owner` (rays,) says which flow a ray belongs to."""

    def __init__(self, flow: Flow, delta: Tensor, owner: Tensor) -> None:
        self.owner = owner
        self.widest = 2 * FAINTEST * flow.thickness[owner].square()
        self.shape = (flow.thickness, flow.steepness, flow.turbulence, flow.shear)
        self.motion = (flow.spin, flow.rotation, last_stable_orbit(flow.spin))
        # One more row and column, so that what lies between the last and the first can be interpolated.
        self.delta = torch.nn.functional.pad(delta, (0, 1, 0, 1), mode="circular").flatten()

    def shines(self, ray: Ray) -> Tensor:
        """Where there is gas: (R,)."""
        z2 = ray.z.square()
        return (ray.w > 1 / FARTHEST) & (z2 < self.widest[ray.index] * (1 - z2))

    def glow(self, ray: Ray, xi: Tensor) -> Tensor:
        """g³ j Σ for light of angular momentum ξ: (R,)."""
        which = self.owner[ray.index]
        h, q, sigma, shear = (part[which] for part in self.shape)
        a, beta, last_orbit = (part[which] for part in self.motion)
        r, z2 = 1 / ray.w, ray.z.square()
        log_r = r.log()
        phi = torch.atan2(ray.y, ray.x) + ray.psi + shear * log_r
        delta = self._interpolate(which, log_r / REACH, phi / (2 * math.pi))
        shine = (sigma * (delta - sigma / 2) - q * log_r - z2 / (1 - z2) / (2 * h.square())).exp()
        g = frequency_ratio(a, beta, last_orbit, r, z2, xi, ray.dw / ray.step * r.square())
        return shine * (r.square() + a.square() * z2) * g * g.square()

    def _interpolate(self, which: Tensor, along: Tensor, across: Tensor) -> Tensor:
        """δ at fractions of its two periods, bilinearly: (R,)."""
        rows, columns = EDDIES
        i, j = (along - along.floor()) * rows, (across - across.floor()) * columns
        i0, j0 = i.long().clamp(max=rows - 1), j.long().clamp(max=columns - 1)
        corner = (which * (rows + 1) + i0) * (columns + 1) + j0
        flat, i, j = self.delta, i - i0, j - j0
        upper = torch.lerp(flat[corner], flat[corner + 1], j)
        lower = torch.lerp(flat[corner + columns + 1], flat[corner + columns + 2], j)
        return torch.lerp(upper, lower, i)
