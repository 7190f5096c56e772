"""The pipeline draws what the package draws, and a folder keeps it or is refused."""

import json
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, DPMSolverMultistepScheduler, UNet2DModel, UniPCMultistepScheduler
from safetensors.torch import load_file
from torch import nn

from namm import polish
from namm.constraints import Periodic, TotalFlux, constraint
from namm.errors import CheckpointError, NammWarning, UsageError
from namm.generative import (
    VPSDE,
    DiffusersNetwork,
    Diffusion,
    DiT,
    DPMSolver,
    Epsilon,
    Flow,
    Mirrored,
    NCSNpp,
    Straight,
    UNet,
    UniPC,
    Velocity,
)
from namm.maps import ICNN, IdentityMap, MirrorMap, ResNet
from namm.pipeline import NAMMPipeline

SHAPE, STEPS = (2, 8, 8), 5
RULE = TotalFlux(3.0) + 0.5 * Periodic((2, 2))
WEIGHTS = "diffusion_pytorch_model.safetensors"


def randomised(network: nn.Module) -> nn.Module:
    """Random weights everywhere: a network that ends in zeros would hide what comes before."""
    for weight in network.parameters():
        nn.init.normal_(weight, std=0.1)
    return network


def make_ncsnpp() -> nn.Module:
    return randomised(NCSNpp(channels=2, height=8, filters=8, multipliers=(1, 2), blocks=1, attention=()))


def make_dit() -> nn.Module:
    return randomised(DiT(channels=2, filters=4, width=16, depth=2, heads=2))


def make_unet() -> nn.Module:
    return randomised(UNet(channels=2, height=8, filters=8, multipliers=(1, 2), blocks=1))


def make_diffusers_unet() -> nn.Module:
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    sizes = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "add_attention": False}
    return DiffusersNetwork(randomised(UNet2DModel(8, in_channels=2, out_channels=2, **sizes, **blocks)))


def make_model(network: nn.Module, prediction=Velocity(), **settings) -> Diffusion:  # noqa: B008
    model = Diffusion(network, SHAPE, prediction=prediction, **settings)
    model.fit_statistics(torch.randn(16, *SHAPE) * torch.tensor([3.0, 0.5]).reshape(2, 1, 1) + 1)
    return model


def make_mirror() -> MirrorMap:
    return MirrorMap(ICNN(channels=2, filters=4), ResNet(channels=2, filters=4, blocks=1, downsamplings=1))


@pytest.fixture
def parts():
    return make_model(make_ncsnpp(), t_min=2e-3, sde=VPSDE(0.2, 15.0)), make_mirror()


@pytest.fixture
def folder(parts, tmp_path):
    NAMMPipeline.from_parts(*parts, RULE).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def draw(pipe, n=3, seed=7):
    return pipe(batch_size=n, num_inference_steps=STEPS, generator=seed)


# Samples


@pytest.mark.parametrize("make_network", [make_ncsnpp, make_dit, make_unet, make_diffusers_unet])
@pytest.mark.parametrize(
    ("prediction", "sde"),
    [(Epsilon(), VPSDE()), (Velocity(), VPSDE()), (Epsilon(), Straight()), (Flow(), Straight(0.99))],
    ids=repr,
)
def test_samples_are_those_of_the_package_before_and_after_saving(make_network, prediction, sde, tmp_path):
    model, mirror = make_model(make_network(), prediction, sde=sde), make_mirror()
    x, y = Mirrored(model, mirror).sample_pairs(3, sampler=DPMSolver(STEPS), generator=7)
    assert x.std() > 0.01
    pipe = NAMMPipeline.from_parts(model, mirror, RULE)
    pipe.save_pretrained(tmp_path)
    loaded = NAMMPipeline.from_pretrained(tmp_path)
    assert type(loaded.network) is type(pipe.network)
    for out in draw(pipe), draw(loaded):
        assert torch.equal(out.images, x)
        assert torch.equal(out.mirror_images, y)
        assert torch.equal(out.distances, RULE(x))


def test_another_seed_gives_other_samples_and_a_generator_moves_on(parts):
    pipe, rng = NAMMPipeline.from_parts(*parts, RULE), torch.Generator().manual_seed(0)
    first, second = draw(pipe, seed=rng), draw(pipe, seed=rng)
    again = draw(pipe, seed=torch.Generator().manual_seed(0))
    assert not torch.allclose(first.images, second.images)
    assert torch.equal(first.images, again.images)


