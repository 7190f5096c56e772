"""The report of a run: which figures and which words, from its contents to the page.

The order is that of a reader's questions: what came out, what was done, in which numbers, what it looks like, what it
cost, how it went, how to do it again.
"""

import shlex
from functools import partial

import numpy as np

from namm.report import html, words
from namm.report.contents import Contents, Cost, Row
from namm.report.figures import BASELINE, OTHER, OURS
from namm.report.figures_samples import grids_figure, samples_figure
from namm.report.figures_studies import Curve, efficiency_figure, training_figure
from namm.report.html import Content, Markup, element, number, pair, paragraph, section, table

STAGES = {
    "map": "learning g and f",
    "mdm": "diffusion model of g(x)",
    "samples": "samples to finetune with",
    "finetune": "finetuning f",
    "dm": "baseline: diffusion model of x",
    "mvae": "autoencoder of g(x)",
    "vae": "baseline: autoencoder of x",
}
KEYS = {name: k for k, name in enumerate(STAGES)}
"""Colours of the stages in the bars of compute."""
HOLDS, FAILS = "✓", "✗"
FEW = 8
"""Changed settings that are shown at once."""

METHOD = (
    "A distance ℓ(x) ≥ 0 says how far an image x is from the rule, and it is zero where the rule holds. A map g is "
    "learned into a mirror space in which there is no rule, together with a map f back that lands on the rule even "
    "from a perturbed point; a diffusion model is trained on the images g(x), and what it samples there is sent "
    "through f. The baseline is the same diffusion model, trained on the images themselves."
)


def report(contents: Contents) -> str:
    """The HTML of a report, whole or, where stages are missing, marked as partial."""
    c = contents
    partly = " (partial)" if c.missing or c.problems else ""
    title = c.name if c.name == c.experiment else f"{c.experiment}: {c.name}"
    return html.page(
        f"{title}{partly}",
        element("p", f"namm · report of a run{partly}", class_="soft"),
        element("h1", title),
        _notes(c),
        _verdict(c),
        _headline(c),
        section("What was done", paragraph(c.rule), paragraph(METHOD), _settings(c)),
        _numbers(c),
        _pictures(c),
        _compute(c),
        _training(c),
        _stages(c),
        _again(c),
        _made(c),
    )


def _notes(c: Contents) -> Markup:
    lines = [paragraph(problem) for problem in c.problems]
    if c.missing:
        where = shlex.quote(c.name)
        go_on = f"namm run --config {where}/settings.yaml --out {where}"
        lines.insert(
            0,
            paragraph(
                element("strong", "This report is partial."),
                f" Not complete: {', '.join(c.missing)}. Below is what there is; ",
                element("code", go_on),
                " goes on.",
            ),
        )
    return element("div", *lines, class_="note") if lines else Markup("")


# What came out


def _verdict(c: Contents) -> Markup:
    """The outcome in its colour, what it rests on, and what to try next."""
    if c.verdict is None:
        return Markup("")
    whose = "this run" if c.row("finetuned") else "the map of this run, which is all there is to judge"
    lead = element("p", element("strong", c.verdict.outcome), f": the verdict on {whose}.", class_="lead")
    marks = ((HOLDS if finding.holds else FAILS, finding.sentence) for finding in c.verdict.findings)
    findings = element("ul", *(element("li", f"{mark} {sentence}") for mark, sentence in marks))
    steps = element("ul", *(element("li", step) for step in c.verdict.next_steps))
    advice = html.joined([paragraph("What to try next:"), steps]) if c.verdict.next_steps else Markup("")
    return element("div", lead, findings, advice, class_=f"verdict {c.verdict.outcome.replace(' ', '-')}")


def _headline(c: Contents) -> Markup:
    ours, base, floor = (c.row(name) for name in ("finetuned", "dm", "data"))
    if ours is None or base is None or floor is None:
        return Markup("")
    tiles = (
        ("distance ℓ from the rule, mean", [row.distance for row in (ours, base, floor)]),
        ("√MMD² to held-out data", [row.mmd[0] for row in (ours, base, floor)]),
        ("total variation over the data's", [row.total_variation for row in (ours, base, floor)]),
    )
    shown = (html.tile(label, *(number(value) for value in values)) for label, values in tiles)
    return html.joined(
        [
            element("div", *shown, class_="tiles"),
            paragraph(words.about_compute(c)),
            paragraph(words.about_others(c)),
        ]
    )


