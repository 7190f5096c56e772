"""No flipped bit in what a run or an export leaves goes unseen, and what has no digests is still read."""

import hashlib
import json
import random
import shutil
import stat
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import namm.digests
from namm import NAMMPipeline, reading
from namm.constraints.count import Counter
from namm.datasets import checksums, open_store, readers
from namm.digests import require_sealed, require_signed, seal, sha256, signed
from namm.errors import CheckpointError, DataError, NammError, RunFolderError
from namm.experiments.engine.folder import read_record, require_intact
from namm.experiments.engine.run import run
from namm.experiments.engine.run_parts import RunParts
from namm.generative.sample_file import SampleFile
from namm.maps import ICNN, MirrorMap, ResNet
from namm.training.checkpoint import Checkpoint, read, write
from namm.weights_file import read_weights, write_weights

FLIPS = 150


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file, in place."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def images(path: Path) -> list[bytes]:
    """Everything that a file of images says."""
    with open_store(path) as store:
        return [store[split][:].numpy().tobytes() for split in ("train", "val", "test")] + [repr(store.parameters)]


def samples(path: Path) -> list[bytes]:
    """Everything that a file of samples says."""
    with SampleFile(path) as file:
        arrays = (file.images[:].numpy(), file.mirror_images[:].numpy(), file.distances)
        return [*(each.tobytes() for each in arrays), file.compute_seconds, repr(file.parameters)]


def checkpoint(path: Path) -> list:
    """Everything that a checkpoint says."""
    kept = read(path)
    return [repr(kept.facts), *((name, tensor.numpy().tobytes()) for name, tensor in sorted(kept.tensors.items()))]


def state(module: torch.nn.Module) -> list:
    return [(name, tensor.numpy().tobytes()) for name, tensor in module.state_dict().items()]


def mirror(path: Path) -> list:
    """Everything that a saved map says, of whose files `path` is one."""
    loaded = MirrorMap.load(path.parent.parent)
    return [*state(loaded), repr(loaded), loaded.standardisation]


def model(path: Path) -> list:
    """Everything that the stage of that trained model says."""
    run_folder = path.parents[2]
    return state(RunParts.load(run_folder).model("mdm"))


def record(path: Path) -> list:
    """Everything that a stage's record and small files say."""
    folder = next(each for each in path.parents if (each / "stage.json").exists())
    require_intact(folder)
    return [repr(read_record(folder)), (folder / "metrics.json").read_text(), (folder / "residuals.npz").read_bytes()]


