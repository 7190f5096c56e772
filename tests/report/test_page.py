"""The page: what it says, that it needs nothing else, and that nothing in it is taken for markup."""

import base64
import hashlib
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from namm import constraint, polish
from namm.evaluation import Figures, judge
from namm.evaluation.scores import Milestone
from namm.report import page as page_module
from namm.report.contents import ROWS as NAMES
from namm.report.contents import Contents, Cost, Row, StageLine
from namm.report.figures.samples import Method, MirrorSpace
from namm.report.page import render_page
from namm.report.paper_scores import PaperScores

RNG = np.random.default_rng(0)
EVIL = "<script>alert(1)</script>&amp;\"'"
VOID = {"meta", "img", "source"}


class Page(HTMLParser):
    """The page as a reader meets it: texts, numbers, attributes; refuses elements that are not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.text, self.numbers, self.rows = [], [], [], "", [], []
        self.code = ""
        self.feed(text)
        assert not self.open
        self.text = " ".join(self.text.split())  # as browsers do

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "data":
            self.numbers.append(float(dict(attrs)["value"]))
            if self.rows:
                self.rows[-1][1].append(self.numbers[-1])
        if tag == "tr":
            self.rows.append(["", []])
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script", "nav"} & set(self.open):
            self.text += data
        if "pre" in self.open:
            self.code += data
        if {"th", "td"} & set(self.open) and "small" not in self.open:
            self.rows[-1][0] += data.strip()

    def pictures(self):
        uris = [value for name, value in self.attributes if name in ("src", "srcset")]
        assert all(uri.startswith("data:image/png;base64,") for uri in uris)
        return [Image.open(io.BytesIO(base64.b64decode(uri.split(",", 1)[1], validate=True))) for uri in uris]


def row(name, distance, mmd=0.1, **others):
    return Row(name, 100, distance, distance / 10, 3 * distance, 100 * distance, (mmd, 0.001), 0.97, 0.95, **others)


ROWS = (
    row("data", 4.7e-8, 0.04),
    row("finetuned", 2.4321e-3, 0.068, paper=PaperScores(0.04, 0.1291, 0.0022, 2.04), fid=3.25),
    row("mdm", 2.9e-3, 0.07, kid=(0.0123, 0.0004)),
    row("dm", 7.2e-3, 0.093),
)


DATA = Figures(4.7e-8, 0.04, 1, 1)
OURS, BASELINE = Figures(2.4321e-3, 0.068, 0.97, 0.95), Figures(7.2e-3, 0.093, 0.97, 0.95)


def method(name):
    return Method(name, RNG.random((2, 1, 4, 4)), np.array([0.1, 0.2]), RNG.random(9), RNG.normal(size=(2, 1, 4, 3)))


TRIED = {3.0: 0.81, 10.0: 0.52, 30.0: 0.34}
"""Costs of λ, and what they leave of ℓ."""


@pytest.fixture(scope="module")
def contents():
    return Contents(
        name="my run",
        experiment="burgers",
        preset="demo",
        rule="Columns follow an equation.",
        changed=[("map.sigma_max", "0.1", "0.2")],
        settings="experiment: burgers\n",
        stages=[StageLine("data", "complete", 1.5, "images 7", "2026-11-15T10:00:00+00:00", "0.1.0")],
        verdict=judge(OURS, BASELINE, DATA),
        rows=ROWS,
        ours=[Cost("map", 80.0, 1000), Cost("mdm", 85.0, 500), Cost("samples", 4.0), Cost("finetune", 16.0, 200)],
        baseline=[Cost("dm", 185.5, 1090)],
        milestones={
            "mdm": [Milestone(250, 120.0, 5e-3, 1e-3, 64), Milestone(500, 165.0, 2.9e-3, 4e-4, 64)],
            "dm": [
                Milestone(273, 46.4, 0.0212, 1e-3, 64),
                Milestone(545, 92.7, 0.0119, 1e-3, 64),
                Milestone(1090, 185.5, 0.0073, 9e-4, 64),
            ],
        },
        methods=[method("ours"), method("baseline")],
        worst=[method("ours"), method("baseline")],
        grids={"data": RNG.random((9, 1, 4, 4))},
        mirror=MirrorSpace(*map(method, ("x", "g(x)", "ŷ", "f(ŷ)"))),
        trainings={"map": [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0, "val/loss": 1.5}]},
        made={"on": "2026-11-15"},
    )


@pytest.fixture(scope="module")
def text(contents):
    return render_page(contents)


@pytest.fixture
def page(text):
    return Page(text)


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures are empty, since drawing them takes long."""
    monkeypatch.setattr(page_module, "png", lambda draw, theme: b"")


