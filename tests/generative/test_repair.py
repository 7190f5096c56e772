"""`namm.repair`: f(g(x)) batch by batch, the figures and the verdict of the evaluation, and what is refused."""

import re
import warnings
from dataclasses import asdict

import numpy as np
import pytest
import torch
from torch import nn

import namm
from namm.constraints import Periodic, TotalFlux
from namm.errors import ConstraintError, DataError, NammWarning, UsageError
from namm.evaluation import compare, distance_summary, floor
from namm.evaluation.verdict import Figures, judge
from namm.generative.repair import SUBSETS, repair
from namm.maps import ICNN, IdentityMap, MirrorMap, ResNet, RuleNet
from namm.training.settings import TrainSettings

RULE = Periodic((2, 2))


def cells(n, seed):
    """Images (n, 1, 8, 8) of four equal tiles, mean about 0.5, standard deviation about 0.25."""
    tile = 0.5 + 0.25 * torch.randn(n, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
    return tile.repeat(1, 1, 2, 2)


def errors(n, seed):
    return 0.1 * torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


class Project(nn.Module):
    """An f that knows the answer: the mean of the tiles."""

    def forward(self, y):
        return RULE.project(y)


class Blank(nn.Module):
    """An f that keeps the rule by losing the images."""

    def forward(self, y):
        return 0.5 + 0 * y


def small_map(**statistics):
    torch.manual_seed(1)
    return MirrorMap(ICNN(1, filters=4, layers=1), ResNet(1, filters=4, blocks=1, dropout=0.5), **statistics)


@pytest.fixture(scope="module")
def images():
    return cells(200, 0), cells(90, 1) + errors(90, 1)


def test_it_is_f_of_g_batch_by_batch_whatever_holds_the_images(images, tmp_path):
    mirror, x = small_map(), images[1]
    mirror.train()  # a dropout that is on would show
    found = repair(x, mirror)
    assert mirror.training
    assert (found.before, found.after, found.data, found.verdict) == (None, None, None, None)
    mirror.eval()
    with torch.no_grad():
        expected = torch.cat([mirror.repair(batch) for batch in x.split(64)])
    assert torch.equal(found.images, expected)
    for other in (x.numpy(), x.double().numpy()):
        array = repair(other, mirror).images
        assert isinstance(array, np.ndarray)
        np.testing.assert_array_equal(array, expected.numpy())
    assert torch.equal(repair(x, IdentityMap()).images, x)


def test_figures_are_those_of_the_evaluation_and_the_verdict_is_the_judges(images):
    data, x = images
    mirror = MirrorMap(nn.Identity(), Project())
    found = namm.repair(x, mirror, rule=RULE, data=data)
    how = {"subsets": SUBSETS, "size": 90}
    mended = RULE.project(x)
    assert found.before == compare(x, data, RULE, **how)
    assert found.after == compare(mended, data, RULE, **how)
    assert found.data == floor(data, RULE, **how)
    ours, baseline, real = (Figures.from_row(asdict(each)) for each in (found.after, found.before, found.data))
    assert found.verdict == judge(ours, baseline, real)
    assert found.verdict.works
    alone = repair(x, mirror, rule=RULE)
    assert alone.before == distance_summary(RULE, x)
    assert alone.after == distance_summary(RULE, mended)
    assert alone.verdict is None
    function = repair(x, mirror, rule=RULE.distance)
    assert function.after.mean == alone.after.mean
    assert "works" in found._repr_html_()


def test_a_rule_that_is_kept_by_losing_the_images_is_called_a_collapse(images):
    data, x = images
    found = repair(x, MirrorMap(nn.Identity(), Blank()), rule=RULE, data=data)
    assert found.after.distance.mean == 0
    assert found.verdict.outcome == "collapsed"
    ours, baseline, real = (Figures.from_row(asdict(each)) for each in (found.after, found.before, found.data))
    assert found.verdict.findings == judge(ours, baseline, real).findings
    assert "namm.polish" in found.verdict.next_steps[0]
    useless = repair(x, IdentityMap(), rule=RULE, data=data).verdict
    assert useless.outcome == "no gain"
    assert "namm repair --finetune" in useless.next_steps[0]
    kept = repair(data[:90], IdentityMap(), rule=RULE, data=data).verdict
    assert kept.next_steps == ("nothing: these images keep the rule as well as the data.",)


def test_a_map_that_was_trained_on_other_data_gets_no_praise():
    def fluxes(n, total, seed):
        x = torch.rand(n, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
        return total * x / x.sum((1, 2, 3), keepdim=True)

    torch.manual_seed(0)
    others = fluxes(128, 32.0, 0)
    mirror = MirrorMap(ICNN(1, filters=4, layers=1), RuleNet(1, 8, 8, filters=4, blocks=1))
    namm.train_map(
        others,
        TotalFlux(32.0),
        mirror,
        noise=namm.ModelErrors(0.1),
        weights=namm.Weights(0.3),
        settings=TrainSettings(budget="60 steps", batch_size=32, learning_rate=3e-3),
        progress=False,
    )
    x, data, rule = fluxes(64, 36.0, 1), fluxes(128, 35.0, 2), TotalFlux(35.0)
    found = repair(x, mirror, rule=rule, data=data)
    assert found.verdict.outcome != "works"
    assert found.after.distance.mean > found.before.distance.mean  # towards 32, away from 35
    assert "baseline" in found.verdict.headline


def test_images_of_another_range_are_warned_of(images):
    data, x = images
    mean, scale = data.mean().item(), data.std().item()
    standardised = small_map(mean=[mean], scale=[scale])
    with warnings.catch_warnings():
        warnings.simplefilter("error", NammWarning)
        repair(x, standardised)
        repair(x[:4], standardised)
        repair(x, small_map(), rule=RULE, data=data)
        repair(2 * x - 1, small_map())  # nothing is known of its range
    has = re.escape("where the map's data have 0.498 and 0.250")
    for wrong in (2 * x - 1, 255 * x, x + 1, x / 4):
        with pytest.warns(NammWarning, match=f"channel 0 .* {has}.*Rescale those of a model"):
            repair(wrong, standardised)
    with pytest.warns(NammWarning, match="if they are rescaled"):
        repair(2 * x - 1, small_map(), rule=RULE, data=data)


def test_a_channel_that_never_varies_is_no_other_range(images):
    x = torch.cat([images[1], torch.full_like(images[1], 3.0)], 1)
    torch.manual_seed(1)
    mirror = MirrorMap(ICNN(2, filters=4, layers=1), ResNet(2, filters=4, blocks=1), mean=[0.5, 3.0], scale=[0.25, 1.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error", NammWarning)
        repair(x, mirror)


def test_what_cannot_be_repaired_is_said_in_a_sentence(images):
    data, x = images
    with pytest.raises(DataError, match=r"3 instead of 1 in channels"):
        repair(x.expand(-1, 3, -1, -1), small_map())
    torch.manual_seed(1)
    sized = MirrorMap(ICNN(1, filters=4, layers=1), RuleNet(1, 8, 8, filters=4, blocks=1))
    with pytest.raises(DataError, match=r"\(1, 16, 16\): 16 instead of 8 in height, 16 instead of 8 in width"):
        repair(torch.rand(4, 1, 16, 16), sized)
    with pytest.raises(DataError, match=r"are \(1, 8, 4\) and the data \(1, 8, 8\)"):
        repair(x[..., :4], small_map(), rule=RULE, data=data)
    with pytest.raises(DataError, match=r"the map cannot take images of shape \(1, 8, 8\)"):
        repair(x, MirrorMap(nn.Identity(), nn.Conv2d(2, 2, 3, padding=1)))
    with pytest.raises(DataError, match=r"must have four axes"):
        repair(x[0], small_map())
    broken = x.clone()
    broken[70, 0, 2, 2] = torch.nan
    with pytest.raises(DataError, match="image 70 of the images to repair holds NaN"):
        repair(broken, small_map())
    with pytest.raises(UsageError, match="by a rule"):
        repair(x, small_map(), data=data)
    with pytest.raises(DataError, match="at least two and four"):
        repair(x[:1], small_map(), rule=RULE, data=data)


def test_what_is_no_map_and_what_is_no_distance(images):
    with pytest.raises(UsageError, match=r"has to_mirror .g. and to_data .f., and 'runs/flux' has not"):
        repair(images[1], "runs/flux")
    with pytest.raises(ConstraintError, match=r"is -.*, below 0: means of it say nothing"):
        repair(images[1], IdentityMap(), rule=lambda x: -x.sum((1, 2, 3)))


def test_few_images_are_measured_but_not_judged(images):
    data, x = images
    with pytest.warns(NammWarning, match="6 images and 200 real ones are too few for a verdict"):
        found = repair(x[:6], MirrorMap(nn.Identity(), Project()), rule=RULE, data=data)
    assert found.verdict is None
    assert found.after.distance.n == 6
