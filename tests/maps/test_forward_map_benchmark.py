"""All ways to compute g agree, and the benchmark prints what it measured."""

import json
import runpy
from pathlib import Path

import pytest
import torch

from namm.maps import ICNN

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "forward_map.py"))


@pytest.mark.parametrize("options", [{}, {"channels": 2, "layers": 2}, {"kernel_size": 5, "layers": 1}])
def test_all_ways_agree(options):
    found = SCRIPT["differences"](ICNN(filters=4, **options))
    assert set(found) == set(SCRIPT["WAYS"])
    assert max(found.values()) <= 1e-12


def test_wrapping_is_differentiated():
    z = torch.randn(2, 3, 4, 5, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: SCRIPT["Wrap"].apply(z, 2), z)


def test_the_table_and_its_file(tmp_path, capsys):
    file = tmp_path / "found.json"
    assert SCRIPT["main"](["--batch", "2", "--train-batch", "2", "--json", str(file)], shape=(1, 8, 8)) == 0
    rows = json.loads(file.read_text())
    assert [row["way"] for row in rows] == ["autograd", "closed form", "recomputed"]
    assert rows[0]["forward_ratio"] == rows[0]["training_ratio"] == 1
    shown = capsys.readouterr().out
    for row in rows:
        assert row["forward_ratio"] == pytest.approx(row["forward"] / rows[0]["forward"])
        assert f"{row['training']:,.0f}" in shown
