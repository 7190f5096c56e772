"""This process among those that torchrun started."""

import torch
from accelerate import PartialState


def process_state() -> PartialState:
    """Rank, number of processes and device; the first call joins them, through Gloo where there is no GPU."""
    return PartialState(cpu=not torch.cuda.is_available())
