"""What a training would lose if it were killed: weights, their average, the optimiser's moments, where it stands.

    ē ← d ē + (1 − d) θ,      d = min(decay, (1 + n)/(10 + n)) at step n

is the average ē of the weights θ. The optimiser sees the weights as one vector (`FlatWeights`).
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
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
"""What Adam keeps of every weight; another optimiser has its own `MOMENTS`."""


@torch.no_grad()
def overwrite(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy `values` into `tensors`, name by name."""
    for name, tensor in tensors.items():
        tensor.copy_(values[name])


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that later changes do not reach."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def vectors_of(optimiser: torch.optim.Optimizer) -> list[nn.Parameter]:
    """What an optimiser updates, in the order in which it counts them."""
    return [vector for group in optimiser.param_groups for vector in group["params"]]


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
    """Trained weights as views of one vector for each of their kinds and dtypes.

    An optimiser that visits hundreds of tensors takes longer than their update does. Training changes the vector, and
    networks see their weights change. Between two steps the gradients of the weights are gathered into that of the
    vector, where clipping and the optimiser find them. A weight without a gradient counts as one whose gradient is
    zero. Each weight keeps its shape, its layout and, until `release`, a place in the vector, with zeros between it and
    the next; whoever else changes it meanwhile must do so in place.

    Args:
        weights: All on one device.
        kinds: What tells weights that are updated in different ways; all alike without it.

    Attributes:
        kinds, counts: The kind of each vector, and how many weights are in it.
    """

    def __init__(self, weights: Sequence[nn.Parameter], kinds: Sequence[Hashable] | None = None) -> None:
        self.weights = list(weights)
        self._places: list[tuple[int, int, tuple[int, ...]]] = []  # of each weight: which vector, where, its strides
        labels = [
            (kind, weight.dtype) for kind, weight in zip(kinds or [None] * len(weights), self.weights, strict=True)
        ]
        distinct = list(dict.fromkeys(labels))
        self.kinds = [kind for kind, _ in distinct]
        self.counts = [labels.count(label) for label in distinct]
        lengths = [0] * len(distinct)
        for label, weight in zip(labels, self.weights, strict=True):
            k, step = distinct.index(label), max(1, ALIGNMENT // weight.element_size())
            strides = torch.empty_like(weight, device="meta").stride()  # its own if they leave no gaps, else contiguous
            self._places.append((k, lengths[k], strides))
            lengths[k] += -(-weight.numel() // step) * step
        zeros = [
            torch.zeros(length, dtype=dtype, device=self.weights[0].device)
            for (_, dtype), length in zip(distinct, lengths, strict=True)
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
        return [self.view(index, vectors[self.vector_of(index)]) for index in range(len(self.weights))]

    def vector_of(self, index: int) -> int:
        """Number of the vector that a weight lies in."""
        return self._places[index][0]

    def view(self, index: int, vector: Tensor) -> Tensor:
        """What a tensor like the weight's vector holds for it, in its shape."""
        _, start, strides = self._places[index]
        return vector.as_strided(self.weights[index].shape, strides, vector.storage_offset() + start)

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
        averages: Further ones, by decay.
        step, total: Updates made, and to be made in all (0 until it is known).
        compute_seconds: Time spent on them.
        losses: The last values reported.
        running: What has been added up since, for the next report; as JSON.
        best: The averaged weights that a watch has kept, and `watched` its figures; empty without one.
    """

    def __init__(
        self,
        module: nn.Module,
        flat: FlatWeights,
        optimisers: Sequence[torch.optim.Optimizer],
        ema_decay: float,
        decays: Sequence[float] = (),
    ) -> None:
        frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
        tensors = module.state_dict(keep_vars=True)
        self.live = {name: tensor for name, tensor in tensors.items() if name not in frozen}
        self.ema = Ema(self.live, ema_decay)
        self.averages = {decay: Ema(self.live, decay) for decay in decays}
        self.flat, self.optimisers = flat, list(optimisers)
        self.step, self.total, self.compute_seconds = 0, 0, 0.0
        self.losses: dict[str, float] = {}
        self.running: dict[str, Any] = {}
        self.best: dict[str, Tensor] = {}
        self.watched: dict[str, Any] = {}

    def average(self, n: int) -> None:
        """Take the live tensors into all averages after update number `n` = 0, 1, 2, …"""
        for ema in (self.ema, *self.averages.values()):
            ema.update(n)

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
        for decay, ema in self.averages.items():
            tensors |= {f"averages/{decay}/{name}": tensor for name, tensor in ema.average.items()}
        tensors |= {f"optimiser/{name}": tensor for name, tensor in self._moments().items()}
        return Checkpoint(tensors, {**self._facts(), "running": self.running})

    def snapshot(self) -> Checkpoint:
        """The averaged weights alone."""
        return Checkpoint(self.ema.average, self._facts())

    def restore(self, checkpoint: Checkpoint) -> None:
        """Set everything to what `checkpoint` returned once."""
        with damage_as(CheckpointError, f"the checkpoint is of another training ({REASON})."):
            self._restore(checkpoint)

    def _restore(self, checkpoint: Checkpoint) -> None:
        groups: dict[str, dict[str, Tensor]] = {
            group: {} for group in ("model", "ema", "best", "averages", "optimiser")
        }
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
        for decay, ema in self.averages.items():
            overwrite(ema.average, {name: groups["averages"][f"{decay}/{name}"] for name in ema.average})
        for optimiser in self.optimisers:
            state = {k: moments[vector] for k, vector in enumerate(vectors_of(optimiser)) if moments}
            optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
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

    def _moments(self) -> dict[str, Tensor]:
        """What optimisers keep of each weight in its own shape, so that layouts may differ next time, as `index/name`.

        Empty before the first step.
        """
        states = {vector: optimiser.state[vector] for optimiser in self.optimisers for vector in vectors_of(optimiser)}
        kept = {}
        for index in range(len(self.flat.weights)):
            state = states[self.flat.vectors[self.flat.vector_of(index)]]
            for name, value in state.items():
                kept[f"{index}/{name}"] = self.flat.view(index, value) if value.ndim else value
        return kept

    @torch.no_grad()
    def _flat_moments(self, tensors: Mapping[str, Tensor]) -> dict[nn.Parameter, dict[str, Tensor]]:
        """The state of each vector from `_moments` in a checkpoint; empty where there are none."""
        if not tensors:
            return {}
        states = {
            vector: {name: torch.zeros_like(vector) for name in getattr(optimiser, "MOMENTS", MOMENTS)}
            for optimiser in self.optimisers
            for vector in vectors_of(optimiser)
        }
        steps = {}
        for index in range(len(self.flat.weights)):
            vector = self.flat.vectors[self.flat.vector_of(index)]
            for name, value in states[vector].items():
                view, kept = self.flat.view(index, value), tensors.get(f"{index}/{name}")
                if kept is None or kept.shape != view.shape:
                    raise CheckpointError("the checkpoint's moments are those of other weights.")
                view.copy_(kept)
            if (step := tensors.get(f"{index}/step")) is not None:  # the same for all weights of a vector
                steps[vector] = {"step": step.clone()}
        return {vector: {**state, **steps.get(vector, {})} for vector, state in states.items()}

    def _facts(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "total": self.total,
            "compute_seconds": self.compute_seconds,
            "losses": self.losses,
            **({"watched": self.watched} if self.watched else {}),
        }
