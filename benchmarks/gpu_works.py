"""What `gpu.py` times: steps of trainings, samples and single maps of the presets, on random images."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gpu_tools import Bench, Figures, calls, flops, training
from namm.evaluation import distance_summary
from namm.experiments.engine import build, build_models
from namm.experiments.engine.settings import Settings
from namm.generative import Diffusion, EulerMaruyama, Mirrored
from namm.maps import MirrorMap
from namm.maps.icnn import project_weights
from namm.training.objectives import MapObjective
from namm.training.train_model import ModelObjective


def map_step(bench: Bench, experiment: str, name: str) -> Figures:
    """A training of g and f on `experiment` as its preset `name` has it."""
    s = bench.settings(experiment, name)
    objective = map_objective(s)
    shape = build.dataset(s.data).shape
    return training(bench, objective, shape, s.map.train, project_weights(objective.mirror))


def map_objective(s: Settings) -> MapObjective:
    mirror = untrained_mirror(s)
    rule, weights = build.constraint(s.data.rule), build_models.weights(s.map.weights, unit=1.0)
    noise = build_models.noise(s.map.noise, s.map.sigma_max)
    return MapObjective(mirror, rule, noise=noise, weights=weights, regulariser=build_models.regulariser(s.map))


def untrained_mirror(s: Settings) -> MirrorMap:
    """g and f as the settings have them, for images that do not matter."""
    return build_models.mirror(s.map, torch.zeros(2, *build.dataset(s.data).shape))


def score_step(bench: Bench, name: str) -> Figures:
    """A training of the score network as the preset `name` has it."""
    s = bench.settings("burgers", name)
    model = score_model(s)
    return training(bench, ModelObjective(model), model.sample_shape, s.mdm.train)


def score_model(s: Settings) -> Diffusion:
    return build_models.diffusion(s.mdm.network, s.mdm.diffusion, build.dataset(s.data).shape, seed=0)


@torch.no_grad()
def network_flops(model: Diffusion) -> float:
    return flops(lambda y: model.denoise(y, torch.ones(len(y))), model.sample_shape)


def sampling(bench: Bench, name: str, steps: int) -> Figures:
    """Steps of Euler–Maruyama with the score network of the preset `name`."""
    model = score_model(bench.settings("burgers", name))
    per_image = network_flops(model)
    bench.place(model)
    few, steps = (2, 4) if bench.quick else (10, steps)

    def draw(steps: int) -> Tensor:
        sampler, size = EulerMaruyama(steps), bench.batch
        return model.sample(size, sampler=sampler, batch_size=size, generator=0, compile=bench.compile, progress=False)

    with bench.arithmetic():
        return calls(bench, partial(draw, few), few * bench.batch, per_image, partial(draw, steps), steps / few)


def whole_samples(bench: Bench, n: int) -> Figures:
    """Samples of the preset `gpu` end to end: the score network by its sampler, then f, then ℓ."""
    s = bench.settings("burgers", "gpu")
    model, mirror = score_model(s), untrained_mirror(s)
    rule, source = build.constraint(s.data.rule), Mirrored(model, mirror)
    steps, n = (2, 2 * bench.batch) if bench.quick else (s.samples.sampler.steps, n)
    with torch.no_grad():
        of_rest = flops(lambda y: rule(mirror.to_data(y)), model.sample_shape)
    per_image = steps * network_flops(model) + of_rest
    bench.place(source)
    rule.to(bench.device)
    sampler = build_models.sampler(replace(s.samples.sampler, steps=steps))

    def draw(n: int) -> float:
        x = source.sample(
            n, sampler=sampler, batch_size=bench.batch, generator=0, compile=bench.compile, progress=False
        )
        return distance_summary(rule, x).mean

    with torch.no_grad(), bench.arithmetic():
        return calls(bench, partial(draw, bench.batch), bench.batch, per_image, partial(draw, n), n / bench.batch)


def one_map(bench: Bench, side: str) -> Figures:
    """f or g of the paper's pair, without gradients."""
    s = bench.settings("burgers", "paper")
    shape, network = build.dataset(s.data).shape, getattr(untrained_mirror(s), side).eval()
    with torch.no_grad(), bench.arithmetic():
        per_image = flops(network, shape)
        x, quick = bench.images(bench.batch, shape), bench.compiled(bench.place(network))
        return calls(bench, lambda: quick(x), bench.batch, per_image)


def distance(bench: Bench) -> Figures:
    """Burgers' ℓ and its gradient."""
    s = bench.settings("burgers", "paper")
    shape, rule = build.dataset(s.data).shape, build.constraint(s.data.rule)

    per_image = flops(lambda x: rule(x.requires_grad_()).sum().backward(), shape)
    x, compiled = bench.images(bench.batch, shape).requires_grad_(), bench.compiled(rule.to(bench.device))
    with bench.arithmetic():
        return calls(bench, lambda: torch.autograd.grad(compiled(x).sum(), x), bench.batch, per_image)
