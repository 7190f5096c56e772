"""Numbers and small tables for people, against Python's own digits and its parser of HTML."""

from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.text import Text

from namm.constraints.contract import ConstraintReport
from namm.evaluation.scores import DistanceSummary, Scores
from namm.evaluation.verdict import Finding, Verdict
from namm.formatting import format_duration, format_estimate, format_number, html_table, print_table, shown_name
from namm.training.trainer import TrainResult

DIGITS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (0.20284, "0.203"),
        (0.2, "0.200"),
        (4.68379e-8, "4.68·10⁻⁸"),
        (9.996e-4, "0.00100"),
        (-0.00243, "-0.00243"),
        (184.9, "185"),
        (9999.0, "1.00·10⁴"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (None, "–"),
    ],
)
def test_numbers_as_people_write_them(value, shown):
    assert format_number(value) == shown


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(1, 6))
@example(1.7976931348623157e308, 3)
def test_the_digits_are_those_of_python(value, digits):
    shown = format_number(value, f".{digits}g").translate(DIGITS).replace("·10", "e")
    assert float(shown) == float(f"{value:.{digits - 1}e}")


@pytest.mark.parametrize(("value", "spec", "shown"), [(0.04, "g", "0.04"), (7, "d", "7"), (1 / 3, ".4f", "0.3333")])
def test_other_formats_are_those_of_python(value, spec, shown):
    assert format_number(value, spec) == shown


def test_an_estimate_has_fewer_digits_in_its_error():
    assert format_estimate(0.0123456, 0.00204) == "0.0123 ± 0.0020"
    assert format_estimate(21, 1.4142, ".4f", ".1f") == "21.0000 ± 1.4"


def test_a_table_on_the_terminal(capsys):
    print_table(["", "ℓ"], [("data", "4.7·10⁻⁸"), ("samples", "–")], title="runs/a", width=40)
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.strip() == "runs/a"
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert rows == [["data", "4.7·10⁻⁸"], ["samples", "–"]]


def test_names_that_look_like_markup_are_printed_as_they_are(capsys):
    name = "runs/[red]a[/red] :heart: [/]"
    print_table(["run", "[bold]x"], [(name, Text("good", "green"))], title=name, width=80)
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.strip() == name
    assert [cell.strip() for cell in lines[1].split("┃")[1:-1]] == ["run", "[bold]x"]
    assert [cell.strip() for cell in lines[3].split("│")[1:-1]] == [name, "good"]


class Cells(HTMLParser):
    """The texts of the elements of a table."""

    def __init__(self, text):
        super().__init__()
        self.open, self.texts = [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert tag in ("table", "caption", "tbody", "tr", "th", "td")
        self.open.append(tag)
        if tag in ("caption", "th", "td"):
            self.texts.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts[-1] += data


@given(st.text(), st.text(), st.text())
@example("<script>", "</td>&amp;\"'", "<img onerror=x>")
def test_tables_hold_what_they_are_given_as_text(title, name, value):
    found = Cells(html_table(title, [(name, value)]))
    assert [each.replace("\r\n", "\n").replace("\r", "\n") for each in found.texts] == [
        each.replace("\r\n", "\n").replace("\r", "\n") for each in (title, name, value)
    ]


def test_values_of_a_table():
    found = Cells(html_table("t", [("a", 4.68379e-8), ("b", 12), ("c", None), ("d", True)]))
    assert found.texts == ["t", "a", "4.68·10⁻⁸", "b", "12", "c", "–", "d", "True"]


# What a notebook shows

EVIL = "<script>alert(1)</script>"
DISTANCE = DistanceSummary(64, 0.01234, 0.002, (0.001, 0.005, 0.011, 0.02, 0.03), 0.0456, 7)


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        (DISTANCE, ["ℓ of 64 images", "0.0123 ± 0.0020", "0.0110", "max (image 7)", "0.0456"]),
        (
            Scores(DISTANCE, (0.068, 0.0013), 0.97, 0.95, 0.001),
            ["64 samples against data", "0.0123", "0.0456", "0.0680 ± 0.0013", "0.970", "0.950"],
        ),
        (
            ConstraintReport(EVIL, 12, 4.7e-8, 1e-9, 6e-8, 3, 0.1, 0.235, 1.5),
            [f"{EVIL} on 12 images", "4.70·10⁻⁸", "max (image 3)", "0.235", "2.00·10⁻⁷", "1.50"],
        ),
        (
            Verdict("no gain", (Finding(True, "a holds."), Finding(False, EVIL)), ("b",)),
            ["verdict: no gain", "✓", "a holds.", "✗", EVIL, "try", "b"],
        ),
        (
            TrainResult(100, 1600, 12.345, {"loss": 0.5, f"val/{EVIL}": 0.25}, Path(EVIL), 80),
            ["training", "100", "1600", "12.3", "80", "0.500", f"val/{EVIL}", "0.250", EVIL],
        ),
        (TrainResult(1, 2, 3.0, {}, None, collapsed=True), ["training, ended by a collapse", "–"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_results_are_tables_in_a_notebook(value, texts):
    found = Cells(value._repr_html_()).texts
    assert [text for text in found if text in texts] == texts


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "1 s"),
        (7.4, "7 s"),
        (43, "45 s"),
        (58, "60 s"),
        (61, "1 min"),
        (155, "3 min"),
        (3540, "59 min"),
        (3590, "1 h"),
        (4700, "1 h 20 min"),
        (47 * 3600, "47 h"),
        (50 * 3600, "2 days"),
    ],
)
def test_times_are_no_finer_than_they_can_be_known(seconds, text):
    assert format_duration(seconds) == text


def test_results_have_one_name_for_people():
    assert shown_name("mmd_ours") == "√MMD² ours"
    assert shown_name("distance_baseline_half_way") == "ℓ baseline half way"
    assert shown_name("total_variation") == "total variation"
