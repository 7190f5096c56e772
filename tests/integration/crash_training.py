"""A training of a small map, as a command: crash_training.py FOLDER. Run, killed and run again by the tests."""

import sys

import torch

from namm import MirrorMap, Periodic, train_map
from namm.datasets.unit_cells import UnitCells
from namm.maps import ICNN, ResNet
from namm.training.objectives import UniformNoise, Weights
from namm.training.settings import TrainSettings


def main(folder: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mirror = MirrorMap(ICNN(layers=1, filters=4), ResNet(filters=4, blocks=1, dropout=0.3))
    settings = TrainSettings(
        budget="120 steps", batch_size=4, checkpoint_seconds=0.0, log_every=5, milestones=3, validations=4
    )
    dataset = UnitCells(size=16)
    data, validation = dataset.images(0, "train", 0, 50), dataset.images(0, "val", 0, 8)
    chosen = {"noise": UniformNoise(0.1), "weights": Weights(), "settings": settings, "progress": False}
    train_map(mirror, data, Periodic(), **chosen, validation=validation, folder=folder)


if __name__ == "__main__":
    main(sys.argv[1])
