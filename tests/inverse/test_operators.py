"""Operators against NumPy and SciPy, and their adjoints."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.ndimage import gaussian_filter

from namm.errors import DataError, UsageError
from namm.inverse import Columns, Downsample, GaussianBlur, GaussianNoise, Linear, Mask, States, operator
from namm.simulators.fluid import lay_out


def double(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.double, generator=torch.Generator().manual_seed(seed))


def checkered(height: int, width: int) -> torch.Tensor:
    return (torch.arange(height)[:, None] + 2 * torch.arange(width)) % 3 == 0


LINEAR = {
    "mask": lambda c, n: Mask(checkered(2 * n, 4 * n)),
    "mask per channel": lambda c, n: Mask(double(c, 2 * n, 4 * n, seed=1) > -1),
    "columns": lambda c, n: Columns((2, 0)),
    "states": lambda c, n: States((5, 0), n),
    "blur": lambda c, n: GaussianBlur(1.3),
    "blur with edges": lambda c, n: GaussianBlur(0.7, "zeros"),
    "downsample": lambda c, n: Downsample(n),
    "matrix": lambda c, n: Linear(double(4, c * 8 * n * n, seed=2)),
    "function": lambda c, n: operator(lambda x: x.cumsum(3)[:, :, ::2]),
    "composition": lambda c, n: Columns(range(2)) @ Downsample(n) @ GaussianBlur(1.0),
}


@pytest.mark.parametrize("name", LINEAR)
@given(batch=st.integers(1, 3), channels=st.integers(1, 2), n=st.integers(1, 3))
def test_adjoints_and_batches(name, batch, channels, n):
    """⟨A x, m⟩ = ⟨x, Aᵀ m⟩ with Aᵀ from autograd at another image, and no image sees the others of its batch."""
    A = LINEAR[name](channels, n)
    x, elsewhere = (double(batch, channels, 2 * n, 4 * n, seed=seed) for seed in (3, 4))
    seen = A(x)
    m = double(*seen.shape, seed=5)
    adjoint = torch.autograd.grad((A(elsewhere.requires_grad_()) * m).sum(), elsewhere)[0]
    assert float((seen * m).sum()) == pytest.approx(float((x * adjoint).sum()), abs=1e-10)
    for i in range(batch):
        assert torch.allclose(A(x[i : i + 1])[0], seen[i], rtol=0, atol=1e-12)


@given(height=st.integers(1, 9), width=st.integers(1, 9), channels=st.integers(1, 2), batch=st.integers(1, 3))
def test_masks_keep_what_was_observed(height, width, channels, batch):
    mask, x = checkered(height, width), double(batch, channels, height, width)
    A = Mask(mask)
    assert np.array_equal(A(x).numpy(), x.numpy()[:, :, mask.numpy()].reshape(batch, -1))
    filled = A.fill(A(x), (channels, height, width))
    assert torch.equal(filled[..., mask], x[..., mask])
    assert filled[..., ~mask].isnan().all()
    assert torch.equal(A.fill(A(x), [channels, height, width], 0.0), filled.nan_to_num(0.0))


def test_states_are_those_laid_out():
    states = double(2, 2, 4, 3, 5, 5)  # two images of 2×4 states of 3 channels
    seen = States((0, 6), 5)(lay_out(states))
    assert torch.equal(seen[:, 0], states[:, 0, 0])
    assert torch.equal(seen[:, 1], states[:, 1, 2])


def test_columns_come_in_the_order_asked_for():
    x = double(2, 1, 3, 6)
    assert torch.equal(Columns((4, 1))(x), torch.stack([x[..., 4], x[..., 1]], -1))


@given(std=st.floats(0.3, 6), height=st.integers(1, 12), width=st.integers(1, 12))
def test_blurs_are_scipys(std, height, width):
    x = double(1, 1, height, width)
    for boundary, mode in (("circular", "wrap"), ("zeros", "constant"), ("cylinder", ("wrap", "constant"))):
        expected = gaussian_filter(x[0, 0].numpy(), std, mode=mode, truncate=8)
        assert np.abs(GaussianBlur(std, boundary)(x)[0, 0].numpy() - expected).max() <= 1e-7
    assert float(GaussianBlur(std)(x).sum()) == pytest.approx(float(x.sum()), abs=1e-9)


def test_blocks_and_matrices_are_numpys():
    x, matrix = double(2, 3, 4, 6), double(5, 72)
    means = x.numpy().reshape(2, 3, 2, 2, 3, 2).mean((3, 5))
    assert np.abs(Downsample(2)(x).numpy() - means).max() <= 1e-14
    assert np.abs(Linear(matrix)(x).numpy() - x.numpy().reshape(2, 72) @ matrix.numpy().T).max() <= 1e-12
    assert Linear(matrix)(x.float()).dtype == torch.float


def test_composition_applies_the_right_one_first():
    x = double(2, 1, 4, 4)
    assert torch.equal((Columns((0,)) @ Downsample(2))(x), Downsample(2)(x)[..., :1])
    assert (Columns((0,)) @ Downsample(2)).name == "Columns @ Downsample"


def test_reduced_precision_is_not_used():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen = Linear(double(2, 4).float())(torch.ones(1, 1, 2, 2, dtype=torch.bfloat16))
    assert seen.dtype == torch.float
    assert torch.allclose(seen, double(2, 4).float().sum(1), atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mask(torch.ones(2, 2)), "booleans"),
        (lambda: Mask(torch.zeros(2, 2, dtype=torch.bool)), "at least one"),
        (lambda: Columns(()), "at least one"),
        (lambda: Columns((1, 1)), "none twice"),
        (lambda: States((-1,), 4), "none negative"),
        (lambda: GaussianBlur(0.0), "std must be positive"),
        (lambda: GaussianBlur(1.0, "mirror"), "zeros, circular"),
        (lambda: Downsample(0), "at least 1"),
        (lambda: Linear(torch.ones(3)), "matrix"),
        (lambda: Linear(torch.full((1, 2), torch.nan)), "finite"),
        (lambda: operator(3), "function"),
        (GaussianNoise, "either std or covariance"),
        (lambda: GaussianNoise(1.0, torch.eye(2)), "either std or covariance"),
        (lambda: GaussianNoise(0.0), "positive"),
        (lambda: GaussianNoise(torch.tensor([1.0, -1.0])), "positive"),
        (lambda: GaussianNoise(float("nan")), "finite"),
        (lambda: GaussianNoise(covariance=torch.ones(2, 3)), "square"),
        (lambda: GaussianNoise(covariance=torch.tensor([[1.0, 0.5], [0.0, 1.0]])), "symmetric"),
        (lambda: GaussianNoise(covariance=torch.ones(0, 0)), "square"),
        (lambda: GaussianNoise(covariance=torch.tensor([[1.0, 1e-5], [0.0, 1.0]])), "symmetric"),
        (lambda: GaussianNoise(covariance=torch.ones(2, 2)), "positive definite"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize(
    ("A", "message"),
    [
        (Mask(torch.ones(3, 3, dtype=torch.bool)), r"\(3, 3\) does not fit images \(C, H, W\) = \(1, 4, 6\)"),
        (Columns((6,)), "columns 0 to 5"),
        (States((6,), 2), "states 0 to 5"),
        (States((0,), 4), "divisible by 4"),
        (Downsample(4), "divisible by 4"),
        (Linear(torch.ones(2, 5)), "5 columns does not fit images of 24"),
        (Downsample(2) @ Mask(torch.ones(4, 6, dtype=torch.bool)), r"Downsample needs .* shape \(2, 24\)"),
    ],
    ids=lambda part: getattr(part, "name", ""),
)
def test_images_that_do_not_fit_are_refused(A, message):
    with pytest.raises(DataError, match=message):
        A(torch.ones(2, 1, 4, 6))


@pytest.mark.parametrize("x", [torch.ones(4, 6), torch.ones(2, 1, 4, 6, dtype=torch.long), np.ones((2, 1, 4, 6))])
def test_only_images_are_measured(x):
    with pytest.raises(DataError, match="floating-point images"):
        Columns((0,))(x)


@pytest.mark.parametrize("fn", [lambda x: x.sum(), lambda x: x.flatten(1).sum(1), lambda x: x[:1], lambda x: 3.0])
def test_functions_that_forget_the_batch_are_refused(fn):
    with pytest.raises(UsageError, match="one measurement for each of 2 images"):
        operator(fn)(torch.ones(2, 1, 4, 6))
