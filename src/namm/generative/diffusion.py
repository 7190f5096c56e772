"""The diffusion model (paper Sec. 3.2, Eq. 6): a network trained by denoising score matching on mirror images y.

    u = (y − mean) / scale per channel,      u(t) = m(t) u + s(t) ε,      t ~ U(t_min, 1),   ε ~ N(0, I)
    loss = E (network(u(t), t) − target)²,   target = ε, v = m ε − s u or ε − u;  the mean over pixels

Times may be drawn otherwise (`times`). For ε and uniform times this is score matching weighted by s², 2/(C·H·W) times
the sum ½ ‖s score + ε‖².

The diffusion lives in standardised space: whatever has a time, that is y_t, `denoise`, `score` and the state of a
sampler, is standardised; whatever has none, that is `loss(y)`, `fit_statistics(y)` and `sample`, is in mirror space
itself. `standardise` and `unstandardise` lead from one to the other.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from namm.errors import UsageError
from namm.generative.base import Seeds, Standardised, check_shape, evaluating, sample_in_batches, sampling_bar
from namm.generative.samplers import EulerMaruyama, Sampler
from namm.generative.schedules import VPSDE, Epsilon, Marginal, Prediction, Schedule
from namm.generative.times import Times, UniformTimes
from namm.gpu import Recorded, can_record, compile_options, use_channels_last
from namm.numerics import at_least_float32

EPSILON, PAPER_SDE, PAPER_SAMPLER, UNIFORM = Epsilon(), VPSDE(), EulerMaruyama(1000), UniformTimes()


class Diffusion(Standardised):
    """A diffusion model of images in mirror space.

    Args:
        network: `network(y_t, t)` with y_t (B, C, H, W) and t (B,) in (0, 1] returns a tensor of y_t's shape: `NCSNpp`,
            `DiT`, `UNet`, any module with these arguments, or a model of diffusers in a `DiffusersNetwork`.
        sample_shape: (C, H, W).
        prediction: What the network's output means: `Epsilon()` (the paper) or `Velocity()`, which learns faster and
            whose samples stay finite after a short training; with straight paths `Flow()`.
        t_min: The smallest time trained and sampled; the same for every model that is compared.
        sde: The noise schedule: `VPSDE()` (the paper), `Straight()` or another `Schedule`.
        times: How times are drawn in training: `UniformTimes()` (the paper) or `LogitNormalTimes()`.
    """

    def __init__(
        self,
        network: nn.Module,
        sample_shape: tuple[int, int, int],
        *,
        prediction: Prediction = EPSILON,
        t_min: float = 1e-3,
        sde: Schedule = PAPER_SDE,
        times: Times = UNIFORM,
    ) -> None:
        super().__init__()
        if len(sample_shape) != 3 or min(sample_shape) < 1:
            raise UsageError(f"sample_shape must be three positive sizes (C, H, W), not {sample_shape}.")
        if not 0 < t_min < sde.t_max:
            raise UsageError(f"t_min must lie between 0 and {sde.t_max:g}, not {t_min}.")
        if not prediction.fits(sde.marginal(torch.tensor([t_min, 0.5]))):
            raise UsageError(
                f"{prediction} does not go with {sde}: Velocity() is for VPSDE(), Flow() for Straight(), and Epsilon() "
                "for either."
            )
        self.network, self.prediction, self.t_min, self.sde, self.times = network, prediction, t_min, sde, times
        channels, height, width = (int(size) for size in sample_shape)
        self.sample_shape = (channels, height, width)
        self.register_statistics()
        self._compiled: FixedBatch | None = None  # kept for the next call
        self._in_use: FixedBatch | None = None  # `_compiled` while samples are made

    @property
    def has_kernels(self) -> bool:
        """Whether the network has kernels for a recording; the loss adds nothing that could not be recorded."""
        return bool(getattr(self.network, "has_kernels", False))

    def extra_repr(self) -> str:
        """What makes this model differ from another with the same network."""
        shown = f"sample_shape={self.sample_shape}, prediction={self.prediction}, t_min={self.t_min}, sde={self.sde}"
        return shown if self.times == UNIFORM else f"{shown}, times={self.times}"  # trainings know themselves by this

    # Learning

    def draw(self, y: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """t (B,) in [t_min, 1], as `times` has it, and ε of y's shape."""
        u = self.times.draw(len(y), y, generator)
        epsilon = torch.randn(y.shape, generator=generator, device=y.device, dtype=y.dtype)
        return self.t_min + (1 - self.t_min) * u, epsilon

    def loss(self, y: Tensor, *draws: Tensor) -> Tensor:
        """Mean squared error of the network on images y (B, C, H, W); `draws` are t and ε, drawn here if not given."""
        return self._trial(y, *draws).error

    def _trial(self, y: Tensor, *draws: Tensor) -> "Trial":
        """The network asked about noisy images y, and its error."""
        check_shape(y, self.sample_shape)
        t, epsilon = (draw.to(at_least_float32(self.mean).dtype) for draw in draws or self.draw(y))
        u, marginal = self.standardise(y), self.sde.marginal(t)
        u_t = marginal.mean * u + marginal.std * epsilon
        output = self._output(u_t, t)
        error = (output - self.prediction.target(u, epsilon, marginal)).square().mean()
        return Trial(u_t, marginal, output, error)

    # Reversing; everything here is standardised

    def denoise(self, y_t: Tensor, t: Tensor) -> Tensor:
        """E[y(0) | y(t)] for y_t (B, C, H, W) and t (B,), both sides standardised; differentiable in y_t."""
        return self.prediction.denoised(self._output(y_t, t), y_t, self.sde.marginal(t))

    def epsilon(self, y_t: Tensor, t: Tensor) -> Tensor:
        """E[ε | y(t)], standardised."""
        return self.prediction.epsilon(self._output(y_t, t), y_t, self.sde.marginal(t))

    def score(self, y_t: Tensor, t: Tensor) -> Tensor:
        """∇ log p(y(t)) = −E[ε | y(t)] / s, standardised."""
        return -self.epsilon(y_t, t) / self.sde.marginal(t).std

    def _output(self, y_t: Tensor, t: Tensor) -> Tensor:
        network = self.network if self._in_use is None else self._in_use
        return at_least_float32(network(y_t, t))

    @contextmanager
    def compiled(self, batch_size: int) -> Iterator[None]:
        """The network is compiled or recorded for batches of that size inside; the code is kept for the next time."""
        if self._compiled is None or self._compiled.size != batch_size:
            device = self.mean.device
            use_channels_last(self.network, device)
            self._compiled = FixedBatch(self.network, batch_size, self.sample_shape, device)
        self._in_use = self._compiled
        try:
            yield
        finally:
            self._in_use = None

    @torch.no_grad()
    def sample(
        self,
        n: int,
        *,
        sampler: Sampler = PAPER_SAMPLER,
        batch_size: int = 64,
        generator: Seeds = None,
        first: int = 0,
        compile: bool = False,
        progress: bool = True,
    ) -> Tensor:
        """`n` samples in mirror space, (n, C, H, W), on the model's device.

        The noise of sample i depends on (seed, i, step) only, so `batch_size` and the number of processes do not change
        it. Under torchrun every process must call this; each makes its share and all get all samples.

        Args:
            n: How many.
            sampler: `EulerMaruyama(1000)` (the paper), `Ancestral`, `DDIM`, `DPMSolver(25)` or `UniPC(25)`.
            batch_size: Samples made together.
            generator: A seed, or a generator to draw it from; None draws it from torch's global one. A sequence gives
                every sample a seed of its own.
            first: Number of the first sample: `sample(64, first=128)` makes samples 128 to 191 of the same seed.
            compile: Compile the network first, for this batch size, or record it if it is `NCSNpp` on a GPU: up to a
                minute, which thousands of samples repay.
            progress: Show a progress bar, where there is a terminal.

        Precision is the caller's: `with namm.numerics.arithmetic("auto", device): …` is the fastest.
        """
        compiled = self.compiled(batch_size) if compile else nullcontext()
        with evaluating(self), compiled, sampling_bar(n, batch_size, sampler.steps, progress) as bar:
            return sample_in_batches(
                lambda noise: self.unstandardise(sampler(self, noise, bar.advance)),
                n,
                self.sample_shape,
                like=at_least_float32(self.mean),
                batch_size=batch_size,
                generator=generator,
                first=first,
            )


