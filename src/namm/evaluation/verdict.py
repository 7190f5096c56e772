"""One verdict on a run, in words that the terminal, the report and the exported files share.

ℓ alone proves nothing: white images satisfy many rules. With ℓ' = ℓ − the data's own mean ℓ, samples are compared with
those of a baseline, the same model trained on plain images for the same compute:

    collapsed   spread < 0.7, or total variation outside [0.5, 2] of the data's,
                or √MMD² > 2 × the baseline's by more than two errors: the images are lost, whatever the rule says
    works       not collapsed, ℓ' ≤ 0.7 × the baseline's, √MMD² ≤ 1.25 × the baseline's or within two errors of it,
                total variation and spread within 15 % of the data's or no further off than the baseline's
    no gain     anything else

Where there is no baseline, a map is judged by itself, on held-out images with noise σ_max added in mirror space:

    collapsed   spread < 0.7 or total variation < 0.5 of the data's, or a cycle error above 0.5
    works       f leaves at most half of the ℓ that noise adds, the cycle error is at most 0.1,
                total variation and spread are from 2/3 to 3/2 of the data's
    no gain     anything else, an f that passes the noise on among it

The last are wider than for samples, because σ_max is the most noise that f is ever given.

Errors are bootstrap errors: of a mean ℓ in closed form, of √MMD² by resampling images (`mmd_error`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from namm.formatting import format_estimate, format_number, html_table

Outcome = Literal["works", "no gain", "collapsed"]

LEAST_SPREAD, VARIATION = 0.7, (0.5, 2.0)
"""Spread and total variation over the data's beyond which images are lost."""
LOST_MMD, NEAR_MMD = 2.0, 1.25
"""√MMD² over the baseline's that means a collapse, and that is still as good."""
GAIN = 0.7
"""ℓ' over the baseline's that is a gain."""
CLOSE = 0.15
"""Deviation from the data's total variation and spread that is still accepted."""
LEFT, CYCLE, LOST_CYCLE = 0.5, 0.1, 0.5
"""Share of the noise's ℓ that a useful f leaves; cycle errors of a map that works, and of one that loses images."""
MAP_RANGE = (2 / 3, 3 / 2)
"""Total variation and spread over the data's of a map that works, with noise of σ_max."""
ERRORS = 2.0
"""Standard errors within which two figures are the same."""


@dataclass(frozen=True)
class Figures:
    """What is judged of one set of samples.

    Attributes:
        distance, distance_error: mean ℓ and its standard error.
        mmd, mmd_error: √MMD² to held-out data and its standard error.
        total_variation, spread: over the data's.
    """

    distance: float
    mmd: float
    total_variation: float
    spread: float
    distance_error: float = 0.0
    mmd_error: float = 0.0

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """Read a row of `evaluate/metrics.json`, where `compare` put it."""
        distance, mmd = row["distance"], row["mmd"]
        return cls(
            distance=distance["mean"],
            mmd=mmd[0],
            total_variation=row["total_variation"],
            spread=row["spread"],
            distance_error=distance["std"] / math.sqrt(distance["n"]),
            mmd_error=row.get("mmd_error", mmd[1]),  # runs of 0.1 know the scatter over subsets alone
        )


@dataclass(frozen=True)
class Finding:
    """One thing that was asked, whether it holds, and the figures, as a sentence."""

    holds: bool
    sentence: str