def bare(contents, **changes):
    """Without pictures, which take long to draw."""
    without = {"methods": (), "worst": (), "grids": {}, "mirror": None, "trainings": {}, "ours": (), "baseline": ()}
    return replace(contents, **without | changes)


def test_every_number_of_every_row_is_in_its_row(page):
    found = {}
    for name in (NAMES[each.name][0] for each in ROWS):
        (found[name],) = (numbers for head, numbers in page.rows if re.match(rf"{re.escape(name)}[\d–]", head))
    for each in ROWS:
        paper = [] if each.paper is None else [each.paper.cd, each.paper.mmd, each.paper.kid, each.paper.fid]
        fid = [] if each.fid is None else [each.fid]
        expected = [each.distance, each.distance_std, each.distance_max, each.cd, *paper[:1], *each.mmd, *paper[1:2],
                    *(each.kid or ()), *paper[2:3], *fid, *paper[3:], each.total_variation, each.spread]  # fmt: skip
        assert found[NAMES[each.name][0]] == expected
    heads = [name for name, _ in page.rows]
    assert heads.index(next(h for h in heads if h.startswith("data4.70"))) < heads.index(
        next(h for h in heads if h.startswith("ours0"))
    )  # the floor first


def test_columns_of_what_was_not_measured_are_left_out(contents):
    def columns(rows):
        page = Page(render_page(bare(contents, rows=rows)))
        return next(head for head, _ in page.rows if head.startswith("mean ℓ")), page

    head, page = columns(ROWS)
    assert head == "mean ℓlargest ℓCD√MMD²KIDFIDtotal variationspread"
    assert "not asked for" not in page.text
    head, page = columns([replace(each, kid=None) for each in ROWS])
    assert head == "mean ℓlargest ℓCD√MMD²FIDtotal variationspread"
    assert 0.0022 not in page.numbers
    assert "KID was not asked for" in page.text
    head, page = columns([replace(each, kid=None, fid=None) for each in ROWS])
    assert head == "mean ℓlargest ℓCD√MMD²total variationspread"
    assert "KID and FID were not asked for" in page.text


def test_the_verdict_comes_first_in_its_words_and_colour(contents, page):
    assert "works: the verdict on this run." in page.text
    for finding in contents.verdict.findings:
        assert f"✓ {finding.sentence}" in page.text
    assert page.text.index(contents.verdict.findings[0].sentence) < page.text.index("What was done")
    assert ("class", "verdict works") in page.attributes
    assert "185 s of compute for ours and 186 s for the baseline." in page.text
    assert page.numbers.count(2.4321e-3) >= 2  # tile and table


def test_settings_commands_versions_and_costs_are_there(page):
    for said in (
        "map.sigma_max",
        "namm run --config 'my run'/settings.yaml --out 'my run-again'",
        "2026-11-15T10:00:00+00:00",
        "1090",
        "Columns follow an equation.",
    ):
        assert said in page.text
    assert page.code.endswith("experiment: burgers\n")
    assert 185.0 in page.numbers  # of ours, together
    assert "partial" not in page.text


