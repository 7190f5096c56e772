"""One evaluation before sampling: samples that do not fit into memory are refused, and those that fit do not change."""

import pytest
import torch

from namm.constraints import constraint
from namm.errors import MemoryShortage
from namm.experiments.engine import build_models
from namm.generative import DPMSolver
from namm.generative.mirrored import Mirrored
from namm.generative.sample_file import SampleFile, rehearse_sampling, write_samples
from namm.maps import IdentityMap


@pytest.fixture
def model(tiny_preset):
    s = tiny_preset.settings
    return build_models.diffusion(s.mdm.network, s.mdm.diffusion, (1, 8, 8), 0)


def limited(monkeypatch, model, limit):
    """Let the network refuse more than `limit` images, and count what it is given."""
    sizes, forward = [], model.network.forward

    def guarded(y, t):
        sizes.append(len(y))
        if len(y) > limit:
            raise MemoryError
        return forward(y, t)

    monkeypatch.setattr(model.network, "forward", guarded)
    return sizes


def write(path, source, **options):
    return write_samples(path, source, 8, seed=0, description={}, sampler=DPMSolver(4), progress=False, **options)


def test_samples_that_do_not_fit_together_are_refused_before_the_first_step(model, monkeypatch, tmp_path):
    source = Mirrored(model, IdentityMap())
    sizes = limited(monkeypatch, model, 3)
    with pytest.raises(
        MemoryShortage, match=r"sampling: 8 samples together do not fit.*2 fit: ask for that batch_size"
    ):
        write(tmp_path / "a.h5", source)
    assert sizes == [8, 4, 2]
    sizes.clear()
    write(tmp_path / "a.h5", source, batch_size=2)
    assert sizes[0] == 2
    assert len(sizes) == 1 + 4 * 4  # one of them dry, then four steps of four batches
    sizes.clear()
    write(tmp_path / "a.h5", source, batch_size=2)  # it is there already
    assert sizes == []


def test_f_and_the_rule_are_part_of_it(model):
    @constraint
    def hungry(x):
        if len(x) > 1:
            raise MemoryError
        return x.abs().mean((1, 2, 3))

    class Hungry(IdentityMap):
        def to_data(self, y):
            raise MemoryError

    with pytest.raises(MemoryShortage, match=r"\(MemoryError\); 1 fit"):
        rehearse_sampling(Mirrored(model, IdentityMap()), 4, hungry)
    with pytest.raises(MemoryShortage, match="not even one fits"):
        rehearse_sampling(Mirrored(model, Hungry()), 4)


def test_samples_are_the_same_with_it_and_without_it(model, monkeypatch, tmp_path):
    source = Mirrored(model, IdentityMap())
    torch.manual_seed(0)
    write(tmp_path / "a.h5", source)
    after = torch.rand(3)
    monkeypatch.setattr("namm.generative.sample_file.rehearse_sampling", lambda *_, **options: None)
    torch.manual_seed(0)
    write(tmp_path / "b.h5", source)
    assert torch.equal(after, torch.rand(3))
    with SampleFile(tmp_path / "a.h5") as a, SampleFile(tmp_path / "b.h5") as b:
        assert torch.equal(a.images[:], b.images[:])
