"""Records that are nested deeply, of endless numbers, of other types than ours, or larger than any record."""

import pytest

from namm.errors import NammError
from namm.exact.certificate import Certificate
from namm.experiments.engine.folder import RECORD, read_record
from namm.experiments.engine.user_rule import read_trusted
from namm.files import read_json
from namm.reading import LARGEST_RECORD
from namm.training import tune
from namm.training.log import read_metrics

BOMBS = ["[" * 100_000, '{"a":' * 100_000, "1" * 5000, '"\\ud800', "\x00", "NaN", "[]", '{"sources": 3}', "{}"]
RECORD_OF_OTHER_TYPES = '{"stage": 1, "key": [], "settings": 0, "needs": 0, "status": {}, "files": 5, "seconds": "x"}'


@pytest.mark.parametrize("text", [*BOMBS, RECORD_OF_OTHER_TYPES])
def test_every_reader_of_json_answers_with_a_sentence(tmp_path, monkeypatch, text):
    path = tmp_path / RECORD
    path.write_text(text)
    monkeypatch.setenv("NAMM_TRUST", str(path))
    for reader in (lambda p: read_record(p.parent), Certificate.load, tune._read, lambda p: read_trusted()):
        with pytest.raises(NammError, match=RECORD):
            reader(path)
    assert read_metrics(path) == []  # a line that is none is left out


def test_a_record_beyond_any_real_one_is_not_parsed(tmp_path):
    with (tmp_path / "run.json").open("wb") as file:
        file.truncate(LARGEST_RECORD + 1)  # no bytes are written
    with pytest.raises(NammError, match=r"run\.json cannot be read \(it has 16 MiB, and at most 16 MiB are read\)"):
        read_json(tmp_path / "run.json")