# The numbers


def _numbers(c: Contents) -> Markup:
    if not c.rows:
        return Markup("")
    columns = {
        "": _name,
        "mean ℓ": lambda row: pair((row.distance, row.distance_std)),
        "largest ℓ": lambda row: number(row.distance_max),
        "CD": lambda row: _beside(row, "cd", number(row.cd)),
        "√MMD²": lambda row: _beside(row, "mmd", pair(row.mmd)),
        "KID": lambda row: _beside(row, "kid", pair(row.kid)),
        "FID": lambda row: _beside(row, "fid", number(row.fid)),
        "total variation": lambda row: number(row.total_variation),
        "spread": lambda row: number(row.spread),
        "verdict": lambda row: row.verdict or Markup(html.NONE),
    }
    measured = {"KID": any(row.kid for row in c.rows), "FID": any(row.fid is not None for row in c.rows)}
    judged = {"verdict": any(row.verdict for row in c.rows)}
    shown = {head: cell for head, cell in columns.items() if (measured | judged).get(head, True)}
    absent = " and ".join(head for head, found in measured.items() if not found)
    note = (
        "± is the standard deviation, of ℓ over samples and of √MMD² and KID over subsets. The row of the data is the "
        "floor: real images that are not those compared with. CD = 100·λ·ℓ with the paper's λ. Total variation and "
        "spread are over the data's: 1 is right. The paper's figures are for its own sizes, networks and budgets, and "
        "√MMD² depends on the size of the subsets: beside another preset than “paper” they are for orientation only."
        + (f" {absent} {'were' if ' ' in absent else 'was'} not asked for." if absent else "")
    )
    return section("All numbers", table(tuple(shown), ([cell(row) for cell in shown.values()] for row in c.rows), note))


def _name(row: Row) -> Markup:
    name, what = words.ROWS.get(row.name, (row.name, ""))
    return html.joined([name, element("small", what)])


def _beside(row: Row, figure: str, ours: Markup) -> Markup:
    """Our figure, and below it the paper's, where it has one."""
    if row.paper is None:
        return ours
    return html.joined([ours, element("small", "paper ", html.as_given(getattr(row.paper, figure)))])


# Figures


def _pictures(c: Contents) -> Markup:
    figures: list[Markup] = []
    floor = row.distance if (row := c.row("data")) else None
    if c.methods:
        figures.append(
            html.picture(
                partial(samples_figure, c.methods, view=c.view, floor=floor),
                "Samples and their distance from the rule.",
                "The first samples of either method, not chosen, on one colour scale; below them, where the rule has "
                "such a picture, by how much each place breaks the rule (white: not at all), on one scale too. At "
                "the foot, how many samples lie how far from the rule.",
                "samples of both methods, their residuals and histograms of their distances",
            )
        )
    if c.grids:
        figures.append(
            html.picture(
                partial(grids_figure, c.grids, view=c.view),
                "Do they look like the data?",
                "The first nine of each set, not chosen, on one colour scale.",
                f"nine images each of {', '.join(c.grids)}",
            )
        )
    if c.worst:
        figures.append(
            html.picture(
                partial(samples_figure, c.worst, view=c.view, with_distances=False),
                "The worst samples.",
                "Of either method, those farthest from the rule: what an average hides.",
                "the samples of both methods that are farthest from the rule",
            )
        )
    return section("Pictures", element("div", *figures, class_="figures")) if figures else Markup("")


# Compute


def _compute(c: Contents) -> Markup:
    if not c.ours and not c.baseline:
        return Markup("")
    sides = [("ours", c.ours), ("baseline", c.baseline)]
    whole = max(sum(cost.seconds for cost in side) for _, side in sides) or 1.0
    drawn = [
        html.joined([element("h3", name), html.bars([(KEYS[cost.stage], cost.seconds) for cost in side], whole)])
        for name, side in sides
        if side
    ]
    lines = [_cost(cost) for _, side in sides for cost in side]
    if len(c.ours) > 1:
        lines.insert(len(c.ours), ("ours together", Markup(html.NONE), number(sum(cost.seconds for cost in c.ours))))
    note = "Seconds in training or sampling steps alone: no validation, input, output or compilation, on either side."
    shown = table(("", "steps", "seconds"), lines, note)
    return section("What it cost", *drawn, shown, paragraph(words.about_more_compute(c)), _efficiency(c))


