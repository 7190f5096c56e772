"""What `DiT` and `UNet` promise alike: shapes, precision, time, a start at zero, files, and that they learn."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from namm.errors import DataError, UsageError
from namm.experiments.engine import build_models
from namm.experiments.engine.settings import DiffusionSettings, NetworkSettings
from namm.experiments.presets import preset
from namm.generative import Diffusion, DiT, NCSNpp, UNet
from namm.generative.networks.layers import ResidualBlock
from namm.generative.networks.ncsnpp.layers import SelfAttention

DIT = {"filters": 4, "width": 16, "depth": 2, "heads": 2, "patch": 2}
U_NET = {"height": 8, "filters": 8, "multipliers": (1, 2), "blocks": 1, "attention": (8,)}
BOTH = pytest.mark.parametrize("kind", [DiT, UNet])


def small(kind, **options):
    return kind(**(DIT if kind is DiT else U_NET) | options)


def shaken(kind, **options):
    """A network whose weights are nowhere zero."""
    network = small(kind, **options).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return network


def images(channels=1, size=(8, 12), n=2):
    return torch.randn(n, channels, *size), torch.linspace(0.1, 0.9, n)


# Shapes and sizes


@BOTH
@settings(max_examples=8)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_any_image_keeps_its_shape_and_never_meets_another(kind, channels, rows, columns, n):
    torch.manual_seed(0)
    network = shaken(kind, channels=channels)
    x, t = images(channels, (2 * rows, 2 * columns), n)
    with torch.no_grad():
        out = network(x, t)
        assert out.shape == x.shape
        torch.testing.assert_close(out[-1:], network(x[-1:], t[-1:]), rtol=1e-4, atol=1e-4)


@BOTH
@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (1, 8, 8)])
def test_other_channels_are_refused(kind, shape):
    with pytest.raises(DataError, match=r"takes images \(B, 1, H, W\)"):
        small(kind)(torch.zeros(shape), torch.tensor(0.5))


@BOTH
@pytest.mark.parametrize("size", [(8, 10), (10, 8)])
def test_sizes_that_do_not_divide_are_refused(kind, size):
    options = {"patch": 4} if kind is DiT else {"unshuffle": 2}
    with pytest.raises(UsageError, match=rf"divisible by 4; these images are {size[0]}×{size[1]}. Crop or pad"):
        small(kind, **options)(torch.zeros(1, 1, *size), torch.tensor(0.5))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (DiT, {"channels": 0}, "channels must be at least 1"),
        (DiT, {"width": 20}, "width must be divisible by 4 heads, 8, not 20"),
        (DiT, {"heads": 0}, "heads must be at least 1"),
        (DiT, {"dropout": 1.0}, "dropout"),
        (UNet, {"blocks": 0}, "blocks must be at least 1"),
        (UNet, {"multipliers": ()}, "multipliers"),
    ],
)
def test_settings_out_of_range_are_refused(kind, options, message):
    with pytest.raises(UsageError, match=f"{kind.__name__}: {message}"):
        small(kind, **options)


def test_a_unet_attends_where_it_is_told_and_in_the_middle():
    def resolutions(**options):
        network, found = small(UNet, **options), []
        for module in network.modules():
            if isinstance(module, SelfAttention):
                module.register_forward_hook(lambda module, inputs, output: found.append(output.shape[2]))
        network(*images(size=(16, 16)))
        return found

    assert resolutions(height=16, attention=()) == [8]
    assert resolutions(height=16, attention=(16,)) == [16, 8, 16]
    assert resolutions(height=32, unshuffle=2, multipliers=(1, 1, 1), attention=(8,)) == [4, 2, 4]  # by height


# Layers


@torch.no_grad()
def test_a_residual_block_is_its_formula():
    block = ResidualBlock(4, 8, 6, dropout=0.5).double().eval()
    x, time = torch.randn(2, 4, 5, 3, dtype=torch.float64), torch.randn(2, 6, dtype=torch.float64)

    def normed(h, groups):
        parts = h.reshape(2, groups, -1)
        centred = parts - parts.mean(2, keepdim=True)
        return (centred / (centred.square().mean(2, keepdim=True) + 1e-6).sqrt()).reshape(h.shape)

    h = normed(x, 1)
    h = normed(F.conv2d(h * h.sigmoid(), block.conv0.weight, block.conv0.bias, padding=1), 2)
    a, b = (time @ block.modulation.weight.T + block.modulation.bias).reshape(2, 2, 8, 1, 1).unbind(1)
    h = (1 + a) * h + b
    h = F.conv2d(h * h.sigmoid(), block.conv1.weight, block.conv1.bias, padding=1)
    shortcut = torch.einsum("oi,bihw->bohw", block.shortcut.weight[:, :, 0, 0], x) + block.shortcut.bias[:, None, None]
    torch.testing.assert_close(block(x, time), (shortcut + h) / 2**0.5, atol=1e-12, rtol=0)


@BOTH
def test_a_network_begins_at_zero_and_uses_every_weight(kind):
    x, t = images()
    assert small(kind)(x, t).abs().max() == 0
    network = shaken(kind)
    network(x, t).square().sum().backward()
    assert not [n for n, p in network.named_parameters() if p.grad is None or p.grad.abs().max() == 0]


@BOTH
def test_the_result_depends_on_time(kind):
    network, (x, _) = shaken(kind), images(n=3)
    at = [network(x, torch.tensor(time)) for time in (0.001, 0.5, 1.0)]
    assert min((at[0] - at[1]).abs().mean(), (at[1] - at[2]).abs().mean()) > 1e-3 * at[1].abs().mean()
    torch.testing.assert_close(at[1], network(x, torch.full((3,), 0.5)))
    with pytest.raises(DataError, match="one entry per image, 3"):
        network(x, torch.rand(2))


@BOTH
def test_dropout_acts_in_training_only(kind):
    network, (x, t) = shaken(kind, dropout=0.5), images()
    assert torch.equal(network(x, t), network(x, t))
    network.train()
    assert not torch.equal(network(x, t), network(x, t))


# Precision, memory and compilers


@BOTH
def test_the_last_convolution_ignores_autocast(kind):
    network, (x, t) = shaken(kind), images()
    seen = []
    handle = network.tail.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output)))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = network(x, t)
    handle.remove()
    h, out = seen[0]
    exact = F.conv2d(h.double(), network.tail.weight.double(), network.tail.bias.double(), padding=1)
    assert rounded.dtype == torch.float32
    assert (out - exact).abs().max() < 1e-5 * exact.abs().max()
    assert 1e-4 < (rounded - network(x, t)).abs().max() / exact.abs().max() < 0.1  # bfloat16 acted inside


@BOTH
def test_weights_in_bfloat16(kind):
    network, (x, t) = shaken(kind), images()
    expected = network(x, t)
    out = network.bfloat16()(x, t)
    assert out.dtype == torch.float32
    assert (out - expected).abs().max() < 0.1 * expected.abs().max()


@BOTH
def test_channels_last_and_compiling_change_no_numbers(kind):
    network, (x, t) = shaken(kind).double(), images()
    expected = network(x.double(), t)
    network.to(memory_format=torch.channels_last)
    packed = x.double().to(memory_format=torch.channels_last)
    torch.testing.assert_close(network(packed, t), expected, atol=1e-10, rtol=0)
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(packed, t), expected, atol=1e-10, rtol=0)


# Files and settings


@BOTH
def test_saving_and_loading_is_exact(kind, tmp_path):
    network, (x, t) = shaken(kind, channels=2), images(2)
    network.save_pretrained(tmp_path)
    assert torch.equal(kind.from_pretrained(tmp_path)(x, t), network(x, t))


CHOICES = {
    "ncsnpp": (NCSNpp, {"blocks": 1, "multipliers": (1, 2), "attention": ()}),
    "unet": (UNet, {"blocks": 1, "multipliers": (1, 2), "attention": ()}),
    "dit": (DiT, {"width": 16, "depth": 3, "heads": 2, "patch": 2}),
}


@pytest.mark.parametrize("kind", CHOICES)
def test_settings_choose_the_network(kind):
    expected, options = CHOICES[kind]
    chosen = NetworkSettings(kind=kind, filters=8, **options)
    model = build_models.diffusion(chosen, DiffusionSettings(), (3, 8, 12), seed=0)
    config = dict(model.network.config)
    assert type(model.network) is expected
    assert {name: config[name] for name in options} == {
        name: list(value) if isinstance(value, tuple) else value for name, value in options.items()
    }
    assert (config["channels"], config["filters"]) == (3, 8)
    assert model.loss(torch.randn(2, 3, 8, 12)).isfinite()
    again = build_models.diffusion(chosen, DiffusionSettings(), (3, 8, 12), seed=0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_a_run_whose_images_have_no_whole_patches_is_refused_at_once():
    chosen = preset("periodic").settings  # 16×16
    network = NetworkSettings(kind="dit", filters=4, width=16, depth=1, heads=1, patch=3)
    with pytest.raises(UsageError, match=r"divisible by 3; these images are 16×16\. .* choose another patch"):
        build_models.check(replace(chosen, mdm=replace(chosen.mdm, network=network)))


# Learning


@BOTH
def test_white_noise_is_learned_pixel_by_pixel(kind):
    """For u ~ N(0, I) the best ε is s u(t), at a loss of E m² = ∫ exp(−0.1 t − 9.95 t²) dt."""
    shape = (1, 8, 8)
    model = Diffusion(small(kind, dropout=0.0), shape)
    times = torch.linspace(1e-3, 1, 10_001, dtype=torch.float64)
    best = torch.exp(-0.1 * times - 9.95 * times.square()).mean().item()
    optimiser = torch.optim.Adam(model.parameters(), 5e-3)
    losses = []
    for _ in range(120):
        loss = model.loss(torch.randn(32, *shape))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert abs(losses[0] - 1) < 0.1
    assert best * 0.9 < sum(losses[-20:]) / 20 < best + 0.1, best
