"""Shared fixtures: the parity files and a quiet, deterministic torch."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

hypothesis.settings.register_profile("default", deadline=None, max_examples=25, derandomize=True)
hypothesis.settings.load_profile("default")


@pytest.fixture
def parity() -> Callable[[str], Mapping[str, np.ndarray]]:
    """Read a file of reference numbers, or skip, saying so, where the folder is absent.

    The folder is `$NAMM_PARITY`, or `shared/parity` beside the project's root.
    """
    default = Path(__file__).resolve().parents[2] / "shared" / "parity"
    folder = Path(os.environ.get("NAMM_PARITY", default))

    def read(name: str) -> Mapping[str, np.ndarray]:
        path = folder / name
        if not path.exists():
            pytest.skip(f"reference numbers {name} are not beside the project (set NAMM_PARITY to their folder)")
        return np.load(path, allow_pickle=False)

    return read


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
