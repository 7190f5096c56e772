"""The training stream is a pure function of (seed, step)."""

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from namm.datasets.batches import (
    Order,
    ResidentBatches,
    StreamingBatches,
    batches,
    check_images,
    check_values,
    map_images,
    to_tensor,
)
from namm.errors import DataError

CPU = torch.device("cpu")


@given(n=st.integers(1, 40), batch=st.integers(1, 50), seed=st.integers(0, 5))
def test_every_epoch_is_a_permutation(n, batch, seed):
    order = Order(n, batch, seed)
    epochs = 3
    stream = np.concatenate([order.indices(step) for step in range(-(-epochs * n // batch))])
    for epoch in range(epochs):
        assert sorted(stream[epoch * n : (epoch + 1) * n]) == list(range(n))


@given(n=st.integers(1, 40), share=st.integers(1, 8), world=st.integers(1, 4), step=st.integers(0, 30))
def test_processes_share_the_batch_of_one(n, share, world, step):
    whole = Order(n, share * world, seed=1).indices(step)
    parts = [Order(n, share * world, seed=1, rank=rank, world=world).indices(step) for rank in range(world)]
    assert np.array_equal(np.concatenate(parts), whole)


def test_order_depends_on_seed_and_epoch():
    first, again, other = Order(100, 100, 0), Order(100, 100, 0), Order(100, 100, 1)
    assert np.array_equal(first.indices(3), again.indices(3))
    assert not np.array_equal(first.indices(3), other.indices(3))
    assert not np.array_equal(first.indices(3), first.indices(4))


@pytest.mark.parametrize("kind", ["tensor", "numpy", "hdf5"])
def test_streaming_gives_the_resident_batches(kind, tmp_path):
    images = torch.rand(23, 1, 3, 2)
    with h5py.File(tmp_path / "images.h5", "w") as file:
        file["x"] = images.numpy()
        source = {"tensor": images, "numpy": images.numpy(), "hdf5": file["x"]}[kind]
        resident = ResidentBatches(source, Order(23, 8, 0), CPU)
        streaming = StreamingBatches(source, Order(23, 8, 0), CPU)
        for step in (0, 1, 2, 3, 7, 5, 6):  # also a jump and a step back
            expected = images[torch.from_numpy(Order(23, 8, 0).indices(step))]
            assert torch.equal(resident.batch(step), expected)
            assert torch.equal(streaming.batch(step), expected)


def test_data_that_do_not_fit_are_streamed(monkeypatch):
    class Memory:
        available = 1000

    monkeypatch.setattr("namm.datasets.batches.psutil.virtual_memory", Memory)
    large, small = np.zeros((200, 1, 1, 1), np.float32), np.zeros((100, 1, 1, 1), np.float32)
    assert isinstance(batches(large, Order(200, 8, 0), CPU), StreamingBatches)
    assert isinstance(batches(small, Order(100, 8, 0), CPU), ResidentBatches)
    assert isinstance(batches(small, Order(100, 8, 0), CPU, 199), ResidentBatches)
    assert isinstance(batches(small, Order(100, 8, 0), CPU, 201), StreamingBatches)  # half of what remains is less
    assert isinstance(batches(torch.from_numpy(large), Order(200, 8, 0), CPU), ResidentBatches)  # is in memory already


def test_dtypes():
    assert to_tensor(np.full(2, 255, np.uint8)).tolist() == [1.0, 1.0]
    assert to_tensor(torch.ones(2, requires_grad=True)).requires_grad is False
    assert to_tensor(np.arange(3.0)[::-1][:1]).tolist() == [2.0]  # contiguous, as NumPy sees it, with a stride below 0
    with pytest.raises(DataError, match="int32 have no known scale"):
        to_tensor(np.zeros(2, np.int32))
    assert to_tensor(np.zeros(2, np.float64)).dtype == torch.float64
    assert to_tensor(torch.zeros(2, dtype=torch.float16)).dtype == torch.float32


def test_arrays_that_torch_does_not_take_by_itself():
    images = np.arange(6, dtype=np.float32).reshape(1, 1, 2, 3)
    frozen = images.copy()
    frozen.flags.writeable = False
    for array in (images.astype(">f4"), images[..., ::-1].copy()[..., ::-1], frozen):
        assert torch.equal(to_tensor(array), torch.from_numpy(images))


def test_what_is_no_set_of_images_is_refused():
    with pytest.raises(DataError, match=r"four axes .* shape \(3, 4, 4\)"):
        check_images(torch.zeros(3, 4, 4))
    with pytest.raises(DataError, match="empty"):
        check_images(torch.zeros(0, 1, 4, 4))


def varied(n, channels, seed=0):
    """Images of mean 0 and standard deviation 1, in float64."""
    return torch.randn(n, channels, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


@given(st.floats(-40, 38), st.integers(1, 5), st.integers(1, 3), st.sampled_from([0.0, 3.0]))
def test_scales_are_refused_where_float32_cannot_square_them(exponent, n, channels, shift):
    x = (varied(n, channels) + shift) * 10.0**exponent
    if x.abs().max() > 1e15:
        with pytest.raises(DataError, match=r"the data reach .* above 1e\+15: divide"):
            check_values(x)
    elif max(np.std(x[:, c].numpy()) for c in range(channels)) < 1e-15:
        with pytest.raises(DataError, match=r"standard deviation of .* below 1e-15 well: multiply"):
            check_values(x)
    else:
        assert check_values(x) == []
        pixels = x.float().flatten()
        assert 0 < pixels.expand(1000, -1).square().sum() < float("inf")  # the reason for the limits


@given(st.floats(-1e14, 1e14), st.integers(1, 400), st.integers(1, 3), st.sampled_from([torch.float32, torch.double]))
def test_constant_images_are_refused_to_within_rounding(value, n, channels, dtype):
    x = torch.full((n, channels, 4, 4), value, dtype=dtype)
    with pytest.raises(DataError, match=r"the data are constant: in (all|256 of the) \d+ images every channel"):
        check_values(x * (1 + 1e-8 * varied(n, channels).to(dtype)))
    if n > 1 and channels > 1:  # one colour each, the same for all
        with pytest.raises(DataError, match="the data are constant"):
            check_values(torch.arange(channels).reshape(1, -1, 1, 1) + x / 1e15)


@given(st.integers(2, 400), st.integers(1, 3), st.floats(-10, 10))
def test_copies_of_one_image_are_refused_but_one_image_is_not(n, channels, exponent):
    one = varied(1, channels) * 10**exponent
    with pytest.raises(DataError, match="images are copies of one, to within rounding"):
        check_values(one.expand(n, -1, -1, -1).clone())
    assert check_values(one) == []
    assert check_values(one * torch.linspace(1, 1.001, n).reshape(-1, 1, 1, 1)) == []


@given(st.integers(2, 30), st.floats(-1e6, 1e6))
def test_a_constant_channel_among_others_is_allowed_and_named(n, value):
    x = varied(n, 3)
    x[:, 1] = value
    assert [each[:38] for each in check_values(x)] == ["channel 1 of the data is constant: it "]
    x[:, 1] = 1e-9 * varied(n, 1, seed=1)[:, 0]  # small beside the others, but not constant
    assert check_values(x) == []


def test_images_that_are_constant_each_are_allowed_and_named():
    x = varied(20, 2)[..., :1, :1]
    assert check_values(x) == []  # vectors: there is no space
    assert check_values(x.expand(-1, -1, 4, 4)) == [
        "every image of the data is constant in space: figures of total variation mean nothing."
    ]


def test_of_a_large_set_a_few_images_all_over_it_are_read():
    class Large:
        """A million images that are read as smaller ones."""

        def __init__(self, size):
            self.shape, self.rows = (10**6, 1, size, size), None

        def __getitem__(self, rows):
            self.rows = rows
            return varied(len(rows), 1)

    small, huge = Large(4), Large(4096)
    check_values(small)
    assert len(small.rows) == 256
    assert (small.rows[0], small.rows[-1]) == (0, 10**6 - 1)
    assert np.diff(small.rows).max() < 4000
    check_values(huge)
    assert huge.rows.tolist() == [0, 10**6 - 1]


def test_values_that_are_not_finite_are_left_to_those_who_read_everything():
    x = varied(5, 1)
    x[2, 0, 1, 1] = float("nan")
    assert check_values(x) == []


def test_images_are_mapped_in_plain_float32_whatever_surrounds():
    layer, x = torch.nn.Conv2d(1, 1, 3, padding=1), torch.rand(70, 1, 8, 8)
    with torch.no_grad():
        exact = layer(x).numpy()
        with torch.autocast("cpu", torch.bfloat16):
            mapped, rounded = map_images(layer, x, CPU, "f"), layer(x).float().numpy()
    np.testing.assert_allclose(mapped, exact, rtol=1e-5, atol=1e-6)
    assert np.abs(rounded - exact).max() > 1e-4
