"""The loop: what it learns, what it keeps, how it stops."""

import json
import os
import signal
import threading
import time
from weakref import ref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from namm.errors import Interrupted, NammWarning, RunFolderError, TrainingError, UsageError
from namm.files import owned
from namm.gpu import Recorded
from namm.training import checkpoint
from namm.training.log import read_metrics
from namm.training.objectives import Objective
from namm.training.settings import TrainSettings
from namm.training.trainer import WARM_UP, train


class Mean(Objective):
    """Learns the mean of the data, with noise and dropout in the way; the loss has a closed-form minimum."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(1, 2, 2))
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("calls", torch.tensor(0))

    def draw(self, batch, generator):
        return (torch.randn(batch[0].shape, generator=generator),)

    def forward(self, *tensors):
        x, z = tensors
        if self.training:
            self.calls += 1
        error = nn.functional.dropout(x + 0.1 * z - self.mean, 0.1, self.training)
        return {"loss": error.square().mean(), "size": x.abs().mean()}


DATA = (torch.rand(64, 1, 2, 2, generator=torch.Generator().manual_seed(0)) + torch.tensor([[0.0, 1.0], [2.0, 3.0]]),)
QUICK = TrainSettings(
    budget="40 steps", batch_size=8, learning_rate=0.05, ema_decay=0.9, log_every=10, checkpoint_seconds=0.0
)


def settings(**changes) -> TrainSettings:
    return TrainSettings(**{**QUICK.__dict__, **changes})


def fit(objective=None, **options):
    objective = objective or Mean()
    options = {"settings": QUICK, "data": DATA, "progress": False} | options
    return objective, train(objective, **options)


def test_it_learns_and_ends_with_the_average():
    objective, result = fit(settings=settings(budget="600 steps", schedule="cosine", batch_size=64))
    assert torch.allclose(objective.mean, DATA[0].mean(0), atol=0.05)
    assert not objective.training
    assert result.steps == 600
    assert result.images == 600 * 64
    assert objective.calls == 600
    assert torch.equal(objective.frozen, torch.ones(1))


def test_moving_average_not_last_weights(tmp_path):
    objective, _ = fit(folder=tmp_path)
    last = checkpoint.read(sorted((tmp_path / "checkpoints").glob("*"))[-1])
    assert torch.equal(objective.mean, last.tensors["ema/mean"])
    assert not torch.equal(objective.mean, last.tensors["model/mean"])


def test_same_seed_same_bytes_other_seed_other_bytes(tmp_path):
    weights = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        fit(folder=tmp_path / name, settings=settings(seed=seed, log_every=1))
        newest = sorted((tmp_path / name / "checkpoints").glob("*"))[-1]
        content = checkpoint.read(newest)
        weights[name] = dict(content.tensors)
    assert all(torch.equal(weights["a"][key], weights["b"][key]) for key in weights["a"])
    assert not torch.equal(weights["a"]["model/mean"], weights["c"]["model/mean"])


def test_global_random_state_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    fit()
    assert torch.equal(torch.rand(3), expected)


class StopsAt(Mean):
    """Sends this process a signal in the middle of a given step."""

    def __init__(self, step: int, number: int = signal.SIGTERM) -> None:
        super().__init__()
        self.step, self.number = step, number

    def forward(self, *tensors):
        losses = super().forward(*tensors)
        if self.calls == self.step:
            os.kill(os.getpid(), self.number)
        return losses


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops_and_the_same_call_goes_on_to_the_same_bits(tmp_path, number):
    plain, _ = fit()
    lazy = settings(checkpoint_seconds=1000.0)
    with pytest.raises(Interrupted, match="step 17 of 40"):
        fit(StopsAt(17, number), folder=tmp_path, settings=lazy)
    assert checkpoint.CheckpointFolder(tmp_path / "checkpoints").latest().facts["step"] == 17
    resumed, result = fit(folder=tmp_path, settings=lazy)
    assert torch.equal(resumed.mean, plain.mean)
    assert result.steps == 40
    steps = [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == [10, 20, 30, 40]


@pytest.mark.parametrize("every", [4, 16])
def test_lines_of_the_log_are_those_of_an_uninterrupted_training(tmp_path, every):
    """Three resumptions within an epoch of 32 steps, none of them at a line."""
    chosen = {"settings": settings(batch_size=2, log_every=every, checkpoint_seconds=1000.0), "validation": DATA}
    plain, _ = fit(folder=tmp_path / "whole", **chosen)
    for step in (6, 13, 19):
        with pytest.raises(Interrupted, match=f"step {step} of 40"):
            fit(StopsAt(step), folder=tmp_path / "stopped", **chosen)
    resumed, _ = fit(folder=tmp_path / "stopped", **chosen)
    assert torch.equal(resumed.mean, plain.mean)
    whole, stopped = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "stopped"))
    assert len(whole) > 2
    for timed in ("seconds", "images_per_second"):
        for line in (*whole, *stopped):
            del line[timed]
    assert stopped == whole


def test_another_number_of_processes_on_resumption_is_said(tmp_path, monkeypatch):
    with pytest.raises(Interrupted):
        fit(StopsAt(17), folder=tmp_path)
    folder = checkpoint.CheckpointFolder(tmp_path / "checkpoints")
    kept = folder.latest()
    assert kept.facts["processes"] == 1
    folder.save(17, checkpoint.Checkpoint(kept.tensors, {**kept.facts, "processes": 4}))
    with pytest.warns(NammWarning, match="goes on with 1 processes and was saved by 4"):
        fit(folder=tmp_path)


def test_leftovers_of_a_killed_training_are_swept(tmp_path):
    with pytest.raises(Interrupted):
        fit(StopsAt(17), folder=tmp_path)
    for name in ("milestones/.step-1.safetensors.7.partial", "checkpoints/.a.7.partial", ".result.json.7.partial"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{")
    (tmp_path / ".mirror.partial" / "g").mkdir(parents=True)
    (tmp_path / "kept.partial").write_text("")
    fit(folder=tmp_path)
    assert [path.name for path in tmp_path.rglob("*.partial")] == ["kept.partial"]


def test_signal_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    fit()
    assert signal.getsignal(signal.SIGTERM) is before


def test_training_works_outside_the_main_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(fit()[1]))
    thread.start()
    thread.join()
    assert results[0].steps == 40


def test_a_finished_training_is_read_back_not_repeated(tmp_path):
    first, result = fit(folder=tmp_path)
    again, read_back = fit(folder=tmp_path)
    assert torch.equal(first.mean, again.mean)
    assert read_back == result
    assert again.calls == 40  # the counter came with the weights: no forward pass was made
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 40


def test_truncated_newest_checkpoint_gives_the_same_result_from_the_one_before(tmp_path):
    plain, _ = fit()
    with pytest.raises(Interrupted):
        fit(StopsAt(20), folder=tmp_path)
    newest = sorted((tmp_path / "checkpoints").glob("*"))[-1]
    newest.write_bytes(newest.read_bytes()[:200])
    with pytest.warns(UserWarning, match="step-000000020.*Going back"):
        resumed, _ = fit(folder=tmp_path)
    assert torch.equal(resumed.mean, plain.mean)


class BecomesNaN(Mean):
    def forward(self, *tensors):
        losses = super().forward(*tensors)
        return losses if self.calls != 13 else {name: value * torch.nan for name, value in losses.items()}


def test_nan_stops_with_the_last_good_checkpoint_and_the_batch(tmp_path):
    with pytest.raises(TrainingError, match=r"step 12\. Its batch: \(8, 1, 2, 2\), min .* max .* values not finite"):
        fit(BecomesNaN(), folder=tmp_path)
    found = checkpoint.CheckpointFolder(tmp_path / "checkpoints").latest()
    assert found.facts["step"] == 12
    assert all(torch.isfinite(tensor).all() for tensor in found.tensors.values())


def test_nan_is_noticed_at_the_next_line_without_a_folder():
    with pytest.raises(TrainingError, match="step 12"):
        fit(BecomesNaN(), settings=settings(log_every=20))


def test_metrics_validation_and_milestones(tmp_path):
    _, result = fit(folder=tmp_path, validation=(DATA[0][:20],), settings=settings(validations=2, milestones=4))
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [10, 20, 30, 40]
    assert [line["step"] for line in lines if "val/loss" in line] == [20, 40]
    assert all(line["images_per_second"] > 0 for line in lines)
    assert lines[-1]["seconds"] == result.compute_seconds
    assert result.losses["val/loss"] == lines[-1]["val/loss"]
    snapshots = sorted((tmp_path / "milestones").glob("*"))
    assert [path.stem for path in snapshots] == [f"step-{step:09d}" for step in (10, 20, 30, 40)]
    last = checkpoint.read(snapshots[-1])
    assert torch.equal(
        last.tensors["mean"], checkpoint.read(sorted((tmp_path / "checkpoints").glob("*"))[-1]).tensors["ema/mean"]
    )
    assert list(tmp_path.rglob("events.out.tfevents*"))


def test_validation_uses_the_average_and_evaluation_mode():
    """The validation loss of the last step equals the loss of the returned, averaged objective without dropout."""
    from namm.numerics import generator

    objective, result = fit(validation=(DATA[0][:8],), settings=settings(validations=1))
    z = torch.randn(8, 1, 2, 2, generator=generator(0, "validation", 0))
    assert result.losses["val/loss"] == pytest.approx(objective(DATA[0][:8], z)["loss"].item(), rel=1e-6)


def test_compute_time_leaves_out_validation_and_saving(tmp_path):
    class Slow(Mean):
        def forward(self, *tensors):
            if not self.training:
                time.sleep(0.05)
            return super().forward(*tensors)

    start = time.perf_counter()
    _, result = fit(Slow(), folder=tmp_path, validation=DATA, settings=settings(validations=10))
    assert time.perf_counter() - start > 10 * 8 * 0.05
    assert result.compute_seconds < 10 * 8 * 0.05


def test_gradient_clipping():
    class Steep(Mean):
        def forward(self, *tensors):
            return {name: 1e6 * value for name, value in super().forward(*tensors).items()}

    seen = []
    objective = Steep()
    objective.mean.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm().item()))
    clipped = []

    def before_step(optimiser, *_):
        (weights,) = optimiser.param_groups[0]["params"]
        clipped.append(weights.grad.norm().item())

    hook = register_optimizer_step_pre_hook(before_step)
    try:
        fit(objective, settings=settings(clip=0.5, budget="3 steps"))
    finally:
        hook.remove()
    assert min(seen) > 0.5
    assert clipped == pytest.approx([0.5] * 3, rel=1e-4)


def test_compiled_training_equals_eager():
    eager, _ = fit(settings=settings(budget="5 steps"))

    class NoCounter(Mean):
        def forward(self, *tensors):
            x, z = tensors
            return {"loss": (x + 0.1 * z - self.mean).square().mean()}

    plain, _ = fit(NoCounter(), settings=settings(budget="5 steps"))
    compiled, _ = fit(NoCounter(), settings=settings(budget="5 steps", compile=True))
    assert torch.allclose(compiled.mean, plain.mean, rtol=1e-5)
    assert not torch.equal(plain.mean, eager.mean)  # dropout made a difference there


def test_an_objective_with_kernels_is_recorded_and_not_compiled(monkeypatch):
    plain, _ = fit(settings=settings(budget="5 steps"))
    calls, made = [], []

    class Counted(Recorded):
        def __init__(self, call):
            super().__init__(call)
            made.append(ref(self))

        def __call__(self, *tensors):
            calls.append(tensors)
            return super().__call__(*tensors)

    monkeypatch.setattr("namm.training.trainer.can_record", lambda *_: True)
    monkeypatch.setattr("namm.training.trainer.Recorded", Counted)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: pytest.fail("compiled"))
    recorded, _ = fit(settings=settings(budget="5 steps", compile=True))
    assert torch.equal(recorded.mean, plain.mean)
    assert len(calls) == 5 + WARM_UP
    assert [recording() for recording in made] == [None]  # nothing holds its memory any more


def test_any_number_of_shapes_can_be_compiled_in_a_process():
    class Quick(Objective):
        def __init__(self, size) -> None:
            super().__init__()
            self.mean = nn.Parameter(torch.zeros(1, size, size))

        def draw(self, batch, generator):
            return ()

        def forward(self, *tensors):
            return {"loss": (tensors[0] - self.mean).square().mean()}

        def compile(self, **options):
            super().compile(backend="eager", **options)

    objectives = [Quick(k) for k in range(2, 7)]  # what is compiled counts as long as it lives
    with torch._dynamo.config.patch(recompile_limit=2):
        for k, objective in enumerate(objectives, 2):
            data = (torch.rand(8, 1, k, k),)
            _, result = fit(objective, data=data, settings=settings(budget="1 steps", compile=True))
            assert result.steps == 1


# Optimisers and averages


class Layers(Mean):
    """Weights of every kind: a matrix, biases, a gain and what belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(16, 16), nn.LayerNorm(4)
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, *tensors):
        h = self.last(torch.tanh(self.layer(torch.tanh(self.first(tensors[0].flatten(1))))))
        losses = super().forward(*tensors)
        return losses | {"loss": losses["loss"] + (self.norm(h) - tensors[0].flatten(1)).square().mean()}


