"""The authors' checkpoints become networks of ours that give the authors' numbers; other files are refused."""

import json
import math
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

from namm import MirrorMap
from namm.cli import main
from namm.errors import CheckpointError, UsageError
from namm.generative import NCSNpp
from namm.generative.networks.ncsnpp.layers import SelfAttention
from namm.import_flax import OfficialState, official_map, official_network, read_official

MAP, MDM, OUTPUTS = "checkpoint_namm.msgpack", "checkpoint_mdm.msgpack", "checkpoint_outputs.npz"
NAMES = {"raw": "params", "ema": "ema"}
FLOAT32, FLOAT64 = (torch.float32, "", 1e-5), (torch.float64, "_f64", 1e-9)


def command(*arguments: str | Path) -> None:
    import_module("namm.cli.import").main([str(argument) for argument in arguments])


def exit_code(*arguments: str | Path) -> int:
    return main(["import", *map(str, arguments)])


def nchw(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).permute(0, 3, 1, 2)


@pytest.fixture
def outputs(parity):
    return parity(OUTPUTS)


@pytest.fixture
def folder(outputs) -> Path:
    return Path(outputs.zip.filename).parent


@pytest.fixture
def imported_map(outputs, folder):
    state = read_official(folder / MAP)
    return lambda weights: official_map(
        state,
        weights,
        residual=bool(outputs["cfg/bwd_residual"]),
        activation=str(outputs["cfg/bwd_activation"]),
        strong_convexity=float(outputs["cfg/fwd_strong_convexity"]),
    )


def difference(result: torch.Tensor, expected: np.ndarray) -> float:
    return float((result - nchw(expected)).abs().max())


@pytest.mark.parametrize(("dtype", "suffix", "tolerance"), [FLOAT32, FLOAT64])
@pytest.mark.parametrize("weights", ["raw", "ema"])
@torch.no_grad()
def test_map(outputs, imported_map, weights, dtype, suffix, tolerance):
    mirror, x = imported_map(weights).to(dtype), nchw(outputs["x"]).to(dtype)
    assert difference(mirror.to_mirror(x), outputs[f"g_{NAMES[weights]}{suffix}"]) <= tolerance
    assert difference(mirror.to_data(x), outputs[f"f_{NAMES[weights]}{suffix}"]) <= tolerance


@pytest.mark.parametrize(("dtype", "suffix", "tolerance"), [FLOAT32, FLOAT64])
@pytest.mark.parametrize("weights", ["raw", "ema"])
@torch.no_grad()
def test_score_network(outputs, folder, weights, dtype, suffix, tolerance):
    x, t = nchw(outputs["score_x"]).to(dtype), torch.from_numpy(outputs["t"]).to(dtype)
    network = official_network(read_official(folder / MDM), weights, height=x.shape[2]).to(dtype)
    output = network(x, t)
    std = (-torch.expm1(-0.5 * 19.9 * t**2 - 0.1 * t)).sqrt()[:, None, None, None]
    assert difference(output, outputs[f"network_{NAMES[weights]}{suffix}"]) <= tolerance
    assert difference(-output / std, outputs[f"score_{NAMES[weights]}{suffix}"]) <= tolerance / std.min()


@torch.no_grad()
def test_default_takes_the_copies_that_the_official_sampling_uses(outputs, folder, imported_map):
    mirror, x = imported_map("published"), nchw(outputs["x"])
    assert difference(mirror.to_mirror(x), outputs["g_ema"]) <= 1e-5
    assert difference(mirror.to_data(x), outputs["f_params"]) <= 1e-5
    y = nchw(outputs["score_x"])
    network = official_network(read_official(folder / MDM), height=y.shape[2])
    assert difference(network(y, torch.from_numpy(outputs["t"])), outputs["network_ema"]) <= 1e-5


