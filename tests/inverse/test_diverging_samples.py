"""Samples that diverge are redrawn, counted and reported; mistakes are named before sampling."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from posterior_oracles import GAUSSIAN, OPERATOR, SEEN, bent, draw, level, problem

from namm.constraints import Constraint, DivergenceFree, constraint
from namm.errors import DataError, UsageError
from namm.generative import VAE, Mirrored
from namm.inverse import (
    AncestralSteps,
    Columns,
    DDIMSteps,
    DPSGuidance,
    Evidence,
    GaussianNoise,
    Guess,
    OfficialSteps,
    operator,
    sample_posterior,
)
from namm.maps import IdentityMap


@dataclass(frozen=True)
class Explosive:
    """Overflows wherever the first pixel of the initial state is above 1 and `zeta` is above `limit`."""

    zeta: float
    limit: float

    def shift(self, guess: Guess, evidence: Evidence) -> torch.Tensor:
        burst = (guess.y_t[:, :1, :1, :1] > 1) & (self.zeta > self.limit) & (guess.step.t > 0.999)
        return DPSGuidance(self.zeta).shift(guess, evidence) + torch.where(burst, torch.inf, 0.0)

    def smaller(self) -> "Explosive":
        return replace(self, zeta=self.zeta / 2)


def test_diverged_samples_are_redrawn_with_half_the_step():
    """They become what half the step, halved again, gives for their own measurement; the others do not change."""
    prior, many = bent(), torch.tensor([[0.0, 1.0], [-2.0, 0.5]], dtype=torch.double)
    expected = [draw(prior, many, n=24, guidance=DPSGuidance(zeta)) for zeta in (0.04, 0.01)]
    found = draw(prior, many, n=24, guidance=Explosive(0.04, 0.015))
    for times, reference in zip((0, 2), expected, strict=True):
        rows = found.redrawn == times
        assert rows.any(1).all()
        assert torch.allclose(found.samples[rows], reference.samples[rows], atol=1e-12)
        assert torch.allclose(found.chi2[rows], reference.chi2[rows])
    assert set(found.redrawn.flatten().tolist()) == {0, 2}
    assert not found.failed.any()
    assert f"{int((found.redrawn > 0).sum())} redrawn, 0 failed" in str(found)
    assert DPSGuidance(0.2, level, 3.0).smaller().zeta == 0.1
    assert DPSGuidance(0.2, level, 3.0).smaller().weight == 3.0


def test_samples_that_never_settle_are_reported():
    prior = bent()
    with pytest.warns(UserWarning, match=r"of 16 samples diverged 2 times"):
        found = draw(prior, n=16, guidance=Explosive(0.04, 1e-9), constraint=level, retries=1)
    failed = found.failed[0]
    assert 0 < failed.sum() < 16
    assert torch.equal(found.redrawn[0], failed.long())
    for part in (found.samples, found.mirror_samples, found.chi2, found.distance):
        assert torch.equal(part[0].isnan().flatten(1).all(1) if part.ndim > 2 else part[0].isnan(), failed)
    calm = draw(prior, n=16, guidance=DPSGuidance(0.04))
    assert torch.allclose(found.samples[0, ~failed], calm.samples[0, ~failed], atol=1e-12)


@dataclass(frozen=True)
class Push:
    """Adds one number at every step."""

    amount: float

    def shift(self, guess: Guess, evidence: Evidence) -> torch.Tensor:
        return torch.full_like(guess.y_t, self.amount)

    def smaller(self) -> "Push":
        return self


@pytest.mark.parametrize(("amount", "steepness"), [(2e4, 1e-9), (0.0, 3000.0)], ids=["state", "measurement"])
def test_what_is_finite_may_have_diverged_too(amount, steepness):
    """A state far outside the data, and an image whose χ² overflows."""
    A = operator(lambda x: torch.exp(steepness * x.square().flatten(1)))
    prior, _ = problem(mirrored=False)
    options = {"n": 4, "guidance": Push(amount), "steps": DDIMSteps(5), "generator": 1}
    with pytest.warns(UserWarning, match="4 of 4 samples"):
        found = sample_posterior(prior, SEEN.new_zeros(1, 3), A, GaussianNoise(1.0), **options)
    assert found.failed.all()


def test_no_operator_sees_a_diverged_sample():
    """Solvers may refuse, or never finish, where there is NaN."""

    @operator
    def strict(x: torch.Tensor) -> torch.Tensor:
        assert x.isfinite().all()
        return x.flatten(1)

    options = {"n": 16, "guidance": Explosive(0.01, 0), "steps": DDIMSteps(9), "generator": 0}
    with pytest.warns(UserWarning, match="diverged"):
        found = sample_posterior(bent(), SEEN.new_zeros(1, 3), strict, GaussianNoise(1.0), **options)
    assert found.failed.any()


def test_a_step_far_too_large_is_brought_down():
    """Under A(x) = x³ a large ζ makes the state run away."""

    @operator
    def cubed(x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1) ** 3

    prior, _ = problem(mirrored=False)
    options = {"n": 8, "guidance": DPSGuidance(0.5), "steps": DDIMSteps(40), "generator": 0}
    seen, noise = torch.full((1, 3), 0.1, dtype=torch.double), GaussianNoise(0.01)
    with pytest.warns(UserWarning, match="smaller zeta"):
        wild = sample_posterior(prior, seen, cubed, noise, retries=0, **options)
    tamed = sample_posterior(prior, seen, cubed, noise, retries=12, **options)
    assert wild.failed.any()
    assert not tamed.failed.any()
    assert torch.equal(tamed.redrawn > 0, wild.failed)


# Mistakes


def sum_by_numpy(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy().sum(3))


@constraint
def level_by_numpy(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.abs(x.detach().numpy().mean((1, 2, 3))))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"measurement": torch.zeros(2)}, DataError, r"shape \(2,\) .* Linear makes \(M, 2\) .* measurement\[None\]"),
        ({"measurement": torch.zeros(1, 3)}, DataError, r"shape \(1, 3\) .* Linear makes \(M, 2\)"),
        ({"measurement": torch.tensor([[0.0, torch.nan]])}, DataError, "1 values that are NaN"),
        ({"operator": operator(sum_by_numpy), "measurement": torch.zeros(1, 1, 1)}, UsageError, "sum_by_numpy breaks"),
        ({"operator": sum_by_numpy}, UsageError, "not an Operator"),
        ({"operator": Columns((5,))}, DataError, "columns 0 to 2"),
        ({"noise": GaussianNoise(torch.ones(3))}, DataError, "does not fit"),
        ({"noise": 0.1}, UsageError, r"GaussianNoise\(std=0\.1\), not 0\.1"),
        ({"measurement": [[0.0, 1.0]]}, UsageError, r"a tensor \(M, …\), not list"),
        ({"constraint": DivergenceFree()}, DataError, r"\(1, 1, 1, 3\)"),
        ({"guidance": DPSGuidance(0.1, DivergenceFree())}, DataError, r"\(1, 1, 1, 3\)"),
        ({"constraint": sum_by_numpy}, UsageError, r"not a Constraint.*constraint\(fn\)"),
        ({"guidance": DPSGuidance(0.1, sum_by_numpy)}, UsageError, "not a Constraint"),
        ({"guidance": DPSGuidance(0.1, level_by_numpy)}, UsageError, "level_by_numpy cannot guide"),
        ({"n": 0}, UsageError, "n must be at least 1"),
        ({"retries": -1}, UsageError, "retries"),
        ({"batch_size": 0}, UsageError, "batch_size"),
        ({"prior": Mirrored(VAE((1, 8, 8), 2, 2), IdentityMap())}, UsageError, "holds a VAE"),
    ],
)
def test_mistakes_are_named_before_sampling(options, error, message):
    def forbidden(*_):
        raise AssertionError("sampling has begun")

    prior = bent()
    prior.model.denoise = forbidden
    settings = {"prior": prior, "measurement": SEEN, "operator": OPERATOR, "noise": GAUSSIAN} | options
    with pytest.raises(error, match=message):
        sample_posterior(**settings)


def test_rules_are_moved_to_the_models_device():
    class Elsewhere(Constraint):
        moved = None

        def to(self, device):
            self.moved = device
            return self

        def distance(self, x):
            assert self.moved == x.device
            return x.square().mean((1, 2, 3))

    measured, guiding = Elsewhere(), Elsewhere()
    found = draw(bent(), n=2, constraint=measured, guidance=DPSGuidance(0.01, guiding, 1.0))
    assert torch.equal(found.distance[0], found.samples[0].square().mean((1, 2, 3)))
    assert measured.moved == guiding.moved == torch.device("cpu")


def test_a_rule_without_gradient_can_be_measured():
    found = draw(bent(), n=2, constraint=level_by_numpy)
    assert torch.equal(found.distance[0], found.samples[0].mean((1, 2, 3)).abs())


def test_a_map_without_gradient_is_named():
    prior = bent()
    prior.mirror.to_data = torch.no_grad()(prior.mirror.to_data)
    with pytest.raises(UsageError, match="leaves autograd"):
        draw(prior)


@pytest.mark.parametrize(
    "make",
    [lambda: DPSGuidance(-0.1), lambda: DPSGuidance(torch.inf), lambda: DPSGuidance(0.1, level, -1.0)],
)
def test_steps_that_go_uphill_are_refused(make):
    with pytest.raises(UsageError, match="finite and not negative"):
        make()


def test_tables_that_make_no_sense_are_refused():
    model = bent().model
    with pytest.raises(UsageError, match="eta"):
        DDIMSteps(20, eta=1.5)
    with pytest.raises(UsageError, match="at least 2 steps"):
        AncestralSteps(1).table(model)
    with pytest.raises(UsageError, match="more than beta_max = 20 steps"):
        OfficialSteps(20).table(model)
