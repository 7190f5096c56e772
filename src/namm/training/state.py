"""What a training would lose if it were killed: weights, their average, the optimiser's moments, where it stands."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from namm.errors import CheckpointError
from namm.training.checkpoint import Checkpoint
from namm.training.ema import Ema
from namm.training.flat import FlatWeights

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What Adam keeps of every weight."""


class TrainingState:
    """The state of a training, to and from checkpoints.

    Attributes:
        live: The tensors of `module` that training changes, by name: all but frozen parameters.
        ema: Their moving average.
        step, total: Updates made, and to be made in all (0 until it is known).
        compute_seconds: Time spent on them.
        losses: The last values reported.
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
        self.best: dict[str, Tensor] = {}
        self.watched: dict[str, Any] = {}

    def keep(self, figures: Mapping[str, float]) -> None:
        """Make the averaged weights, whose figures these are, the best so far."""
        self.best = {name: tensor.detach().clone() for name, tensor in self.ema.average.items()}
        self.watched |= {"best": dict(figures), "kept_step": self.step}

    @torch.no_grad()
    def copy_result_to_live(self) -> None:
        """Leave the weights that training is for in the module: the best, where they were watched, or the average."""
        if not self.best:
            self.ema.copy_to_live()
        for name, tensor in self.best.items():
            self.live[name].copy_(tensor)

    def checkpoint(self) -> Checkpoint:
        """All of it."""
        tensors = {f"model/{name}": tensor for name, tensor in self.live.items()}
        tensors |= {f"ema/{name}": tensor for name, tensor in self.ema.average.items()}
        tensors |= {f"best/{name}": tensor for name, tensor in self.best.items()}
        for name, moments in self._moments().items():
            tensors |= {f"optimiser/{index}/{name}": tensor for index, tensor in enumerate(moments)}
        return Checkpoint(tensors, self._facts())

    def snapshot(self) -> Checkpoint:
        """The averaged weights alone."""
        return Checkpoint(self.ema.average, self._facts())

    def restore(self, checkpoint: Checkpoint) -> None:
        """Set everything to what `checkpoint` returned once."""
        groups: dict[str, dict[str, Tensor]] = {"model": {}, "ema": {}, "best": {}, "optimiser": {}}
        for name, tensor in checkpoint.tensors.items():
            group, rest = name.split("/", 1)
            groups[group][rest] = tensor
        if missing := self.live.keys() ^ groups["model"].keys():
            raise CheckpointError(
                f"the checkpoint is of another network: {', '.join(sorted(missing)[:3])} do not match."
            )
        moments = self._joined(groups["optimiser"])
        with torch.no_grad():
            for name, tensor in self.live.items():
                tensor.copy_(groups["model"][name])
        self.ema.load(groups["ema"])
        self.optimiser.load_state_dict({"state": moments, "param_groups": self.optimiser.state_dict()["param_groups"]})
        facts = checkpoint.facts
        if groups["best"]:
            self.best = {name: groups["best"][name].to(tensor) for name, tensor in self.live.items()}
            self.watched = dict(facts["watched"])
        self.step, self.total = int(facts["step"]), int(facts["total"])
        self.compute_seconds, self.losses = float(facts["compute_seconds"]), dict(facts["losses"])

    def _moments(self) -> dict[str, list[Tensor]]:
        """Of each weight in its own shape, so that layouts and vectors may be others next time; none before a step."""
        states = [self.optimiser.state[vector] for vector in self.flat.vectors]
        if not all(states):
            return {}
        found = {name: self.flat.views([state[name] for state in states]) for name in MOMENTS}
        return found | {"step": [states[0]["step"]] * len(self.flat.weights)}

    @torch.no_grad()
    def _joined(self, tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
        """The optimiser's state of `_moments` in a checkpoint, empty where there are none."""
        if not tensors:
            return {}
        found = [{name: torch.zeros_like(vector) for name in MOMENTS} for vector in self.flat.vectors]
        for name in MOMENTS:
            for index, view in enumerate(self.flat.views([state[name] for state in found])):
                kept = tensors.get(f"{index}/{name}")
                if kept is None or kept.shape != view.shape:
                    raise CheckpointError("the checkpoint's moments are those of other weights.")
                view.copy_(kept)
        return {k: {**state, "step": tensors["0/step"]} for k, state in enumerate(found)}

    def _facts(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "total": self.total,
            "compute_seconds": self.compute_seconds,
            "losses": self.losses,
            **({"watched": self.watched} if self.watched else {}),
        }
