"""The whole method on one page: a diffusion model of two-dimensional flows that neither gain nor lose fluid.

    rule      ℓ(x) ≥ 0, zero where the velocities x have no divergence
    map       g and f with f(g(x)) ≈ x and ℓ(f(g(x) + noise)) ≈ 0
    model     any generative model, trained on y = g(x)
    samples   f(y), to be compared with samples of the same model trained on x itself

Run it, a minute or so on one CPU core: python examples/minimal.py [--steps 300] [--samples 256] [--seed 0]
"""

import argparse

import torch
from torch import Tensor

import namm
from namm.evaluation import Scores, compare, floor
from namm.generative import DPMSolver, NCSNpp, Velocity
from namm.maps import ICNN, ResNet

SIZE, N_TRAIN = 16, 2048


def difference(field: Tensor, axis: int) -> Tensor:
    """Central difference on a periodic grid, in units of the grid spacing."""
    return (field.roll(-1, axis) - field.roll(1, axis)) / 2


def flows(n: int, generator: torch.Generator) -> Tensor:
    """Velocities (n, 2, SIZE, SIZE) of random smooth stream functions ψ: (∂ψ/∂y, −∂ψ/∂x) has no divergence."""
    frequency = torch.fft.fftfreq(SIZE) * SIZE
    smooth = torch.exp(-(frequency[:, None] ** 2 + frequency**2) / 6)
    noise = torch.randn(n, SIZE, SIZE, generator=generator)
    stream = torch.fft.ifft2(torch.fft.fft2(noise) * smooth).real
    x = torch.stack([difference(stream, -2), -difference(stream, -1)], 1)
    return 0.3 * x / x.std()  # the map is trained with noise up to 0.1, a third of this: as large as the model's errors


@namm.constraint
def divergence(x: Tensor) -> Tensor:
    """The rule, ℓ(x): mean over pixels of |∂u/∂x + ∂v/∂y|, (B, 2, H, W) -> (B,)."""
    return (difference(x[:, 0], -1) + difference(x[:, 1], -2)).abs().mean((1, 2))


def new_map() -> namm.MirrorMap:
    """Untrained g, the gradient of a convex network, and f, a residual network."""
    g = ICNN(channels=2, layers=1, filters=8)
    f = ResNet(2, 16, 2, 1, normalisation="none", dropout=0.0, skip=True, activation="none", boundary="circular")
    return namm.MirrorMap(g, f)


def new_model() -> namm.Diffusion:
    """An untrained diffusion model; the same for both sides of the comparison."""
    network = NCSNpp(2, SIZE, filters=32, multipliers=(1,), blocks=1, attention=(), dropout=0.0, unshuffle=2)
    return namm.Diffusion(network, (2, SIZE, SIZE), prediction=Velocity())


def settings(steps: int, batch_size: int, rate: float, seed: int) -> namm.TrainSettings:
    """Adam for `steps` updates, its rate falling to zero."""
    return namm.TrainSettings(
        f"{steps} steps", batch_size, rate, (0.9, 0.999), "cosine", warmup_steps=20, clip=1.0, ema_decay=0.99, seed=seed
    )


def main(steps: int = 300, samples: int = 256, seed: int = 0) -> dict[str, Scores]:
    """Train both models, draw from both, and return the scores of the data, of the plain model and of ours."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    train, test = flows(N_TRAIN, generator), flows(2 * samples, generator)

    mirror = new_map()
    learned = namm.train_map(
        train,
        divergence,
        mirror,
        noise=namm.UniformNoise(0.1),
        weights=namm.Weights(constraint=2.5),
        settings=settings(steps, 8, 2e-3, seed),
    )
    ours = namm.Mirrored(new_model(), mirror)
    fitted = namm.train_model(ours.model, train, mirror, settings=settings(steps, 32, 2e-3, seed))

    # The plain model gets the compute of the map as well, as further steps.
    more = round(steps * (1 + learned.compute_seconds / fitted.compute_seconds))
    plain = namm.Mirrored(new_model(), namm.IdentityMap())
    namm.train_model(plain.model, train, plain.mirror, settings=settings(more, 32, 2e-3, seed))

    scores = {"data": floor(test, divergence, subsets=10, size=samples)}
    for name, model in (("plain model", plain), ("ours", ours)):
        x = model.sample(samples, sampler=DPMSolver(20), generator=seed).cpu()
        scores[name] = compare(x, test, divergence, subsets=10, size=samples)
    print(f"{'':12} {'mean ℓ':>8} {'√MMD²':>8} {'TV ratio':>9} {'spread ratio':>13}")
    for name, s in scores.items():
        print(f"{name:12} {s.distance.mean:8.4f} {s.mmd.mean:8.4f} {s.total_variation:9.2f} {s.spread:13.2f}")
    return scores


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train and compare both models.")
    parser.add_argument("--steps", type=int, default=300, help="updates of the map and of the model on it")
    parser.add_argument("--samples", type=int, default=256, help="drawn from each model")
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
