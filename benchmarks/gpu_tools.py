"""What rows and comparisons of `gpu.py` share: clocks, kernels, FLOPs, processes, a training by the package's loop."""

import gc
import json
import math
import os
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from namm.clock import clock
from namm.experiments.engine.settings import ForwardSettings, NetworkSettings, Settings
from namm.experiments.presets import preset
from namm.gpu import use_channels_last
from namm.numerics import arithmetic, generator
from namm.precision import Precision
from namm.training.objectives import Objective
from namm.training.settings import TrainSettings
from namm.training.trainer import rehearse, train

Module = TypeVar("Module", bound=nn.Module)
MATRIX = re.compile(r"gemm|conv(?!ert)|xmma|cutlass|nvjet|sdpa|flash|wgrad|dgrad|fprop|triton_tem|triton_mm")
FUSED = re.compile(r"triton_(poi|red|per|for)_")  # inductor's own, named after what they are fused from
KINDS = {
    "own": re.compile(r"^_(normalise|join|copy|up|down|fold|solve)(_back)?$"),
    "pointwise": re.compile(r"triton_(poi|for)_"),
    "reductions": re.compile(r"triton_(red|per)_|reduce_kernel"),
    "random": re.compile(r"dropout|distribution|philox", re.IGNORECASE),
    "optimiser": re.compile(r"multi_tensor_apply"),
    "copies": re.compile(r"memcpy|memset|copy", re.IGNORECASE),
}
"""Kinds of kernels that are not matrix products, by what their names match first."""
SECONDS = 4.0
"""Approximate length of a timed training."""
BUSY = 0.7


@dataclass(frozen=True)
class Figures:
    """What one measurement found; an image of `sampling` is one step of one image."""

    images_per_second: float
    flops_per_image: float
    warmup_seconds: float
    kernels: Mapping[str, float]
    """Seconds per image in each kernel."""


def number(value: float | None, form: str = "") -> str:
    """Format a figure for people."""
    return "–" if value is None else format(value, form or (",.0f" if value >= 1000 else ".4g"))


# Other processes


def run_apart(script: str, arguments: Sequence[str], caches: str) -> Any:
    """What a call of `script` prints last, as JSON; compilers find and leave their code in the folder `caches`.

    Python keeps what it has compiled of a module, as it does by itself.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), caches)
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def prepare(script: str, calls: Mapping[str, Sequence[str]], processes: int) -> None:
    """Fill the compiler's cache, by calls of `script` whose figures are thrown away, so many at a time."""

    def run(name: str) -> None:
        done = subprocess.run([sys.executable, script, *calls[name]], check=False, capture_output=True, text=True)
        why = f": exit code {done.returncode}, {done.stderr.strip()[-500:]}" if done.returncode else ""
        print(f"prepared {name}{why}", flush=True)

    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(run, calls))


@contextmanager
def compiled_by_torch() -> Iterator[None]:
    """Networks with kernels of their own are compiled like any other inside."""
    with ExitStack() as stack:
        for home in ("namm.training.trainer", "namm.generative.diffusion"):
            stack.enter_context(patch(f"{home}.can_record", lambda *_: False))
        yield


# Where and how


