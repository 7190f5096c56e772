"""The progress bar: what stays on the terminal, whatever its width and whatever there is to show."""

import io
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from namm import progress
from namm.progress import ProgressBar, fitted

TERMS = {
    **{"loss": 0.12345, "cycle": 0.023456, "constraint": 0.0034567, "regulariser": 1.2345},
    **{"val/loss": 0.23456, "val/cycle": 0.034567, "val/constraint": 0.0045678, "val/regulariser": 1.3456},
    **{"learning_rate": 0.0002, "images_per_second": 1234.5},
}


def terminal(width):
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=20)


def last_frame(console):
    """Lines of the last drawing: what follows the last time that the cursor went up, or back to the line's start."""
    drawn = re.split(r"\x1b\[\d*A|\r", console.file.getvalue().rstrip())[-1]
    return [line for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn).split("\n") if line.strip()]


def drawn(width, title="map", values=TERMS):
    bar = ProgressBar(title, 3000, console=terminal(width))
    with bar:
        for step in (4, 8, 12):  # the time left is known from the third update on
            time.sleep(0.001)
            bar.update(step, values)
    return last_frame(bar.console)


@pytest.mark.parametrize("width", [60, 80, 110])
@pytest.mark.parametrize("title", ["map", "kolmogorov flow images that are many"])
def test_title_bar_steps_and_time_stay_whatever_the_terms(width, title):
    first, second = drawn(width, title)
    assert first.startswith(title[:20])
    assert first.count("━") + first.count("╸") + first.count("╺") >= 10
    assert re.search(r" 12/3000 \d+:\d\d:\d\d", first)
    assert len(first) <= width
    assert len(second) <= width
    assert second.startswith("  loss 0.1235  cycle 0.02346  constraint 0.003457")
    assert second.rstrip().endswith("…")


def test_all_terms_are_there_where_they_fit():
    _, second = drawn(250)
    assert second.split() == [word for name, value in TERMS.items() for word in (name, f"{value:.4g}")]
    assert len(drawn(80, values={})) == 1


@given(st.lists(st.text("abc 0.1/", min_size=1, max_size=30), max_size=12), st.integers(1, 150))
def test_terms_are_dropped_whole_from_the_right(terms, width):
    line = fitted(terms, width)
    full = "  " + "  ".join(terms)
    if not terms:
        assert line == ""
    elif len(full) <= width:
        assert line == full
    else:
        kept = line.removesuffix("  …")
        assert full.startswith(kept)
        assert kept.startswith("  " + terms[0])
        assert len(line) <= width or kept == "  " + terms[0]
        count = next(k for k in range(1, len(terms) + 1) if "  " + "  ".join(terms[:k]) == kept)
        assert count == len(terms) or len("  " + "  ".join([*terms[: count + 1], "…"])) > width


def test_steps_are_counted_and_added():
    bar = ProgressBar("sampling 8", 10, start=2, console=terminal(80))
    with bar:
        bar.advance()
        bar.advance(3)
        bar.extend(5)
    assert " 6/15 " in last_frame(bar.console)[0]


def test_without_a_terminal_there_are_lines_now_and_then(capsys, monkeypatch):
    bar = ProgressBar("map", 3)
    with bar:
        bar.update(1, {"loss": 0.5})  # too soon
        later = time.monotonic() + 16
        monkeypatch.setattr(progress.time, "monotonic", lambda: later)
        bar.update(2, {"loss": 0.25})
        bar.update(3, {"loss": 0.125})  # the last
    assert capsys.readouterr().err.splitlines() == ["map  2/3  about 15 s left  loss 0.25", "map  3/3  loss 0.125"]


@pytest.mark.parametrize("forced", ["", "1"])
def test_what_is_not_visible_says_nothing(capsys, monkeypatch, forced):
    monkeypatch.setenv("FORCE_COLOR", forced)
    with ProgressBar("map", 3, visible=False) as bar:
        bar.update(3, {"loss": 0.5})
    assert capsys.readouterr() == ("", "")


# Time left where there is no terminal


def paced(steps, monkeypatch, total=1000):
    """Lines of a bar whose updates come at (second, step)."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), force_terminal=False, width=200)
    bar = ProgressBar("model", total, console=console)
    for now[0], step in steps:
        bar.update(step, {"loss": 0.5})
    return console.file.getvalue().splitlines()


def test_lines_tell_the_time_left_once_it_is_known(monkeypatch):
    lines = paced([(6, 10), (21, 40), (36, 70)], monkeypatch)
    assert lines[0] == "model  10/1000  loss 0.5"  # nothing was watched yet
    assert lines[1] == "model  40/1000  about 8 min left  loss 0.5"
    assert lines[2] == "model  70/1000  about 8 min left  loss 0.5"


def test_a_slow_beginning_is_forgotten(monkeypatch):
    slow = [(10 * k, k) for k in range(1, 7)]  # a step in ten seconds
    fast = [(60 + k, 6 + 10 * k) for k in range(1, 121)]  # ten steps a second
    assert paced([*slow, *fast], monkeypatch, total=3006)[-1].startswith("model  1106/3006  about 3 min left")


def test_a_bar_that_stands_still_promises_nothing(monkeypatch):
    assert [line.count("left") for line in paced([(6, 10), (40, 10), (60, 10)], monkeypatch)] == [0, 0, 0]


def test_the_last_line_has_nothing_left(monkeypatch):
    assert "left" not in paced([(6, 10), (20, 500), (36, 1000)], monkeypatch)[-1]