def test_distances_are_the_rule_on_the_images(parts):
    out = draw(NAMMPipeline.from_parts(*parts, TotalFlux(3.0)))
    by_hand = np.abs(out.images.double().numpy().sum((1, 2, 3)) - 3.0)
    np.testing.assert_allclose(out.distances.numpy(), by_hand, rtol=1e-6)


def test_without_maps_the_images_are_the_mirror_images(parts, tmp_path):
    NAMMPipeline.from_parts(parts[0], IdentityMap(), RULE).save_pretrained(tmp_path)
    out = draw(NAMMPipeline.from_pretrained(tmp_path))
    assert torch.equal(out.images, out.mirror_images)
    assert torch.equal(out.images, parts[0].sample(3, sampler=DPMSolver(STEPS), generator=7))
    assert not (tmp_path / "f").exists()


def test_arrays_have_channels_last_and_a_tuple_the_same_order(parts):
    pipe = NAMMPipeline.from_parts(*parts, RULE)
    tensors = draw(pipe)
    arrays = pipe(3, STEPS, generator=7, output_type="np", return_dict=False)
    for array, tensor in zip(arrays[:2], (tensors.images, tensors.mirror_images), strict=True):
        np.testing.assert_array_equal(array, tensor.numpy().transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(arrays[2], tensors.distances.numpy())


# Schedulers


def test_the_scheduler_has_the_marginals_of_the_continuous_diffusion(folder):
    scheduler = NAMMPipeline.from_pretrained(folder).scheduler
    t = (np.arange(1000) + 1) / 1000
    expected = np.exp(-0.2 * t - 0.5 * (15.0 - 0.2) * t**2)
    np.testing.assert_allclose(scheduler.alphas_cumprod.numpy(), expected, rtol=2e-4)
    assert scheduler.config.prediction_type == "v_prediction"


def test_the_scheduler_of_straight_paths_is_that_of_flow_matching():
    """Beside the noise level t the image has the weight 1 − t; and it can be exchanged as any other."""
    pipe = NAMMPipeline.from_parts(make_model(make_ncsnpp(), Flow(), sde=Straight()), make_mirror(), RULE)
    assert pipe.scheduler.config.prediction_type == "flow_prediction"
    mean, std = pipe.scheduler._sigma_to_alpha_sigma_t(torch.tensor(0.3))
    assert (float(mean), float(std)) == pytest.approx((0.7, 0.3))
    pipe.scheduler = UniPCMultistepScheduler.from_config(pipe.scheduler.config)
    assert pipe.sampler(STEPS) == UniPC(STEPS, 2)
    pipe.scheduler = UniPCMultistepScheduler()
    with pytest.raises(UsageError, match="other noise levels"):
        draw(pipe)


def test_a_folder_without_a_schedule_is_one_of_the_papers(parts):
    pipe = NAMMPipeline.from_parts(*parts, RULE)
    settings = {name: value for name, value in pipe.config.diffusion.items() if name != "schedule"}
    pipe.register_to_config(diffusion=settings)
    assert pipe.diffusion.sde == VPSDE(0.2, 15.0)


def test_another_scheduler_changes_the_sampler(parts):
    pipe = NAMMPipeline.from_parts(*parts, RULE)
    before = draw(pipe).images
    pipe.scheduler = DPMSolverMultistepScheduler.from_config(pipe.scheduler.config, algorithm_type="sde-dpmsolver++")
    assert pipe.sampler(STEPS) == DPMSolver(STEPS, stochastic=True)
    pipe.scheduler = UniPCMultistepScheduler.from_config(pipe.scheduler.config)
    expected = Mirrored(*parts).sample(3, sampler=UniPC(STEPS, order=2), generator=7)
    assert torch.equal(draw(pipe).images, expected)
    assert not torch.allclose(expected, before)


def test_a_scheduler_that_does_not_fit_is_refused(parts):
    pipe = NAMMPipeline.from_parts(*parts, RULE)
    pipe.scheduler = UniPCMultistepScheduler()
    with pytest.raises(UsageError, match="other noise levels"):
        draw(pipe)
    pipe.scheduler = DDPMScheduler()
    with pytest.raises(UsageError, match="DDPMScheduler cannot drive"):
        draw(pipe)


# Folders

FRESH = """
import sys
import warnings
from namm import NAMMPipeline
pipe = NAMMPipeline.from_pretrained(sys.argv[1])
out = pipe(batch_size=3, num_inference_steps=5, generator=7)
from safetensors.torch import save_file
save_file(dict(out), sys.argv[2])
"""


def test_a_fresh_process_without_network_draws_the_same(parts, folder, tmp_path):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "-c", FRESH, str(folder), str(tmp_path / "out.safetensors")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    there, here = load_file(tmp_path / "out.safetensors"), draw(NAMMPipeline.from_parts(*parts, RULE))
    for name in ("images", "mirror_images", "distances"):
        torch.testing.assert_close(there[name], here[name], rtol=1e-5, atol=1e-5)


def test_a_folder_holds_safetensors_and_text_only_and_a_second_saving_the_same(folder, tmp_path):
    NAMMPipeline.from_pretrained(folder).save_pretrained(tmp_path / "again")
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    configs = ["f/config.json", "g/config.json", "network/config.json", "scheduler/scheduler_config.json"]
    weights = [f"{part}/{WEIGHTS}" for part in ("f", "g", "network")]
    assert names == sorted(["README.md", "model_index.json", "pipeline.py", *configs, *weights])
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes(), name


def test_the_card_says_which_rule_and_how_to_load(folder):
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: namm\n")
    assert "`TotalFlux(total=3.0) + 0.5 * Periodic(tiles=(2, 2))`" in card
    assert 'NAMMPipeline.from_pretrained("path/to/this/folder")' in card
    assert "g, ICNN of 1,096 numbers" in card


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def change_scale(path):
    index = json.loads(path.read_text())
    index["diffusion"]["scale"][0] *= 2
    path.write_text(json.dumps(index))


def forget_checksums(path):
    index = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in index.items() if key not in ("_files", "_sha256")}))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (f"f/{WEIGHTS}", flip_a_byte, f"changed: f/{WEIGHTS}"),
        (f"network/{WEIGHTS}", lambda path: os.truncate(path, 1000), f"changed: network/{WEIGHTS}"),
        (f"g/{WEIGHTS}", os.remove, f"missing: g/{WEIGHTS}"),
        ("scheduler/scheduler_config.json", os.remove, "missing: scheduler/scheduler_config.json"),
        ("g/config.json", lambda path: path.write_text("{}"), "changed: g/config.json"),
        ("g/extra.bin", lambda path: path.write_text(""), "foreign: g/extra.bin"),
        ("model_index.json", change_scale, "model_index.json has been changed"),
        ("model_index.json", forget_checksums, "model_index.json was not finished"),
        ("model_index.json", lambda path: os.truncate(path, 100), "model_index.json was not finished"),
        ("model_index.json", os.remove, "model_index.json cannot be read"),
    ],
)
def test_a_damaged_folder_is_refused_and_the_file_named(folder, name, damage, message):
    NAMMPipeline.from_pretrained(folder)
    damage(folder / name)
    with pytest.raises(CheckpointError, match=message):
        NAMMPipeline.from_pretrained(folder)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere holds no saved pipeline"):
        NAMMPipeline.from_pretrained(tmp_path / "nowhere")


