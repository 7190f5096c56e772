"""Your own instrument: images seen only as their row and column sums, as in tomography from two angles.

Run it: python examples/own_operator.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import namm
from namm.generative import Velocity
from namm.inverse import DDIMSteps, DPSGuidance, GaussianNoise, operator, sample_posterior
from namm.training.settings import TrainSettings


@operator
def projections(x: torch.Tensor) -> torch.Tensor:
    """A(x): the sums of the rows and of the columns, (B, 1, H, W) -> (B, 1, H + W)."""
    return torch.cat([x.sum(3), x.sum(2)], dim=2)


class Network(nn.Module):
    """A small network for 8×8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(65, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 64))

    def forward(self, y_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """(B, 1, 8, 8), (B,) -> (B, 1, 8, 8)."""
        output: torch.Tensor = self.layers(torch.cat([y_t.flatten(1), t[:, None]], 1)).reshape(y_t.shape)
        return output


def main(steps: int = 600) -> tuple[float, float]:
    """Learn a prior of smooth images; return the error of its samples, and of those that know the projections."""
    images = F.interpolate(torch.randn(2049, 1, 3, 3), size=8, mode="bicubic")
    truth = images[:1]
    prior = namm.Mirrored(namm.Diffusion(Network(), (1, 8, 8), prediction=Velocity()), namm.IdentityMap())
    settings = TrainSettings(budget=f"{steps} steps", batch_size=128, learning_rate=2e-3, ema_decay=0.98)
    namm.train_model(prior.model, images[1:], prior.mirror, settings=settings)
    noise = GaussianNoise(std=0.2)
    measurement = projections(truth) + noise.sample(projections(truth))
    guidance, few = DPSGuidance(zeta=0.02), DDIMSteps(200)
    posterior = sample_posterior(prior, measurement, projections, noise, n=32, guidance=guidance, steps=few)
    print(posterior)
    truth = truth.to(posterior.samples.device)
    errors = [(x - truth).square().mean().sqrt().item() for x in (prior.sample(32), posterior.samples[0])]
    print(f"error of samples of the prior: {errors[0]:.2f}; given the projections: {errors[1]:.2f}")
    return errors[0], errors[1]


if __name__ == "__main__":
    main()
