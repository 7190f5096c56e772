"""The short form of `benchmarks/fuzz.py`: a few mutations of every reader's files, and what counts as a finding."""

import json
from contextlib import suppress

import pytest

import fuzz
from namm.errors import NammError


@pytest.fixture(autouse=True)
def _brief(monkeypatch):
    monkeypatch.setattr(fuzz, "GUARD", 0.3)
    fuzz._speed_up_guard(monkeypatch.setattr)


@pytest.mark.parametrize("name", fuzz.READERS)
def test_every_reader_reads_or_refuses(tmp_path, name):
    reader = fuzz.READERS[name]
    reader.make(tmp_path)
    originals = {file: (tmp_path / file).read_bytes() for file in reader.files}
    read = 0
    for i in range(25):
        file, content = fuzz.input_number(i, name, 1, originals)
        (tmp_path / file).write_bytes(content)
        with suppress(NammError):
            fuzz.fingerprint(reader.read(tmp_path, tmp_path / file))
            read += 1
        (tmp_path / file).write_bytes(originals[file])
    assert read < 25 or name == "source"  # some mutations do harm


def test_inputs_depend_on_seed_reader_and_number_alone():
    originals = {"a": bytes(range(200)), "b": b"text: 12"}
    inputs = [fuzz.input_number(i, "npy", 0, originals) for i in range(50)]
    assert inputs == [fuzz.input_number(i, "npy", 0, originals) for i in range(50)]
    assert len(set(inputs)) > 45
    assert inputs != [fuzz.input_number(i, "npz", 0, originals) for i in range(50)]


def bad(_, file):
    """A reader with one fault of each kind, told by the size of its file."""
    size = len(file.read_bytes())
    if size % 4 == 0:
        raise KeyError("foreign")
    if size % 4 == 1:
        raise NammError("a sentence")
    return size


class Queue(list):
    put = list.append

    def close(self): ...

    def join_thread(self): ...


def test_foreign_errors_and_silent_changes_are_findings(tmp_path, monkeypatch):
    reader = fuzz.Reader(lambda folder: (folder / "x").write_bytes(bytes(102)), ("x",), bad, verifies=True)
    monkeypatch.setitem(fuzz.READERS, "bad", reader)
    state, found = [0, 0, 0, 0, 0], Queue()
    fuzz.worker("bad", 0, (0, 80), tmp_path, state, found)
    assert state[0] == 80
    assert {kind for _, kind, *_ in found} == {"foreign", "silent"}
    for _, kind, what, _, content in found:
        assert (len(content) % 4 == 0) == (kind == "foreign") == ("KeyError" in what)
        assert kind == "foreign" or len(content) != 102


def test_a_campaign_goes_on_where_it_stopped(tmp_path, capsys):
    command = ["--only", "npy", "--out", str(tmp_path), "--inputs"]
    assert fuzz.main([*command, "30"]) == 0
    assert json.loads((tmp_path / "npy.json").read_text())["done"] == 30
    (tmp_path / "npy.json").write_text(json.dumps({"seed": 0, "done": 40, "findings": [[3, "foreign", "KeyError"]]}))
    assert fuzz.main([*command, "40"]) == 1  # nothing is left to try, and the finding stands
    assert "input 3: foreign, KeyError" in capsys.readouterr().out