@dataclass(frozen=True)
class Verdict:
    """The outcome, what it rests on, and what to try next.

    Attributes:
        outcome: `works`, `no gain` or `collapsed`.
        findings: what was asked, one by one.
        next_steps: what the measured symptoms call for; empty where it works.
    """

    outcome: Outcome
    findings: tuple[Finding, ...]
    next_steps: tuple[str, ...] = ()

    @property
    def works(self) -> bool:
        """Whether the method did what it is for."""
        return self.outcome == "works"

    @property
    def headline(self) -> str:
        """The outcome and the first reason for it, on one line."""
        reasons = [finding for finding in self.findings if finding.holds == self.works] or self.findings
        return f"{self.outcome}: {reasons[0].sentence}"

    def lines(self) -> list[str]:
        """The verdict as the terminal shows it: the outcome, the findings, what to try next."""
        marks = [f"  {'+' if finding.holds else '-'} {finding.sentence}" for finding in self.findings]
        return [f"verdict: {self.outcome}", *marks, *(f"  try: {step}" for step in self.next_steps)]

    def _repr_html_(self) -> str:
        findings = [("✓" if finding.holds else "✗", finding.sentence) for finding in self.findings]
        return html_table(f"verdict: {self.outcome}", [*findings, *(("try", step) for step in self.next_steps)])

    def as_json(self) -> dict[str, Any]:
        """The verdict as plain values."""
        findings = [asdict(finding) for finding in self.findings]
        return {"outcome": self.outcome, "findings": findings, "next_steps": list(self.next_steps)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `as_json`."""
        findings = tuple(Finding(bool(each["holds"]), str(each["sentence"])) for each in values["findings"])
        return cls(values["outcome"], findings, tuple(values.get("next_steps", ())))


def _decide(lost: str | None, findings: Sequence[Finding], cures: Callable[[Outcome], list[str]]) -> Verdict:
    """The verdict on images that are `lost`, if they are, or of which `findings` hold; else `cures` say what to try."""
    if lost is not None:
        return Verdict("collapsed", (Finding(False, lost), *findings), tuple(cures("collapsed")))
    if all(finding.holds for finding in findings):
        return Verdict("works", tuple(findings))
    return Verdict("no gain", tuple(findings), tuple(cures("no gain")))


# Samples against a baseline


def judge(
    ours: Figures,
    baseline: Figures,
    data: Figures,
    *,
    map_figures: Mapping[str, Any] | None = None,
    repaired: Figures | None = None,
) -> Verdict:
    """The verdict on samples beside a baseline.

    Args:
        ours: The samples that are judged.
        baseline: Samples of the same model, trained on plain images for the same compute.
        data: Other real images, the floor.
        map_figures: What the stage `map` measured, from which causes are told.
        repaired: The baseline's samples through f(g(·)), which may do better.
    """
    lost = _loss_of_images(ours.total_variation, ours.spread) or _loss_of_distribution(ours, baseline)
    findings = (
        _distance_finding(ours, baseline, data),
        _mmd_finding(ours, baseline, data),
        _resemblance_finding(ours, baseline),
    )

    def cures(outcome: Outcome) -> list[str]:
        """What the symptoms call for, the likeliest cause first."""
        steps = [_cure_of_a_collapse(ours, baseline)] if outcome == "collapsed" else []
        learned = judge_map(map_figures) if map_figures is not None else None
        if learned is not None and not learned.works:
            steps += learned.next_steps
        elif outcome == "no gain" and ours.distance - data.distance > GAIN * (baseline.distance - data.distance):
            steps.append(_cure_of_no_gain(baseline, data))
        if outcome == "no gain" and _is_far_off(ours) and _is_far_off(baseline):
            steps.append(
                "train both models longer (mdm.train.budget; the baseline follows): the plain model's samples do not "
                "have the data's total variation or spread either."
            )
        if outcome == "no gain" and repaired is not None and judge(repaired, baseline, data).works:
            steps.append("repair the baseline's samples by f(g(x)) instead: the row repaired works.")
        if not steps:
            steps.append("train the mirrored model longer (mdm.train.budget): its samples resemble the data less.")
        return list(dict.fromkeys(steps))

    return _decide(lost, findings, cures)


def loses_images(total_variation: float, spread: float) -> bool:
    """Whether images with these ratios to the data's are lost, without a baseline to compare with."""
    low, high = VARIATION
    return not (spread >= LEAST_SPREAD and low <= total_variation <= high)  # NaN is a loss too


def _loss_of_images(total_variation: float, spread: float) -> str | None:
    if not loses_images(total_variation, spread):
        return None
    least, most = VARIATION
    return (
        f"the images are lost: spread is {format_number(spread, '.2g')} of the data's, where less than "
        f"{LEAST_SPREAD:g} is a collapse, and total variation {format_number(total_variation, '.2g')}, where less than "
        f"{least:g} or more than {most:g} is one."
    )


def _loss_of_distribution(ours: Figures, baseline: Figures) -> str | None:
    error = math.hypot(ours.mmd_error, LOST_MMD * baseline.mmd_error)
    if ours.mmd - LOST_MMD * baseline.mmd <= ERRORS * error:
        return None
    return (
        f"the distribution is lost: √MMD² to held-out data is {format_number(ours.mmd)}, more than twice the "
        f"baseline's {format_number(baseline.mmd)}."
    )


def _distance_finding(ours: Figures, baseline: Figures, data: Figures) -> Finding:
    excess, reference = ours.distance - data.distance, baseline.distance - data.distance
    means = (
        f"mean ℓ is {format_number(ours.distance)} against the baseline's {format_number(baseline.distance)} and the "
        f"data's {format_number(data.distance, '.2g')}"
    )
    if reference <= 0:
        return Finding(False, f"{means}: the baseline keeps the rule as well as the data.")
    ratio = excess / reference
    error = math.hypot(ours.distance_error / reference, ratio * baseline.distance_error / reference)
    share = format_estimate(ratio, error, ".2f", ".2f")
    return Finding(ratio <= GAIN, f"{means}: {share} of the baseline's excess ({GAIN:g} or less is a gain).")


def _mmd_finding(ours: Figures, baseline: Figures, data: Figures) -> Finding:
    error = math.hypot(ours.mmd_error, baseline.mmd_error)
    return Finding(
        ours.mmd <= NEAR_MMD * baseline.mmd or ours.mmd - baseline.mmd <= ERRORS * error,
        f"√MMD² to held-out data is {format_number(ours.mmd)} against the baseline's "
        f"{format_estimate(baseline.mmd, error, error_spec='.1g')}, and {format_number(data.mmd)} of real images (at "
        f"most {NEAR_MMD:g} times the baseline's, or within two errors, is as good).",
    )


def _resemblance_finding(ours: Figures, baseline: Figures) -> Finding:
    return Finding(
        _are_near(ours, baseline),
        f"{_resemblance(ours.total_variation, ours.spread)}, the baseline's "
        f"{format_number(baseline.total_variation, '.2f')} and {format_number(baseline.spread, '.2f')} "
        f"(within {CLOSE:.0%}, or no further off, is right).",
    )


def _is_far_off(figures: Figures) -> bool:
    """Whether total variation or spread is more than 15 % from the data's."""
    return max(abs(figures.total_variation - 1), abs(figures.spread - 1)) > CLOSE


def _resemblance(variation: float, spread: float) -> str:
    return (
        f"total variation is {format_number(variation, '.2f')} and spread {format_number(spread, '.2f')} of the data's"
    )


def _are_near(ours: "Figures | Watched", other: "Figures | Watched") -> bool:
    """Whether total variation and spread are within 15 % of the data's, or no further off than the other's."""
    pairs = ((ours.total_variation, other.total_variation), (ours.spread, other.spread))
    return all(abs(value - 1) <= max(CLOSE, abs(allowed - 1)) for value, allowed in pairs)


def _cure_of_a_collapse(ours: Figures, baseline: Figures) -> str:
    if loses_images(baseline.total_variation, baseline.spread):
        return "train the models longer (mdm.train.budget): the baseline's samples are lost too."
    if ours.total_variation > VARIATION[1]:
        return "use less noise (map.sigma_max) or train the map longer (map.train.budget): f passes noise on."
    return (
        "give the rule less weight (map.weights.constraint, finetune.weights.constraint), or finetune for fewer steps: "
        "f gives up the images for the rule."
    )


def _cure_of_no_gain(baseline: Figures, data: Figures) -> str:
    if baseline.distance - data.distance <= ERRORS * math.hypot(baseline.distance_error, data.distance_error):
        return "nothing: the plain model keeps this rule already."
    return (
        "more noise (map.sigma_max) or a longer training of the model (mdm.train.budget): the map mends the noise it "
        "was trained with, but the model errs in another way or by more."
    )


# A map by itself


def noise_left(figures: Mapping[str, Any]) -> float:
    """The share that f leaves of the ℓ that noise adds: (ℓ(f(g(x) + σz)) − ℓ(x)) / (ℓ(x + σz) − ℓ(x))."""
    floor = float(figures["distance_data"])
    added, left = float(figures["distance_noise"]) - floor, float(figures["distance_map"]) - floor
    return left / added if added > 0 else math.inf


def judge_map(figures: Mapping[str, Any]) -> Verdict:
    """The verdict on a map by itself, from what `measure` found on held-out images."""
    left, cycle = noise_left(figures), float(figures["cycle_error"])
    variation, spread = float(figures["total_variation"]), float(figures["spread"])
    noise, after, data = (figures[f"distance_{name}"] for name in ("noise", "map", "data"))
    cycle_shown = format_number(cycle, ".2g")
    findings = (
        Finding(
            left <= LEFT,
            f"f leaves {format_number(left, '.2f')} of the ℓ that noise adds: {format_number(noise)} with noise, "
            f"{format_number(after)} after f, the data's own is {format_number(data, '.2g')} ({LEFT:g} or less is "
            "useful).",
        ),
        Finding(cycle <= CYCLE, f"the cycle error |x − f(g(x))| is {cycle_shown} of |x| ({CYCLE:g} or less is right)."),
        Finding(
            all(MAP_RANGE[0] <= ratio <= MAP_RANGE[1] for ratio in (variation, spread)),
            f"with noise of σ_max {_resemblance(variation, spread)} ({MAP_RANGE[0]:.2f} to {MAP_RANGE[1]:g} is right).",
        ),
    )
    lost = _loss_of_images(min(variation, 1.0), spread)  # noise that f passes on hides the images, but loses none
    if lost is None and not cycle <= LOST_CYCLE:
        lost = f"the images are lost: f(g(x)) is off by {cycle_shown} of |x|."

    def cures(outcome: Outcome) -> list[str]:
        steps = []
        if max(variation, spread) > MAP_RANGE[1]:
            steps.append("use less noise (map.sigma_max): f passes it on, so it is large for these images.")
        elif not min(variation, spread) >= MAP_RANGE[0]:
            steps.append("give the rule less weight (map.weights.constraint): f smooths the images to keep it.")
        if not cycle <= CYCLE:
            steps.append("train the map longer (map.train.budget), or give the cycle more weight (map.weights.cycle).")
        if not left <= LEFT:
            steps.append(
                "give the rule more weight (map.weights.constraint) or train the map longer (map.train.budget): "
                "f has not learned it. A rule about the whole image needs less noise (map.sigma_max)."
            )
        return steps

    return _decide(lost, findings, cures)


# An f that is trained further


@dataclass(frozen=True)
class Watched:
    """What is watched while f is finetuned, on held-out samples ỹ and held-out images x.

    Attributes:
        distance: mean ℓ(f(ỹ)).
        cycle_error: mean |x − f(g(x))| / mean |x|.
        total_variation, spread: of f(ỹ) over the images'.
    """

    distance: float
    cycle_error: float
    total_variation: float
    spread: float

    def has_collapsed(self, start: "Watched") -> bool:
        """Whether training has lost images that the map's f, measured as `start`, had."""
        lost = loses_images(self.total_variation, self.spread) or not self.cycle_error <= LOST_CYCLE
        return not math.isfinite(self.distance) or (lost and not self._is_as_near(start))

    def improves(self, best: "Watched", start: "Watched") -> bool:
        """Whether this f is to be kept instead of `best`: closer to the rule, and as near to the images as allowed.

        Total variation and spread must be within 15 % of the data's, the cycle error at most 0.1; what the map's f,
        `start`, does not meet may stay as it was.
        """
        return self.distance < best.distance and self._is_as_near(start)

    def _is_as_near(self, start: "Watched") -> bool:
        return _are_near(self, start) and self.cycle_error <= max(CYCLE, start.cycle_error)
