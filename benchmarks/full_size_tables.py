"""What `full_size.py` asks of its figures, and its tables as Markdown; all from what it writes to metrics.json."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from against_baseline import LABELS
from namm.experiments.engine.stages import STAGES
from namm.experiments.paper.output import NOT_THE_PAPERS, Table, Value
from namm.formatting import format_number

Found = dict[str, Any]
SECONDS = 480
"""Compute of map, mdm, samples and finetune together."""


# What is asked


@dataclass(frozen=True)
class Line:
    """A figure, what is asked of it and whether that is met; None where it was not measured.

    One that is a `stretch` would be better still, and does not count.
    """

    name: str
    asked: str
    figure: float | None
    met: bool | None
    shown: str = ""
    stretch: bool = False

    @property
    def verdict(self) -> str:
        """In words."""
        return "not computed" if self.met is None else f"{self.shown}, {'met' if self.met else 'short'}"


def judge(found: Found) -> list[Line]:
    """Every figure of one seed that something is asked of."""
    ours, base = found["rows"]["finetuned"], found["rows"]["dm"]
    below, mmd = 1 - ours["cd"] / base["cd"], ours["mmd"][0] / base["mmd"][0]
    variation, rate = ours["total_variation"], found["images_per_second_dm_over_mdm"]
    spent, plain_spent = found["compute_seconds_ours"], found["compute_seconds_baseline"]
    step, excess = plain_spent / found["stages"]["dm"]["steps"], plain_spent - spent
    closer = "CD of MDM + f finetuned, below DM's by"
    gain = None if ours["kid"] is None or base["kid"] is None else 1e4 * (ours["kid"][0] - base["kid"][0])
    return [
        Line(closer, "≥ 75 %", below, below >= 0.75, _percent(below)),
        Line(closer, "≥ 91 % (stretch)", below, below >= 0.91, _percent(below), stretch=True),
        Line(
            "10⁴ · KID of MDM + f finetuned − DM's",
            "< 0",
            gain,
            None if gain is None else gain < 0,
            "" if gain is None else f"{gain:.2f}",
        ),
        Line("√MMD² of MDM + f finetuned / DM's", "≤ 1.25", mmd, mmd <= 1.25, f"{mmd:.3f}"),
        Line("total variation / data's", "≥ 0.85", variation, variation >= 0.85, f"{variation:.3f}"),
        Line("images/s of DM / MDM's", "within 5 %", rate, abs(rate - 1) <= 0.05, f"{rate:.3f}"),
        Line("compute seconds of ours", f"≤ {SECONDS}", spent, spent <= SECONDS, f"{spent:.1f}"),
        Line(
            "compute of DM / ours",
            "within a step or 2 %",
            plain_spent / spent,
            abs(excess) <= max(step, 0.02 * spent),
            f"{plain_spent / spent:.3f}",
        ),
    ]


def spread(judged: Mapping[str, Sequence[Line]], seeds: Mapping[str, Found]) -> dict[str, dict[str, float]]:
    """Least, mean and largest over seeds of the figures that are judged, and of CD itself."""
    values = {
        f"CD of {LABELS[row]}": [found["rows"][row]["cd"] for found in seeds.values()] for row in ("finetuned", "dm")
    }
    for lines in zip(*judged.values(), strict=True):
        if not lines[0].stretch:
            values[lines[0].name] = [line.figure for line in lines if line.figure is not None]
    return {
        name: {"min": min(each), "mean": sum(each) / len(each), "max": max(each)}
        for name, each in values.items()
        if each
    }


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


# Tables


def page(report: Found) -> str:
    """The tables as Markdown, with what they are of."""
    seeds = report["seeds"]
    judged = {seed: judge(found) for seed, found in seeds.items()}
    first = next(iter(seeds.values()))
    changed = ", ".join(f"{name} {after}" for name, _, after in first["changed"] if not name.endswith("seed"))
    about = (
        f"Experiment `{report['experiment']}`, preset `{report['preset']}`{f', with {changed}' if changed else ''}; "
        f"{first['rows']['finetuned']['n']} samples. "
        f"Run on: {'; '.join(sorted({each for found in seeds.values() for each in found['machines']}))}. "
        f"{report['made']['by']}, {report['made']['made (UTC)']} UTC. Written by `{report['command']}`."
    )
    scale = f"± is the standard deviation over subsets; CD = 100·λ·ℓ, λ = {report['paper']['weight']:g}."
    note = scale if report["preset"] == "paper" else f"{scale} {NOT_THE_PAPERS}"
    parts = ["## Quality", quality(report), note, "## Cost", costs_of(seeds)]
    if any(found["dm_along"] for found in seeds.values()):
        parts += ["The baseline half-way through its training and at its end:", along_of(seeds)]
    parts += ["## Acceptance", acceptance(judged)]
    if len(seeds) > 1:
        over: list[list[Value]] = [[name, *each.values()] for name, each in spread(judged, seeds).items()]
        parts.append(Table({"over seeds": "", "min": ".4g", "mean": ".4g", "max": ".4g"}, over).markdown())
    return "\n\n".join([about, *parts]) + "\n"


def quality(report: Found) -> str:
    """A row for each way to a sample, and the paper's."""
    formats = {"seed": "", "row": "", "mean ℓ": ".3g", "CD": ".3g", "√MMD²": ".4f", "KID · 10⁴": ".2f", "FID": ".4g"}
    formats |= {"total variation": ".3f", "spread": ".3f"}
    rows: list[list[Value]] = []
    for seed, found in report["seeds"].items():
        for name, label in LABELS.items():
            if row := found["rows"].get(name):
                mmd = "{:.4f} ± {:.4f}".format(*row["mmd"])
                kid = "{:.2f} ± {:.2f}".format(*(1e4 * each for each in row["kid"])) if row["kid"] else None
                rest = (row["fid"], row["total_variation"], row["spread"])
                rows.append([seed, label, row["distance"], row["cd"], mmd, kid, *rest])
    for name, label in LABELS.items():
        if row := report["paper"].get(name):
            cd, fid = (format_number(row[key], "g") for key in ("cd", "fid"))
            rows.append(["paper", label, None, cd, row["mmd"], 1e4 * row["kid"], fid, None, None])
    return Table(formats, rows).markdown()


