"""Brackets in brackets: each level of YAML takes several calls of Python, until its stack or its patience ends."""

import pytest

from namm.errors import UsageError
from namm.experiments.engine.settings_file import from_yaml


@pytest.mark.parametrize("text", ["[" * 60_000, "{a: " * 15_000, "- " * 30_000, "? " * 30_000])
def test_depth_is_refused(text):
    with pytest.raises(UsageError, match="is not YAML: it is nested more than 16 deep"):
        from_yaml(text)
