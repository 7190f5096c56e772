"""Samples on two processes: distributed_sampling.py FOLDER."""

import sys
from functools import partial
from pathlib import Path

import torch
from accelerate import PartialState
from safetensors.torch import save_file
from test_diffusion import convolutional

from namm.generative.samplers import EulerMaruyama
from ranks import run_ranks


def sample(folder: Path) -> None:
    torch.set_num_threads(1)
    processes = PartialState(cpu=True)
    torch.manual_seed(0)
    model = convolutional()
    options = {"sampler": EulerMaruyama(5), "batch_size": 16, "progress": False}
    seeded = model.sample(67, generator=2, **options)
    torch.manual_seed(processes.process_index)  # unequal on purpose: processes must agree on the seed of the first
    unseeded = model.sample(3, **options)
    save_file({"seeded": seeded, "unseeded": unseeded}, folder / f"rank{processes.process_index}.safetensors")
    processes.wait_for_everyone()
    processes.destroy_process_group()


if __name__ == "__main__":
    run_ranks(2, partial(sample, Path(sys.argv[1])))