def costs_of(seeds: Mapping[str, Found]) -> str:
    """What every stage cost, and all that the baseline is equal to."""
    rows: list[list[Value]] = []
    for seed, found in seeds.items():
        for name in (stage for stage in STAGES if stage in found["stages"]):  # read back, they are in another order
            each = found["stages"][name]
            if name == "dm":
                rows.append([seed, "ours together", None, None, found["compute_seconds_ours"], None])
            rows.append([seed, name, each["steps"], each["images"], each["compute_seconds"], each["images_per_second"]])
    formats = {"seed": "", "stage": "", "steps": "d", "images": "d", "compute seconds": ".2f", "images/s": ".4g"}
    return Table(formats, rows).markdown()


def along_of(seeds: Mapping[str, Found]) -> str:
    """The baseline at half and at full budget."""
    figures = ("step", "compute_seconds", "n", "mean", "cd")
    rows = [
        [seed, f"DM, {name} budget", *(point[figure] for figure in figures)]
        for seed, found in seeds.items()
        for name in ("half", "full")
        if (point := found["dm_along"].get(name))
    ]
    formats = {"seed": "", "": "", "steps": "d", "compute seconds": ".2f", "samples": "d", "mean ℓ": ".3g", "CD": ".3g"}
    return Table(formats, rows).markdown()


def acceptance(judged: Mapping[str, Sequence[Line]]) -> str:
    """A row for each figure that something is asked of."""
    same = list(zip(*judged.values(), strict=True))
    rows = [[lines[0].name, lines[0].asked, *(line.verdict for line in lines)] for lines in same]
    return Table({"figure": "", "asked": "", **{f"seed {seed}": "" for seed in judged}}, rows).markdown()