@dataclass(frozen=True)
class Bench:
    """Where and how a row is measured; one that `prepares` only fills the compiler's cache: no figure counts."""

    device: torch.device
    batch: int
    precision: Precision
    quick: bool
    prepares: bool = False

    @property
    def brief(self) -> bool:
        """Whether a few steps are enough."""
        return self.quick or self.prepares

    @property
    def compile(self) -> bool:
        """Whether to compile."""
        return not self.quick

    def settings(self, experiment: str, name: str) -> Settings:
        """A preset, or its miniature."""
        s = preset(experiment, name).settings
        if not self.quick:
            return s
        size: dict[str, Any] = {"size": 8}
        f, unshuffle = replace(s.map.f, filters=4, blocks=1, downsamplings=1), s.mdm.network.unshuffle
        network = NetworkSettings(filters=8, multipliers=(1,), blocks=1, attention=(), unshuffle=unshuffle)
        maps, mdm = replace(s.map, g=ForwardSettings(1, 4), f=f), replace(s.mdm, network=network)
        return replace(s, data=replace(s.data, **size), map=maps, mdm=mdm)

    def arithmetic(self) -> AbstractContextManager[None]:
        """The row's precision."""
        return arithmetic(self.precision, self.device)

    def place(self, module: Module) -> Module:
        """`module` as the training loop leaves it on the device, without weights that are all zero."""
        for weight in module.parameters():
            if weight.ndim > 1 and not weight.any():
                nn.init.normal_(weight, std=0.02)
        use_channels_last(module.to(self.device), self.device)
        return module.eval()

    def images(self, n: int, shape: tuple[int, int, int]) -> Tensor:
        """Random images, standardised: every pixel uniform."""
        return (torch.rand(n, *shape, generator=generator(0, "benchmark")).to(self.device) - 0.5) * 12**0.5

    def compiled(self, call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """`call`, recorded as a CUDA graph."""
        return torch.compile(call, options={"triton.cudagraphs": True}) if self.compile else call

    def clock(self) -> float:
        """Seconds, once all that was asked of the device is done."""
        return clock(self.device)

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds of a warm call: the median of five groups of calls, or one call that takes longer than all."""
        enough = 0.01 if self.brief else 0.3

        def once(calls: int) -> float:
            start = self.clock()
            for _ in range(calls):
                call()
            return (self.clock() - start) / calls

        first = once(1)
        return first if first > 5 * enough else statistics.median(once(math.ceil(enough / first)) for _ in range(5))

    def fresh(self) -> None:
        """Give back what is not used, and measure memory from here."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_tflops(self) -> float:
        """Rate of a product of large bfloat16 matrices."""
        n = 256 if self.quick else 8192
        a, b = (torch.randn(n, n, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        torch.mm(a, b)
        return 2e-12 * n**3 / self.seconds(lambda: torch.mm(a, b))

    def bandwidth(self) -> float:
        """GB/s, read and written, of a large copy."""
        source = torch.ones(2**20 if self.quick else 2**30, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        target.copy_(source)
        return 2e-9 * source.nbytes / self.seconds(lambda: target.copy_(source))


# Kernels


class Profile:
    """Time in each kernel, or on a CPU in each operation."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.cuda = bench, bench.device.type == "cuda"
        self.profiler = profile(activities=[ProfilerActivity.CUDA if self.cuda else ProfilerActivity.CPU])
        self.updates = 0
        for name, value in (("DISABLE_CUPTI_LAZY_REINIT", "1"), ("TEARDOWN_CUPTI", "0")):
            os.environ.setdefault(name, value)  # as torch does for CUDA graphs, which a second profile may not survive

    def start(self) -> None:
        """Begin, once the device is idle."""
        self.bench.clock()
        self.profiler.start()

    def stop(self) -> None:
        """End, once the device is idle."""
        self.bench.clock()
        self.profiler.stop()

    def after_step(self, first: int, last: int) -> None:
        """Profile the updates after the `first` up to the `last`; called after every one."""
        self.updates += 1
        if self.updates == first:
            self.start()
        elif self.updates == last:
            self.stop()

    def kernels(self, images: int) -> dict[str, float]:
        """Seconds per image."""
        found: defaultdict[str, float] = defaultdict(float)
        for event in self.profiler.events() or ():
            if (event.device_type == DeviceType.CUDA) == self.cuda and not event.is_user_annotation:
                found[event.name] += event.self_device_time_total if self.cuda else event.self_cpu_time_total
        return {name: 1e-6 * microseconds / images for name, microseconds in found.items() if microseconds}


def bound(kernels: Mapping[str, float], wall: float) -> str:
    """What bounds a work of `wall` seconds that spends `kernels[name]` of them in each kernel."""
    busy = sum(kernels.values())
    if busy < BUSY * wall:
        return "launch"
    return "arithmetic" if by_kind(kernels).get("matrix", 0.0) > busy / 2 else "memory"


def by_kind(kernels: Mapping[str, float]) -> dict[str, float]:
    """Seconds of all kernels of a kind, largest first."""
    found: defaultdict[str, float] = defaultdict(float)
    for name, seconds in kernels.items():
        is_matrix = MATRIX.search(name.lower()) and not FUSED.match(name)
        matching = (kind for kind, pattern in KINDS.items() if pattern.search(name))
        found["matrix" if is_matrix else next(matching, "others")] += seconds
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def flops(call: Callable[[Tensor], object], shape: tuple[int, int, int]) -> float:
    """FLOPs per image of a call with two images; on a CPU, where no layer is rewritten into what a GPU does faster."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call(torch.rand(2, *shape))
    return counter.get_total_flops() / 2


# Measurements


def training(
    bench: Bench,
    objective: Objective,
    shape: tuple[int, int, int],
    settings: TrainSettings,
    after_step: Callable[[], None] = lambda: None,
) -> Figures:
    """A training by the package's own loop; the dry step before it does not count in its memory."""
    # Profiled are steps of the loop's trial, which are not timed; a training of a few steps has none.
    budget, first, last = ("4 steps", 2, 3) if bench.brief else (f"{SECONDS / 60} minutes", 20, 25)
    how: dict[str, Any] = {"batch_size": bench.batch, "precision": bench.precision, "compile": bench.compile}
    seldom: dict[str, Any] = {"log_every": 10**9, "checkpoint_seconds": math.inf, "validations": 0, "milestones": 0}
    settings = replace(settings, budget=budget, **how, **seldom)
    images = bench.images(8 * bench.batch, shape)
    per_image = flops(lambda x: objective(x, *objective.draw((x,), generator(0)))["loss"].backward(), shape)
    objective.zero_grad()
    profiled = Profile(bench)

    def after() -> None:
        after_step()
        profiled.after_step(first, last)

    start = bench.clock()
    rehearse(objective, (images,), settings, bench.device)
    bench.fresh()
    done = train(objective, (images,), settings, after_step=after, progress=False)
    warmup = bench.clock() - start - done.compute_seconds
    kernels = profiled.kernels((last - first) * bench.batch)
    return Figures(done.images / done.compute_seconds, per_image, warmup, kernels)


def calls(
    bench: Bench,
    short: Callable[[], object],
    images: int,
    per_image: float,
    long: Callable[[], object] | None = None,
    ratio: float = 1.0,
) -> Figures:
    """Warm up and profile `short`, a work on `images` images; time `long`, the same on `ratio` times as many."""
    bench.fresh()
    start = bench.clock()
    for _ in range(3):
        short()
    warmup = bench.clock() - start
    seconds = bench.seconds(short if bench.prepares else long or short)
    profiled = Profile(bench)
    profiled.start()
    short()
    profiled.stop()
    return Figures(ratio * images / seconds, per_image, warmup, profiled.kernels(images))
