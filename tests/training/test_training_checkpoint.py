"""Checkpoints are whole or absent, and damage is noticed."""

import pytest
import torch

from namm.errors import CheckpointError
from namm.files import remove_partials
from namm.training.checkpoint import Checkpoint, CheckpointFolder, read, write

TENSORS = {
    "weights": torch.randn(7, 5, dtype=torch.float64),
    "half": torch.randn(3).to(torch.bfloat16),
    "count": torch.tensor(3),
    "empty": torch.zeros(0, 2),
}


def test_what_is_written_is_read(tmp_path):
    facts = {"step": 12, "losses": {"loss": 0.1 + 0.2}, "none": None}
    write(tmp_path / "c", Checkpoint(TENSORS, facts))
    again = read(tmp_path / "c")
    assert again.facts == facts
    assert again.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert again.tensors[name].dtype == tensor.dtype
        assert torch.equal(again.tensors[name], tensor)


def test_the_same_content_gives_the_same_bytes(tmp_path):
    for k in range(8):
        write(tmp_path / str(k), Checkpoint(TENSORS, {"step": 1}))
    assert len({(tmp_path / str(k)).read_bytes() for k in range(8)}) == 1


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncation_is_noticed(tmp_path, keep):
    path = tmp_path / "c"
    write(path, Checkpoint(TENSORS, {}))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="truncated or not one of ours"):
        read(path)


def test_a_flipped_bit_is_noticed(tmp_path):
    path = tmp_path / "c"
    write(path, Checkpoint(TENSORS, {}))
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="corrupt"):
        read(path)


def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_used(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        folder.save(step, Checkpoint(TENSORS, {"step": step}))
    newest = folder.paths()[-1]
    newest.write_bytes(newest.read_bytes()[:-10])
    (tmp_path / ".step-000000003.safetensors.1.partial").write_bytes(b"cut short")
    with pytest.warns(UserWarning, match=f"{newest.name}.*Going back to the one before"):
        found = folder.latest()
    assert found.facts["step"] == 1
    assert list(tmp_path.glob(".*.partial"))  # another process may be writing it
    remove_partials(tmp_path)
    assert not list(tmp_path.glob(".*.partial"))


def test_when_none_can_be_read_nothing_is_started_over(tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.save(1, Checkpoint(TENSORS, {}))
    folder.paths()[0].write_bytes(b"")
    with pytest.warns(UserWarning, match="empty"), pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        folder.latest()
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):  # nor when it is tried again
        folder.latest()


def test_trouble_with_the_disk_is_not_taken_for_damage(tmp_path, monkeypatch):
    folder = CheckpointFolder(tmp_path)
    folder.save(1, Checkpoint(TENSORS, {}))

    def broken(*arguments, **options):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("namm.weights_file.safe_open", broken)
    with pytest.raises(OSError, match="Input/output"):
        folder.latest()
    assert len(folder.paths()) == 1


def test_tied_weights_can_be_written(tmp_path):
    weight = torch.randn(3, 3)
    write(tmp_path / "c", Checkpoint({"a": weight, "b": weight, "c": weight.T}, {}))
    again = read(tmp_path / "c").tensors
    assert torch.equal(again["a"], again["b"])
    assert torch.equal(again["c"], weight.T)


def test_only_the_last_few_are_kept(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in range(5):
        folder.save(step, Checkpoint({}, {"step": step}))
    assert [path.stem for path in folder.paths()] == ["step-000000003", "step-000000004"]
    assert folder.latest().facts["step"] == 4


def test_no_checkpoint(tmp_path):
    assert CheckpointFolder(tmp_path / "nothing").latest() is None


def test_a_checkpoint_that_a_killed_process_did_not_remove_is_removed(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=9)
    for step in range(5):
        folder.save(step, Checkpoint(TENSORS, {}))
    CheckpointFolder(tmp_path, keep=3).prune()
    assert [path.stem for path in folder.paths()] == [f"step-{step:09d}" for step in (2, 3, 4)]
