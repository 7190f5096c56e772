"""States that are incomplete, foreign or hostile are refused before anything is built or written."""

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from flax_encoding import packed

from namm.errors import CheckpointError
from namm.import_flax import OfficialState, official_map
from namm.maps import ResNet

KERNEL = np.zeros((3, 3, 1, 8), np.float32)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"weights": {}}, "neither a NAMM state .* its fields are: weights"),
        ({"params": {"Conv_0": {"kernel": KERNEL}}}, "no weights in the field 'params_ema'"),
        ({"params_ema": {"Conv_0": {"kernel": KERNEL}}}, "not a network of the official code"),
        (
            {"params_ema": {"Conv_0": {"kernel": KERNEL * np.float32(np.nan)}}},
            "Conv_0/kernel is not an array of finite",
        ),
        ({"params_ema": {"Conv_0": {"kernel": 1}}}, "Conv_0/kernel is not an array"),
        ({"params_ema": {"Conv_0": {"kernel": KERNEL[:, :0]}}}, "Conv_0/kernel is not an array of finite"),
        ({"fwd_params_ema": {"a": KERNEL}}, "no weights in the field 'bwd_params'"),
        ({"fwd_params_ema": {"a": KERNEL}, "bwd_params": {"a": KERNEL}}, "array 'final_conv2d/kernel' is missing"),
    ],
)
def test_incomplete_states_are_refused(tmp_path, state, message):
    (tmp_path / "checkpoint").write_bytes(packed(state))
    with pytest.raises(CheckpointError, match=message):
        import_module("namm.cli.import").main([str(tmp_path / "checkpoint"), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def layer(kernel: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {"kernel": np.full(kernel, 0.5, np.float32), "bias": np.zeros(kernel[-1], np.float32)}


def norm(filters: int) -> dict[str, np.ndarray]:
    return {"scale": np.ones(filters, np.float32), "bias": np.zeros(filters, np.float32)}


def small_map(filters: int) -> OfficialState:
    """A state whose g is complete and whose f claims `filters` in its first layer and has 4 in its others."""
    convex = {"wz_0": layer((1, 1, 1, 1)), "final_conv2d": layer((1, 1, 1, 1))}
    convex = {name: {"kernel": arrays["kernel"]} for name, arrays in convex.items()}
    for k in (0, 1):
        convex |= {f"wx_quad_{k}": {"kernel": np.ones((1, 1, 1, 1), np.float32)}, f"wx_lin_{k}": layer((1, 1, 1, 1))}
    block = {
        "Conv_0": layer((3, 3, 4, 4)),
        "GroupNorm_0": norm(4),
        "Conv_1": layer((3, 3, 4, 4)),
        "GroupNorm_1": norm(4),
    }
    residual = {"Conv_0": layer((7, 7, 1, filters)), "GroupNorm_0": norm(filters)}
    residual |= {"ResNetBlock_0": block, "Conv_1": layer((7, 7, 4, 1))}
    return OfficialState(Path("it"), {"fwd_params_ema": convex, "bwd_params": residual})


def test_shapes_that_fit_are_imported():
    f = official_map(small_map(4)).f
    assert isinstance(f, ResNet)
    assert torch.equal(f.state_dict()["tail.weight"], torch.full((1, 4, 7, 7), 0.5))


def test_a_few_arrays_cannot_ask_for_a_huge_network(monkeypatch):
    """Networks of 10⁵ filters have 10¹¹ weights: no memory may be asked for before the shapes are compared."""
    sizes = []
    register = torch.nn.Module.register_parameter

    def recording(module, name, parameter):
        sizes.append(0 if parameter is None or parameter.is_meta else parameter.numel())
        register(module, name, parameter)

    monkeypatch.setattr(torch.nn.Module, "register_parameter", recording)
    with pytest.raises(CheckpointError, match=r"should have shape \[100000, 100000, 3, 3\] and has \[4, 4, 3, 3\]"):
        official_map(small_map(100_000))
    assert max(sizes) < 1000
