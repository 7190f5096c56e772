"""A diffusers model that knows nothing of a rule, and its samples repaired: three charge densities that cancel.

Run it: python examples/repair_diffusers.py     (one to two minutes on a CPU)
"""

from typing import Any

import torch
import torch.nn.functional as F
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from torch import Tensor

import namm


@namm.constraint
def neutral(x: Tensor) -> Tensor:
    """ℓ(x): mean over pixels of |sum of the channels|, (B, 3, H, W) -> (B,)."""
    return x.sum(1).abs().mean((1, 2))


def train_elsewhere(images: Tensor, steps: int) -> DDPMPipeline:
    """A plain DDPM of images (N, 3, 8, 8) scaled to [-1, 1], as anybody trains one."""
    size, blocks = images.shape[-1], 2
    network = UNet2DModel(
        sample_size=size,
        block_out_channels=(32,) * blocks,
        down_block_types=("DownBlock2D",) * blocks,
        up_block_types=("UpBlock2D",) * blocks,
        layers_per_block=1,
        norm_num_groups=8,
    )
    scheduler, optimiser = DDPMScheduler(1000), torch.optim.Adam(network.parameters(), 1e-3)
    for _ in range(steps):
        x = images[torch.randint(len(images), (32,))]
        noise, t = torch.randn_like(x), torch.randint(1000, (32,))
        loss = F.mse_loss(network(scheduler.add_noise(x, noise, t), t).sample, noise)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return DDPMPipeline(network, scheduler)


def main(steps: int = 1000, n: int = 128, draw_steps: int = 200, **options: Any) -> namm.Verdict:
    """Train both, draw n samples, repair them, and print the verdict; `options` are those of `train_map`."""
    smooth = F.interpolate(torch.randn(700, 3, 4, 4), 8, mode="bicubic")
    images, held_out = (smooth - smooth.mean(1, keepdim=True)).split([400, 300])
    low, high = images.min(), images.max()
    pipe = train_elsewhere(2 * (images - low) / (high - low) - 1, steps)
    pipe.set_progress_bar_config(disable=True)
    mirror = namm.train_map(images, neutral, **options).mirror

    drawn = pipe(batch_size=n, num_inference_steps=draw_steps, output_type="np").images  # (n, 8, 8, 3) in [0, 1]
    samples = low + (high - low) * torch.from_numpy(drawn).movedim(-1, 1)  # (n, 3, 8, 8) in the data's units
    verdict = namm.repair(samples, mirror, rule=neutral, data=held_out).verdict
    assert verdict is not None  # there are enough images to judge
    print("\n".join(verdict.lines()))
    return verdict


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