class Trial(NamedTuple):
    """What the network makes of one noisy batch in training."""

    u_t: Tensor  # the noisy images, standardised
    marginal: Marginal  # m and s at their times
    output: Tensor
    error: Tensor  # mean square, a scalar


class DiffusersNetwork(nn.Module):
    """A model of diffusers, such as `UNet2DModel`, as a network in continuous time: its index is 1000 t − 1."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, y_t: Tensor, t: Tensor) -> Tensor:
        """(B, C, H, W), (B,) -> (B, C, H, W)."""
        return self.model(y_t, 1000 * t - 1).sample


class FixedBatch:
    """`network(y_t, t)` for batches of `size` images of `shape`, recorded if it has kernels for `device` or compiled.

    A smaller batch is filled up with copies of its rows: another size would be recorded or compiled anew, which
    takes as long as hundreds of samples or many thousand.
    """

    def __init__(self, network: nn.Module, size: int, shape: tuple[int, int, int], device: torch.device) -> None:
        self.size = size
        self.call: Callable[..., Tensor]
        if can_record(network, device):
            self.graphs, self.call = False, Recorded(network)
            return
        options = compile_options(network, device, size * math.prod(shape))
        self.graphs = options["triton.cudagraphs"]
        self.call = torch.compile(network, fullgraph=True, dynamic=False, options=options)

    def __call__(self, y_t: Tensor, t: Tensor) -> Tensor:
        """(B, C, H, W) and (B,) -> (B, C, H, W), B at most `size`."""
        n = len(y_t)
        if n < self.size:
            rows = torch.arange(self.size, device=y_t.device) % n
            y_t, t = y_t[rows], t[rows]
        output = self.call(y_t, t)
        return (output.clone() if self.graphs else output)[:n]  # the next replay writes to the same memory
