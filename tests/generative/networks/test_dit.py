"""The transformer's attention against a softmax of complex numbers, and what it knows of places."""

import math

import numpy as np
import pytest
import torch

from namm.generative.networks.dit import Block, DiT, RotaryAttention, positions, rotated

ROWS, COLUMNS, WIDTH, HEADS = 3, 5, 16, 2
SIZE = WIDTH // HEADS
LIKE = torch.zeros((), dtype=torch.float64)


def waves(rows: int = ROWS, columns: int = COLUMNS, away: float = 0.0) -> torch.Tensor:
    theta = positions(rows, columns, SIZE // 2, like=LIKE) + away
    return torch.cat([theta.cos(), theta.sin()], dim=-1)


def attention() -> RotaryAttention:
    layer = RotaryAttention(WIDTH, HEADS).double()
    torch.nn.init.normal_(layer.gain, 1.0, 0.5)
    return layer


def test_positions_are_rows_and_columns_times_frequencies():
    frequencies = [100 ** (-j / 2) for j in range(2)]
    expected = [[n * w for n in (row, column) for w in frequencies] for row in range(ROWS) for column in range(COLUMNS)]
    np.testing.assert_allclose(positions(ROWS, COLUMNS, 4, like=LIKE).numpy(), expected, atol=1e-14)


@torch.no_grad()
def test_attention_is_softmax_of_rotated_products():
    layer, x = attention(), torch.randn(2, ROWS * COLUMNS, WIDTH, dtype=torch.float64)
    q, k, v = ((x @ w.T + b).numpy() for w, b in zip(layer.qkv.weight.chunk(3), layer.qkv.bias.chunk(3), strict=True))
    theta, gain = positions(ROWS, COLUMNS, SIZE // 2, like=LIKE).numpy(), layer.gain.numpy()
    heads = []
    for head in range(HEADS):
        part = slice(head * SIZE, (head + 1) * SIZE)
        turned = []
        for entries, scale in ((q[..., part], gain[0]), (k[..., part], gain[1])):
            unit = scale * entries / np.sqrt(np.square(entries).mean(-1, keepdims=True))
            turned.append((unit[..., : SIZE // 2] + 1j * unit[..., SIZE // 2 :]) * np.exp(1j * theta))
        scores = np.exp(np.einsum("bnd,bmd->bnm", turned[0], turned[1].conj()).real / math.sqrt(SIZE))
        heads.append(scores / scores.sum(-1, keepdims=True) @ v[..., part])
    expected = np.concatenate(heads, -1) @ layer.out.weight.numpy().T + layer.out.bias.numpy()
    np.testing.assert_allclose(layer(x, waves()).numpy(), expected, atol=1e-12)


def test_scores_depend_on_differences_of_places():
    q, k = torch.randn(2, ROWS * COLUMNS, SIZE, dtype=torch.float64)
    here, there = (rotated(q, turn) @ rotated(k, turn).T for turn in (waves(), waves(away=0.7)))
    torch.testing.assert_close(here, there, atol=1e-12, rtol=0)
    assert not torch.allclose(here, q @ k.T, atol=0.1)


@torch.no_grad()
def test_attention_follows_tokens_that_change_places_with_their_angles():
    layer, order = attention(), torch.randperm(ROWS * COLUMNS)
    x = torch.randn(1, ROWS * COLUMNS, WIDTH, dtype=torch.float64)
    moved = layer(x[:, order], waves()[order])
    torch.testing.assert_close(moved, layer(x, waves())[:, order], atol=1e-12, rtol=0)
    assert not torch.allclose(layer(x[:, order], waves()), moved, atol=1e-3)


def test_blocks_begin_as_the_identity():
    network = DiT(filters=4, width=WIDTH, depth=1, heads=HEADS, patch=2).double()
    (block,) = network.blocks
    assert isinstance(block, Block)
    x, time = torch.randn(2, ROWS * COLUMNS, WIDTH, dtype=torch.float64), torch.randn(2, WIDTH, dtype=torch.float64)
    assert torch.equal(block(x, time, waves()), x)


@torch.no_grad()
@pytest.mark.parametrize("along", ["rows", "columns"])
def test_the_network_knows_where_a_patch_lies(along):
    network = DiT(filters=4, width=WIDTH, depth=1, heads=HEADS, patch=2).double().eval()
    for weight in (network.tail.weight, network.modulation.weight):
        torch.nn.init.normal_(weight)
    size = (40, 8) if along == "rows" else (8, 40)
    out = network(torch.ones(1, 1, *size, dtype=torch.float64), torch.tensor(0.5))
    inner = out[0, 0, 12:28, 2:6] if along == "rows" else out[0, 0, 2:6, 12:28].T  # beyond the reach of the edges
    assert (inner[:8] - inner[8:]).abs().max() > 1e-2 * inner.abs().max()
    network.place.weight.zero_()
    out = network(torch.ones(1, 1, *size, dtype=torch.float64), torch.tensor(0.5))
    inner = out[0, 0, 12:28, 2:6] if along == "rows" else out[0, 0, 2:6, 12:28].T
    assert (inner[:8] - inner[8:]).abs().max() < 1e-9 * inner.abs().max()
