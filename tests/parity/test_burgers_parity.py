"""Burgers' steps and distances against the published reference numbers.

The reference's "Crank–Nicolson" is forward Euler, so its own images and losses are compared with our Euler step; the
true Crank–Nicolson arrays of the same file were made, and checked against Newton's method, independently of us.
"""

import numpy as np
import pytest
import torch

from namm.constraints.burgers import Burgers
from namm.simulators.burgers import BurgersGrid, crank_nicolson, euler, rollout


def nchw(array, dtype=torch.float64):
    return torch.from_numpy(array).movedim(-1, 1).to(dtype)


@pytest.fixture
def reference(parity):
    return parity("burgers.npz")


@pytest.fixture
def rule(reference):
    def build(step=crank_nicolson):
        return Burgers(
            step,
            nu=float(reference["cfg/nu"]),
            length=float(reference["cfg/dx"]) * (reference["ic"].shape[1] - 1),
            dt=float(reference["cfg/dt"]),
            inner_steps=int(reference["cfg/inner_steps"]),
        )

    return build


@pytest.mark.parametrize(
    ("step", "key", "tolerance"),
    [(crank_nicolson, "cn_image", 1e-10), (euler, "euler_image_f64", 1e-12), (euler, "ref_image", 2e-5)],
)
def test_trajectories(reference, step, key, tolerance):
    grid = BurgersGrid(*(float(reference[f"cfg/{name}"]) for name in ("dx", "dt", "nu")))
    columns = reference[key].shape[2]
    ours = rollout(torch.from_numpy(reference["ic"]), grid, columns, int(reference["cfg/inner_steps"]), step)
    np.testing.assert_allclose(ours.flip(-2)[..., None], reference[key], atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("step", "loss_key", "grad_key"),
    [
        (crank_nicolson, "perturbed_cn_loss", "perturbed_cn_grad"),
        (euler, "perturbed_euler_loss_f64", "perturbed_euler_grad_f64"),
        (euler, "perturbed_ref_loss", "perturbed_euler_grad_f64"),
    ],
)
def test_distance_and_gradient_of_perturbed_images(reference, rule, step, loss_key, grad_key):
    x = nchw(reference["perturbed_image"]).requires_grad_()
    loss = rule(step)(x)
    (grad,) = torch.autograd.grad(loss.mean(), x)
    np.testing.assert_allclose(loss.detach(), reference[loss_key], rtol=1e-9)
    expected = nchw(reference[grad_key])
    assert (grad - expected).norm() / expected.norm() < 1e-6
    assert (grad - expected).abs().max() / expected.abs().max() < 1e-6


def test_distance_in_float32(reference, rule):
    loss = rule()(nchw(reference["perturbed_image"], torch.float32))
    np.testing.assert_allclose(loss, reference["perturbed_cn_loss"], rtol=1e-4)


def test_floors_of_the_reference_images(reference, rule):
    assert rule()(nchw(reference["cn_image"])).max() < 1e-12
    assert rule(euler)(nchw(reference["euler_image_f64"])).max() < 1e-12
    assert rule(euler)(nchw(reference["ref_image"])).max() < 1e-7
    np.testing.assert_allclose(rule()(nchw(reference["ref_image"])), reference["ref_image_cn_loss"], rtol=1e-3)


def test_projection_is_the_reference_trajectory(reference, rule):
    x = nchw(reference["cn_image"])
    noisy = torch.cat([x[..., :1], torch.randn_like(x[..., 1:])], dim=-1)
    torch.testing.assert_close(rule().project(noisy), x, rtol=0, atol=1e-10)


def test_euler_distance_of_white_noise(parity):
    reference = parity("constraints.npz")
    loss = Burgers(euler)(nchw(reference["burgers_x"], torch.float32))
    np.testing.assert_allclose(loss, reference["burgers_loss_reference_euler"], rtol=1e-5)


def test_published_test_set_follows_euler_and_not_crank_nicolson(parity):
    x = nchw(np.asarray(parity("burgers_test_set.npy")))
    assert Burgers(euler)(x).mean() < 1e-7
    assert Burgers()(x).mean().item() == pytest.approx(1.631e-4, rel=5e-3)
    assert Burgers().residual(x).abs().max().item() == pytest.approx(5.51e-3, rel=1e-2)
