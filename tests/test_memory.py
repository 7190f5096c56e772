"""Attempts that do not fit into memory, against a memory of known size."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from namm.memory import shortage

CPU = torch.device("cpu")


def attempt_within(memory: int):
    def attempt(size: int) -> None:
        torch.rand(size)
        if size > memory:
            raise MemoryError(f"{size} do not fit\nand more about it")

    return attempt


@given(st.integers(1, 300), st.integers(0, 300))
def test_a_smaller_size_that_fits_is_found(size, memory):
    """A halving of `size` that fits, with the next larger one not fitting, and the random state as before."""
    before = torch.get_rng_state()
    found = shortage(attempt_within(memory), size, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    if size <= memory:
        assert found is None
        return
    message, fitting = found
    assert message == f"{size} do not fit"
    halvings = [size >> k for k in range(10)]
    assert fitting == next((half for half in halvings if half <= memory), 0)


def test_other_errors_are_not_taken_for_a_shortage():
    def broken(size: int) -> None:
        raise ValueError("another mistake")

    with pytest.raises(ValueError, match="another mistake"):
        shortage(broken, 4, CPU)
