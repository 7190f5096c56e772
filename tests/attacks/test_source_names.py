"""A rule's source that imports a name of thousands of parts: each part was a look at the disk, and a longer name."""

from namm.experiments.engine.rule_source import locate


def test_names_without_end_are_passed_over(tmp_path):
    name = ".".join(["a"] * 4000)
    (tmp_path / "rule_with_names.py").write_text(f"import {name}\nimport {'b' * 5000}\n\n\ndef rule(x): ...\n")
    source = locate("rule_with_names:rule", str(tmp_path))
    assert list(source.files) == ["rule_with_names"]


def test_source_that_no_parser_takes_is_hashed_as_it_is(tmp_path):
    for content in (b"(" * 50_000, b"\x00", b"\xff\xfe", b"-" * 50_000 + b"1", b"def f(:\n"):
        (tmp_path / "rule_of_noise.py").write_bytes(content)
        assert locate("rule_of_noise:rule", str(tmp_path)).fingerprint
