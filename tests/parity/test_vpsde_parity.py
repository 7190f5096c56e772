"""The diffusion against the published one: marginals and the denoising score-matching loss."""

import numpy as np
import pytest
import torch

from namm.generative.schedules import VPSDE

SDE = VPSDE()


def difference(ours: torch.Tensor, theirs: np.ndarray) -> np.ndarray:
    return np.abs(ours.double().numpy() - theirs.astype(np.float64))


@pytest.mark.parametrize("name", ["mean_coef", "std"])
@pytest.mark.parametrize("suffix", ["", "_f64"])
def test_marginals(parity, name, suffix):
    """Where |c| ≤ 1e-3 the reference replaces exp and expm1 by their first terms."""
    file = parity("vpsde.npz")
    t = torch.from_numpy(file["t"]).to(torch.double if suffix else torch.float)
    error = difference({"mean_coef": SDE.mean, "std": SDE.std}[name](t), file[name + suffix])
    plain = SDE.log_mean(t).abs().numpy() > 1e-3
    assert plain.any()
    assert (~plain).any()
    assert error[plain].max() <= 1e-6
    assert error[~plain].max() <= 3e-5


def test_coefficients(parity):
    file = parity("vpsde.npz")
    beta = SDE.beta(torch.from_numpy(file["t"]))
    assert difference(beta, file["beta"]).max() <= 2e-6
    assert difference(-0.5 * beta, file["drift_of_ones"]).max() <= 1e-6
    assert difference(beta.sqrt(), file["diffusion"]).max() <= 1e-6


@pytest.mark.parametrize("suffix", ["", "_f64"])
def test_denoising_score_matching(parity, suffix):
    """The file's score is score(x, t) = −x."""
    file = parity("vpsde.npz")
    dtype = torch.double if suffix else torch.float
    x, z = (torch.from_numpy(file[name]).permute(0, 3, 1, 2).to(dtype) for name in ("dsm_x", "dsm_z"))
    marginal = SDE.marginal(torch.from_numpy(file["dsm_t"]).to(dtype))
    tolerance = 2e-6 if marginal.mean.log().abs().min() > 1e-3 else 2e-3  # as in test_marginals
    xt = marginal.mean * x + marginal.std * z
    near = {"rel": tolerance}
    per_sample = 0.5 * (z - marginal.std * xt).square().flatten(1).sum(1)
    assert difference(xt.permute(0, 2, 3, 1), file["dsm_xt"]).max() <= tolerance
    assert difference(per_sample, file["dsm_loss_per_sample" + suffix]).max() <= tolerance * per_sample.max()
    assert float(per_sample.mean()) == pytest.approx(float(file["dsm_loss" + suffix]), **near)
    pixels = x[0].numel()
    assert float(2 * per_sample.mean() / pixels) == pytest.approx(float(file["dsm_loss_reduce_mean"]), **near)
    beta = SDE.beta(torch.from_numpy(file["dsm_t"]).to(dtype))
    likelihood = (per_sample * beta / marginal.std.flatten().square()).mean()
    assert float(likelihood) == pytest.approx(float(file["dsm_loss_likelihood_weighted"]), **near)


def test_the_published_discrete_schedule_is_close_to_ours(parity):
    """Theirs is linear in the index; both tend to the same diffusion."""
    file = parity("vpsde.npz")
    ours = (1 - SDE.discrete_betas()).cumprod(0)
    assert difference(ours, file["alphas_cumprod_f64"]).max() <= 2e-3
