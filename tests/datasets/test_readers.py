"""What h5py, NumPy and Pillow wrote comes back as it was, and every bad file gets its own sentence."""

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from namm.datasets.readers import open_images, read_images
from namm.errors import DataError, UsageError

RNG = np.random.default_rng(0)
NCHW = RNG.normal(size=(7, 2, 5, 6)).astype(np.float32)
NHWC = NCHW.transpose(0, 2, 3, 1)


def save(path, array, key="images"):
    match path.suffix:
        case ".npy":
            np.save(path, array)
        case ".npz":
            np.savez(path, **{key: array, "other": np.zeros(3)})
        case _:
            with h5py.File(path, "w") as file:
                file[key] = array
                file["deep/other"] = np.zeros(3)
    return path


def key_for(path):
    return None if path.suffix == ".npy" else "images"


SUFFIXES = pytest.mark.parametrize("suffix", [".h5", ".hdf5", ".npy", ".npz"])


@SUFFIXES
@pytest.mark.parametrize(("layout", "array"), [("NCHW", NCHW), ("NHWC", NHWC)])
@pytest.mark.parametrize("dtype", ["f4", "f8", ">f4"])
def test_floats_come_back_in_nchw(tmp_path, suffix, layout, array, dtype):
    path = save(tmp_path / f"x{suffix}", array.astype(dtype))
    x = read_images(path, key=key_for(path), layout=layout)
    assert x.dtype == torch.float32
    assert x.is_contiguous()
    np.testing.assert_array_equal(x, NCHW)
    x += 1  # nothing on disk may change, nor may torch refuse
    np.testing.assert_array_equal(read_images(path, key=key_for(path), layout=layout), NCHW)


@SUFFIXES
def test_bytes_are_scaled_to_the_unit_interval_and_booleans_taken_as_such(tmp_path, suffix):
    pixels = np.arange(256, dtype=np.uint8).reshape(4, 1, 8, 8)
    path = save(tmp_path / f"x{suffix}", pixels)
    x = read_images(path, key=key_for(path), layout="NCHW")
    np.testing.assert_allclose(x.double(), pixels / 255.0, atol=1e-7)
    assert (x.min(), x.max()) == (0, 1)
    path = save(tmp_path / f"b{suffix}", pixels > 100)
    np.testing.assert_array_equal(read_images(path, key=key_for(path), layout="NCHW"), pixels > 100)


@SUFFIXES
@pytest.mark.parametrize(
    ("array", "layout", "sentence"),
    [
        (NCHW[:, 0], "NCHW", r"has 3 axes, \(7, 5, 6\), and images need 4 in the order NCHW.*channel axis"),
        (NCHW[0, 0], "NCHW", r"has 2 axes, \(5, 6\)"),
        (np.float32(1), "NCHW", r"has 0 axes"),
        (NCHW[:0], "NCHW", r"is empty: its shape is \(0, 2, 5, 6\)"),
        (NCHW.astype(np.int32), "NCHW", r"int32 integers, whose scale is unknown.*convert it to float32"),
        (NCHW.astype(np.complex64), "NCHW", r"values of type complex64"),
        (
            np.zeros((3, 1, 64, 64)),
            "NHWC",
            r"64 channels.*axis 3 is 64 long while axis 1 is 1.*layout='NCHW'",
        ),
        (
            np.zeros((3, 64, 48, 3)),
            "NCHW",
            r"64 channels.*axis 1 is 64 long while axis 3 is 3.*layout='NHWC'",
        ),
        (np.full((2, 1, 4, 4), 1e300), "NCHW", r"holds inf at index \(0, 0, 0, 0\)"),
    ],
)
def test_arrays_that_are_no_images_are_refused(tmp_path, suffix, array, layout, sentence):
    path = save(tmp_path / f"bad{suffix}", array)
    with pytest.raises(DataError, match=rf"bad\{suffix}.*{sentence}"):
        read_images(path, key=key_for(path), layout=layout)


@pytest.mark.parametrize(("shape", "layout"), [((2, 16, 4, 4), "NCHW"), ((2, 8, 8, 3), "NHWC"), ((2, 3, 4, 9), "NCHW")])
def test_small_images_with_many_channels_are_believed(tmp_path, shape, layout):
    path = save(tmp_path / "x.npy", np.zeros(shape))
    n, a, b, c = shape
    assert read_images(path, layout=layout).shape == (shape if layout == "NCHW" else (n, c, a, b))


