"""One step of mirror DPS against the published one, in float64."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from namm.generative.schedules import VPSDE
from namm.inverse import Columns, DPSGuidance, Evidence, GaussianNoise, OfficialSteps, guided_step


@dataclass
class Toy:
    """The file's score is score(y, t) = −y; where |c| ≤ 1e-3 the reference takes the first terms of m and s²."""

    sample_shape: tuple[int, int, int]
    sde: VPSDE = VPSDE()  # noqa: RUF009
    t_min: float = 1e-3

    def denoise(self, y_t: Tensor, t: Tensor) -> Tensor:
        c = self.sde.log_mean(t).reshape(-1, 1, 1, 1)
        small = c.abs() <= 1e-3
        mean, variance = torch.where(small, 1 + c, c.exp()), torch.where(small, -2 * c, 1 - torch.exp(2 * c))
        return (y_t - variance * y_t) / mean

    def score(self, y_t: Tensor, t: Tensor) -> Tensor:
        return -y_t

    def unstandardise(self, u: Tensor) -> Tensor:
        return u


def images(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).double().movedim(-1, -3)


def test_constants(parity):
    file = parity("dps.npz")
    table = OfficialSteps(len(file["timesteps_f64"])).table(Toy((1, 1, 1)))

    def column(name: str) -> np.ndarray:
        return np.array([getattr(step, name) for step in table])

    index = file["timestep_index"]
    assert np.array_equal(index, np.arange(len(table))[::-1])
    assert np.abs(column("t") - file["timesteps_f64"]).max() <= 1e-9
    assert np.abs(column("denoised") - file["posterior_mean_coef1_f64"][index]).max() <= 1e-9
    assert np.abs(column("state") - file["posterior_mean_coef2_f64"][index]).max() <= 1e-9
    assert np.abs(2 * np.log(column("noise")) - file["model_log_variance_f64"][index]).max() <= 1e-9


def test_steps_of_mirror_dps(parity):
    """f = tanh, A = the first columns; noise, ζ, σ and the times, rounded to float32, are the file's."""
    file = parity("dps.npz")
    y = images(file["y"])
    xt, z, x0, after = (images(file[name]) for name in ("xt", "noise", "x0_hat_f64", "x_prev_f64"))
    toy = Toy(tuple(xt.shape[2:]))
    table = OfficialSteps(len(file["timesteps_f64"])).table(toy)
    evidence = Evidence(
        y.expand(xt.shape[1], *y.shape), Columns(range(y.shape[-1])), GaussianNoise(std=float(file["sigma"]))
    )
    guidance = DPSGuidance(zeta=float(file["zeta"]))
    for k, i in enumerate(file["loop_i"]):
        assert table[i].t == pytest.approx(float(file["t"][k]), abs=1e-7)
        step = replace(table[i], t=float(file["t"][k]))
        t = torch.full((xt.shape[1],), step.t, dtype=torch.double)
        assert (toy.denoise(xt[k], t) - x0[k]).abs().max() <= 1e-9
        ours = guided_step(xt[k], step, toy, torch.tanh, guidance, evidence) + step.noise * z[k]
        assert (ours - after[k]).abs().max() <= 1e-9
