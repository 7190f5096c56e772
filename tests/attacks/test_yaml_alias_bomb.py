"""Billion laughs: nine lists of nine aliases each are 400 bytes of YAML and 10⁹ items when they are written out."""

from itertools import pairwise

import pytest

from namm.errors import UsageError
from namm.experiments.engine.settings_file import changes, read_yaml

NAMES = "abcdefghij"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(9 * [f'*{before}'])}]\n" for before, name in pairwise(NAMES)
)


def test_aliases_are_refused(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text(f"experiment: burgers\n{BOMB}")
    assert file.stat().st_size < 600
    with pytest.raises(UsageError, match=r"settings\.yaml is not YAML: settings have no aliases: write the value out"):
        read_yaml(file)


def test_settings_that_lie_in_a_folder_are_not_expanded_either():
    assert changes(BOMB, "experiment: burgers") == "the file was written otherwise"


def test_a_value_that_contains_itself_is_refused(tmp_path):
    (tmp_path / "settings.yaml").write_text("&a {experiment: burgers, map: *a}")
    with pytest.raises(UsageError, match="no aliases"):
        read_yaml(tmp_path / "settings.yaml")
