"""What tests of experiments share."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _coarse_pictures(coarse_pictures):
    with coarse_pictures():
        yield
