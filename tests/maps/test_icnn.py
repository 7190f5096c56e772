"""g is the gradient of a strongly convex potential, whatever its weights."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from namm.errors import DataError, UsageError
from namm.maps import ICNN
from namm.maps.icnn import neighbourhoods, overlap_add
from namm.maps.layers import circular_conv2d, circular_conv2d_transpose

shapes = st.fixed_dictionaries(
    {
        "channels": st.integers(1, 3),
        "layers": st.integers(1, 3),
        "filters": st.integers(1, 5),
        "kernel_size": st.sampled_from([1, 3, 5]),
        "strong_convexity": st.sampled_from([0.1, 0.5, 0.9, 1.0]),
        "negative_slope": st.sampled_from([0.0, 0.2, 1.0]),
    }
)


def random_icnn(config: dict, seed: int) -> ICNN:
    """An ICNN in float64 with weights large enough that the potential's part of g is not negligible."""
    torch.manual_seed(seed)
    network = ICNN(**config).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_()
    network.project_weights()
    return network


@pytest.mark.parametrize(("channels", "layers", "count"), [(1, 3, 30_368), (2, 2, 22_560), (1, 2, 20_544)])
def test_parameter_counts_of_the_paper(channels, layers, count):
    assert sum(p.numel() for p in ICNN(channels, layers).parameters()) == count


@given(config=shapes, seed=st.integers(0, 1000), height=st.integers(5, 8), width=st.integers(5, 8))
def test_closed_form_is_the_gradient_of_the_potential(config, seed, height, width):
    network = random_icnn(config, seed)
    x = torch.randn(2, config["channels"], height, width, dtype=torch.double)
    gradient = torch.func.grad(lambda x: network.potential(x).sum())(x)
    scale = gradient.abs().max().clamp(min=1)
    assert ((network.potential_gradient(x) - gradient).abs().max() / scale) <= 1e-10
    alpha = config["strong_convexity"]
    assert ((network(x) - (1 - alpha) * gradient - alpha * x).abs().max() / scale) <= 1e-10


@given(config=shapes, seed=st.integers(0, 1000), distance=st.sampled_from([1e-3, 1.0, 30.0]))
def test_strongly_monotone(config, seed, distance):
    network = random_icnn(config, seed)
    a = torch.randn(4, config["channels"], 6, 7, dtype=torch.double)
    b = a + distance * torch.randn_like(a)
    inner = ((network(a) - network(b)) * (a - b)).sum((1, 2, 3))
    bound = config["strong_convexity"] * (a - b).square().sum((1, 2, 3))
    assert (inner >= bound * (1 - 1e-9)).all()


def test_not_monotone_with_a_negative_weight():
    """The test above can fail: a concave potential breaks the inequality."""
    network = random_icnn({"layers": 1, "filters": 4, "strong_convexity": 0.1}, 0)
    with torch.no_grad():
        network.output.fill_(-1.0)
    a, b = torch.randn(2, 8, 1, 6, 6, dtype=torch.double)
    inner = ((network(a) - network(b)) * (a - b)).sum((1, 2, 3))
    assert (inner < 0).any()


def test_potential_is_convex_along_a_line():
    network = random_icnn({"layers": 2, "filters": 4}, 3)
    a, b = torch.randn(2, 16, 1, 6, 6, dtype=torch.double)
    middle = network.potential((a + b) / 2)
    assert (middle <= (network.potential(a) + network.potential(b)) / 2 + 1e-9).all()


def test_project_weights_touches_only_what_must_be_non_negative():
    network = ICNN(layers=2, filters=4)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_()
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    network.project_weights()
    for name, parameter in network.named_parameters():
        expected = before[name].clamp(min=0) if name in ("hidden", "output") else before[name]
        assert torch.equal(parameter, expected)
        assert (before[name] < 0).any()


def test_equivariant_under_shifts_of_the_torus():
    network = random_icnn({"layers": 2, "filters": 4, "channels": 2}, 1)
    x = torch.randn(2, 2, 8, 6, dtype=torch.double)
    assert torch.allclose(network(x.roll((3, 2), (-2, -1))), network(x).roll((3, 2), (-2, -1)))


def test_normalisation_divides_by_width_and_channels():
    network = random_icnn({"layers": 1, "filters": 3, "channels": 2}, 2)
    x = torch.randn(1, 2, 6, 6, dtype=torch.double)
    wide = x.repeat(1, 1, 1, 2)
    tall = x.repeat(1, 1, 2, 1)
    assert torch.allclose(network.potential(wide), network.potential(x))
    assert torch.allclose(network.potential(tall), 2 * network.potential(x))


def test_autocast_does_not_round():
    network = ICNN(layers=2, filters=8)
    x = torch.randn(2, 1, 8, 8)
    plain = network(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(network(x), plain)
    assert network(x.half()).dtype == torch.float32


def test_initial_weights():
    torch.manual_seed(0)
    network = ICNN(channels=2, filters=64)
    assert network.quadratic.std().item() == pytest.approx((2 * 9) ** -0.5, rel=0.05)
    assert network.linear.std().item() == pytest.approx((2 * 9) ** -0.5, rel=0.05)
    assert 0 <= network.hidden.min() < 1e-4
    assert 9e-4 < network.hidden.max() <= 1e-3
    assert network.bias.abs().max() == 0


@given(
    k=st.sampled_from([1, 3, 5, 7]),
    channels=st.integers(1, 3),
    height=st.integers(7, 9),
    width=st.integers(7, 9),
)
def test_circular_convolution_against_torch_padding(k, channels, height, width):
    x = torch.randn(2, channels, height, width, dtype=torch.double)
    weight = torch.randn(4, channels, k, k, dtype=torch.double)
    p = k // 2
    expected = F.conv2d(F.pad(x, (p, p, p, p), mode="circular"), weight)
    assert torch.allclose(circular_conv2d(x, weight), expected)
    matrix = weight.permute(0, 2, 3, 1).flatten(1)[..., None, None]
    assert torch.allclose(F.conv2d(neighbourhoods(x, k), matrix), expected)


def test_transposes_are_adjoint():
    x, y = torch.randn(2, 3, 8, 7, dtype=torch.double), torch.randn(2, 4, 8, 7, dtype=torch.double)
    weight = torch.randn(4, 3, 3, 3, dtype=torch.double)
    left = (circular_conv2d(x, weight) * y).sum()
    assert torch.allclose(left, (x * circular_conv2d_transpose(y, weight)).sum())
    u = torch.randn(2, 27, 8, 7, dtype=torch.double)
    assert torch.allclose((neighbourhoods(x, 3) * u).sum(), (x * overlap_add(u, 3)).sum())


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("channels", 0),
        ("layers", 0),
        ("filters", -1),
        ("kernel_size", 4),
        ("strong_convexity", 0.0),
        ("negative_slope", 2.0),
    ],
)
def test_settings_out_of_range_are_named(setting, value):
    with pytest.raises(UsageError, match=setting):
        ICNN(**{setting: value})


def test_images_it_cannot_take_are_refused():
    with pytest.raises(DataError, match=r"takes images \(B, 2, H, W\)"):
        ICNN(channels=2)(torch.zeros(1, 1, 8, 8))
    with pytest.raises(DataError, match="smaller than the kernel"):
        ICNN(kernel_size=5)(torch.zeros(1, 1, 4, 8))
