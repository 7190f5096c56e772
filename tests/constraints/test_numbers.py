"""Rules with a number per image, against closed forms: each image its own total."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import namm
from namm.constraints.description import describe
from namm.errors import ConstraintError, DataError, UsageError

N, PIXELS = 40, 2 * 6 * 8


def excess(x, c):
    return x.sum((1, 2, 3)) - c


OPTIONS = {
    "residual": excess,
    "project": lambda x, c: x - excess(x, c)[:, None, None, None] / PIXELS,
}


def own_total(condition):
    return namm.constraint(lambda x, c: excess(x, c).abs(), condition=condition, name="own total", **OPTIONS)


def data(dtype=torch.float64):
    """Images (N, 2, 6, 8), each with a total of its own, and the totals."""
    x = torch.rand(N, 2, 6, 8, generator=torch.Generator().manual_seed(0), dtype=dtype)
    totals = torch.linspace(5, 20, N, dtype=dtype)
    return x * (totals / x.sum((1, 2, 3)))[:, None, None, None], totals


@pytest.fixture(params=[-1, 0, 1])
def channel(request):
    return request.param


def pairs(images, numbers, channel):
    """`with_number`, with the plane in any channel."""
    x = namm.with_number(images, numbers)
    order = [0, 1]
    order.insert(channel % 3, 2)
    return x[:, order]


def test_numbers_come_back_as_they_went(channel):
    x, totals = data()
    both = pairs(x, totals, channel)
    assert both.shape == (N, 3, 6, 8)
    assert torch.equal(both[:, channel].amax((1, 2)), totals)
    images, numbers = namm.split_number(both, channel)
    assert torch.equal(images, x)
    torch.testing.assert_close(numbers, totals, rtol=1e-15, atol=0)


def test_each_image_is_measured_by_its_own_total(channel):
    x, totals = data()
    rule, off = own_total(channel), torch.linspace(-3, 3, N, dtype=x.dtype)
    assert rule(pairs(x, totals, channel)).max() < 1e-13
    torch.testing.assert_close(rule(pairs(x, totals + off, channel)), off.abs())
    fixed = namm.TotalFlux(float(totals[0]))(x)
    assert fixed[0] < 1e-13
    assert fixed[-1] > 14  # a single total for all would be another rule


def test_a_plane_that_is_not_constant_costs_its_mean_deviation(channel):
    """Half of the plane one too high, half one too low: its mean is still the number, its mean deviation is 1."""
    x, totals = data()
    both = pairs(x, totals, channel)
    both[:, channel, :, :4] += 1
    both[:, channel, :, 4:] -= 1
    rule = own_total(channel)
    torch.testing.assert_close(rule(both), torch.ones_like(totals))
    expected = torch.cat([torch.ones(N, 6, 4), -torch.ones(N, 6, 4)], 2).to(x)
    torch.testing.assert_close(rule.residual(both)[:, 1:], expected.flatten(1))


def test_projection_keeps_the_number_and_gives_the_image_its_total(channel):
    x, totals = data()
    noisy = pairs(x, totals, channel) + 0.1 * torch.randn(N, 3, 6, 8, generator=torch.Generator().manual_seed(1))
    rule = own_total(channel)
    images, numbers = namm.split_number(noisy, channel)
    nearest = images - ((images.sum((1, 2, 3)) - numbers) / PIXELS)[:, None, None, None]
    torch.testing.assert_close(rule.project(noisy), pairs(nearest, numbers, channel))
    assert rule(rule.project(noisy)).max() < 1e-12
    assert rule.residual(rule.project(noisy)).abs().max() < 1e-12


def test_a_condition_may_be_a_function_of_the_image():
    """The second channel adds up to the first one's maximum, whatever that is."""
    rule = namm.constraint(
        lambda x, c: (x[:, 1].sum((1, 2)) - c).abs(), condition=lambda x: x[:, 0].amax((1, 2)), name="as bright"
    )
    x, _ = data()
    torch.testing.assert_close(rule(x), (x[:, 1].sum((1, 2)) - x[:, 0].amax((1, 2))).abs())
    x[:, 1] *= (x[:, 0].amax((1, 2)) / x[:, 1].sum((1, 2)))[:, None, None]
    rule.check(x).require_obeyed()


