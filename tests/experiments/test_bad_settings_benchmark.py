"""The definition of the verdict as the benchmark writes it out, against the one that runs use; and what it spoils."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bad_settings
from namm.evaluation import Figures, judge
from namm.experiments.presets import preset

ratios = st.floats(0, 3)


def row(distance, mmd, variation, spread):
    return {
        "distance": {"mean": distance, "std": 0.1, "n": 100},
        "mmd": [mmd, 0.0],
        "mmd_error": 0.01,
        "total_variation": variation,
        "spread": spread,
    }


rows = st.builds(row, st.floats(0, 2), st.floats(0, 0.5), ratios, ratios)


@given(rows, rows)
def test_both_definitions_agree(ours, baseline):
    data = row(0.01, 0.03, 1.0, 1.0)
    figures = [Figures.from_row(each) for each in (ours, baseline, data)]
    expected = bad_settings.outcome_by_definition({"finetuned": ours, "dm": baseline, "data": data})
    assert judge(*figures).outcome == expected


@pytest.mark.parametrize(
    ("how", "read", "factor"),
    [
        ("sigma_max x 30", lambda s: s.map.sigma_max, 30),
        ("lambda x 1000", lambda s: s.map.weights.constraint, 1000),
        ("lambda = 0", lambda s: s.map.weights.constraint, 0),
        ("finetuning lambda x 1e6", lambda s: s.finetune.weights.constraint, 1e6),
    ],
)
def test_one_setting_is_spoiled(how, read, factor):
    before = bad_settings.shortened(preset("burgers").settings, bad_settings.Options())
    after = bad_settings.SPOILED[how](before)
    assert read(after) == pytest.approx(factor * read(before))
    assert after.mdm == before.mdm
    assert bad_settings.SPOILED["map of 50 steps"](before).map.train.budget == "50 steps"