def test_a_network_whose_class_is_not_imported_is_named(folder):
    index_path = folder / "model_index.json"
    index = json.loads(index_path.read_text())
    from namm.pipeline import _index_sha256

    index["network"] = ["somebody.networks", "Own"]
    index_path.write_text(json.dumps(index | {"_sha256": _index_sha256(index)}))
    with pytest.raises(CheckpointError, match=r"somebody\.networks"):
        NAMMPipeline.from_pretrained(folder)


# Rules of one's own


def darkness(x):
    return x.square().mean((1, 2, 3))


@pytest.mark.parametrize("handed_in", [darkness, constraint(darkness)], ids=["function", "constraint"])
def test_a_rule_of_ones_own_is_handed_in_at_load(parts, tmp_path, handed_in):
    NAMMPipeline.from_parts(*parts, handed_in).save_pretrained(tmp_path)
    assert "constraint=rule)" in (tmp_path / "README.md").read_text()
    with pytest.raises(UsageError, match=r"'darkness'.*constraint=rule"):
        NAMMPipeline.from_pretrained(tmp_path)
    out = draw(NAMMPipeline.from_pretrained(tmp_path, constraint=handed_in))
    np.testing.assert_allclose(out.distances.numpy(), (out.images.numpy() ** 2).mean((1, 2, 3)), rtol=1e-5)


