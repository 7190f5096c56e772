"""A model of diffusers as a network of ours: what its own scheduler says of the clean image, `Diffusion` says too."""

import pytest
import torch
from diffusers import DDIMScheduler, UNet2DModel
from torch import nn

from namm.generative import DDIM, VPSDE, DiffusersNetwork, Diffusion, Epsilon, Velocity

SHAPE = (2, 8, 8)
LOW, HIGH = -3.0, 9.0


@pytest.fixture(scope="module")
def unet():
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    sizes = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "add_attention": False}
    network = UNet2DModel(8, in_channels=2, out_channels=2, **sizes, **blocks)
    for weight in network.parameters():
        nn.init.normal_(weight, std=0.1)
    return network.eval()


def wrapped(unet, prediction, sde=VPSDE()):  # noqa: B008
    """As docs/guides/repair.md has it."""
    model = Diffusion(DiffusersNetwork(unet), SHAPE, prediction=prediction, sde=sde)
    model.mean.fill_((LOW + HIGH) / 2)
    model.scale.fill_((HIGH - LOW) / 2)
    return model


@pytest.mark.parametrize(("name", "prediction"), [("epsilon", Epsilon()), ("v_prediction", Velocity())])
@pytest.mark.parametrize(("start", "end"), [(1e-4, 0.02), (2e-4, 0.01)])
@torch.no_grad()
def test_the_clean_image_is_that_of_the_scheduler(unet, name, prediction, start, end):
    scheduler = DDIMScheduler(beta_start=start, beta_end=end, prediction_type=name, clip_sample=False)
    model = wrapped(unet, prediction, VPSDE(1000 * start, 1000 * end))
    y = torch.randn(3, *SHAPE)
    for index in (20, 200, 500):
        scheduler.set_timesteps(1000)
        theirs = scheduler.step(unet(y, index).sample, index, y).pred_original_sample
        ours = model.denoise(y, torch.full((3,), (index + 1) / 1000))
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


@torch.no_grad()
def test_samples_are_those_of_the_scheduler_in_units_of_the_data(unet):
    """Mean and spread over samples, since the noise is another."""
    scheduler = DDIMScheduler(clip_sample=False, prediction_type="v_prediction")
    scheduler.set_timesteps(100)
    state = torch.randn((64, *SHAPE))
    for index in scheduler.timesteps:
        state = scheduler.step(unet(state, index).sample, index, state).prev_sample
    theirs = LOW + (HIGH - LOW) * (state + 1) / 2
    ours = wrapped(unet, Velocity()).sample(64, sampler=DDIM(100), generator=0, progress=False)
    scale = theirs.std()
    assert float((ours.mean(0) - theirs.mean(0)).abs().mean() / scale) < 0.2
    assert float(ours.std() / scale) == pytest.approx(1, abs=0.1)
