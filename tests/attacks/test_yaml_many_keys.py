"""A settings file of 289 kB of keys: looking for doubles in a list takes a time that grows with their square."""

import time

import pytest
import yaml

from namm.errors import UsageError
from namm.experiments.engine.settings_file import LARGEST, _Loader, from_yaml


def test_a_file_beyond_any_real_one_is_refused_unread():
    text = "experiment: burgers\n" + "".join(f"k{i}: 1\n" for i in range(30_000))
    with pytest.raises(UsageError, match=rf"has {len(text)} characters, and settings have at most {LARGEST}"):
        from_yaml(text)


def test_looking_for_doubles_takes_linear_time():
    def seconds(count: int) -> float:
        node = yaml.MappingNode("tag:yaml.org,2002:map", [])
        one = yaml.ScalarNode("tag:yaml.org,2002:int", "1")
        node.value = [(yaml.ScalarNode("tag:yaml.org,2002:str", f"k{i}"), one) for i in range(count)]
        began = time.process_time()
        assert len(_Loader("").construct_mapping(node)) == count
        return time.process_time() - began

    seconds(100)
    assert seconds(16_000) < 40 * min(seconds(1000) for _ in range(3))  # 16 times as many; their square is 256
