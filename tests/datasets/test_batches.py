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


def test_images_are_mapped_in_plain_float32_whatever_surrounds():
    layer, x = torch.nn.Conv2d(1, 1, 3, padding=1), torch.rand(70, 1, 8, 8)
    with torch.no_grad():
        exact = layer(x).numpy()
        with torch.autocast("cpu", torch.bfloat16):
            mapped, rounded = map_images(layer, x, CPU, "f"), layer(x).float().numpy()
    np.testing.assert_allclose(mapped, exact, rtol=1e-5, atol=1e-6)
    assert np.abs(rounded - exact).max() > 1e-4
