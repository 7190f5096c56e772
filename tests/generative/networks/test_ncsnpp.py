"""The score network's blocks against their definitions, and what the network promises besides its numbers."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.signal import correlate2d

from namm.errors import DataError, UsageError
from namm.generative import NCSNpp
from namm.generative.networks.ncsnpp.layers import (
    PictureConv2d,
    PyramidStep,
    ResidualBlock,
    SelfAttention,
    double,
    embed_time,
    group_norm,
    halve,
)

SMALL = {"height": 8, "filters": 8, "multipliers": (1, 2), "blocks": 1, "attention": (4,)}
PHI = np.outer([1, 3, 3, 1], [1, 3, 3, 1]) / 64


def small(**options) -> NCSNpp:
    """A network whose weights are nowhere zero."""
    network = NCSNpp(**SMALL | options)
    shake(network)
    return network.eval()


@torch.no_grad()
def shake(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))


def images(channels: int = 1, size: tuple[int, int] = (8, 8), n: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, channels, *size), torch.linspace(0.1, 0.9, n)


@pytest.mark.parametrize(("channels", "height", "parameters"), [(1, 64, 15_696_449), (2, 128, 15_698_178)])
def test_the_papers_network_has_the_papers_number_of_parameters(channels, height, parameters):
    with torch.device("meta"):
        network = NCSNpp(channels=channels, height=height)
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters


LAYOUTS = pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])


@LAYOUTS
def test_halve_filters_and_keeps_even_pixels(memory):
    x = torch.randn(1, 2, 6, 10, dtype=torch.float64).contiguous(memory_format=memory)
    padded = np.pad(x.numpy(), ((0, 0), (0, 0), (1, 1), (1, 1)))
    expected = [correlate2d(channel, PHI, mode="valid")[::2, ::2] for channel in padded[0]]
    np.testing.assert_allclose(halve(x)[0].numpy(), expected, atol=1e-14)


@LAYOUTS
def test_double_inserts_zeros_and_filters(memory):
    x = torch.randn(1, 2, 3, 5, dtype=torch.float64).contiguous(memory_format=memory)
    spread = np.zeros((2, 6, 10))
    spread[:, ::2, ::2] = x[0].numpy()
    padded = np.pad(spread, ((0, 0), (2, 1), (2, 1)))
    expected = [correlate2d(channel, 4 * PHI, mode="valid") for channel in padded]
    np.testing.assert_allclose(double(x)[0].numpy(), expected, atol=1e-14)


def test_pyramid_filters_at_full_resolution_first():
    step = PyramidStep(1, 1).double()
    x = torch.randn(1, 1, 6, 8, dtype=torch.float64)
    filtered = correlate2d(np.pad(x[0, 0].numpy(), 2), PHI, mode="valid")
    expected = (
        correlate2d(filtered, step.conv.weight[0, 0].detach().numpy(), mode="valid")[::2, ::2] + step.conv.bias.item()
    )
    np.testing.assert_allclose(step(x)[0, 0].detach().numpy(), expected, atol=1e-14)


@pytest.mark.parametrize("resampling", [halve, double])
def test_resampling_keeps_the_layout_and_is_exact_in_bfloat16(resampling):
    x = torch.randint(-8, 9, (2, 4, 600, 6)).bfloat16()
    plain, packed = resampling(x), resampling(x.contiguous(memory_format=torch.channels_last))
    assert packed.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(packed, plain)
    assert torch.equal(plain, resampling(x.double()).bfloat16())


def test_group_norm_of_channels_last_images_is_torchs():
    norm, theirs = group_norm(16).double(), torch.nn.GroupNorm(4, 16, eps=1e-6).double()
    shake(norm)
    theirs.load_state_dict(norm.state_dict())
    x = (10 + torch.randn(3, 16, 5, 7, dtype=torch.float64)).contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    a, b = norm(x), theirs(x)
    assert a.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(a, b, rtol=1e-11, atol=1e-11)
    weight = torch.randn_like(a)
    leaves = zip(
        torch.autograd.grad(a, (x, *norm.parameters()), weight),
        torch.autograd.grad(b, (x, *theirs.parameters()), weight),
        strict=True,
    )
    assert all(torch.allclose(one, other, rtol=1e-9, atol=1e-10) for one, other in leaves)


def test_group_norm_computes_in_float32():
    x = (30 + torch.randn(2, 8, 16, 16)).bfloat16().contiguous(memory_format=torch.channels_last)
    found = group_norm(8)(x)
    assert found.dtype == torch.bfloat16
    assert (found.float() - group_norm(8)(x.float())).abs().max() < 0.02


def test_attention_is_softmax_over_all_pixels():
    block = SelfAttention(8).double()
    shake(block)
    x = torch.randn(2, 8, 3, 5, dtype=torch.float64)
    groups = x.reshape(2, 2, 60)  # eight channels make two groups of four
    normed = (groups - groups.mean(2, keepdim=True)) / (groups.var(2, keepdim=True, correction=0) + 1e-6).sqrt()
    normed = normed.reshape(2, 8, 15) * block.norm.weight[:, None] + block.norm.bias[:, None]
    q, k, v = (
        torch.einsum("oc,bcn->bon", w, normed) + b[:, None]
        for w, b in zip(block.qkv.weight.chunk(3), block.qkv.bias.chunk(3), strict=True)
    )
    weights = torch.einsum("bcn,bcm->bnm", q, k).div(math.sqrt(8)).exp()
    mixed = torch.einsum("bnm,bcm->bcn", weights / weights.sum(2, keepdim=True), v)
    out = torch.einsum("oc,bcn->bon", block.out.weight, mixed) + block.out.bias[:, None]
    expected = (x + out.reshape(x.shape)) / math.sqrt(2)
    torch.testing.assert_close(block(x), expected, atol=1e-12, rtol=0)


def test_time_is_embedded_with_the_published_frequencies():
    s = torch.tensor([3.0, 700.0], dtype=torch.float64)
    frequencies = [10_000 ** (-j / 3) for j in range(4)]
    expected = [[f(w * v) for f in (math.sin, math.cos) for w in frequencies] for v in s.tolist()]
    torch.testing.assert_close(embed_time(s, 8), torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=0)
    rounding = (embed_time(s, 8, reference=True) - embed_time(s, 8)).abs().max()
    assert 1e-8 < rounding < 1e-4


@pytest.mark.parametrize(("channels", "groups"), [(4, 1), (48, 12), (128, 32), (192, 32), (6, 1), (264, 24)])
def test_groups_divide_the_channels(channels, groups):
    assert group_norm(channels).num_groups == groups
    assert group_norm(channels).eps == 1e-6


def test_branches_and_the_network_begin_at_zero():
    network = NCSNpp(**SMALL, dropout=0.0)
    x, t = images()
    assert network(x, t).abs().max() == 0
    blocks = [m for m in network.modules() if isinstance(m, ResidualBlock)]
    attentions = [m for m in network.modules() if isinstance(m, SelfAttention)]
    zeros = {id(m.conv1.weight) for m in blocks} | {id(m.out.weight) for m in attentions} | {id(network.tail.weight)}
    for name, parameter in network.named_parameters():
        if parameter.ndim > 1:
            assert bool((parameter == 0).all()) == (id(parameter) in zeros), name
    bound = (6 / (9 * (1 + 8))) ** 0.5  # Glorot's, of the first convolution
    assert 0.8 * bound < network.head.weight.abs().max() <= bound


@pytest.mark.parametrize("options", [{}, {"channels": 3, "attention": (8, 4)}, {"unshuffle": 2, "attention": ()}])
def test_every_weight_is_used(options):
    network = small(**options)
    x, t = images(options.get("channels", 1), (8, 12))
    network(x, t).square().sum().backward()
    unused = [n for n, p in network.named_parameters() if p.grad is None or p.grad.abs().max() == 0]
    assert not unused


def test_rescaling_is_2x_minus_1():
    plain, rescaling = small(), NCSNpp(**SMALL, rescale_input=True).eval()
    rescaling.load_state_dict(plain.state_dict())
    x, t = images()
    torch.testing.assert_close(rescaling(x, t), plain(2 * x - 1, t))
    assert (rescaling(x, t) - plain(x, t)).abs().max() > 1e-2


def test_unshuffling_trades_pixels_for_channels():
    folded = small(unshuffle=2, height=16)
    plain = NCSNpp(**SMALL, channels=4).eval()
    plain.load_state_dict(folded.state_dict())
    x, t = images(size=(16, 24))
    torch.testing.assert_close(folded(x, t), F.pixel_shuffle(plain(F.pixel_unshuffle(x, 2), t), 2))


def test_one_time_for_all_images():
    network = small()
    x, _ = images(n=3)
    torch.testing.assert_close(network(x, torch.tensor(0.4)), network(x, torch.full((3,), 0.4)))
    with pytest.raises(DataError, match="one entry per image, 3"):
        network(x, torch.rand(2))


def test_dropout_acts_in_training_only():
    network, (x, t) = small(dropout=0.5), images()
    assert torch.equal(network(x, t), network(x, t))
    network.train()
    assert not torch.equal(network(x, t), network(x, t))


@LAYOUTS
def test_compiled_network_is_the_eager_one(memory):
    network, (x, t) = small().to(memory_format=memory), images(size=(8, 12))
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    results = []
    for call in (network, compiled):
        network.zero_grad()
        leaf = x.clone(memory_format=memory).requires_grad_()
        out = call(leaf, t)
        out.square().sum().backward()
        results.append([out, leaf.grad, *(p.grad.clone() for p in network.parameters())])
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)


def test_channels_last_changes_memory_and_not_numbers():
    network, (x, t) = small().double(), images()
    expected = network(x.double(), t)
    network.to(memory_format=torch.channels_last)
    out = network(x.double().to(memory_format=torch.channels_last), t)
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=0)
    assert network.head(x.double().to(memory_format=torch.channels_last)).is_contiguous(
        memory_format=torch.channels_last
    )


def test_last_convolution_ignores_autocast():
    network, (x, t) = small(), images()
    seen = []
    handle = network.tail.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output)))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = network(x, t)
    handle.remove()
    h, out = seen[0]
    exact = F.conv2d(h.double(), network.tail.weight.double(), network.tail.bias.double(), padding=1)
    assert rounded.dtype == torch.float32
    assert (out - exact).abs().max() < 1e-5 * exact.abs().max()
    difference = (rounded - network(x, t)).abs().max()
    assert 1e-4 < difference / exact.abs().max() < 0.1  # bfloat16 acted inside


def test_weights_in_bfloat16():
    network, (x, t) = small(), images()
    expected = network(x, t)
    out = network.bfloat16()(x, t)
    assert out.dtype == torch.float32
    assert (out - expected).abs().max() < 0.1 * expected.abs().max()


def test_saving_and_loading_is_exact(tmp_path):
    network, (x, t) = small(channels=2, rescale_input=True, reference_frequencies=True), images(2)
    network.save_pretrained(tmp_path)
    loaded = NCSNpp.from_pretrained(tmp_path)
    assert not loaded.training
    assert torch.equal(loaded(x, t), network(x, t))
    assert torch.equal(loaded.double()(x.double(), t), network.double()(x.double(), t))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 3, 8, 8), r"takes images \(B, 1, H, W\)"),
        ((1, 8, 8), r"takes images \(B, 1, H, W\)"),
        ((2, 1, 8, 9), "divisible by 2; these images are 8×9"),
        ((2, 1, 16, 8), "made for images 8 high"),
    ],
)
def test_images_that_do_not_fit_are_refused(shape, message):
    with pytest.raises(DataError, match=message):
        small()(torch.zeros(shape), torch.tensor(0.5))


def test_any_height_without_attention():
    x, t = images(size=(16, 4))
    assert small(attention=())(x, t).shape == x.shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": 0}, "channels must be at least 1"),
        ({"blocks": 0}, "blocks must be at least 1"),
        ({"filters": 7}, "filters must be even"),
        ({"multipliers": ()}, "multipliers"),
        ({"dropout": 1.0}, "dropout"),
        ({"height": 9}, "height must be divisible by 2"),
    ],
)
def test_settings_out_of_range_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        NCSNpp(**SMALL | options)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture_in_two_parts_gives_the_same_convolution_and_gradients(channels):
    head = PictureConv2d(channels, 6, 3, padding=1)
    found = []
    for forward in (head.for_matrix_units, head):
        x = torch.linspace(-2, 3, 2 * channels * 5 * 4).reshape(2, channels, 5, 4).requires_grad_()
        y = forward(x)
        found.append((y, *torch.autograd.grad(y, [x, head.weight, head.bias], torch.cos(y.detach()))))
    for ours, plain in zip(*found, strict=True):
        assert torch.allclose(ours, plain, rtol=1e-4, atol=1e-4 * float(plain.detach().abs().max()))