def test_check_holds_it_to_the_contract():
    x, totals = data()
    both = namm.with_number(x, totals)
    report = own_total(-1).check(both)
    assert report.mean < 1e-12
    report.require_obeyed()
    with pytest.raises(DataError, match="data break the constraint own total"):
        own_total(-1).check(namm.with_number(x, totals.flip(0))).require_obeyed()
    signed = namm.constraint(excess, condition=-1)
    with pytest.raises(ConstraintError, match="excess is negative"):
        signed.check(namm.with_number(x, totals + 5))
    for wrong, match in (
        (lambda x, c: excess(x, c).abs()[:, None], rf"returned shape \({N}, 1\)"),
        (lambda x, c: c.tolist(), "returned list, not a tensor"),
        (lambda x, c: c.long(), "not a floating-point distance"),
        (lambda x, c: excess(x, c.mean()).abs(), "mixes the images of a batch"),
    ):
        with pytest.raises(ConstraintError, match=match):
            namm.constraint(wrong, condition=-1).check(both)


def test_composes_compiles_and_describes_itself():
    x, totals = data(torch.float32)
    both = namm.with_number(x, totals + 0.5)
    rule = 2.0 * own_total(-1) + namm.constraint(lambda x: x.abs().mean((1, 2, 3)), name="dim")
    torch.testing.assert_close(rule(both), 1 + both.abs().mean((1, 2, 3)), rtol=1e-4, atol=1e-4)
    assert rule.name == "2 * own total + dim"
    assert (2.0 * own_total(-1)).has_project
    assert describe(own_total(-1)) == {"own": "own total"}
    torch._dynamo.reset()
    compiled = torch.compile(rule, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(both), rule(both))


class Weighted(torch.nn.Module):
    """A function with a buffer: Σ w x = c."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weights", torch.full((2, 6, 8), 2.0))

    def forward(self, x, c=None):
        total = (self.weights * x).sum((1, 2, 3))
        return total if c is None else (total - c).abs()


def test_buffers_of_function_and_condition_follow_the_images():
    x, totals = data(torch.float32)
    torch.testing.assert_close(
        namm.constraint(Weighted(), condition=-1)(namm.with_number(x, 2 * totals - 1)).mean(),
        torch.tensor(1.0),
        rtol=1e-4,
        atol=0,
    )
    with FakeTensorMode():
        for condition, channels in ((-1, 3), (Weighted(), 2)):
            rule = namm.constraint(Weighted(), condition=condition)
            assert rule(torch.zeros(4, channels, 6, 8, device="cuda")).device.type == "cuda"
            assert all(buffer.device.type == "cuda" for buffer in rule.buffers())


def test_mistakes_are_named():
    x, totals = data()
    with pytest.raises(DataError, match=r"one number for each, \(B,\); got \(40, 2, 6, 8\) and \(39,\)"):
        namm.with_number(x, totals[1:])
    with pytest.raises(DataError, match=r"from channel 5 of images \(40, 2, 6, 8\).*with_number"):
        own_total(5)(x)
    with pytest.raises(DataError, match="that channel and another"):
        own_total(0)(x[:, :1])
    with pytest.raises(ConstraintError, match=r"condition of own total returned shape \(40, 2\) for 40 images"):
        own_total(lambda x: x.mean((2, 3)))(x)
    with pytest.raises(ConstraintError, match="condition of own total returned float"):
        own_total(lambda x: 1.0)(x)
    with pytest.raises(UsageError, match="'last' is no condition"):
        own_total("last")
    with pytest.raises(UsageError, match=r"called with \(x, c\), and one is not made for that"):
        namm.constraint(lambda x: x.mean((1, 2, 3)), condition=-1)
    with pytest.raises(UsageError, match=r"called with \(x\), and one is not made for that"):
        namm.constraint(excess)
