"""A user's folder for the tests of the command line: images in a file that is not ours, and a rule in a module."""

import h5py
import numpy as np

MARK = "CHARGES_MARK"
"""Variable of the environment: a file that is made when the rule's module is run."""
RULE = f"""
import os

if "{MARK}" in os.environ:
    open(os.environ["{MARK}"], "a").close()

def neutral(x):
    return x.sum(1).abs().mean((1, 2))
"""
OWN = ["--data", "ions.h5", "--constraint", "charges:neutral"]
TINY = [
    "--force",  # so little training makes no map worth going on with
    *("--map.g.layers", "1", "--map.g.filters", "4", "--map.f.filters", "4", "--map.f.blocks", "1"),
    *("--map.f.downsamplings", "1", "--map.train.batch-size", "4", "--map.train.budget", "6 steps"),
    *("--mdm.network.filters", "8", "--mdm.network.multipliers", "1", "--mdm.train.budget", "6 steps"),
    *("--mdm.train.batch-size", "4", "--dm.train.batch-size", "4"),
    *("--samples.n", "64", "--samples.n-val", "8", "--samples.sampler.steps", "3"),
    *("--finetune.train.budget", "4 steps", "--evaluate.n", "64", "--evaluate.mmd-subsets", "2"),
    *("--evaluate.sampler.steps", "3", "--evaluate.milestone-samples", "0"),
]


def ions(n=200, seed=0):
    x = np.random.default_rng(seed).standard_normal((n, 3, 8, 8)).astype(np.float32)
    return 0.5 * (x - x.mean(1, keepdims=True))


def write(folder):
    """A user's folder: images in an HDF5 file that is not ours, and a module."""
    folder.mkdir(exist_ok=True)
    with h5py.File(folder / "ions.h5", "w") as file:
        file["density"] = ions()
    (folder / "charges.py").write_text(RULE)
    return folder