class StopsInLayers(StopsAt, Layers):
    """The same, stopped in the middle of a given step."""


@pytest.mark.parametrize("optimiser", ["adam", "adamw", "muon"])
def test_every_optimiser_learns_and_goes_on_to_the_same_bits(tmp_path, optimiser):
    chosen = {"settings": settings(optimiser=optimiser, averages=(0.5, 0.99), checkpoint_seconds=1000.0)}
    chosen["validation"] = (DATA[0][:20],)
    plain, whole = fit(Layers(), folder=tmp_path / "whole", **chosen)
    with pytest.raises(Interrupted, match="step 17 of 40"):
        fit(StopsInLayers(17), folder=tmp_path / "stopped", **chosen)
    resumed, result = fit(Layers(), folder=tmp_path / "stopped", **chosen)
    kept = [checkpoint.CheckpointFolder(tmp_path / name / "checkpoints").latest() for name in ("whole", "stopped")]
    assert kept[0].tensors.keys() == kept[1].tensors.keys()
    for name, tensor in kept[0].tensors.items():
        assert torch.equal(tensor, kept[1].tensors[name]), name
    assert ("optimiser/1/momentum" in kept[0].tensors) == (optimiser == "muon")
    assert ("optimiser/1/exp_avg_sq" in kept[0].tensors) == (optimiser != "muon")
    for name, tensor in resumed.state_dict().items():
        assert torch.equal(tensor, plain.state_dict()[name])
    assert result.losses == whole.losses
    first = read_metrics(tmp_path / "whole" / "metrics.jsonl")[0]
    assert result.losses["val/loss"] < 0.6 * first["loss"]