def _cost(cost: Cost) -> tuple[Content, ...]:
    steps = Markup(html.NONE) if cost.steps is None else str(cost.steps)
    return html.keyed(KEYS[cost.stage], STAGES[cost.stage]), steps, number(cost.seconds)


def _efficiency(c: Contents) -> Markup:
    seconds = {cost.stage: cost.seconds for cost in (*c.ours, *c.baseline)}
    ends = {
        "mdm": (seconds.get("map", 0.0) + seconds.get("mdm", 0.0), OTHER),
        "finetuned": (sum(cost.seconds for cost in c.ours), OURS),
        "dm": (seconds.get("dm", 0.0), BASELINE),
    }
    curves = []
    for name, (spent, colour) in ends.items():
        row, along = c.row(name), c.milestones.get(name, ())
        points = [(each.compute_seconds, each.mean, each.std) for each in along]
        if not points and row is not None:
            points = [(spent, row.distance, row.distance_std)]
        if points:
            seconds, mean, std = np.array(points).T
            curves.append(Curve(words.ROWS[name][0], seconds, mean, std, colour))
    if not curves:
        return Markup("")
    floor = row.distance if (row := c.row("data")) else None
    few = max((each.n for along in c.milestones.values() for each in along), default=None)
    return html.picture(
        partial(efficiency_figure, curves, floor),
        "Distance against compute.",
        "Mean ± standard deviation of ℓ over "
        + ("the samples, where each training ends. " if few is None else f"{few} samples as the trainings went on. ")
        + "Ours starts where the map is learned, and finetuning where its samples are made. Lower is better; at equal "
        "compute ours and the baseline end above each other.",
        "mean distance of each method's samples against its compute seconds",
    )


# How it went


def _training(c: Contents) -> Markup:
    if not c.trainings:
        return Markup("")
    named = {STAGES.get(name, name).removeprefix("baseline: "): lines for name, lines in c.trainings.items()}
    return section(
        "How the trainings went",
        html.picture(
            partial(training_figure, named),
            "Losses against steps.",
            "Training losses are means over the steps since the last point; validation is on images that were not "
            "trained on. For the maps, ℓ is that of f(g(x) + σz), before it is weighted. The losses of the two "
            "diffusion models are of different images and cannot be compared.",
            "loss curves of every training",
        ),
    )


def _stages(c: Contents) -> Markup:
    lines = (
        (line.name, line.state, Markup(html.NONE) if line.seconds is None else f"{line.seconds:.1f}", line.results,
         line.finished, line.version)
        for line in c.stages
        if line.name != "report"
    )  # fmt: skip
    shown = table(("stage", "state", "seconds", "found", "finished (UTC)", "namm"), lines)
    return section("The stages", element("div", shown, class_="wide"))


def _settings(c: Contents) -> Markup:
    begun = f"The settings are those of the preset {c.preset!r} of the experiment {c.experiment!r}"
    if not c.changed:
        return paragraph(f"{begun}, unchanged.")
    shown = element("div", table(("setting", f"preset {c.preset}", "here"), c.changed), class_="wide")
    inside = shown if len(c.changed) <= FEW else html.details(f"the {len(c.changed)} changes", shown)
    return html.joined([paragraph(f"{begun}, with changes."), inside])


def _again(c: Contents) -> Markup:
    where = shlex.quote(c.name)
    return section(
        "Doing it again",
        paragraph("In the folder that holds the run:"),
        html.code(f"namm run --config {where}/settings.yaml --out {shlex.quote(c.name + '-again')}"),
        paragraph(
            "On a CPU, the same version, settings and steps give the same numbers to the last bit. A budget in minutes "
            "becomes a number of steps on the machine at hand."
        ),
        html.details("settings.yaml", html.code(c.settings)),
    )


def _made(c: Contents) -> Markup:
    said = "; ".join(f"{name}: {value}" for name, value in c.made.items())
    note = "That is the machine of the report, which need not be that of the stages."
    return section("This report", paragraph(f"{said}. {note}")) if c.made else Markup("")