@SUFFIXES
@given(
    where=st.tuples(*(st.integers(0, n - 1) for n in NHWC.shape)),
    value=st.sampled_from([np.nan, np.inf, -np.inf]),
)
def test_the_first_nan_is_named_by_its_index_in_the_file(tmp_path_factory, suffix, where, value):
    array = NHWC.copy()
    array[where] = value
    array[-1, -1, -1, -1] = np.nan
    path = save(tmp_path_factory.mktemp("nan") / f"x{suffix}", array)
    with pytest.raises(DataError) as caught:
        read_images(path, key=key_for(path), layout="NHWC")
    assert f"at index {tuple(where)}" in str(caught.value)
    assert str(array[where]) in str(caught.value)


@pytest.mark.parametrize("suffix", [".h5", ".npz"])
def test_missing_keys_list_those_there_are(tmp_path, suffix):
    path = save(tmp_path / f"x{suffix}", NCHW)
    other = "deep/other" if suffix == ".h5" else "other"
    with pytest.raises(DataError, match=r"has no array 'img'; its keys are: .*images") as caught:
        read_images(path, key="img", layout="NCHW")
    assert other in str(caught.value)
    with pytest.raises(DataError, match=r"no key says which.*images"):
        read_images(path, layout="NCHW")


def test_a_group_is_not_an_array(tmp_path):
    path = save(tmp_path / "x.h5", NCHW)
    with pytest.raises(DataError, match=r"no array 'deep'; its keys are: deep/other, images"):
        read_images(path, key="deep", layout="NCHW")


@SUFFIXES
def test_the_layout_must_be_said(tmp_path, suffix):
    path = save(tmp_path / f"x{suffix}", NCHW)
    with pytest.raises(UsageError, match="does not say which axis holds the channels"):
        read_images(path, key=key_for(path))
    with pytest.raises(UsageError, match=r"no layout 'CHW'; the layouts are NCHW and NHWC"):
        read_images(path, key=key_for(path), layout="CHW")


@SUFFIXES
@given(keep=st.floats(0, 0.98))
def test_truncated_files_are_refused(tmp_path_factory, suffix, keep):
    path = save(tmp_path_factory.mktemp("cut") / f"x{suffix}", NCHW)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole))])
    with pytest.raises(DataError, match=rf"x\{suffix} cannot be read as"):
        read_images(path, key=key_for(path), layout="NCHW")