def test_the_page_asks_for_nothing_from_elsewhere(text, page):
    assert "http://" not in text
    assert "https://" not in text
    assert "@import" not in text
    assert "url(" not in text
    assert not {"link", "iframe", "object", "form", "base"} & set(page.tags)
    assert {name for name, _ in page.attributes} & {"action", "onclick", "onload"} == set()
    for link in (value for name, value in page.attributes if name == "href"):
        assert link.startswith(("#", "data:text/csv;charset=utf-8;base64,"))


def test_the_policy_allows_the_one_script_that_is_there(text):
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]+)">', text)
    data, script = re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = {name: values for name, *values in (rule.split() for rule in policy.split(";"))}
    assert rules == {
        "default-src": ["'none'"],
        "img-src": ["data:"],
        "style-src": ["'unsafe-inline'"],
        "script-src": [f"'sha256-{digest}'"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
    }
    assert text.count("<script") == 2
    assert json.loads(data)["panels"]


def test_contents_lead_to_every_section(contents, text, page):
    found = [value[1:] for name, value in page.attributes if name == "href" and value.startswith("#")]
    assert found == re.findall(r'<section id="([^"]+)">', text)
    assert {"numbers", "pictures", "mirror", "cost", "again"} <= set(found)
    assert 'id="mirror"' not in render_page(bare(contents, mirror=None))


def test_every_picture_shows_something_in_both_inks(page):
    found = page.pictures()
    assert len(found) == 2 * page.tags.count("picture") == 14
    for image in found:
        pixels = np.asarray(image.convert("RGBA"))
        assert pixels[..., 3].max() == 255
        assert len(np.unique(pixels[pixels[..., 3] > 0].view(np.uint32))) > 10
    dark, light = (np.asarray(image.convert("RGBA")) for image in found[:2])
    ink = [pixels[pixels[..., 3] == 255][:, :3].mean() for pixels in (dark, light)]
    assert ink[0] != ink[1]
    assert all(value for name, value in page.attributes if name == "alt")


# What came out, in words


@pytest.mark.parametrize(
    ("changes", "outcome", "colour"),
    [
        ({"distance": 9e-3}, "no gain", "verdict no-gain"),
        ({"distance": 0.0, "spread": 0.1}, "collapsed", "verdict collapsed"),
        ({"total_variation": 0.6}, "no gain", "verdict no-gain"),
    ],
)
def test_bad_news_are_told(contents, changes, outcome, colour):
    verdict = judge(replace(OURS, **changes), BASELINE, DATA)
    found = Page(render_page(bare(contents, verdict=verdict)))
    assert f"{outcome}: the verdict on this run." in found.text
    assert ("class", colour) in found.attributes
    assert "✗" in found.text
    assert f"What to try next: {verdict.next_steps[0]}" in found.text
    assert "closer to the rule" not in found.text


def test_without_samples_the_map_is_what_is_judged(contents):
    found = Page(render_page(bare(contents, rows=())))
    assert "the verdict on the map of this run, which is all there is to judge" in found.text
    assert "verdict on" not in Page(render_page(bare(contents, verdict=None))).text


def test_rows_have_verdicts_of_their_own(contents):
    rows = [replace(each, verdict="no gain" if each.name == "mdm" else None) for each in ROWS]
    page = Page(render_page(bare(contents, rows=rows)))
    assert next(head for head, _ in page.rows if head.startswith("mean ℓ")).endswith("spreadverdict")
    assert next(head for head, _ in page.rows if head.startswith("ours, not finetuned")).endswith("no gain")


@pytest.mark.usefixtures("undrawn")
def test_a_baseline_of_less_compute_and_other_ways_are_named(contents):
    def said(changed):
        return Page(render_page(changed)).text

    short = replace(contents, ours=[Cost("map", 100.0)], baseline=[Cost("dm", 50.0)])
    assert "for the baseline: the baseline had less, and the comparison favours ours." in said(short)
    busy = replace(short, baseline=[Cost("dm", 50.0, 400)], step_seconds=0.25)
    assert (
        "All this with 100 s of compute for ours and 50.0 s for the baseline. The machine was busier for ours: at its "
        "speed then, the baseline's steps would have taken 100 s."
    ) in said(busy)
    assert "favours ours" in said(replace(busy, step_seconds=0.2))
    others = replace(contents, rows=(*ROWS, row("projected", 1e-7), row("repaired", 2e-3)))
    assert (
        "Other ways to bring the baseline's samples to the rule: baseline + project (mean ℓ 1.00·10⁻⁷, √MMD² 0.100), "
        "baseline repaired (mean ℓ 0.00200, √MMD² 0.100)."
    ) in said(others)
    assert "Other ways" not in said(contents)


@pytest.mark.usefixtures("undrawn")
def test_a_few_step_model_has_a_row_and_its_own_cost(contents):
    found = Page(render_page(replace(contents, rows=(*ROWS, row("few", 3.3e-3)), few=[Cost("few", 12.5, 98765)])))
    assert "ours, few steps" in found.text
    assert "few-step model, distilled from that of g(x)" in found.text
    assert "98765" in found.text
    assert 12.5 in found.numbers
    assert "few-step model" not in Page(render_page(contents)).text


# Along the way


@pytest.mark.usefixtures("undrawn")
def test_the_baseline_is_shown_half_way_and_at_its_end(contents, page):
    said = (
        "The mean ℓ of its samples is 0.0119 after half of its steps (92.7 s) and 0.00730 at the end (186 s), each "
        "over 64 samples."
    )
    assert said in page.text
    assert {0.0119, 92.7} <= set(page.numbers)
    odd = replace(contents, milestones={"dm": contents.milestones["dm"][::2]})
    for without in (odd, replace(contents, milestones={})):
        assert "after half of its steps" not in Page(render_page(without)).text


def test_the_curves_are_the_milestones_and_where_there_are_none_the_ends(contents, page, monkeypatch):
    drawn = []
    contents = replace(contents, methods=(), worst=(), grids={}, mirror=None, trainings={})
    monkeypatch.setattr(page_module, "efficiency_figure", lambda curves, floor: drawn.append((curves, floor)))
    monkeypatch.setattr(page_module, "png", lambda draw, theme: draw() or b"")
    assert "over 64 samples as the trainings went on" in page.text
    render_page(contents)
    curves, floor = drawn[0]
    assert floor == ROWS[0].distance
    found = {curve.name: np.stack([curve.seconds, curve.mean, curve.std], 1).tolist() for curve in curves}
    assert found == {
        "ours, not finetuned": [[120.0, 5e-3, 1e-3], [165.0, 2.9e-3, 4e-4]],
        "ours": [[185.0, ROWS[1].distance, ROWS[1].distance_std]],
        "baseline": [[46.4, 0.0212, 1e-3], [92.7, 0.0119, 1e-3], [185.5, 0.0073, 9e-4]],
    }
    without = render_page(replace(contents, milestones={}))
    assert "where each training ends" in Page(without).text
    assert [len(curve.seconds) for curve in drawn[-1][0]] == [1, 1, 1]


# Partial runs, and what could not be read


def test_a_partial_run_is_marked_and_its_missing_stages_are_named(contents):
    stages = [StageLine("data", "complete"), StageLine("map", "partial"), StageLine("mdm", "not there yet")]
    found = Page(render_page(bare(contents, rows=(), stages=[*stages, StageLine("report", "not there yet")])))
    assert "This report is partial. Not complete: map, mdm." in found.text
    assert "namm run --config 'my run'/settings.yaml --out 'my run' goes on" in found.text
    assert found.text.lstrip().startswith("burgers: my run (partial)")
    assert "All numbers" not in found.text
    assert "figure" not in found.tags


def test_nothing_at_all_is_a_page_too():
    found = Page(render_page(Contents("a", "b", "c", "d", problems=["evaluate: it is broken"])))
    assert "evaluate: it is broken" in found.text
    assert "unchanged" in found.text


# Escaping


def test_markup_in_whatever_comes_from_outside_is_text(contents):
    evil = bare(
        contents,
        name=EVIL,
        experiment=EVIL,
        preset=EVIL,
        rule=EVIL,
        changed=[(EVIL, EVIL, EVIL)],
        settings=EVIL,
        stages=[StageLine(EVIL, EVIL, 1.0, EVIL, EVIL, EVIL)],
        rows=[replace(ROWS[0], name=EVIL)],
        made={EVIL: EVIL},
        problems=[EVIL],
    )
    written = render_page(evil)
    assert written.count("<script") == 2  # the page's own
    assert Page(written).text.count("alert(1)") >= 15


@given(st.text(), st.text())
@example(EVIL, EVIL)
def test_text_survives_escaping(content, value):
    hostile = Contents("a", "b", "c", "d", settings=content, grids={value: np.zeros((1, 1, 2, 2))})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_module, "png", lambda draw, theme: b"")
        page = Page(render_page(hostile))
    normal = lambda s: re.sub(r"\r\n?", "\n", s)  # noqa: E731
    assert normal(page.code.split("a-again", 1)[1]) == normal(content)
    assert dict(page.attributes)["alt"] == f"nine images each of {value}"


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_the_page_keeps_every_number_in_full(value):
    page = Page(render_page(Contents("a", "b", "c", "d", rows=[row("data", value)])))
    assert page.numbers[0] == value
    table = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
    (shown,) = re.findall(r"other real images: the floor ([^±]+)±", page.text)
    assert float(shown.translate(table).replace("·10", "e")) == pytest.approx(value, rel=6e-3)


