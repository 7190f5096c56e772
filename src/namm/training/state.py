"""What a training would lose if it were killed: weights, their average, the optimiser's moments, where it stands.

    ē ← d ē + (1 − d) θ,      d = min(decay, (1 + n)/(10 + n)) at step n

is the average ē of the weights θ. The optimiser sees the weights as one vector (`FlatWeights`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from namm.errors import CheckpointError, TrainingError
from namm.reading import REASON, damage_as
from namm.training.checkpoint import Checkpoint

ALIGNMENT = 128
"""Bytes; every weight begins at a multiple, where kernels read memory in wide pieces."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""What Adam keeps of every weight."""


@torch.no_grad()
def overwrite(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy `values` into `tensors`, name by name."""
    for name, tensor in tensors.items():
        tensor.copy_(values[name])


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that later changes do not reach."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


class Ema:
    """Exponential moving average ē of `live` tensors, which training changes in place; integers are copied."""

    def __init__(self, live: Mapping[str, Tensor], decay: float) -> None:
        self.live, self.decay, self.average = dict(live), decay, copies(live)
        floating = [name for name, tensor in live.items() if tensor.is_floating_point()]
        self._averages = [self.average[name] for name in floating]
        self._weights = [live[name].detach() for name in floating]
        self._others = {name: self.average[name] for name in live if name not in floating}

    @torch.no_grad()
    def update(self, n: int) -> None:
        """Take in the live tensors after update number `n` = 0, 1, 2, …"""
        decay = min(self.decay, (1 + n) / (10 + n))
        torch._foreach_lerp_(self._averages, self._weights, 1 - decay)
        overwrite(self._others, self.live)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The live tensors hold the average inside this context, and their own values again after it."""
        before = copies(self.live)
        overwrite(self.live, self.average)
        try:
            yield
        finally:
            overwrite(self.live, before)


class FlatWeights:
    """Trained weights as views of one vector for each of their dtypes.

    An optimiser that visits hundreds of tensors takes longer than their update does. Training changes the vector, and
    networks see their weights change. Between two steps the gradients of the weights are gathered into that of the
    vector, where clipping and the optimiser find them. A weight without a gradient counts as one whose gradient is
    zero. Each weight keeps its shape, its layout and, until `release`, a place in the vector, with zeros between it and
    the next; whoever else changes it meanwhile must do so in place.

    Args:
        weights: All on one device.
    """

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self.weights = list(weights)
        self._places: list[tuple[int, int, tuple[int, ...]]] = []  # of each weight: which vector, where, its strides
        dtypes = list(dict.fromkeys(weight.dtype for weight in self.weights))
        lengths = [0] * len(dtypes)
        for weight in self.weights:
            k, step = dtypes.index(weight.dtype), max(1, ALIGNMENT // weight.element_size())
            strides = torch.empty_like(weight, device="meta").stride()  # its own if they leave no gaps, else contiguous
            self._places.append((k, lengths[k], strides))
            lengths[k] += -(-weight.numel() // step) * step
        zeros = [
            torch.zeros(length, dtype=dtype, device=self.weights[0].device)
            for dtype, length in zip(dtypes, lengths, strict=True)
        ]
        self.vectors = [nn.Parameter(vector) for vector in zeros]
        self._whole_gradients = [torch.zeros_like(vector) for vector in zeros]
        for vector, gradient in zip(self.vectors, self._whole_gradients, strict=True):
            vector.grad = gradient
        for weight, view in zip(self.weights, self.views(zeros), strict=True):
            view.copy_(weight.data)
            weight.data, weight.grad = view, None
        self._gradients = self.views(self._whole_gradients)
        self._addresses = [weight.data_ptr() for weight in self.weights]

    def views(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """What vectors like these hold for each weight, in its shape."""
        return [
            vectors[k].as_strided(weight.shape, strides, vectors[k].storage_offset() + start)
            for weight, (k, start, strides) in zip(self.weights, self._places, strict=True)
        ]

    @torch.no_grad()
    def gather(self) -> None:
        """Take the gradients of the weights into those of the vectors, as zeros where there are none, and drop them."""
        for whole in self._whole_gradients:
            whole.zero_()  # what lies between weights too: clipping by a norm that is not finite spoils it
        places, gradients = [], []
        for place, weight in zip(self._gradients, self.weights, strict=True):
            if weight.grad is not None:
                places.append(place)
                gradients.append(weight.grad)
                weight.grad = None
        torch._foreach_copy_(places, gradients)

    def require_in_place(self) -> None:
        """Refuse weights that somebody has given other memory: the optimiser would not see them any more."""
        if [weight.data_ptr() for weight in self.weights] != self._addresses:
            raise TrainingError(
                "a weight was replaced during the training, as `weight.data = …` does; change weights in place, for "
                "example with `weight.clamp_(min=0)`."
            )

    def release(self) -> None:
        """Give every weight memory of its own again."""
        for weight in self.weights:
            weight.data = weight.data.clone()


class TrainingState:
    """The state of a training, to and from checkpoints.

    Attributes:
        live: The tensors of `module` that training changes, by name: all but frozen parameters.
        ema: Their moving average.
        step, total: Updates made, and to be made in all (0 until it is known).
        compute_seconds: Time spent on them.
        losses: The last values reported.
        running: What has been added up since, for the next report; as JSON.
        best: The averaged weights that a watch has kept, and `watched` its figures; empty without one.
    """

    def __init__(
        self, module: nn.Module, flat: FlatWeights, optimiser: torch.optim.Optimizer, ema_decay: float
    ) -> None:
        frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
        tensors = module.state_dict(keep_vars=True)
        self.live = {name: tensor for name, tensor in tensors.items() if name not in frozen}
        self.ema = Ema(self.live, ema_decay)
        self.flat, self.optimiser = flat, optimiser
        self.step, self.total, self.compute_seconds = 0, 0, 0.0
        self.losses: dict[str, float] = {}
        self.running: dict[str, Any] = {}
        self.best: dict[str, Tensor] = {}
        self.watched: dict[str, Any] = {}

    def keep(self, figures: Mapping[str, float]) -> None:
        """Make the averaged weights, whose figures these are, the best so far."""
        self.best = copies(self.ema.average)
        self.watched |= {"best": dict(figures), "kept_step": self.step}

    def copy_result_to_live(self) -> None:
        """Leave the weights that training is for in the module: the best, where they were watched, or the average."""
        overwrite(self.live, self.best or self.ema.average)

    def checkpoint(self) -> Checkpoint:
        """The whole state."""
        tensors = {f"model/{name}": tensor for name, tensor in self.live.items()}
        tensors |= {f"ema/{name}": tensor for name, tensor in self.ema.average.items()}
        tensors |= {f"best/{name}": tensor for name, tensor in self.best.items()}
        for name, moments in self._moments().items():
            tensors |= {f"optimiser/{index}/{name}": tensor for index, tensor in enumerate(moments)}
        return Checkpoint(tensors, {**self._facts(), "running": self.running})

    def snapshot(self) -> Checkpoint:
        """The averaged weights alone."""
        return Checkpoint(self.ema.average, self._facts())

    def restore(self, checkpoint: Checkpoint) -> None:
        """Set everything to what `checkpoint` returned once."""
        with damage_as(CheckpointError, f"the checkpoint is of another training ({REASON})."):
            self._restore(checkpoint)

    def _restore(self, checkpoint: Checkpoint) -> None:
        groups: dict[str, dict[str, Tensor]] = {"model": {}, "ema": {}, "best": {}, "optimiser": {}}
        for name, tensor in checkpoint.tensors.items():
            group, rest = name.split("/", 1)
            groups[group][rest] = tensor
        if missing := self.live.keys() ^ groups["model"].keys():
            raise CheckpointError(
                f"the checkpoint is of another network: {', '.join(sorted(missing)[:3])} do not match."
            )
        moments = self._flat_moments(groups["optimiser"])
        overwrite(self.live, groups["model"])
        overwrite(self.ema.average, groups["ema"])
        self.optimiser.load_state_dict({"state": moments, "param_groups": self.optimiser.state_dict()["param_groups"]})
        facts = checkpoint.facts
        if groups["best"]:
            self.best = {name: groups["best"][name].to(tensor) for name, tensor in self.live.items()}
            self.watched = dict(facts["watched"])
        self.step, self.total = int(facts["step"]), int(facts["total"])
        self.compute_seconds, self.losses = float(facts["compute_seconds"]), dict(facts["losses"])
        self.running = dict(facts.get("running", {}))  # version 0.1 kept none

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Steps made inside this context are undone after it."""
        before = self.checkpoint().copy()
        yield
        self._restore(before)

    def _moments(self) -> dict[str, list[Tensor]]:
        """Adam's moments of each weight in its own shape, so that layouts may differ next time; none before a step."""
        states = [self.optimiser.state[vector] for vector in self.flat.vectors]
        if not all(states):
            return {}
        moments = {name: self.flat.views([state[name] for state in states]) for name in MOMENTS}
        return moments | {"step": [states[0]["step"]] * len(self.flat.weights)}

    @torch.no_grad()
    def _flat_moments(self, tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
        """The optimiser's state of `_moments` in a checkpoint, empty where there are none."""
        if not tensors:
            return {}
        moments = [{name: torch.zeros_like(vector) for name in MOMENTS} for vector in self.flat.vectors]
        for name in MOMENTS:
            for index, view in enumerate(self.flat.views([state[name] for state in moments])):
                kept = tensors.get(f"{index}/{name}")
                if kept is None or kept.shape != view.shape:
                    raise CheckpointError("the checkpoint's moments are those of other weights.")
                view.copy_(kept)
        return {k: {**state, "step": tensors["0/step"]} for k, state in enumerate(moments)}

    def _facts(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "total": self.total,
            "compute_seconds": self.compute_seconds,
            "losses": self.losses,
            **({"watched": self.watched} if self.watched else {}),
        }
