"""What a training would lose if it were killed: weights, their average, the optimiser's moments, where it stands."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from namm.errors import CheckpointError
from namm.training.checkpoint import Checkpoint
from namm.training.ema import Ema


class TrainingState:
    """The state of a training, to and from checkpoints.

    Attributes:
        live: The tensors of `module` that training changes, by name: all but frozen parameters.
        ema: Their moving average.
        step, total: Updates made, and to be made in all (0 until it is known).
        compute_seconds: Time spent on them.
        losses: The last values reported.
    """

    def __init__(self, module: nn.Module, optimiser: torch.optim.Optimizer, ema_decay: float) -> None:
        frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
        tensors = module.state_dict(keep_vars=True)
        self.live = {name: tensor for name, tensor in tensors.items() if name not in frozen}
        self.ema = Ema(self.live, ema_decay)
        self.optimiser = optimiser
        self.step, self.total, self.compute_seconds = 0, 0, 0.0
        self.losses: dict[str, float] = {}

    def checkpoint(self) -> Checkpoint:
        """All of it."""
        tensors = {f"model/{name}": tensor for name, tensor in self.live.items()}
        tensors |= {f"ema/{name}": tensor for name, tensor in self.ema.average.items()}
        for index, moments in self.optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser/{index}/{name}": tensor for name, tensor in moments.items()}
        return Checkpoint(tensors, self._facts())

    def snapshot(self) -> Checkpoint:
        """The averaged weights alone."""
        return Checkpoint(self.ema.average, self._facts())

    def restore(self, checkpoint: Checkpoint) -> None:
        """Set everything to what `checkpoint` returned once."""
        groups: dict[str, dict[str, Tensor]] = {"model": {}, "ema": {}, "optimiser": {}}
        for name, tensor in checkpoint.tensors.items():
            group, rest = name.split("/", 1)
            groups[group][rest] = tensor
        if missing := self.live.keys() ^ groups["model"].keys():
            raise CheckpointError(
                f"the checkpoint is of another network: {', '.join(sorted(missing)[:3])} do not match."
            )
        with torch.no_grad():
            for name, tensor in self.live.items():
                tensor.copy_(groups["model"][name])
        self.ema.load(groups["ema"])
        self._restore_moments(groups["optimiser"])
        facts = checkpoint.facts
        self.step, self.total = int(facts["step"]), int(facts["total"])
        self.compute_seconds, self.losses = float(facts["compute_seconds"]), dict(facts["losses"])

    def _restore_moments(self, flat: Mapping[str, Tensor]) -> None:
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in flat.items():
            index, moment = name.split("/", 1)
            state.setdefault(int(index), {})[moment] = tensor
        groups = self.optimiser.state_dict()["param_groups"]
        vectors = [vector for group in self.optimiser.param_groups for vector in group["params"]]
        found = [state[index]["exp_avg"].shape for index in sorted(state)]
        if found and found != [vector.shape for vector in vectors]:
            raise CheckpointError("the checkpoint's moments are those of other weights, or of another version of namm.")
        self.optimiser.load_state_dict({"state": state, "param_groups": groups})

    def _facts(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "total": self.total,
            "compute_seconds": self.compute_seconds,
            "losses": self.losses,
        }
