"""Convolutions and norms made for matrix units, against torch's own."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from namm.maps.layers import FirstConv2d, InstanceNorm2d, LastConv2d, conv2d_from_few, conv2d_to_few
from namm.numerics import in_two


def case(inputs: int, outputs: int, k: int, rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    """An image, a kernel and a bias, from which gradients are asked."""
    rng = torch.Generator().manual_seed(inputs + 7 * outputs + 49 * k)
    shapes = (2, inputs, rows, columns), (outputs, inputs, k, k), (outputs,)
    return tuple(torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_() for shape in shapes)


def assert_same(ours, theirs, tensors) -> None:
    """Values and gradients."""
    a, b = ours(*tensors), theirs(*tensors)
    assert a.shape == b.shape
    assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(a)
    for one, other in zip(
        torch.autograd.grad(a, tensors, weight), torch.autograd.grad(b, tensors, weight), strict=True
    ):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


@given(channels=st.integers(1, 4), k=st.sampled_from([1, 3, 7]), rows=st.integers(7, 12), columns=st.integers(7, 12))
def test_few_input_channels(channels, k, rows, columns):
    assert_same(conv2d_from_few, F.conv2d, case(channels, 5, k, rows, columns))


@given(
    channels=st.integers(1, 3),
    k=st.sampled_from([1, 3, 7]),
    rows=st.integers(1, 3),
    columns=st.integers(1, 3),
    block=st.sampled_from([2, 4]),
)
def test_few_output_channels(channels, k, rows, columns, block):
    tensors = case(6, channels, k, block * rows + k - 1, block * columns + k - 1)
    assert_same(lambda x, w, b: conv2d_to_few(x, w, b, block), F.conv2d, tensors)


def test_without_bias():
    x, weight, _ = case(1, 4, 3, 6, 6)
    assert torch.allclose(conv2d_from_few(x, weight), F.conv2d(x, weight))
    x, weight, _ = case(4, 1, 3, 6, 6)
    assert torch.allclose(conv2d_to_few(x, weight), F.conv2d(x, weight))


@pytest.mark.parametrize("boundary", ["zeros", "circular", "cylinder"])
def test_what_a_gpu_computes_of_a_padded_image_is_what_a_cpu_does(boundary):
    first, last = (
        kind(a, b, 7, boundary=boundary).double() for kind, a, b in ((FirstConv2d, 1, 6), (LastConv2d, 6, 1))
    )
    x = torch.randn(2, 1, 8, 12, dtype=torch.float64)
    h = conv2d_from_few(first.padded(x), first.weight, first.bias)
    assert torch.allclose(h, first(x), rtol=1e-12, atol=1e-12)
    assert torch.allclose(conv2d_to_few(last.padded(h), last.weight, last.bias), last(h), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("boundary", ["zeros", "circular", "cylinder"])
def test_a_picture_in_two_parts_gives_the_same_convolution_and_gradients(boundary):
    first = FirstConv2d(2, 6, 7, boundary=boundary)
    found = []
    for forward in (first.for_matrix_units, first):
        x = torch.linspace(-1, 2, 2 * 2 * 8 * 12).reshape(2, 2, 8, 12).requires_grad_()
        y = forward(x)
        found.append((y, *torch.autograd.grad(y, [x, first.weight, first.bias], torch.cos(y.detach()))))
    for ours, plain in zip(*found, strict=True):
        assert torch.allclose(ours, plain, rtol=1e-4, atol=1e-4 * float(plain.detach().abs().max()))


def test_a_picture_in_two_parts_is_hardly_rounded_by_matrix_units():
    """Their inputs are bfloat16 here; the weights are such already, so all that can be lost is lost of the picture."""
    first = FirstConv2d(1, 6, 7, boundary="circular")
    with torch.no_grad():
        first.weight.copy_(first.weight.bfloat16())
        x = 0.5 + torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        weight = torch.cat([first.weight, first.weight], dim=1)
        exact = first.double()(x.double())
        errors = [
            (conv2d_from_few(first.padded(parts).bfloat16().double(), kernel.double(), first.bias) - exact).abs().max()
            for parts, kernel in ((in_two(x), weight), (x, first.weight))
        ]
    assert errors[0] < 1e-4 < errors[1]
    assert errors[0] < errors[1] / 50


def test_few_channels_in_bfloat16_stay_there():
    x, weight, bias = (tensor.detach().float() for tensor in case(1, 8, 7, 14, 14))
    with torch.autocast("cpu", torch.bfloat16):
        found = conv2d_from_few(x, weight, bias)
    assert found.dtype == torch.bfloat16
    assert (found.float() - F.conv2d(x, weight, bias)).abs().max() < 0.05 * found.abs().max()


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_instance_norm_is_torchs_and_keeps_the_layout(memory):
    ours, theirs = (kind(3, eps=1e-6, affine=True).double() for kind in (InstanceNorm2d, nn.InstanceNorm2d))
    with torch.no_grad():
        for norm in (ours, theirs):
            norm.weight.copy_(torch.tensor([0.5, 2.0, -1.0]))
            norm.bias.copy_(torch.tensor([0.0, 1.0, 3.0]))
    x = (5 + torch.randn(2, 3, 4, 6, dtype=torch.float64)).contiguous(memory_format=memory).requires_grad_()
    a, b = ours(x), theirs(x)
    assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)
    assert a.is_contiguous(memory_format=memory)
    weight = torch.randn_like(a)
    assert torch.allclose(*(torch.autograd.grad(each, x, weight)[0] for each in (a, b)), rtol=1e-10, atol=1e-12)


def test_instance_norm_computes_in_float32():
    norm = InstanceNorm2d(2, eps=1e-6, affine=True)
    x = 100 + torch.randn(2, 2, 8, 8)
    found = norm(x.bfloat16())
    assert found.dtype == torch.bfloat16
    assert (found.float() - norm(x.bfloat16().float())).abs().max() < 0.02
