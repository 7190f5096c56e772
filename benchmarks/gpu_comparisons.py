"""Sections of `gpu.py`: a figure of ours and the same of a named baseline, measured by the same call.

Some are measured in processes of their own, which find nothing compiled: `gpu.py --child` runs such a process.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from gpu_tools import Bench, Figures, compiled_by_torch, number, run_apart
from gpu_works import distance, map_step, sampling, score_model, score_step, untrained_mirror
from namm.constraints import Burgers
from namm.evaluation import mmd2
from namm.experiments.assimilation.assimilate import Sampling
from namm.experiments.assimilation.tasks import named_operator, papers_observation
from namm.experiments.divergence import DivergenceData
from namm.experiments.engine import build, build_models
from namm.experiments.engine.settings import Settings
from namm.generative import Mirrored
from namm.inverse import DDIMSteps, DPSGuidance, GaussianNoise, sample_posterior
from namm.maps import ICNN
from namm.simulators.burgers import crank_nicolson, euler
from namm.training.optimisers import build as build_optimisers
from namm.training.optimisers import kinds
from namm.training.settings import TrainSettings
from namm.training.state import FlatWeights
from namm.training.train_model import ModelObjective
from namm.training.trainer import train
from shared import peak_bytes

SCRIPT = str(Path(__file__).with_name("gpu.py"))
RATE = "images/s"
FIRST_STEP = {"cold": 60.0, "warm": 15.0}
"""Seconds that the first step of a process may take, with nothing compiled and with a filled cache."""
POSTERIOR_GIB = 40.0


@dataclass(frozen=True)
class Comparison:
    """Our figure and the baseline's; `limit` is the most that ours may be, in the same unit."""

    what: str
    unit: str
    ours: float
    baseline: str
    theirs: float
    limit: float | None = None

    @property
    def ratio(self) -> float:
        """How many times better ours is."""
        return self.ours / self.theirs if self.unit == RATE else self.theirs / self.ours

    @property
    def falls_short(self) -> bool:
        """Whether ours is beyond its limit."""
        return self.limit is not None and self.ours > self.limit

    def plain(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return asdict(self) | {"ratio": self.ratio, "falls_short": self.falls_short}

    def verdict(self) -> str:
        """What is to be said of it where it falls short."""
        return f"missed: {self.line()}"

    def line(self) -> str:
        """All of it, for people."""
        asked = "" if self.limit is None else f"; at most {number(self.limit)}: {'no' if self.falls_short else 'yes'}"
        figures = f"{number(self.ours)} {self.unit}, {self.baseline} {number(self.theirs)}"
        return f"{self.what}: {figures}, ratio {self.ratio:.2f}{asked}"


# In this process


def update(bench: Bench) -> Iterator[Comparison]:
    """An update of all weights as one vector, against Adam on each of them, with gradients there already."""
    s = bench.settings("burgers", "paper")
    for name, network in (("score network", score_model(s)), ("maps", untrained_mirror(s))):
        weights = [p for p in network.to(bench.device).parameters() if p.requires_grad]
        theirs = 1e3 * bench.seconds(_updates(weights, [torch.optim.Adam(weights, fused=True)]))
        flat = FlatWeights(weights)
        ours = 1e3 * bench.seconds(_updates(weights, [torch.optim.Adam(flat.vectors, fused=True)], flat))
        yield Comparison(f"update of the {name}, {len(weights)} tensors", "ms", ours, "one by one", theirs)


def muon(bench: Bench) -> Iterator[Comparison]:
    """Muon's update of the score network, all matrices of a shape at once, against torch's and against Adam's."""
    network = score_model(bench.settings("burgers", "paper")).to(bench.device)
    weights = [p for p in network.parameters() if p.requires_grad]
    settings = TrainSettings(optimiser="muon")
    found = kinds(settings, network, weights)
    pairs = [
        (nn.Parameter(weight.detach().reshape(kind.matrix or weight.shape).clone()), kind.matrix is not None)
        for weight, kind in zip(weights, found, strict=True)
    ]
    matrices, others = ([weight for weight, is_matrix in pairs if is_matrix == wanted] for wanted in (True, False))
    apart = [torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw"), torch.optim.AdamW(others, fused=True)]
    one_by_one = 1e3 * bench.seconds(_updates([*matrices, *others], apart))
    flat = FlatWeights(weights, found)
    ours = 1e3 * bench.seconds(_updates(weights, build_optimisers(settings, flat, bench.device), flat))
    flat.release()
    flat = FlatWeights(weights)
    adam = 1e3 * bench.seconds(_updates(weights, [torch.optim.Adam(flat.vectors, fused=True)], flat))
    what = f"Muon's update of the score network, {len(matrices)} matrices"
    yield Comparison(what, "ms", ours, "torch's", one_by_one)
    yield Comparison(what, "ms", ours, "Adam's", adam)


def _updates(
    weights: Sequence[nn.Parameter], optimisers: Sequence[torch.optim.Optimizer], flat: FlatWeights | None = None
) -> Callable[[], None]:
    """An update that is warm: of each weight, or of all of them as the vectors of `flat`."""
    gradients = [torch.randn_like(w) for w in weights]
    updated = weights if flat is None else flat.vectors

    def step() -> None:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        if flat is not None:
            flat.gather()
        torch.nn.utils.clip_grad_norm_(updated, 1.0)
        for optimiser in optimisers:
            optimiser.step()

    step()
    return step


def by_autograd(g: ICNN, x: Tensor) -> Tensor:
    """g(x) from ∇P by reverse differentiation, itself differentiable where x is."""
    with torch.enable_grad():
        leaf = x if x.requires_grad else x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(g.potential(leaf).sum(), leaf, create_graph=x.requires_grad)
    return torch.lerp(gradient, x, g.strong_convexity)


def closed_form(bench: Bench) -> Iterator[Comparison]:
    """g in closed form, compiled, against autograd of its potential, which cannot be compiled twice over."""
    s = bench.settings("burgers", "paper")
    shape, g = build.dataset(s.data).shape, untrained_mirror(s).g.to(bench.device)
    assert isinstance(g, ICNN)
    weights = [p for p in g.parameters() if p.requires_grad]
    ways: tuple[Callable[[Tensor], Tensor], ...] = (torch.compile(g) if bench.compile else g, partial(by_autograd, g))

    def forward(way: Callable[[Tensor], Tensor], x: Tensor) -> None:
        with torch.set_grad_enabled(x.requires_grad):
            y = way(x)
        if x.requires_grad:
            torch.autograd.grad(y, [x, *weights], torch.ones_like(y))

    for what, batch in (("g", 1024), ("g with gradients", 256)):
        x = bench.images(batch // 8 if bench.quick else batch, shape).requires_grad_("with" in what)
        with bench.arithmetic():
            for way in ways:
                forward(way, x)  # compiles
            ours, theirs = (len(x) / bench.seconds(partial(forward, way, x)) for way in ways)
        yield Comparison(f"{what}, batch {len(x)}", RATE, ours, "autograd", theirs)


def forward_euler(bench: Bench) -> Iterator[Comparison]:
    """Burgers' ℓ and its gradient on 16 images, with Crank–Nicolson steps against forward Euler's, neither compiled."""
    x = torch.rand(16, 1, *(2 * (16 if bench.quick else 64,)), device=bench.device, requires_grad=True)

    def milliseconds(step: Callable[..., Tensor]) -> float:
        rule = Burgers(step=step).to(bench.device)
        return 1e3 * bench.seconds(lambda: torch.autograd.grad(rule(x).sum(), x))

    ours, theirs = map(milliseconds, (crank_nicolson, euler))
    yield Comparison("ℓ of Burgers' and its gradient, implicit steps", "ms", ours, "forward Euler", theirs)


def recorded(bench: Bench) -> Iterator[Comparison]:
    """The score network with kernels of our own as one recorded CUDA graph, against the same compiled by torch."""
    train_step, draw = partial(score_step, name="paper"), partial(sampling, name="paper", steps=100)
    works = (("score step", train_step, 64), ("score step", train_step, 256), ("sampling", draw, 256))
    for what, work, batch in works:
        own = replace(bench, batch=batch // 8 if bench.quick else batch)
        ours = _rate(own, work)
        with compiled_by_torch():
            theirs = _rate(own, work)
        yield Comparison(f"{what}, batch {own.batch}", RATE, ours, "compiled", theirs)


def _rate(bench: Bench, work: Callable[[Bench], Figures]) -> float:
    bench.fresh()
    found = work(bench).images_per_second
    torch.compiler.reset()
    return found


def posterior_memory(bench: Bench) -> Iterator[Comparison]:
    """GPU memory and time of 32 posterior samples of 128×256×2 by mirror DPS, in bf16 against plain float32.

    The networks of the divergence-free experiment are untrained: what they hold does not depend on what they learned.
    """
    s = _divergence(bench)
    default = Sampling().together(build.dataset(s.data).shape)
    for together in (default, 32):
        what = f"32 posterior samples, {together} together"
        ours, theirs = (_posterior(replace(bench, precision=name), s, together) for name in ("auto", "fp32"))
        yield Comparison(f"{what}, a step", "s", ours[0], "fp32", theirs[0])
        if bench.device.type == "cuda":
            limit = POSTERIOR_GIB if together == default else None
            yield Comparison(f"{what}, memory", "GiB", ours[1], "fp32", theirs[1], limit)


def _divergence(bench: Bench) -> Settings:
    s = bench.settings("divergence", "paper")
    return replace(s, data=DivergenceData(size=8, rows=1, columns=2)) if bench.quick else s


def _posterior(bench: Bench, s: Settings, together: int, steps: int = 3) -> tuple[float, float]:
    """Seconds of a step, and GiB."""
    shape = build.dataset(s.data).shape
    model = build_models.diffusion(s.mdm.network, s.mdm.diffusion, shape, seed=0)
    prior = Mirrored(model, untrained_mirror(s)).to(bench.device)
    operator = named_operator(papers_observation(s.data), s.data, shape)
    y, how = operator(torch.zeros(1, *shape)).to(bench.device), (DPSGuidance(1e-3), DDIMSteps(steps))
    bench.fresh()
    start = bench.clock()
    with bench.arithmetic():
        sample_posterior(
            *(prior, y, operator, GaussianNoise(std=0.2)),
            n=4 if bench.quick else 32,
            guidance=how[0],
            steps=how[1],
            batch_size=together,
            generator=0,
            progress=False,
        )
    seconds = (bench.clock() - start) / steps
    return seconds, torch.cuda.max_memory_reserved() / 2**30 if bench.device.type == "cuda" else 0.0


# In processes of their own


def _apart(bench: Bench, caches: str, section: str, *arguments: str) -> dict[str, float]:
    """What `CHILDREN[section]` finds in another process, whose compilers use the folder `caches`."""
    found: dict[str, float] = run_apart(
        SCRIPT, ["--child", section, *arguments, *(["--quick"] if bench.quick else [])], caches
    )
    return found


def implicit_step(bench: Bench) -> Iterator[Comparison]:
    """All sweeps of an implicit step of Burgers' ℓ in one kernel, against a kernel for every sweep; both compiled."""
    for what, work in (("ℓ and gradient, batch 128", "distance"), ("map step, preset gpu, batch 128", "map")):
        found = {}
        for way in ("kernel", "sweeps"):
            with tempfile.TemporaryDirectory() as caches:
                found[way] = _apart(bench, caches, "implicit-step", work, way)
        for figure, unit in (("", RATE), (", warm-up", "s")):
            ours, theirs = (found[way][unit] for way in ("kernel", "sweeps"))
            yield Comparison(what + figure, unit, ours, "a kernel for every sweep", theirs)


def implicit_child(bench: Bench, work: str, way: str) -> dict[str, float]:
    """Rate and warm-up of one work by one way."""
    step = partial(map_step, experiment="burgers", name="gpu")
    works: dict[str, Callable[[Bench], Figures]] = {"distance": distance, "map": step}
    with patch("namm.simulators.burgers._has_kernel", lambda *_: way == "kernel"):
        found = works[work](replace(bench, batch=16 if bench.quick else 128))
    return {RATE: found.images_per_second, "s": found.warmup_seconds}


def warm_up(bench: Bench) -> Iterator[Comparison]:
    """Seconds from the start of a process to its first step, recorded against compiled by torch; preset `gpu`."""
    for stage in ("training", "sampling"):
        found = {}
        for way in ("recorded", "compiled"):
            with tempfile.TemporaryDirectory() as caches:  # the second process finds what the first has left
                for each in FIRST_STEP:
                    found[way, each] = _apart(bench, caches, "warm-up", stage, way, repr(time.time()))["s"]
        for each, limit in FIRST_STEP.items():
            what, asked = f"first step of {stage}, {each} cache", None if bench.quick else limit
            yield Comparison(what, "s", found["recorded", each], "compiled", found["compiled", each], asked)


def warm_up_child(bench: Bench, stage: str, way: str, start: str) -> dict[str, float]:
    """Seconds since `start`, a time of the machine's clock, when the first step is done."""
    s, first = bench.settings("burgers", "gpu"), []

    def done() -> None:
        bench.clock()
        first.append(time.time() - float(start))

    model = score_model(s)
    with compiled_by_torch() if way == "compiled" else nullcontext():
        if stage == "sampling":
            batch = 4 if bench.quick else 256
            y = bench.images(batch, bench.place(model).sample_shape)
            with torch.no_grad(), bench.arithmetic(), model.compiled(batch) if bench.compile else nullcontext():
                model.denoise(y, torch.ones(batch, device=y.device))
            done()
        else:
            how = replace(s.mdm.train, budget="1 steps", compile=bench.compile, validations=0, milestones=0)
            images = bench.images(how.batch_size, model.sample_shape)
            train(ModelObjective(model), (images,), how, after_step=done, progress=False)
    return {"s": first[0]}


def mmd(bench: Bench) -> Iterator[Comparison]:
    """MMD² of many images in blocks, against every matrix of distances kept."""
    n, size = (500, 16) if bench.quick else (10_000, 64)
    with tempfile.TemporaryDirectory() as caches:
        found = {method: _apart(bench, caches, "mmd", method, str(n), str(size)) for method in MMD}
    limits = {"s": None, "CPU s": None, "MiB": None} if bench.quick else {"s": 120.0, "CPU s": None, "MiB": 3 * 1024.0}
    ours, theirs = found.values()
    if abs(ours["value"] - theirs["value"]) > 1e-4:
        raise SystemExit(f"MMD² differs: {ours['value']} in blocks, {theirs['value']} by full matrices")
    for unit, limit in limits.items():
        what = f"MMD² of {n} and {n} images of {size}×{size}"
        yield Comparison(what, unit, ours[unit], "full matrices", theirs[unit], limit)


def full_matrices(x: Tensor, y: Tensor) -> float:
    """Biased MMD² as one writes it first, with every matrix kept."""
    a, b = x.flatten(1), y.flatten(1)
    xx, yy, xy = (torch.cdist(p, q).square() for p, q in ((a, a), (b, b), (a, b)))
    median = xx[torch.ones_like(xx, dtype=torch.bool).triu(1)].median()
    return float(sum(sign * (-d / median).exp().mean() for sign, d in ((1, xx), (1, yy), (-2, xy))))


MMD: dict[str, Callable[[Tensor, Tensor], float]] = {"blocks": mmd2, "full matrices": full_matrices}


def mmd_child(bench: Bench, method: str, n: str, size: str) -> dict[str, float]:
    """One method's figures: seconds on the clock and of all threads, and the most memory of the process."""
    torch.manual_seed(0)
    shape = (int(n), 1, int(size), int(size))
    x, y = torch.rand(shape), torch.rand(shape).pow_(1.1)
    MMD[method](x[:64], y[:64])  # what a first call costs is not what a pair costs
    start, cpu = time.perf_counter(), time.process_time()
    value = MMD[method](x, y)
    seconds = {"s": time.perf_counter() - start, "CPU s": time.process_time() - cpu}
    return {"value": value, **seconds, "MiB": peak_bytes() / 2**20}


SECTIONS: dict[str, Callable[[Bench], Iterator[Comparison]]] = {
    "update": update,
    "muon": muon,
    "closed-form": closed_form,
    "recorded": recorded,
    "implicit-step": implicit_step,
    "warm-up": warm_up,
    "posterior-memory": posterior_memory,
    "forward-euler": forward_euler,
    "mmd": mmd,
}
CHILDREN: dict[str, Callable[..., dict[str, float]]] = {
    "implicit-step": implicit_child,
    "warm-up": warm_up_child,
    "mmd": mmd_child,
}