def test_an_optimiser_without_work_is_refused_before_the_folder_is_taken(tmp_path):
    with pytest.raises(UsageError, match="muon has nothing to work on"):
        fit(folder=tmp_path / "new", settings=settings(optimiser="muon"))
    assert not (tmp_path / "new").exists()


def test_each_optimiser_goes_its_own_way():
    ends = [fit(Layers(), settings=settings(optimiser=name))[0].layer.weight for name in ("adam", "adamw", "muon")]
    assert not any(torch.equal(ends[k], ends[k - 1]) for k in range(3))


def test_averages_are_reported_and_kept_and_none_is_chosen(tmp_path):
    """That of decay d is what a training with `ema_decay` d ends with, and so is its validation loss."""
    chosen = {"validation": (DATA[0][:20],), "settings": settings(averages=(0.5, 0.99))}
    objective, result = fit(folder=tmp_path / "run", **chosen)
    assert list(result.averages) == [0.5, 0.99]
    for decay in (0.9, 0.5, 0.99):
        alone, its = fit(settings=settings(ema_decay=decay), validation=chosen["validation"])
        mine = objective.state_dict() if decay == 0.9 else result.averages[decay]
        assert torch.equal(mine["mean"], alone.mean)
        assert result.losses["val/loss" if decay == 0.9 else f"val@{decay}/loss"] == its.losses["val/loss"]
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["val@0.5/loss"] == result.losses["val@0.5/loss"]
    _, read_back = fit(folder=tmp_path / "run", **chosen)
    assert torch.equal(read_back.averages[0.99]["mean"], result.averages[0.99]["mean"])
    assert read_back.losses == result.losses
    assert "averages" not in json.loads((tmp_path / "run" / "result.json").read_text())
    assert "tensor" not in repr(result)