@SUFFIXES
def test_files_of_another_kind_are_refused(tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    path.write_text("these are not images")
    with pytest.raises(DataError, match="of another kind"):
        read_images(path, key=key_for(path), layout="NCHW")


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_pickles_are_not_opened(tmp_path, suffix):
    path = save(tmp_path / f"x{suffix}", np.array([{"a": 1}], dtype=object))
    with pytest.raises(DataError, match="holds Python objects"):
        read_images(path, key=key_for(path), layout="NCHW")


def test_an_npy_file_renamed_to_npz_is_refused(tmp_path):
    save(tmp_path / "x.npy", NCHW).rename(tmp_path / "x.npz")
    with pytest.raises(DataError, match="cannot be read as an NPZ file"):
        read_images(tmp_path / "x.npz", key="images", layout="NCHW")


def test_missing_files_wrong_suffixes_and_useless_keys_are_named(tmp_path):
    with pytest.raises(DataError, match=r"no file or folder .*gone\.npy"):
        read_images(tmp_path / "gone.npy", layout="NCHW")
    with pytest.raises(DataError, match=r"no file .*gone\.h5"):
        open_images(tmp_path / "gone.h5", key="x", layout="NCHW")
    (tmp_path / "x.tiff").touch()
    with pytest.raises(DataError, match=r"suffix '\.tiff'.*folder of \.png"):
        read_images(tmp_path / "x.tiff", layout="NCHW")
    with pytest.raises(DataError, match="key 'a' has no meaning"):
        read_images(save(tmp_path / "x.npy", NCHW), key="a", layout="NCHW")


class TestLazy:
    @pytest.fixture(params=["NCHW", "NHWC"])
    def lazy(self, request, tmp_path):
        path = save(tmp_path / "x.h5", NCHW if request.param == "NCHW" else NHWC)
        with open_images(path, key="images", layout=request.param) as images:
            yield images

    @pytest.mark.parametrize(
        "index",
        [
            0,
            -1,
            slice(None),
            slice(2, 5),
            slice(5, 2),
            slice(None, None, -2),
            [3, 0, 3],
            np.array([6, -7]),
            [],
            2 * [1],
        ],
    )
    def test_indexing_is_that_of_the_array(self, lazy, index):
        expected = NCHW[np.asarray(index, dtype=int)] if isinstance(index, list) else NCHW[index]
        assert lazy[index].shape == expected.shape
        np.testing.assert_array_equal(lazy[index], expected)

    def test_a_tensor_indexes_too(self, lazy):
        np.testing.assert_array_equal(lazy[torch.tensor([2, 1])], NCHW[[2, 1]])

    def test_shape_and_length(self, lazy):
        assert lazy.shape == NCHW.shape
        assert len(lazy) == 7

    def test_pieces_cover_everything(self, lazy, monkeypatch):
        monkeypatch.setattr("namm.datasets.readers.PIECE_BYTES", 2 * NCHW[0].nbytes)
        assert len(lazy.pieces()) == 4
        np.testing.assert_array_equal(torch.cat([lazy[s] for s in lazy.pieces()]), NCHW)

    @pytest.mark.parametrize("index", [7, -8, [0, 7]])
    def test_indices_outside_are_refused(self, lazy, index):
        with pytest.raises(IndexError, match="outside the 7 images"):
            lazy[index]

    def test_masks_and_floats_are_refused(self, lazy):
        for index in (np.ones(7, bool), [0.5]):
            with pytest.raises(TypeError, match="indexed by integers"):
                lazy[index]

    def test_nan_is_found_where_it_is_read(self, tmp_path):
        array = NCHW.copy()
        array[4, 1, 2, 3] = np.nan
        with open_images(save(tmp_path / "nan.h5", array), key="images", layout="NCHW") as images:
            np.testing.assert_array_equal(images[:4], NCHW[:4])
            for index in (4, [6, 4], slice(3, 6)):
                with pytest.raises(DataError, match=r"nan at index \(4, 1, 2, 3\)"):
                    images[index]


class TestPngs:
    def write(self, folder, name, pixels, mode=None):
        Image.fromarray(pixels, mode).save(folder / name)

    def test_grey_and_colour_come_back_in_order_of_name(self, tmp_path):
        for channels in (1, 3):
            folder = tmp_path / str(channels)
            folder.mkdir()
            pixels = RNG.integers(0, 256, (3, 5, 4, channels), dtype=np.uint8)
            for name, image in zip(["b.png", "a.png", "c.PNG"], pixels, strict=True):
                self.write(folder, name, image[..., 0] if channels == 1 else image)
            (folder / "notes.txt").write_text("not an image")
            x = read_images(folder)
            assert x.shape == (3, channels, 5, 4)
            np.testing.assert_allclose(x, pixels[[1, 0, 2]].transpose(0, 3, 1, 2) / 255, atol=1e-7)

    def test_one_bit_images_are_zeros_and_ones(self, tmp_path):
        bits = RNG.integers(0, 2, (6, 9)).astype(bool)
        Image.fromarray(bits).save(tmp_path / "a.png")
        np.testing.assert_array_equal(read_images(tmp_path)[0, 0], bits)

    def test_differing_sizes_are_refused_by_name(self, tmp_path):
        self.write(tmp_path, "a.png", np.zeros((5, 4), np.uint8))
        self.write(tmp_path, "b.png", np.zeros((5, 6), np.uint8))
        with pytest.raises(DataError, match=r"b\.png is 5×6 with 1 channel and .*a\.png is 5×4"):
            read_images(tmp_path)

    def test_mixed_colour_is_refused(self, tmp_path):
        self.write(tmp_path, "a.png", np.zeros((5, 4), np.uint8))
        self.write(tmp_path, "b.png", np.zeros((5, 4, 3), np.uint8))
        with pytest.raises(DataError, match="one size and colour mode"):
            read_images(tmp_path)

    @pytest.mark.parametrize(
        ("mode", "pixels"), [("RGBA", np.zeros((3, 3, 4), np.uint8)), ("I;16", np.zeros((3, 3), np.uint16))]
    )
    def test_alpha_and_sixteen_bits_are_refused(self, tmp_path, mode, pixels):
        self.write(tmp_path, "a.png", pixels)
        with pytest.raises(DataError, match=rf"a\.png has the colour mode '{mode}'"):
            read_images(tmp_path)

    def test_damaged_and_disguised_pngs_are_refused(self, tmp_path):
        self.write(tmp_path, "a.png", RNG.integers(0, 256, (40, 40), dtype=np.uint8))
        whole = (tmp_path / "a.png").read_bytes()
        for bad in (whole[: len(whole) // 2], whole[:10], b"", b"text"):
            (tmp_path / "a.png").write_bytes(bad)
            with pytest.raises(DataError, match=r"a\.png cannot be read as a PNG"):
                read_images(tmp_path)

    def test_an_empty_folder_is_refused(self, tmp_path):
        with pytest.raises(DataError, match=r"holds no \.png file"):
            read_images(tmp_path)