def test_certificates_of_polished_rows_are_shown_where_there_are_some(contents, text):
    assert "Polished samples" not in text
    rule = constraint(lambda x: x.sum((1, 2, 3)).abs(), residual=lambda x: x.sum((1, 2, 3)), name="neutral")
    summaries = {
        name: polish(torch.randn(n, 1, 4, 4), rule, floor=floor).certificate.summary() | {"notes": notes}
        for name, n, floor, notes in (("finetuned_polished", 7, 0.0, []), ("dm_polished", 9, 0.01, [EVIL, EVIL]))
    }
    page = Page(render_page(replace(contents, certificates=summaries)))
    rows = {title: numbers for title, numbers in page.rows if "of " in title and "images" not in title}
    shown = next(numbers for title, numbers in rows.items() if title.startswith("baseline polished9 of 9"))
    figures = ("before_mean", "after_mean", "after_max", "floor", "rounding", "moved_mean")
    assert shown == [summaries["dm_polished"][name] for name in figures]
    assert any(title.startswith("ours, polished7 of 7") for title in rows)
    assert page.text.count("alert(1)") == 1  # a note that two rows have in common is said once


@pytest.mark.usefixtures("undrawn")
def test_how_numbers_were_chosen_is_shown_where_they_were(contents):
    trials = [{"cost": cost, "left": left, "cycle_error": 0.02, "total_variation": 1.1} for cost, left in TRIED.items()]
    tuning = {"sigma": 0.12, "weight": 30.0 * 0.7, "unit": 0.7, "distance_errors": 0.4, "compute_seconds": 5.5}
    tuning |= {"distance_samples": 0.9, "trials": trials}
    page = render_page(replace(contents, tuning=tuning))
    rows = re.findall(r'<th scope="row"><data value="([^"]+)">[^<]*</data>(<small>chosen</small>)?', page)
    chosen = {float(value): bool(mark) for value, mark in rows}
    assert chosen == {3.0 * 0.7: False, 10.0 * 0.7: False, 30.0 * 0.7: True}
    for left in TRIED.values():
        assert f'<data value="{left}">' in page
    given = render_page(replace(contents, tuning=tuning | {"trials": [], "distance_samples": None}))
    assert "as it was given" in given
    assert "trained for seconds" not in given
    assert "were chosen" not in render_page(contents)