def test_weights_are_changed_after_every_step_of_all_optimisers():
    objective, seen = Layers(), []

    def after_step():
        seen.append(objective.layer.weight.detach().clone())
        with torch.no_grad():
            objective.layer.weight.clamp_(min=0)

    fit(objective, settings=settings(optimiser="muon", budget="5 steps", ema_decay=0.0), after_step=after_step)
    assert len(seen) == 5
    assert float(seen[-1].min()) < 0
    assert torch.equal(objective.layer.weight, seen[-1].clamp(min=0))


# Folders


def test_a_training_of_an_earlier_version_goes_on(tmp_path):
    """Its record knows neither optimisers nor further averages; with others than its own it is another training."""
    with pytest.raises(Interrupted):
        fit(StopsAt(17), folder=tmp_path)
    record = json.loads((tmp_path / "settings.json").read_text())["settings"]
    assert not record.keys() & {"optimiser", "weight_decay", "averages"}
    assert record.keys() >= {"learning_rate", "ema_decay"}
    with pytest.raises(RunFolderError, match=r"settings.optimiser: absent -> adamw"):
        fit(folder=tmp_path, settings=settings(optimiser="adamw"))
    assert fit(folder=tmp_path)[1].steps == 40


def test_other_settings_are_refused(tmp_path):
    fit(folder=tmp_path)
    with pytest.raises(RunFolderError, match=r"other settings \(settings.learning_rate: 0.05 -> 0.1\)"):
        fit(folder=tmp_path, settings=settings(learning_rate=0.1))


