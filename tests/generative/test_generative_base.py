"""What models share: statistics of channels, and noise that belongs to a sample."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from namm.generative.base import SampleNoise, SeparateNoise, as_seed, channel_statistics


def test_statistics_stream_over_pieces(monkeypatch):
    monkeypatch.setattr("namm.generative.base.CHUNK", 7)
    y = 1000 + torch.randn(40, 2, 6, 5) * torch.tensor([1.0, 0.01]).reshape(2, 1, 1)
    mean, deviation = channel_statistics(y.numpy(), (2, 6, 5))
    assert np.allclose(mean, y.double().numpy().mean((0, 2, 3)), rtol=1e-12)
    assert np.allclose(deviation, y.double().numpy().std((0, 2, 3)), rtol=1e-9)


@given(st.integers(0, 200), st.integers(1, 150), st.integers(0, 3))
def test_noise_is_a_slice_of_an_endless_stream(start, n, step):
    like = torch.zeros(1)
    endless = SampleNoise(1, 0, 400, (1, 2), like)(step)
    part = SampleNoise(1, start, start + n, (1, 2), like)(step)
    assert torch.equal(part, endless[start : start + n])
    assert not torch.equal(part, SampleNoise(1, start, start + n, (1, 2), like)(step + 1))
    assert torch.equal(SampleNoise(1, start, start + n, (1, 2), like.double())(step), part.double())


def test_separate_noise_is_one_draw_for_each_seed(monkeypatch):
    drawn, randn = [], torch.randn
    monkeypatch.setattr(torch, "randn", lambda *size, **options: drawn.append(randn(*size, **options)) or drawn[-1])
    z = SeparateNoise((4, 5, 6), 7, (2, 9), torch.zeros(1).double())(3)
    assert z.shape == (3, 2, 9)
    assert z.dtype == torch.double
    assert sum(each.numel() for each in drawn) == z.numel()
    assert torch.equal(SeparateNoise((8, 5), 0, (2, 9), torch.zeros(1))(3)[1].double(), z[1])
    assert not torch.equal(SeparateNoise((8, 5), 0, (2, 9), torch.zeros(1))(2)[1].double(), z[1])
    many = SeparateNoise(tuple(range(500)), 0, (20,), torch.zeros(1))(0)  # deviations of 10 000 values
    assert abs(many.mean()) < 0.05
    assert abs(many.std() - 1) < 0.04


def test_generators_seeds_and_the_global_generator():
    assert as_seed(7) == 7
    a, b = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    assert as_seed(a) == as_seed(b)
    assert as_seed(a) != as_seed(torch.Generator().manual_seed(1))  # a has moved on
    torch.manual_seed(4)
    first = as_seed(None)
    torch.manual_seed(4)
    assert as_seed(None) == first
    assert as_seed(None) != first
