"""The tables as CSV: every number in full, read back by Python's own reader, and no text that runs."""

import base64
import csv
import io
from dataclasses import replace

import numpy as np

from namm.report.contents import Contents, Cost, Row
from namm.report.figures.samples import Method
from namm.report.figures.studies import Curve
from namm.report.paper_scores import PaperScores
from namm.report.tables import csv_files, csv_text

ROW = Row("finetuned", 100, 1 / 3, 1e-9, 0.7, 33.3, (0.1, 1 / 7), 0.97, 0.95, kid=None, paper=PaperScores(1, 2, 3, 4))
EMPTY = Contents("a", "b", "c", "d")


def read(uri):
    kind, content = uri.split(",", 1)
    assert kind == "data:text/csv;charset=utf-8;base64"
    return list(csv.DictReader(io.StringIO(base64.b64decode(content).decode(), newline="")))


def test_numbers_keep_all_their_digits():
    other = replace(ROW, name="dm", kid=(0.25, 0.125), paper=None, verdict="no gain")
    ours, baseline = read(csv_files(replace(EMPTY, rows=[ROW, other]), [])["numbers"])
    assert {name: float(ours[name]) for name in ("distance", "mmd", "mmd_std", "paper_fid")} == {
        **{"distance": 1 / 3, "mmd": 0.1, "mmd_std": 1 / 7, "paper_fid": 4.0}
    }
    assert (ours["kid"], baseline["kid"], baseline["kid_std"]) == ("", "0.25", "0.125")
    assert baseline["name"] == "dm"
    assert baseline["verdict"] == "no gain"


def test_distances_of_all_samples_are_there_to_the_last_bit():
    rng = np.random.default_rng(0)
    drawn = {"ours": rng.random(5).astype(np.float32), "baseline": rng.random(3).astype(np.float32)}
    methods = [Method(name, np.zeros((1, 1, 2, 2)), np.zeros(1), each) for name, each in drawn.items()]
    rows = read(csv_files(replace(EMPTY, methods=methods), [])["distances"])
    for name, each in drawn.items():
        assert [np.float32(row[name]) for row in rows if row[name]] == each.tolist()


def test_curves_trainings_and_costs():
    curve = Curve("ours", np.array([1.0, 2.0]), np.array([0.5, 0.25]), np.array([0.1, 0.1]), "red")
    lines = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0, "val/loss": 1.5}]
    contents = replace(EMPTY, trainings={"map": lines}, ours=[Cost("map", 80.25, 1000)], baseline=[Cost("dm", 1.5)])
    found = {name: read(uri) for name, uri in csv_files(contents, [curve]).items()}
    assert set(found) == {"efficiency", "training", "cost"}
    assert [(row["method"], float(row["seconds"]), float(row["mean"])) for row in found["efficiency"]] == [
        *(("ours", 1.0, 0.5), ("ours", 2.0, 0.25))
    ]
    assert [row["val/loss"] for row in found["training"]] == ["", "1.5"]
    assert [(row["side"], row["seconds"]) for row in found["cost"]] == [("ours", "80.25"), ("baseline", "1.5")]


def test_changed_settings_that_are_numbers_stay_numbers():
    changed = [("a", "-1.0", "-2.5e-07"), ("b", "+1", "-1+cmd|' /C calc'!A0")]  # settings arrive as text
    rows = [list(row.values()) for row in read(csv_files(replace(EMPTY, changed=changed), [])["changed"])]
    assert rows == [["a", "-1.0", "-2.5e-07"], ["b", "+1", "'-1+cmd|' /C calc'!A0"]]


def test_no_text_is_a_formula_and_numbers_stay_numbers():
    text = csv_text(["=A1"], [['=HYPERLINK("http://x")'], ["@SUM(A1)"], ["a,b\n"], [-1.5]])
    assert list(csv.reader(io.StringIO(text, newline=""))) == [
        *(["'=A1"], ['\'=HYPERLINK("http://x")'], ["'@SUM(A1)"], ["a,b\n"], ["-1.5"])
    ]