def test_what_only_observes_may_change_on_resumption(tmp_path):
    plain, _ = fit()
    with pytest.raises(Interrupted):
        fit(StopsAt(20), folder=tmp_path)
    resumed, _ = fit(folder=tmp_path, settings=settings(log_every=7, keep=1, checkpoint_seconds=9.0, validations=3))
    assert torch.equal(resumed.mean, plain.mean)


def test_a_foreign_folder_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("chapter 1")
    with pytest.raises(RunFolderError, match=r"not a training of namm \(it holds thesis.tex\)"):
        fit(folder=tmp_path)
    (tmp_path / "settings.json").write_text("{}")
    with pytest.raises(RunFolderError, match="not written by a training of namm"):
        fit(folder=tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "chapter 1"


def test_an_unwritable_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="cannot be written"):
        fit(folder=tmp_path / "file" / "run")


def test_a_folder_in_use_is_refused(tmp_path):
    with owned(tmp_path), pytest.raises(RunFolderError, match=f"in use by process {os.getpid()}"):
        fit(folder=tmp_path)
    fit(folder=tmp_path)


def test_nothing_to_train():
    objective = Mean()
    objective.requires_grad_(False)
    with pytest.raises(TrainingError, match="nothing to train"):
        fit(objective)


def test_a_batch_that_cannot_be_shared(monkeypatch):
    monkeypatch.setattr("accelerate.Accelerator.num_processes", 3)
    with pytest.raises(UsageError, match="batch_size 8 cannot be shared by 3 processes"):
        fit()


def test_nothing_is_swept_in_a_folder_of_somebody_else(tmp_path):
    draft = tmp_path / "work" / ".film.partial"
    draft.mkdir(parents=True)
    (draft / "scene").write_text("years of work")
    with pytest.raises(RunFolderError, match="is not empty and not a training of namm"):
        fit(folder=tmp_path)
    assert (draft / "scene").read_text() == "years of work"
    assert [path.name for path in tmp_path.iterdir()] == ["work"]  # no lock, either
