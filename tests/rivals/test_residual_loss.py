"""The loss with ℓ against one written out in NumPy; a training of it is that of a plain model's weights."""

import numpy as np
import pytest
import torch
from torch import nn

from generative.oracles import marginals
from namm.constraints import TotalFlux
from namm.generative import Diffusion, DPMSolver, Velocity
from namm.maps import IdentityMap
from namm.rivals import ResidualLoss, Rival
from namm.training.settings import TrainSettings
from namm.training.train_model import train_model

SHAPE = (1, 2, 3)
RULE = TotalFlux(2.0)


class Small(nn.Module):
    """a y + b t."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.tensor(-0.2))

    def forward(self, y_t, t):
        return self.a * y_t + self.b * t.reshape(-1, 1, 1, 1)


@pytest.fixture
def model():
    found = Diffusion(Small(), SHAPE, prediction=Velocity())
    found.mean.fill_(0.5)
    found.scale.fill_(2.0)
    return found


def test_the_loss_is_denoising_and_the_rule_of_the_estimate(model):
    x, t, epsilon = torch.randn(7, *SHAPE), torch.rand(7) * 0.9 + 0.05, torch.randn(7, *SHAPE)
    m, s = (each.numpy().reshape(-1, 1, 1, 1) for each in marginals(t))
    u, z = (x.double().numpy() - 0.5) / 2, epsilon.double().numpy()
    y = m * u + s * z
    output = 0.3 * y - 0.2 * t.double().numpy().reshape(-1, 1, 1, 1)
    clean = 2 * (m * y - s * output) + 0.5
    error = ((output - (m * z - s * u)) ** 2).mean()
    rule = ((m / s).flatten() * np.abs(clean.sum((1, 2, 3)) - 2)).mean()
    found = ResidualLoss(0.7).informed(model, RULE).loss(x, t, epsilon)
    assert found.item() == pytest.approx(error + 0.7 * rule, rel=1e-5)


def test_without_weight_it_is_the_plain_loss(model):
    x = torch.randn(7, *SHAPE)
    draws = model.draw(x, torch.Generator().manual_seed(0))
    informed = ResidualLoss(0.0).informed(model, RULE)
    assert torch.equal(informed.loss(x, *draws), model.loss(x, *draws))
    assert informed.state_dict().keys() == model.state_dict().keys()


def test_training_lowers_the_rule_and_leaves_a_plain_models_weights(model, tmp_path):
    x = torch.randn(64, *SHAPE)
    x = x - x.mean((1, 2, 3), keepdim=True) + 2 / 6
    settings = TrainSettings(budget="60 steps", learning_rate=0.02, validations=0)

    def trained(weight):
        fresh = Diffusion(Small(), SHAPE, prediction=Velocity())
        informed = ResidualLoss(weight).informed(fresh, RULE)
        train_model(informed, x, IdentityMap(), settings=settings, folder=tmp_path / str(weight), progress=False)
        return informed

    plain, informed = trained(0.0), trained(1.0)
    sampler = DPMSolver(10)
    drawn = ResidualLoss().sample(informed, RULE, 200, sampler=sampler, generator=0)
    assert RULE(drawn).mean() < 0.9 * RULE(Rival().sample(plain, RULE, 200, sampler=sampler, generator=0)).mean()
    again = Diffusion(Small(), SHAPE, prediction=Velocity())
    again.load_state_dict(informed.state_dict())
    assert torch.equal(again.sample(200, sampler=sampler, generator=0, progress=False), drawn)
