"""Your own rule on your own data: charge densities of three kinds of ions, neutral in sum at every pixel.

Run it: python examples/own_constraint.py
Images in a file, through every stage, in this folder: namm run --data FILE --constraint own_constraint:neutral
"""

import torch
import torch.nn.functional as F

import namm
from namm.maps import ICNN, ResNet


@namm.constraint
def neutral(x: torch.Tensor) -> torch.Tensor:
    """ℓ(x): mean over pixels of |sum of the channels|, (B, 3, H, W) -> (B,)."""
    return x.sum(1).abs().mean((1, 2))


def main(steps: int = 300) -> tuple[float, float]:
    """Learn a map for the rule; return mean ℓ of images with noise added, and with that noise added in mirror space."""
    smooth = F.interpolate(torch.randn(512, 3, 4, 4), size=16, mode="bicubic")
    images = 0.5 * (smooth - smooth.mean(1, keepdim=True))
    print(neutral.check(images))
    f = ResNet(channels=3, filters=8, blocks=2, normalisation="none", dropout=0.0, skip=True, activation="none")
    mirror = namm.MirrorMap(ICNN(channels=3, layers=1, filters=8), f)
    settings = namm.TrainSettings(budget=f"{steps} steps", learning_rate=2e-3, schedule="cosine", ema_decay=0.98)
    noise, weights = namm.UniformNoise(0.1), namm.Weights(2.5)  # left out, both are chosen by trials
    namm.train_map(images[:448], neutral, mirror, noise=noise, weights=weights, settings=settings)
    x, z = images[448:].to(f.device), 0.1 * torch.randn(64, 3, 16, 16, device=f.device)
    with torch.no_grad():
        direct, mirrored = neutral(x + z).mean(), neutral(mirror.to_data(mirror.to_mirror(x) + z)).mean()
    print(f"mean ℓ with noise added: {direct:.4f}; with the same noise added in mirror space: {mirrored:.4f}")
    return direct.item(), mirrored.item()


if __name__ == "__main__":
    main()
