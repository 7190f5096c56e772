"""The verdict against its definition, and the bootstrap error against independent draws."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from namm.evaluation import Figures, Verdict, judge, judge_map, mmd, mmd_error
from namm.evaluation.verdict import Watched, noise_left

DATA = Figures(1e-3, 0.03, 1.0, 1.0)
BASELINE = Figures(1.1e-2, 0.05, 0.97, 0.98, 1e-4, 1e-3)
OURS = Figures(4e-3, 0.052, 0.95, 0.97, 1e-4, 1e-3)
MAP = {
    "distance_data": 1e-3,
    "distance_noise": 2.1e-2,
    "distance_map": 3e-3,
    "cycle_error": 0.02,
    "total_variation": 1.02,
    "spread": 0.99,
}


def outcome(**changes):
    return judge(replace(OURS, **changes), BASELINE, DATA).outcome


def test_a_closer_and_equally_good_method_works():
    verdict = judge(OURS, BASELINE, DATA)
    assert verdict.outcome == "works"
    assert verdict.works
    assert not verdict.next_steps
    assert "0.30 ± 0.01 of the baseline's excess" in verdict.headline  # (0.004 − 0.001) / (0.011 − 0.001)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"distance": 0.007999}, "works"),
        ({"distance": 0.008001}, "no gain"),
        ({"mmd": 0.0624}, "works"),
        ({"mmd": 0.0626, "mmd_error": 1e-3}, "no gain"),
        ({"mmd": 0.07, "mmd_error": 0.0101}, "works"),  # within two errors of the baseline's
        ({"total_variation": 0.851}, "works"),
        ({"total_variation": 0.84}, "no gain"),
        ({"spread": 1.16}, "no gain"),
        ({"spread": 0.69}, "collapsed"),
        ({"total_variation": 0.49}, "collapsed"),
        ({"total_variation": 2.01}, "collapsed"),
        ({"mmd": 0.2}, "collapsed"),
        ({"mmd": 0.102, "mmd_error": 0.01}, "no gain"),  # above twice the baseline's, but not by two errors
        ({"distance": 0.02}, "no gain"),
    ],
)
def test_every_line_of_the_definition_decides(changes, expected):
    assert outcome(**changes) == expected


def test_deviations_no_larger_than_the_baselines_are_allowed():
    rough = replace(BASELINE, total_variation=1.3, spread=0.75)
    ours = replace(OURS, total_variation=0.71, spread=1.24)
    assert judge(ours, rough, DATA).outcome == "works"
    assert judge(replace(ours, total_variation=0.69), rough, DATA).outcome == "no gain"


def test_white_images_on_the_rule_are_a_collapse():
    """What `namm run periodic` of version 0.1 made: a perfect ℓ and one white image."""
    white = Figures(5e-6, 1.17, 1e-3, 1e-3)
    verdict = judge(white, Figures(0.4, 0.08, 1.1, 0.95), Figures(0.0, 0.03, 1.0, 1.0))
    assert verdict.outcome == "collapsed"
    assert verdict.headline.startswith("collapsed: the images are lost: spread is 0.001")
    assert "less weight" in verdict.next_steps[0]


def test_flux_of_the_first_version_is_no_gain():
    """ℓ went from 2.64 to 2.69 by f: the map has learned nothing."""
    learned = judge_map(
        MAP | {"distance_data": 1e-5, "distance_noise": 2.64, "distance_map": 2.69, "total_variation": 12.0}
    )
    assert learned.outcome == "no gain"
    assert "f leaves 1.02 of the ℓ that noise adds" in learned.headline
    assert "map.sigma_max" in learned.next_steps[0]
    assert "map.weights.constraint" in learned.next_steps[1]
    ours, baseline = Figures(2.3, 0.1, 1.0, 1.0), Figures(1.9, 0.1, 1.0, 1.0)
    verdict = judge(ours, baseline, DATA, map_figures=MAP | {"distance_map": 2.1e-2})
    assert verdict.outcome == "no gain"
    assert verdict.next_steps[0] == learned.next_steps[1]


def test_a_baseline_on_the_rule_leaves_nothing_to_gain():
    verdict = judge(OURS, replace(BASELINE, distance=5e-4), DATA)
    assert verdict.outcome == "no gain"
    assert "keeps the rule as well as the data" in verdict.headline
    assert any("already" in step for step in verdict.next_steps)


def test_models_that_are_both_undertrained_are_to_be_trained_longer():
    """ℓ fell 120-fold and the samples are as rough as the plain model's: the map is not what is missing."""
    verdict = judge(replace(OURS, total_variation=1.33), replace(BASELINE, total_variation=1.27), DATA)
    assert verdict.outcome == "no gain"
    assert "train both models longer" in verdict.next_steps[0]
    smooth = judge(replace(OURS, total_variation=0.7), BASELINE, DATA)
    assert not any("both models" in step for step in smooth.next_steps)


def test_repairing_is_advised_where_it_works():
    verdict = judge(replace(OURS, distance=0.01), BASELINE, DATA, repaired=OURS)
    assert any("repair" in step for step in verdict.next_steps)


