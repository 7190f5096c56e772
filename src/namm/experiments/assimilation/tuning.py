"""Which ζ, and which weight of the rule, is best for a method: tried on truths that it is not judged by (Fig. 11).

Given a measurement, a sample of the true posterior and the truth are draws of one distribution, so they fit it equally
well on average. χ² of the samples is therefore compared with that of the truths, about 1 per measured value: where it
is smaller the samples fit the noise, where it is larger they have not arrived. Of all settings that were tried,
`choose` takes

    1. those without samples that failed and with a mean χ² within 10 % of the truths' (if there is none: with the χ²
       nearest to it, as a ratio);
    2. of these, those whose error against the truth is at most 5 % above the smallest;
    3. of these, the one with the smallest ℓ.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from namm.constraints import Constraint
from namm.errors import UsageError
from namm.experiments.assimilation.assimilate import PosteriorSummary, Sampling, Score, Setting, assimilate, score
from namm.experiments.assimilation.tasks import Task
from namm.generative import Mirrored

TOLERANCE, SLACK = 0.1, 0.05
ZETAS = {"dps": (0.0005, 0.001, 0.002, 0.005, 0.01, 0.03, 0.1), "likelihood": (0.25, 0.5, 1.0, 2.0, 4.0)}
WEIGHTS = {"dps": (50.0, 100.0, 200.0, 400.0, 800.0, 2000.0), "likelihood": (1e3, 3e3, 1e4, 3e4, 1e5)}
"""What is tried, by guidance."""
REFINEMENTS = 4

OnSummary = Callable[[PosteriorSummary], None]


def grid(
    methods: Sequence[str], zetas: Sequence[float], weights: Sequence[float], guidance: str = "dps"
) -> list[Setting]:
    """Every ζ of every method, and with every weight where the rule guides."""
    if not zetas or not weights or min(*zetas, *weights) <= 0:
        raise UsageError(f"ζ and weights must be positive and at least one each, not {zetas} and {weights}.")
    return [
        Setting(method, zeta, weight, guidance)
        for method in methods
        for weight in (weights if method == "cg-dps" else (0.0,))
        for zeta in zetas
    ]


def try_settings(
    sources: Mapping[str, Mirrored],
    task: Task,
    settings: Sequence[Setting],
    rule: Constraint,
    sampling: Sampling,
    log: OnSummary = lambda outcome: None,
) -> list[Score]:
    """How each setting does on the task's truths; `log` is given every outcome before it is let go of."""
    scores = []
    for setting in settings:
        outcome = assimilate(sources[setting.method], task, setting, rule, sampling)
        log(outcome)
        scores.append(score(outcome))
    return scores


def choose(tried: Sequence[Score], target: float = 1.0) -> Score:
    """The best setting of one method, as the module says; `target` is the truths' χ² per measured value."""
    whole = [s for s in tried if s.failed == 0 and math.isfinite(s.chi2) and s.chi2 > 0 and math.isfinite(s.error)]
    if not whole:
        raise UsageError("every setting that was tried has samples that diverged: try a smaller ζ, or more steps.")
    fitting = [s for s in whole if abs(s.chi2 - target) <= TOLERANCE * target]
    fitting = fitting or [min(whole, key=lambda s: abs(math.log(s.chi2 / target)))]
    least = min(s.error for s in fitting)
    return min((s for s in fitting if s.error <= (1 + SLACK) * least), key=lambda s: s.distance)


def tune(
    sources: Mapping[str, Mirrored],
    task: Task,
    rule: Constraint,
    sampling: Sampling,
    *,
    guidance: str = "dps",
    zetas: Sequence[float] = (),
    weights: Sequence[float] = (),
    refinements: int = REFINEMENTS,
    log: OnSummary = lambda outcome: None,
) -> dict[str, list[Score]]:
    """All that was tried, by method: the grid, and values of ζ between its neighbours where χ² crosses its target."""
    zetas, weights = zetas or ZETAS[guidance], weights or WEIGHTS[guidance]
    tried: dict[str, list[Score]] = {}
    for method in sources:
        tried[method] = []
        for weight in weights if method == "cg-dps" else (0.0,):
            scores: list[Score] = []
            settings = grid([method], zetas, [weight or 1.0], guidance)
            for _ in range(1 + refinements):
                scores += try_settings(sources, task, settings, rule, sampling, log)
                settings = [Setting(method, zeta, weight, guidance) for zeta in crossings(scores, task.truth_chi2)]
            tried[method] += scores
    return tried


def crossings(tried: Sequence[Score], target: float = 1.0) -> list[float]:
    """Values of ζ at which χ² should meet its target, between neighbours on either side of it that both miss it.

    Straight lines in the logarithms; no further than a quarter of the interval from its middle, so that each interval
    shrinks.
    """
    ranked = sorted((s for s in tried if s.failed == 0 and s.chi2 > 0), key=lambda s: s.setting.zeta)
    found = []
    for low, high in pairwise(ranked):
        a, b = math.log(low.chi2 / target), math.log(high.chi2 / target)
        hit = any(abs(s.chi2 - target) <= TOLERANCE / 2 * target for s in (low, high))
        if a * b < 0 and not hit:
            share = min(max(a / (a - b), 0.25), 0.75)
            found.append(low.setting.zeta * (high.setting.zeta / low.setting.zeta) ** share)
    return found
