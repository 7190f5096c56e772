"""A training in float64 on one process and on two: distributed_training.py FOLDER, which gets folders 1 and 2."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from accelerate import PartialState
from safetensors.torch import save_file

from namm import MirrorMap, Periodic, train_map
from namm.datasets.unit_cells import UnitCells
from namm.maps import ICNN, ResNet
from namm.training.objectives import UniformNoise, Weights
from namm.training.settings import TrainSettings
from ranks import run_ranks


def train(folder: Path) -> None:
    torch.set_num_threads(1)
    processes = PartialState(cpu=True)
    rank = processes.process_index
    torch.manual_seed(rank)  # unequal on purpose: processes must agree on the weights of the first
    mirror = MirrorMap(ICNN(layers=1, filters=4), ResNet(filters=4, blocks=1, dropout=0.0)).double()
    settings = TrainSettings(budget="50 steps", batch_size=8, learning_rate=1e-3, log_every=1, validations=2)
    data = UnitCells(size=16).images(0, "train", 0, 52).double()
    chosen = {"noise": UniformNoise(0.1), "weights": Weights(), "settings": settings, "progress": False}
    train_map(mirror, data, Periodic(), **chosen, validation=data[:6], folder=folder / "run")
    save_file(mirror.state_dict(), folder / f"rank{rank}.safetensors")
    wide = MirrorMap(ICNN(layers=1, filters=4), ResNet(filters=16, blocks=1, dropout=0.0)).double()
    chosen |= {"settings": replace(settings, optimiser="muon", budget="8 steps", averages=(0.1,))}
    trained = train_map(wide, data, Periodic(), **chosen, validation=data[:6], folder=folder / "muon")
    average = {f"average/{name}": tensor for name, tensor in trained.averages[0.1].items()}
    save_file(wide.state_dict() | average, folder / f"muon{rank}.safetensors")
    processes.wait_for_everyone()
    processes.destroy_process_group()


def main(folder: Path) -> None:
    for world in (1, 2):
        (folder / str(world)).mkdir()
        run_ranks(world, partial(train, folder / str(world)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