@torch.no_grad()
def test_command_writes_networks_that_load(outputs, folder, tmp_path, capsys):
    residual, activation = ("yes" if outputs["cfg/bwd_residual"] else "no"), str(outputs["cfg/bwd_activation"])
    map_options = ("--weights", "ema", "--residual", residual, "--activation", activation)
    assert exit_code(folder / MAP, "--out", tmp_path, *map_options) == 0
    x, y = nchw(outputs["x"]), nchw(outputs["score_x"])
    assert exit_code(folder / MDM, "--out", tmp_path, "--weights", "raw", "--height", str(y.shape[2])) == 0
    mirror, network = MirrorMap.load(tmp_path), NCSNpp.from_pretrained(tmp_path / "network")
    assert difference(mirror.to_mirror(x), outputs["g_ema"]) <= 1e-5
    assert difference(mirror.to_data(x), outputs["f_ema"]) <= 1e-5
    assert difference(network(y, torch.from_numpy(outputs["t"])), outputs["network_params"]) <= 1e-5
    source = json.loads((tmp_path / "imported-network.json").read_text())
    assert (source["epoch"], source["weights"]) == (int(outputs["mdm_epoch"]), "raw")
    assert f"epoch {int(outputs['namm_epoch'])}" in capsys.readouterr().out
    with pytest.raises(UsageError, match="exists already and is not overwritten"):
        command(folder / MDM, "--out", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("g", "f", "network", "imported-map.json", "imported-network.json")
    }


def test_command_needs_no_options_where_shapes_tell(outputs, folder, tmp_path):
    assert exit_code(folder / MDM, "--out", tmp_path) == 0
    config = NCSNpp.load_config(tmp_path / "network")
    assert config["filters"] == int(outputs["cfg/nf"])
    assert config["multipliers"] == outputs["cfg/ch_mult"].tolist()
    assert config["blocks"] == int(outputs["cfg/num_res_blocks"])


def test_heights_that_shapes_cannot_tell_apart(parity, outputs):
    file = parity("ncsnpp.npz")
    multipliers, attention, height = (
        file["cfg/ch_mult"].tolist(),
        file["cfg/attn_resolutions"].tolist(),
        file["x"].shape[1],
    )
    level = [height / 2**i in attention for i in range(len(multipliers))].index(True)
    alike = {attention[0] * 2**i for i, multiplier in enumerate(multipliers) if multiplier == multipliers[level]}
    arrays = {key.removeprefix("params/"): file[key] for key in file if key.startswith("params/")}
    state = OfficialState(Path("file"), {"params_ema": arrays})
    for other in (8, 16, 32, 64, 128, 256):
        if other not in alike:
            with pytest.raises(UsageError, match=f"not {other}; give --height"):
                official_network(state, height=other, attention=attention)
        else:
            attended = [m.attention for m in official_network(state, height=other, attention=attention).up]
            assert [isinstance(m, SelfAttention) for m in attended[::-1]].index(True) == math.log2(other / attention[0])


def test_command_refuses_what_it_cannot_do(folder, tmp_path):
    with pytest.raises(UsageError, match="which file"):
        command()
    with pytest.raises(UsageError, match="these weights fit"):
        command(folder / MDM, "--out", tmp_path / "a", "--height", "4096")
    assert exit_code(folder / MDM, "--weights", "other") == 2
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("name", [MAP, MDM])
def test_truncated_files_are_refused(folder, tmp_path, name):
    content = (folder / name).read_bytes()
    for kept in (1, 2, 20, 1000, len(content) // 2, len(content) - 1):
        (tmp_path / name).write_bytes(content[:kept])
        with pytest.raises(CheckpointError, match="truncated or corrupt"):
            read_official(tmp_path / name)
    (tmp_path / name).write_bytes(content + b"\0")
    with pytest.raises(CheckpointError, match="1 bytes follow its end"):
        read_official(tmp_path / name)


def test_the_wrong_kind_of_state_is_refused(folder):
    with pytest.raises(CheckpointError, match="holds a map, not a network"):
        official_network(read_official(folder / MAP))
    with pytest.raises(CheckpointError, match="holds a network, not a map"):
        official_map(read_official(folder / MDM))
