"""What the page's script draws: the pictures of the still figures as numbers, with their colours and coordinates.

A value is a half-precision number times its picture's scale, which keeps it to 1 part in 2000 (0.05 %); one below 10⁻⁹
of the picture's largest is kept less well. A picture that several figures show is stored once.
"""

import base64
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

import matplotlib as mpl
import numpy as np

from namm.report.contents import Contents
from namm.report.figures.base import DEVIATIONS, VALUES, Array, Block
from namm.report.figures.samples import grids_block, image_block, mirror_blocks, residual_block

LARGEST = 2.0**15
"""What the largest value of a picture is scaled to: a power of two below the largest half, 65504."""
ROOM = 540_000
"""Values of a figure, 1.4 MB in the page; of larger pictures it has fewer, or none, and the still figure stays."""
SIDES = (3, 2, 1)
"""Pictures of a set are so many by so many."""


class Pictures:
    """The pictures of a page, each once."""

    def __init__(self) -> None:
        self.stored: list[dict[str, Any]] = []
        self._known: dict[tuple[tuple[int, ...], bytes], int] = {}

    def add(self, picture: Array) -> int:
        """The number of a picture (H, W)."""
        key = picture.shape, picture.astype(np.float32).tobytes()
        if key not in self._known:
            self._known[key] = len(self.stored)
            self.stored.append(encoded(picture))
        return self._known[key]


def encoded(picture: Array) -> dict[str, Any]:
    """A picture (H, W) in halves: value = half × scale."""
    scale = (float(np.abs(picture).max()) or 1.0) / LARGEST
    halves = (picture.astype(np.float64) / scale).astype("<f2")
    height, width = picture.shape
    return {"height": height, "width": width, "scale": scale, "halves": _base64(halves.tobytes())}


def page_data(c: Contents) -> dict[str, Any]:
    """Everything that the script is given, as JSON values; figures without interaction are not among its panels."""
    pictures, panels = Pictures(), {}
    for name, blocks in _panels(c).items():
        if fitting := _fitting(blocks):
            panels[name] = [_block(block, pictures) for block in fitting]
    colours = {"values": _colours(VALUES), "deviations": _colours(DEVIATIONS)}
    return {
        "colours": colours,
        "coordinates": asdict(c.view.coordinates),
        "axes": c.view.coordinates.in_words(*first.shape) if (first := _first(c)) is not None else "",
        "pictures": pictures.stored,
        "panels": panels,
    }


def _first(c: Contents) -> Array | None:
    """A picture of an image, if there is one."""
    found = [*(method.images for method in c.methods), *c.grids.values()]
    return c.view.show(found[0][:1])[0] if found else None


def _panels(c: Contents) -> dict[str, list[Block]]:
    """The blocks of every figure that is one of pictures."""
    found: dict[str, list[Block | None]] = {
        name: [image_block(methods, c.view), residual_block(methods, c.view)]
        for name, methods in (("samples", c.methods), ("worst", c.worst))
        if methods
    }
    if c.mirror:
        found["mirror"] = [*mirror_blocks(c.mirror, c.view)]
    if c.grids:
        found["grids"] = [_grids(c)]
    return {name: [block for block in blocks if block is not None] for name, blocks in found.items()}


def _grids(c: Contents) -> Block:
    """The first images of each set, in squares as large as there is room for."""
    blocks = (grids_block(c.grids, c.view, side**2) for side in SIDES)
    return next((block for block in blocks if _values([block]) <= ROOM), grids_block(c.grids, c.view, 1))


def _fitting(blocks: Sequence[Block]) -> Sequence[Block]:
    return blocks if _values(blocks) <= ROOM else ()


def _values(blocks: Sequence[Block]) -> int:
    return sum(row.size for block in blocks for row in block.rows)


def _block(block: Block, pictures: Pictures) -> dict[str, Any]:
    captions = block.captions or [[]] * len(block.rows)
    rows = [
        {"name": name, "pictures": [pictures.add(picture) for picture in row], "captions": list(texts)}
        for name, row, texts in zip(block.names, block.rows, captions, strict=True)
    ]
    return {
        "label": block.label,
        "symbol": block.symbol,
        "signed": block.signed,
        "ends": list(block.ends),
        "offset": list(block.offset),
        "rows": rows,
    }


@cache
def _colours(name: str) -> str:
    """A colour map as 256 times three bytes."""
    return _base64((mpl.colormaps[name](np.arange(256))[:, :3] * 255).round().astype(np.uint8).tobytes())


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
