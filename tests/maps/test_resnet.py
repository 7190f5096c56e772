"""f: counts, shapes, boundaries and precision of the generator."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from namm.errors import DataError, UsageError
from namm.maps import ResNet
from namm.maps.layers import DoublingConv2d, SameConv2d


@pytest.mark.parametrize(
    ("channels", "filters", "count"),
    [(1, 64, 7_832_577), (2, 64, 7_838_850), (1, 32, 1_962_497), (2, 32, 1_965_634)],
)
def test_parameter_counts_of_the_paper(channels, filters, count):
    assert sum(p.numel() for p in ResNet(channels, filters).parameters()) == count


options = st.fixed_dictionaries(
    {
        "channels": st.integers(1, 3),
        "blocks": st.integers(0, 2),
        "downsamplings": st.integers(0, 2),
        "normalisation": st.sampled_from(["instance", "none"]),
        "residual": st.booleans(),
        "skip": st.booleans(),
        "activation": st.sampled_from(["softplus", "sigmoid", "tanh", "none"]),
        "boundary": st.sampled_from(["zeros", "circular", "cylinder"]),
    }
)


@given(config=options, rows=st.integers(2, 4), columns=st.integers(2, 4))
def test_every_combination_keeps_the_shape(config, rows, columns):
    network = ResNet(filters=4, **config)
    x = torch.randn(2, config["channels"], 4 * rows, 4 * columns)
    assert network(x).shape == x.shape


@given(config=options)
def test_gradients_reach_every_parameter(config):
    network = ResNet(filters=4, dropout=0.0, **config).double()
    x = torch.randn(2, config["channels"], 8, 8, dtype=torch.double)
    (network(x) * torch.randn_like(x)).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in network.parameters())


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("normalisation", ["instance", "none"])
def test_circular_boundary_is_equivariant_under_shifts(skip, normalisation):
    network = ResNet(filters=4, blocks=2, boundary="circular", skip=skip, normalisation=normalisation)
    network = network.double().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(5)  # so that what crosses the boundary is not lost in the small initial weights
    x = torch.randn(2, 1, 16, 12, dtype=torch.double)
    shift = (4, -8)  # a multiple of the downsampling factor
    expected = network(x).roll(shift, (-2, -1))
    assert torch.allclose(network(x.roll(shift, (-2, -1))), expected, atol=1e-12)
    zeros = ResNet(filters=4, blocks=2, skip=skip, normalisation=normalisation).double().eval()
    zeros.load_state_dict(network.state_dict())
    assert not torch.allclose(zeros(x.roll(shift, (-2, -1))), zeros(x).roll(shift, (-2, -1)), atol=1e-6)


def test_in_a_cylinder_only_the_rows_go_round():
    network = ResNet(filters=4, blocks=2, boundary="cylinder", skip=True, normalisation="none").double().eval()
    x = torch.randn(2, 1, 16, 16, dtype=torch.double)
    down, across = ((4, -2), (4, -1))  # shifts by the downsampling factor
    assert torch.allclose(network(x.roll(*down)), network(x).roll(*down), atol=1e-12)
    assert not torch.allclose(network(x.roll(*across)), network(x).roll(*across), atol=1e-6)
    far, there = x.clone(), slice(-4, None)
    far[..., there] = 0
    one_layer = network.head
    assert torch.equal(one_layer(far)[..., :4], one_layer(x)[..., :4])  # the first columns do not see the last


@pytest.mark.parametrize("boundary", ["zeros", "circular", "cylinder"])
def test_doubling_against_its_definition(boundary):
    layer = DoublingConv2d(1, 1, boundary=boundary).double()
    torch.nn.init.zeros_(layer.bias)
    n = 4
    x = torch.randn(n, n, dtype=torch.double)
    kernel = layer.weight[0, 0].flip(0, 1)  # out[o] = Σ_i x[i] k[2i − o + 2] with flax's k, ours reversed
    expected = torch.zeros(2 * n, 2 * n, dtype=torch.double)
    rows, columns = (range(-1 if goes_round else 0, n) for goes_round in (boundary != "zeros", boundary == "circular"))
    for o in range(2 * n):
        for p in range(2 * n):
            for i in rows:
                for j in columns:
                    a, b = 2 * i - o + 2, 2 * j - p + 2
                    if 0 <= a <= 2 and 0 <= b <= 2:
                        expected[o, p] += x[i % n, j % n] * kernel[a, b]
    assert torch.allclose(layer(x[None, None])[0, 0], expected)


def test_stride_two_pads_after_the_end():
    layer = SameConv2d(1, 1, 3, stride=2).double()
    torch.nn.init.zeros_(layer.bias)
    x = torch.randn(1, 1, 6, 6, dtype=torch.double)
    corner = (layer.weight[0, 0] * x[0, 0, :3, :3]).sum()
    last = (layer.weight[0, 0, :2, :2] * x[0, 0, 4:, 4:]).sum()
    out = layer(x)
    assert out.shape == (1, 1, 3, 3)
    assert torch.allclose(out[0, 0, 0, 0], corner)
    assert torch.allclose(out[0, 0, 2, 2], last)


def test_residual_addition_comes_before_the_activation():
    network = ResNet(filters=4, blocks=1)
    torch.nn.init.zeros_(network.tail.weight)
    x = torch.randn(2, 1, 8, 8)
    assert torch.equal(network(x), torch.nn.functional.softplus(x))


def test_skip_carries_the_head_to_the_tail():
    network = ResNet(filters=4, blocks=1, skip=True, residual=False, activation="none", normalisation="none")
    for layer in network.up:
        torch.nn.init.zeros_(layer[0].weight)
        torch.nn.init.zeros_(layer[0].bias)
    x = torch.randn(2, 1, 8, 8)
    assert torch.allclose(network(x), network.tail(network.head(x)))


def test_what_the_skip_carries_is_not_rounded_by_autocast():
    f = ResNet(1, filters=4, blocks=1, normalisation="none", dropout=0.0, skip=True, activation="none").eval()
    with torch.no_grad():
        f.up[-1][0].weight.zero_()  # so that nothing but the skip reaches the tail
        f.up[-1][0].bias.zero_()
        x = torch.rand(2, 1, 8, 8)
        with torch.autocast("cpu", torch.bfloat16):
            found = f(x)
    assert torch.allclose(found, f(x), rtol=0, atol=1e-6)


def test_output_is_not_rounded_by_autocast():
    network = ResNet(filters=8, blocks=1, activation="none").eval()
    torch.nn.init.zeros_(network.tail.weight)
    x = torch.rand(2, 1, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = network(x)
    assert out.dtype == torch.float32
    assert torch.equal(out, x)  # the residual addition keeps every bit of x


def test_dropout_only_in_training():
    network = ResNet(filters=4, blocks=2, dropout=0.5)
    x = torch.randn(1, 1, 8, 8)
    assert not torch.equal(network(x), network(x))
    network.eval()
    assert torch.equal(network(x), network(x))


def test_sizes_it_cannot_take_are_refused_with_a_remedy():
    network = ResNet(filters=4)
    with pytest.raises(DataError, match=r"divisible by 4; these images are 30×32"):
        network(torch.zeros(1, 1, 30, 32))
    with pytest.raises(DataError, match="too small"):
        network(torch.zeros(1, 1, 4, 4))
    with pytest.raises(DataError, match=r"takes images \(B, 1, H, W\)"):
        network(torch.zeros(1, 3, 32, 32))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("filters", 0),
        ("blocks", -1),
        ("downsamplings", -1),
        ("dropout", 1.0),
        ("normalisation", "batch"),
        ("activation", "relu"),
        ("boundary", "mirror"),
    ],
)
def test_settings_out_of_range_are_named(setting, value):
    with pytest.raises(UsageError, match=setting):
        ResNet(**{setting: value})
