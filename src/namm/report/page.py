"""The report of a run as one HTML file that needs nothing else.

`report.html.j2` says what the page says, `report.css` how it looks, and `report.js` lets a reader look closer: it draws
the pictures from their values (`panels`) in place of the still ones, which stay where scripts do not run. Here are the
values and the pictures that they need.

The template escapes whatever it is given. Pictures are data URIs, in the ink of a light and of a dark page. The page's
own security policy allows one script, known by its hash, and no request.
"""

import base64
import hashlib
import re
import shlex
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.resources import files
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup
from matplotlib.figure import Figure

from namm.evaluation.scores import half_way
from namm.formatting import ABSENT, format_number
from namm.report.contents import ROWS, Contents
from namm.report.figures.base import BASELINE_COLOUR, OTHER_COLOUR, OURS_COLOUR, Theme, png
from namm.report.figures.samples import distances_figure, grids_figure, mirror_figure, samples_figure
from namm.report.figures.studies import Curve, efficiency_figure, training_figure
from namm.report.panels import page_data
from namm.report.tables import csv_files

STAGES = {
    "map": "learning g and f",
    "mdm": "diffusion model of g(x)",
    "samples": "samples to finetune with",
    "finetune": "finetuning f",
    "dm": "baseline: diffusion model of x",
    "repair": "repair of a shorter baseline: finetuning f",
    "few": "few-step model, distilled from that of g(x)",
    "mvae": "autoencoder of g(x)",
    "vae": "baseline: autoencoder of x",
}
FAIR = 0.98
"""Compute of the baseline over ours, below which it had less."""
THEMES: tuple[Theme, Theme] = ("light", "dark")


def render_page(contents: Contents) -> str:
    """The HTML of a report, whole or, where stages are missing, marked as partial."""
    c = contents
    along, curves = c.milestones.get("dm", ()), _curves(c)
    drawn = {
        name: {theme: _data_uri(png(draw, theme)) for theme in THEMES} for name, draw in _figures(c, curves).items()
    }
    script = _script()
    return _template().render(
        c=c,
        sections=_sections(c),
        file=re.sub(r"[^\w.-]+", "-", c.name, flags=re.ASCII).strip("-.") or "report",
        tables=csv_files(c, curves),
        data=page_data(c),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        title=c.name if c.name == c.experiment else f"{c.experiment}: {c.name}",
        names=ROWS,
        stages=STAGES,
        compute=_compute(c),
        half_way=half_way(along),
        end=along[-1] if along else None,
        n_along=max((each.n for points in c.milestones.values() for each in points), default=None),
        pictures=drawn,
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("namm", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"number": _number, "quote": shlex.quote}
    return environment.get_template("report.html.j2")


@cache
def _script() -> str:
    """The page's script, as it stands between its tags: browsers compare its hash byte by byte."""
    return files("namm.report").joinpath("report.js").read_text(encoding="utf-8")


def _sections(c: Contents) -> dict[str, str]:
    """The titles of the sections that the page has, by the names that links lead to."""
    titles = {
        "done": ("What was done", True),
        "numbers": ("All numbers", c.rows),
        "pictures": ("Pictures", c.methods or c.grids or c.worst),
        "mirror": ("Mirror space", c.mirror),
        "cost": ("What it cost", c.ours or c.baseline),
        "chosen": ("How σ_max and λ were chosen", c.tuning),
        "trainings": ("How the trainings went", c.trainings),
        "stages": ("The stages", True),
        "again": ("Doing it again", True),
        "report": ("This report", c.made),
    }
    return {name: title for name, (title, content) in titles.items() if content}


def _number(value: float | None, spec: str = ".3g") -> str:
    """A number for people; the page keeps it in full as the value of a <data> element."""
    if value is None:
        return ABSENT
    return Markup('<data value="{}">{}</data>').format(repr(float(value)), format_number(value, spec))


def _compute(c: Contents) -> dict[str, Any]:
    """Seconds of both sides, the longer one, and whether the baseline had less or ours a busier machine."""
    ours, baseline = (sum(cost.seconds for cost in side) for side in (c.ours, c.baseline))
    steps = sum(cost.steps or 0 for cost in c.baseline)
    priced = baseline if c.step_seconds is None else steps * c.step_seconds
    return {
        "ours": ours,
        "baseline": baseline,
        "longest": max(ours, baseline) or 1.0,
        "priced": priced,
        "unfair": priced < FAIR * ours,
        "busier": baseline < FAIR * ours,
    }


def _figures(c: Contents, curves: Sequence[Curve]) -> dict[str, Callable[[], Figure]]:
    """What draws each picture of the page; only those that there is something to see in."""
    floor = row.distance if (row := c.row("data")) else None
    logs = {STAGES.get(name, name).removeprefix("baseline: "): lines for name, lines in c.trainings.items()}
    drawn = {
        "samples": (c.methods, partial(samples_figure, c.methods, view=c.view, with_distances=False)),
        "distances": (c.methods, partial(distances_figure, c.methods, floor)),
        "grids": (c.grids, partial(grids_figure, c.grids, view=c.view)),
        "worst": (c.worst, partial(samples_figure, c.worst, view=c.view, with_distances=False)),
        "efficiency": (curves, partial(efficiency_figure, curves, floor)),
        "training": (logs, partial(training_figure, logs)),
    }
    if c.mirror is not None:
        drawn["mirror"] = (c.mirror.methods, partial(mirror_figure, c.mirror, view=c.view))
    return {name: draw for name, (values, draw) in drawn.items() if values}


def _curves(c: Contents) -> list[Curve]:
    """ℓ against compute: the milestones of each training, or where it ended; none while nothing has a cost."""
    spent = {cost.stage: cost.seconds for cost in (*c.ours, *c.baseline)}
    ends = {
        "mdm": (spent.get("map", 0.0) + spent.get("mdm", 0.0), OTHER_COLOUR),
        "finetuned": (sum(cost.seconds for cost in c.ours), OURS_COLOUR),
        "dm": (spent.get("dm", 0.0), BASELINE_COLOUR),
    }
    curves = []
    for name, (end, colour) in ends.items() if spent else ():
        row = c.row(name)
        points = [(each.compute_seconds, each.mean, each.std) for each in c.milestones.get(name, ())]
        if not points and row is not None:
            points = [(end, row.distance, row.distance_std)]
        if points:
            seconds, mean, std = np.array(points).T
            curves.append(Curve(ROWS[name][0], seconds, mean, std, colour))
    return curves


def _data_uri(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"
