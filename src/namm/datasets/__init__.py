"""Images to learn from: our own datasets, drawn by seed, and readers for a user's files."""

from namm.datasets.base import SPLITS, Dataset
from namm.datasets.burgers import BurgersTrajectories, burgers_trajectories
from namm.datasets.lazy import LazyImages
from namm.datasets.readers import open_images, read_images
from namm.datasets.store import Store, load, open_store, write_store
from namm.datasets.unit_cells import UnitCells, unit_cells

DATASETS: dict[str, type[Dataset]] = {recipe.name: recipe for recipe in (BurgersTrajectories, UnitCells)}
"""Our own datasets by the name the command line uses."""

__all__ = [
    "DATASETS",
    "SPLITS",
    "BurgersTrajectories",
    "Dataset",
    "LazyImages",
    "Store",
    "UnitCells",
    "burgers_trajectories",
    "load",
    "open_images",
    "open_store",
    "read_images",
    "unit_cells",
    "write_store",
]