@pytest.mark.parametrize(
    ("name", "read_all"),
    [
        ("data/images.h5", images),
        ("samples/train.h5", samples),
        ("map/training/checkpoints/step-000000006.safetensors", checkpoint),
        ("mdm/training/milestones/step-000000002.safetensors", checkpoint),
        ("mdm/training/model.safetensors", model),
        ("map/training/mirror/f/diffusion_pytorch_model.safetensors", mirror),
        ("map/training/mirror/g/config.json", mirror),
        ("evaluate/stage.json", record),
        ("evaluate/metrics.json", record),
        ("evaluate/residuals.npz", record),
    ],
)
def test_a_flipped_bit_is_refused_or_changes_nothing(name, read_all, whole_run, tmp_path):
    """Every flip is seen, but in bytes that hold nothing; and a file that was whole is read as it was."""
    folder = tmp_path / "run"
    shutil.copytree(whole_run, folder)
    path, rng, refused = folder / name, random.Random(0), 0
    content, whole = path.read_bytes(), read_all(path)
    for _ in range(FLIPS if path.suffix in (".h5", ".json") else FLIPS // 5):
        flip(path, bit := rng.randrange(8 * len(content)))
        said = ""
        try:
            assert read_all(path) == whole, f"bit {bit}"
        except NammError as error:
            said = str(error)
        assert not said or path.name in said or path.parent.name in said
        refused += bool(said)
        path.write_bytes(content)
    assert refused > 10
    assert read_all(path) == whole


def test_standardisation_is_signed(tmp_path):
    pair = MirrorMap(ICNN(1, layers=1, filters=4), ResNet(1, filters=4, blocks=1, downsamplings=1), [0.5], [2.0])
    pair.save(tmp_path)
    path = tmp_path / "standardisation.json"
    assert MirrorMap.load(tmp_path).standardisation == {"mean": [0.5], "scale": [2.0]}
    path.write_text(path.read_text().replace("2.0", "3.0"))
    with pytest.raises(CheckpointError, match=r"standardisation\.json is not as it was written"):
        MirrorMap.load(tmp_path)
    path.write_text(json.dumps({"mean": [0.5], "scale": [3.0]}))  # as version 0.1 wrote it
    assert MirrorMap.load(tmp_path).standardisation["scale"] == [3.0]


def test_a_counter_is_checked(tmp_path):
    Counter(8).save(path := tmp_path / "counter.safetensors")
    flip(path, 8 * (path.stat().st_size - 10))
    with pytest.raises(CheckpointError, match=r"the counter .*counter\.safetensors is corrupt.*train it again"):
        Counter.load(path)


def test_a_stage_is_not_built_on_damaged_files(whole_run, tiny_preset, tmp_path):
    folder = tmp_path / "burgers"
    shutil.copytree(whole_run, folder)
    shutil.rmtree(folder / "evaluate")
    path = folder / "dm" / "training" / "metrics.jsonl"
    path.write_text(path.read_text().replace("1", "2", 1))
    with pytest.raises(RunFolderError, match=r"changed: .*dm/training/metrics\.jsonl\).*again"):
        run(tiny_preset, folder, until="evaluate", log=lambda line: None, progress=False, force=True)


def test_a_removed_model_is_written_again_from_its_checkpoint(whole_run, tiny_preset, tmp_path):
    """What the errors advise."""
    folder = tmp_path / "burgers"
    shutil.copytree(whole_run, folder)
    kept = folder / "mdm" / "training" / "model.safetensors"
    content, digests = kept.read_bytes(), folder / "map" / "training" / "mirror" / "g" / "digests.json"
    kept.unlink()
    shutil.rmtree(digests.parents[1])
    run(tiny_preset, folder, until="mdm", log=lambda line: None, progress=False, force=True)
    assert kept.read_bytes() == content
    assert digests.read_bytes() == (whole_run / digests.relative_to(folder)).read_bytes()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(bad, tmp_path, whole_run):
    pair = MirrorMap(ICNN(1, layers=1, filters=4), ResNet(1, filters=4, blocks=1, downsamplings=1))
    name, weight = list(pair.f.named_parameters())[2]
    weight.data.view(-1)[1] = bad
    pair.save(tmp_path / "map")
    with pytest.raises(CheckpointError, match=rf"map/f holds no usable weights: 1 of the \d+ numbers in {name}"):
        MirrorMap.load(tmp_path / "map")

    shutil.copytree(whole_run, tmp_path / "run")
    path = tmp_path / "run" / "mdm" / "training" / "model.safetensors"
    without_digests(tmp_path / "run" / "mdm")
    tensors, about = read_weights(path, "it", "no")
    tensors[next(name for name in tensors if name.endswith("weight"))].view(-1)[0] = bad
    write_weights(path, tensors, about)
    with pytest.raises(CheckpointError, match=r"model\.safetensors holds no usable weights: 1 of the"):
        RunParts.load(tmp_path / "run").model("mdm")


def test_a_pipeline_with_weights_that_are_not_finite_is_refused(whole_run, tmp_path):
    from namm.cli import main

    assert main(["export", str(whole_run), "-o", str(tmp_path / "pipe")]) == 0
    pipe = NAMMPipeline.from_pretrained(tmp_path / "pipe")
    for part in ("g", "f", "network"):
        for file in (tmp_path / "pipe" / part).iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o644, file  # readable by whom the umask lets read
    content = "".join(path.read_text() for path in (tmp_path / "pipe").rglob("*.json"))
    content += (tmp_path / "pipe" / "README.md").read_text()
    assert str(whole_run) not in content
    assert str(tmp_path) not in content
    name, weight = next(iter(pipe.network.named_parameters()))
    weight.data.view(-1)[0] = float("nan")
    pipe.save_pretrained(tmp_path / "bad")
    with pytest.raises(CheckpointError, match=rf"network holds no usable weights: 1 of the \d+ numbers in {name}"):
        NAMMPipeline.from_pretrained(tmp_path / "bad")


def test_a_map_that_was_loaded_is_saved_without_its_place(tmp_path):
    pair = MirrorMap(ICNN(1, layers=1, filters=4), ResNet(1, filters=4, blocks=1, downsamplings=1))
    pair.save(tmp_path / "here")
    MirrorMap.load(tmp_path / "here").save(tmp_path / "there")
    for file in (path for path in (tmp_path / "there").rglob("*") if path.is_file()):
        assert file.read_bytes() == (tmp_path / "here" / file.relative_to(tmp_path / "there")).read_bytes()
        assert stat.S_IMODE(file.stat().st_mode) == 0o644


def test_files_without_digests_are_read(tmp_path, whole_run):
    """As version 0.1 wrote them."""
    shutil.copytree(whole_run, tmp_path / "run")
    for stage in ("data", "map", "mdm"):
        without_digests(tmp_path / "run" / stage)
    path = tmp_path / "run" / "mdm" / "training" / "model.safetensors"
    whole = model(path)
    save_file(load_file(path), path)
    assert model(path) == whole
    shutil.rmtree(tmp_path / "map", ignore_errors=True)
    for digests in (tmp_path / "run").rglob("digests.json"):
        digests.unlink()
    MirrorMap.load(tmp_path / "run" / "map" / "training" / "mirror")
    with h5py.File(tmp_path / "run" / "data" / "images.h5", "r+") as file:
        del file.attrs["sha256"]
    assert images(tmp_path / "run" / "data" / "images.h5") == images(whole_run / "data" / "images.h5")
    assert read_record(tmp_path / "run" / "map").digests == {}


def without_digests(stage: Path) -> None:
    """Let a stage's record be as version 0.1 wrote it."""
    path = stage / "stage.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({key: each for key, each in content.items() if key not in ("sha256", "digests")}))


@pytest.mark.parametrize("name", ["data/images.h5", "mdm/training/model.safetensors"])
def test_a_whole_file_of_another_run_is_not_taken_for_this_ones(name, whole_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole_run, folder)
    path = folder / name
    if path.suffix == ".h5":
        content = path.read_bytes()
        with h5py.File(path, "r+") as file:
            file["train"][:1] += 1
            file["checksums/train"][0] = checksums.checksum(file["train"][:64])
        assert path.read_bytes() != content
    else:
        tensors, about = read_weights(path, "it", "no")
        write_weights(path, {each: tensor + 1 for each, tensor in tensors.items()}, about)
    with pytest.raises(RunFolderError, match=rf"changed: .*{path.name}\): copy it anew"):
        RunParts.load(folder).folder(name.partition("/")[0])


def test_only_the_rows_that_are_read_are_compared_and_each_once(whole_run, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "SETTLED", -1)
    path = tmp_path / "images.h5"
    shutil.copy(whole_run / "data" / "images.h5", path)
    with h5py.File(path, "r+") as file:
        file["train"][70] += 1  # in the second block of 64
    compared = []
    monkeypatch.setattr(
        checksums, "checksum", lambda values, real=checksums.checksum: compared.append(1) or real(values)
    )
    with open_store(path) as store:
        for index in (slice(0, 10), np.array([3, 60]), 5):
            store["train"][index]
        assert len(compared) == 1
        for index in (slice(60, 65), np.array([3, 79]), 64):
            with pytest.raises(DataError, match=r"images\.h5 is damaged \(rows 64 to 79 of 'train' do not match"):
                store["train"][index]
    with open_store(path) as store:
        compared.clear()
        store["train"][:64]
        assert compared == []
    with readers.open_images(path) as lazily, pytest.raises(DataError, match="is damaged"):
        lazily[:]


def test_a_file_is_hashed_once_until_it_changes(tmp_path, monkeypatch):
    hashed = []
    monkeypatch.setattr(reading, "SETTLED", -1)
    monkeypatch.setattr(hashlib, "file_digest", lambda *a, real=hashlib.file_digest: hashed.append(1) or real(*a))
    path = tmp_path / "x"
    path.write_text("one")
    assert sha256(path) == sha256(path) == hashlib.sha256(b"one").hexdigest()
    assert len(hashed) == 1
    path.write_text("three")
    assert sha256(path) == hashlib.sha256(b"three").hexdigest()
    assert len(hashed) == 2


def test_a_file_that_has_just_changed_is_hashed_every_time(tmp_path, monkeypatch):
    """Within a tick of the disk's clock it may change again and have the same date."""
    monkeypatch.setattr(namm.digests, "stamp", lambda path: (0, 0, 0, at, at))
    path, at = tmp_path / "x", time.time_ns()
    for content in (b"one", b"two"):
        path.write_bytes(content)
        assert sha256(path) == hashlib.sha256(content).hexdigest()


def test_facts_of_a_checkpoint_are_part_of_its_digest(tmp_path):
    write(path := tmp_path / "c", Checkpoint({"a": torch.ones(3)}, {"step": 3}))
    content = path.read_bytes()
    assert content.count(b'\\"step\\": 3') == 1
    path.write_bytes(content.replace(b'\\"step\\": 3', b'\\"step\\": 7'))
    with pytest.raises(CheckpointError, match="is corrupt"):
        read(path)


@pytest.mark.parametrize("name", ["sha256", "namm"])
def test_weights_whose_digest_has_lost_its_name_are_no_unsigned_ones(tmp_path, name):
    write(path := tmp_path / "c", Checkpoint({"a": torch.ones(3)}, {"step": 3}))
    content = bytearray(path.read_bytes().replace(name.encode(), b"z" + name[1:].encode()))
    content[-2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="is corrupt"):
        read(path)


def test_a_standardisation_whose_digest_has_lost_its_name_is_refused(tmp_path):
    pair = MirrorMap(ICNN(1, layers=1, filters=4), ResNet(1, filters=4, blocks=1, downsamplings=1), [0.5], [2.0])
    pair.save(tmp_path)
    path = tmp_path / "standardisation.json"
    path.write_text(path.read_text().replace("sha256", "sha255").replace("2.0", "3.0"))
    with pytest.raises(CheckpointError, match=r"standardisation\.json cannot be read \(it holds mean, scale, sha255\)"):
        MirrorMap.load(tmp_path)


def test_a_sealed_folder_and_a_signed_object(tmp_path):
    (tmp_path / "a").write_text("a")
    require_sealed(tmp_path, "no matter")  # nobody has sealed it
    seal(tmp_path)
    require_sealed(tmp_path, "no matter")
    (tmp_path / "a").unlink()
    with pytest.raises(CheckpointError, match=r"missing: .*/a\): copy it anew\."):
        require_sealed(tmp_path, "copy it anew.")
    (tmp_path / "digests.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"digests\.json cannot be read"):
        require_sealed(tmp_path, "copy it anew.")
    content = {"a": [1.5, None], "b": {"c": "ℓ"}}
    back = json.loads(json.dumps(signed(content)))
    assert require_signed(tmp_path, back, "", DataError) == content
    assert require_signed(tmp_path, content, "", DataError) == content  # unsigned
    with pytest.raises(DataError, match="does not match"):
        require_signed(tmp_path, back | {"a": [1.5, 0]}, "", DataError)
    with pytest.raises(DataError, match="no JSON object"):
        require_signed(tmp_path, [back], "", DataError)