numbers = st.one_of(st.floats(0, 3), st.just(math.nan))


@given(numbers, numbers, numbers, numbers)
def test_works_means_what_it_says(distance, mmd_value, variation, spread):
    """Written independently of the code, for the same baseline and data."""
    verdict = judge(Figures(distance, mmd_value, variation, spread, 0.01, 0.01), BASELINE, DATA)
    good = (
        distance - 1e-3 <= 0.7 * 1e-2
        and (mmd_value <= 0.0625 or mmd_value - 0.05 <= 2 * math.hypot(0.01, 1e-3))
        and 0.85 <= variation <= 1.15
        and 0.85 <= spread <= 1.15
    )
    assert verdict.works == good
    if not good:
        assert verdict.next_steps
        assert not all(finding.holds for finding in verdict.findings)


def test_a_verdict_survives_json():
    for verdict in (judge(OURS, BASELINE, DATA), judge_map(MAP | {"cycle_error": 0.7})):
        assert Verdict.from_json(verdict.as_json()) == verdict


def test_rows_of_the_first_version_can_be_judged():
    row = {"distance": {"mean": 0.1, "std": 0.2, "n": 100}, "mmd": [0.05, 0.003], "total_variation": 1.0, "spread": 0.9}
    assert Figures.from_row(row) == Figures(0.1, 0.05, 1.0, 0.9, 0.02, 0.003)
    assert Figures.from_row(row | {"mmd_error": 0.001}).mmd_error == 0.001


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "works"),
        ({"distance_map": 1.11e-2}, "no gain"),
        ({"cycle_error": 0.11}, "no gain"),
        ({"cycle_error": 0.51}, "collapsed"),
        ({"total_variation": 1.49}, "works"),
        ({"total_variation": 1.51}, "no gain"),
        ({"total_variation": 0.66}, "no gain"),
        ({"spread": 1.6}, "no gain"),
        ({"total_variation": 22.0}, "no gain"),  # an f that has learned nothing passes the noise on
        ({"total_variation": 0.4}, "collapsed"),
        ({"total_variation": math.nan}, "collapsed"),
        ({"spread": 0.6}, "collapsed"),
        ({"distance_noise": 1e-3}, "no gain"),  # noise adds nothing: there was nothing to learn from
        ({"cycle_error": math.nan}, "collapsed"),
    ],
)
def test_a_map_is_judged_by_itself(changes, expected):
    verdict = judge_map(MAP | changes)
    assert verdict.outcome == expected
    assert bool(verdict.next_steps) == (expected != "works")


def test_what_noise_leaves():
    assert noise_left(MAP) == pytest.approx(0.1)
    assert noise_left(MAP | {"distance_noise": 5e-4}) == math.inf


def test_a_finetuned_f_is_kept_only_if_all_its_figures_allow_it():
    start = Watched(0.01, 0.02, 1.3, 0.95)
    assert Watched(0.009, 0.02, 1.3, 0.95).improves(start, start)
    assert not Watched(0.011, 0.02, 1.0, 1.0).improves(start, start)
    assert not Watched(0.001, 0.02, 1.31, 0.95).improves(start, start)
    assert not Watched(0.001, 0.02, 0.65, 0.95).improves(start, start)
    assert not Watched(0.001, 0.2, 1.0, 1.0).improves(start, start)
    assert not Watched(math.nan, 0.02, 1.0, 1.0).improves(start, start)


def test_a_collapse_in_finetuning_is_one_that_the_map_did_not_have():
    start = Watched(0.01, 0.02, 1.0, 0.95)
    assert Watched(1e-6, 0.02, 0.1, 0.95).has_collapsed(start)
    assert Watched(1e-6, 0.02, 1.0, 0.1).has_collapsed(start)
    assert Watched(1e-6, 0.9, 1.0, 1.0).has_collapsed(start)
    assert Watched(math.inf, 0.02, 1.0, 1.0).has_collapsed(start)
    assert not Watched(1e-6, 0.02, 0.7, 0.8).has_collapsed(start)  # smoother, not lost
    rough = replace(start, total_variation=3.0)
    assert not Watched(0.005, 0.02, 2.5, 0.95).has_collapsed(rough)


def test_the_bootstrap_error_is_the_spread_over_independent_draws():
    rng = np.random.default_rng(0)

    def draw(n, shift):
        return torch.from_numpy(rng.normal(shift, 1, (n, 1, 2, 2)))

    values = [float(mmd(draw(60, 0), draw(60, 0.7), subsets=1, size=60)) for _ in range(60)]
    errors = [mmd_error(draw(60, 0), draw(60, 0.7), seed=k) for k in range(5)]
    assert np.mean(errors) == pytest.approx(np.std(values), rel=0.35)
    many = [mmd_error(draw(240, 0), draw(240, 0.7), seed=k) for k in range(5)]
    assert np.mean(many) == pytest.approx(np.mean(errors) / 2, rel=0.35)