def test_a_rule_handed_in_replaces_the_saved_one(folder, tmp_path):
    pipe = NAMMPipeline.from_pretrained(folder, constraint=TotalFlux(9.0))
    pipe.save_pretrained(tmp_path / "again")
    assert repr(NAMMPipeline.from_pretrained(tmp_path / "again").constraint) == "TotalFlux(total=9.0)"


# What cannot become a pipeline


class OwnPrediction(Epsilon):
    pass


class OwnSchedule(VPSDE):
    pass


def test_parts_that_cannot_be_saved_are_refused(parts):
    model, mirror = parts
    with pytest.raises(UsageError, match="network is a Conv2d"):
        NAMMPipeline.from_parts(make_model(nn.Conv2d(2, 2, 1)), mirror, RULE)
    with pytest.raises(UsageError, match="f is a Identity"):
        NAMMPipeline.from_parts(model, MirrorMap(mirror.g, nn.Identity()), RULE)
    with pytest.raises(UsageError, match=r"can save Epsilon\(\), Velocity\(\) and Flow\(\)"):
        NAMMPipeline.from_parts(make_model(model.network, OwnPrediction()), mirror, RULE)
    with pytest.raises(UsageError, match=r"schedules VPSDE\(\) and Straight\(\), not OwnSchedule"):
        NAMMPipeline.from_parts(make_model(model.network, sde=OwnSchedule()), mirror, RULE)
    with pytest.raises(UsageError, match="a function of images"):
        NAMMPipeline.from_parts(model, mirror, None)


def test_calls_that_make_no_sense_are_refused(parts, tmp_path):
    pipe = NAMMPipeline.from_parts(*parts, RULE)
    with pytest.raises(UsageError, match="output_type"):
        pipe(output_type="latent")
    with pytest.raises(UsageError, match="generator must be"):
        pipe(generator="one")
    with pytest.raises(UsageError, match="safe_serialization"):
        pipe.save_pretrained(tmp_path / "pickled", safe_serialization=False)
    assert not (tmp_path / "pickled").exists()
    with pytest.raises(UsageError, match="float32 weights"):
        NAMMPipeline.from_parts(parts[0], IdentityMap(), RULE).to(torch.bfloat16)()
    with pytest.raises(UsageError, match="describes no diffusion model"):
        NAMMPipeline(None, None, pipe.network, pipe.scheduler, {"sample_shape": [1, 8, 8]}, RULE)


# Ranges


def standardised_parts(mean=0.0, scale=1.0):
    """Maps of data with mean 5 and deviation 2, and a model whose samples have these statistics."""
    model = Diffusion(make_ncsnpp(), SHAPE, prediction=Velocity())
    model.mean.fill_(mean)
    model.scale.fill_(scale)
    return model, make_mirror().standardise_by(torch.full((2,), 5.0), torch.full((2,), 2.0))


@pytest.mark.parametrize(("mean", "scale"), [(5.0, 2.0), (0.0, 0.3), (2.0, 0.9)], ids=["data", "[-1, 1]", "shifted"])
def test_a_model_of_another_range_than_the_maps_is_refused(mean, scale):
    with pytest.raises(UsageError, match=r"channel 0 of what the model draws.*namm\.train_model.*namm\.repair"):
        NAMMPipeline.from_parts(*standardised_parts(mean, scale), RULE)
    model, _ = standardised_parts(mean, scale)
    NAMMPipeline.from_parts(model, make_mirror(), RULE)  # maps that know no statistics
    NAMMPipeline.from_parts(model, IdentityMap(), RULE)


class Shrunk(nn.Module):
    """E[ε | y(t)] of images that are all but 0, as of a model of another range without statistics."""

    def forward(self, y_t, t):
        return y_t / (1 - torch.exp(-0.1 * t - 9.95 * t**2)).sqrt().reshape(-1, 1, 1, 1)


