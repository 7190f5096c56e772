"""The benchmark of DPS's bias prints what its problem has in closed form, and the bias itself."""

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "dps_bias.py"


def test_dps_believes_the_measurement_to_the_last_digit(capsys):
    module = runpy.run_path(str(SCRIPT))
    module["main"](["--samples", "64", "--steps", "200", "--std", "0.5"])
    _, truth, *found = (line.split() for line in capsys.readouterr().out.splitlines())
    assert len(found) == len(module["ZETAS"])
    assert [float(value) for value in truth[-3:-1]] == [1, 1]
    rows = {float(row[-4]): [float(value) for value in row[-3:]] for row in found}
    spread, slope, chi2 = rows[0.1]
    assert slope == pytest.approx(1 + 0.5**2, abs=0.03)  # x = m instead of the mean m/(1 + σ²)
    assert spread < 0.5
    assert chi2 < 0.2 < float(truth[-1])
    assert rows[0.3][0] == pytest.approx(3 * spread, rel=0.2)  # what spread there is comes from the step
