"""Images to learn from: our own datasets, drawn by seed, and readers for a user's files."""

from namm.datasets.base import SPLITS, Dataset, Simulated
from namm.datasets.blackholes import BlackHoles, black_holes
from namm.datasets.burgers import BurgersTrajectories, burgers_trajectories
from namm.datasets.darcy import DarcyFlow, darcy_flow
from namm.datasets.galaxies import Galaxies, galaxies
from namm.datasets.kolmogorov import KolmogorovFlow, kolmogorov_flow
from namm.datasets.readers import LazyImages, open_images, read_images
from namm.datasets.store import Store, load, open_store, write_store
from namm.datasets.unit_cells import UnitCells, unit_cells

DATASETS: dict[str, type[Dataset]] = {
    recipe.name: recipe for recipe in (BurgersTrajectories, UnitCells, KolmogorovFlow, Galaxies, BlackHoles)
}
"""The paper's datasets by the name the command line uses."""

__all__ = [
    "DATASETS",
    "SPLITS",
    "BlackHoles",
    "BurgersTrajectories",
    "DarcyFlow",
    "Dataset",
    "Galaxies",
    "KolmogorovFlow",
    "LazyImages",
    "Simulated",
    "Store",
    "UnitCells",
    "black_holes",
    "burgers_trajectories",
    "darcy_flow",
    "galaxies",
    "kolmogorov_flow",
    "load",
    "open_images",
    "open_store",
    "read_images",
    "unit_cells",
    "write_store",
]
