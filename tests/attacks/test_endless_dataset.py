"""More images than the disk holds: laying out their index alone would take hours and all memory."""

import pytest

from namm.datasets import UnitCells, write_store
from namm.errors import RunFolderError


def test_what_the_disk_does_not_hold_is_not_begun(tmp_path):
    with pytest.raises(
        RunFolderError, match=r"cells\.h5 will take 1\d\.\d+ TiB, and its disk has .* left: ask for fewer"
    ):
        write_store(tmp_path / "cells.h5", UnitCells(), {"train": 10**9}, quiet=True)
    assert list(tmp_path.iterdir()) == []