def test_samples_far_from_the_data_of_the_maps_are_warned_of(tmp_path):
    pipe = NAMMPipeline.from_parts(*standardised_parts(), RULE)
    pipe.save_pretrained(tmp_path)
    pipe.network.forward = Shrunk().forward
    pipe.register_to_config(diffusion={**pipe.config.diffusion, "prediction": "epsilon"})
    pipe.scheduler = DPMSolverMultistepScheduler.from_config(pipe.scheduler.config, prediction_type="epsilon")
    with torch.no_grad():
        for weight in pipe.f.parameters():
            weight.zero_()
    with pytest.warns(NammWarning, match=r"channel 0 of these samples .* where the maps' data have 5.00 and 2.00"):
        draw(pipe, n=16)
    NAMMPipeline.from_pretrained(tmp_path, g=None)  # nothing is known of mirror images without g


def test_the_card_states_how_near_to_the_rule_polished_samples_were(parts, tmp_path):
    pipe = NAMMPipeline.from_parts(*parts, RULE)
    assert "Polished" not in pipe.model_card()
    certificate = polish(draw(pipe).images, RULE).certificate.summary()
    NAMMPipeline.from_parts(*parts, RULE, certificate=certificate).save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "3 of 3 images reach the rule, by Gauss-Newton: mean ℓ in float64" in card
    assert NAMMPipeline.from_pretrained(tmp_path).model_card() == card


# As callers of diffusers expect


def test_a_generator_for_every_image_decides_on_it_alone(parts):
    pipe = NAMMPipeline.from_parts(*parts, RULE)

    def generators(*seeds):
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    together = draw(pipe, 3, generators(5, 6, 7)).images
    others = draw(pipe, 3, generators(8, 6, 5)).images
    (alone,) = draw(pipe, 1, generators(6)).images
    for image in (together[1], others[1]):
        torch.testing.assert_close(image, alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(others[2], together[0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(together[0], together[2], rtol=0.1)
    with pytest.raises(UsageError, match="2 generators for a batch_size of 3"):
        draw(pipe, 3, generators(1, 2))
    with pytest.raises(UsageError, match="not a str"):
        draw(pipe, 1, ["one"])


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_pictures_are_the_pixels_from_black_to_white(channels, mode):
    network = randomised(NCSNpp(channels=channels, height=8, filters=8, multipliers=(1, 2), blocks=1, attention=()))
    model = Diffusion(network, (channels, 8, 8), prediction=Velocity())
    model.fit_statistics(0.5 + 0.05 * torch.randn(64, channels, 8, 8))
    pipe = NAMMPipeline.from_parts(model, IdentityMap(), TotalFlux(3.0))
    exact = draw(pipe, 2).images
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = pipe(batch_size=2, num_inference_steps=STEPS, generator=7, output_type="pil")
    outside = float(((exact < 0) | (exact > 1)).float().mean())
    assert any("were cut off" in str(each.message) for each in caught) == (outside > 0.01)
    assert [picture.mode for picture in out.images] == [mode, mode]
    assert [picture.size for picture in out.images] == [(8, 8)] * 2
    expected = (255 * exact.numpy().clip(0, 1)).transpose(0, 2, 3, 1)
    found = np.stack([np.asarray(picture).reshape(8, 8, channels) for picture in out.images])
    assert np.abs(found - expected).max() <= 0.5 + 1e-4
    assert torch.equal(out.mirror_images, exact)


def test_images_of_two_channels_are_no_pictures(parts):
    with pytest.raises(UsageError, match="images of 2 channels are no pictures"):
        NAMMPipeline.from_parts(*parts, RULE)(output_type="pil")


ALONE = """
import sys, warnings
from diffusers import DiffusionPipeline
warnings.simplefilter("ignore")
try:
    DiffusionPipeline.from_pretrained(sys.argv[1])
except ValueError as error:
    print(error)
assert "namm" not in sys.modules
pipe = DiffusionPipeline.from_pretrained(sys.argv[1], trust_remote_code=True)
pipe.set_progress_bar_config(disable=True)
print(type(pipe).__name__, pipe(num_inference_steps=5, generator=7).images.double().sum().item())
"""


def test_diffusers_alone_loads_it_or_says_what_it_needs(folder, tmp_path):
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(folder)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    *refusal, last = done.stdout.strip().split("\n")
    assert "pipeline.py" in refusal[0]
    assert "trust_remote_code=True" in " ".join(refusal)
    name, total = last.split()
    assert name == "NAMMPipeline"
    mine = draw(NAMMPipeline.from_pretrained(folder), 1).images.double().sum().item()
    assert float(total) == pytest.approx(mine, rel=1e-5)
