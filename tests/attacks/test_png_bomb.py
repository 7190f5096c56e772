"""A picture of 30 kB that is 16 000 pixels a side, and one of more pixels than Pillow believes."""

import struct
import zlib

import pytest

from namm.datasets import read_images
from namm.errors import DataError


def png(path, width, height, rows):
    """A grey PNG that says `width` × `height`, with so many rows of zeros."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    packed = zlib.compress(bytes((width + 1) * rows), 1)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b""))


def test_rows_that_are_not_there_are_not_black(tmp_path):
    png(tmp_path / "x.png", 7, 8_000_000, 20)  # 56 MB of pixels: no more than one may unpack to
    with pytest.raises(DataError, match=r"x\.png cannot be read as a PNG: 7×8000000 pixels do not fit into .* bytes"):
        read_images(tmp_path)


@pytest.mark.parametrize(("side", "sentence"), [(12_000, "would unpack to"), (60_000, "decompression bomb")])
def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path, side, sentence):
    png(tmp_path / "x.png", side, side, 200)
    with pytest.raises(DataError, match=rf"x\.png.*{sentence}"):
        read_images(tmp_path)
