"""Numbers of thousands of digits, and counts of images that no disk holds."""

import pytest

from namm.errors import UsageError
from namm.experiments.engine.settings_file import from_yaml

HUGE = ["9" * 5000, "9" * 4000, "0x" + "F" * 60_000, "1" + ":59" * 20_000, "-" + "9" * 30]


@pytest.mark.parametrize("number", HUGE, ids=["unreadable", "long", "hexadecimal", "sexagesimal", "negative"])
@pytest.mark.parametrize("setting", ["data: {n_train: %s}", "map: {sigma_max: %s}"])
def test_numbers_without_end_are_refused(setting, number):
    with pytest.raises(UsageError, match=r"has too many digits"):
        from_yaml(f"experiment: burgers\n{setting % number}")


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("data: {n_train: 100000000000000}", "n_train must be at most 1000000000, not 100000000000000"),
        ("samples: {n: 100000000000000}", "n and n_val must be at most"),
        ("evaluate: {n: 100000000000000}", "n and n_fid must be at most"),
    ],
)
def test_more_images_than_anybody_means_are_refused(setting, sentence):
    with pytest.raises(UsageError, match=sentence):
        from_yaml(f"experiment: burgers\n{setting}")


@pytest.mark.parametrize("value", ["2020-13-45", "1:59.5" + ":59" * 300, "!!binary abc", "!!python/name:os.system"])
def test_values_that_python_cannot_make_are_refused(value):
    with pytest.raises(UsageError):
        from_yaml(f"experiment: burgers\nmap: {{sigma_max: {value}}}")
