"""`namm data`: draw a dataset into an HDF5 file."""

import textwrap
from pathlib import Path

from namm.cli.options import HELP, parse, pick, take_name
from namm.errors import UsageError
from namm.experiments.engine.experiment import Experiment
from namm.experiments.presets import EXPERIMENTS, find, require_name


def drawable() -> dict[str, Experiment]:
    """The experiments whose data can be drawn, by the dataset's own name and by the experiment's."""
    known = [find(name) for name in EXPERIMENTS]
    return {name: each for each in known for name in (each.dataset or each.name, each.name)}


def usage() -> str:
    """The help text that needs no dataset."""
    known = [find(name) for name in EXPERIMENTS]
    names = ", ".join(f"{each.dataset} (or {each.name})" if each.dataset else each.name for each in known)
    return "\n".join(
        [
            "usage: namm data NAME [--out FILE] [--n-train N] [--n-val N] [--n-test N] [--seed N] [--SETTING VALUE]",
            "",
            "Draw a dataset into an HDF5 file with the splits train, val and test. Interrupted, it goes on where it",
            "stopped; a complete file of the same settings is left alone, one of others is never overwritten.",
            "",
            textwrap.fill(names, 110, initial_indent="  NAME        ", subsequent_indent=" " * 14),
            "  --out FILE  where to write (default: NAME.h5)",
            "  --SETTING   sizes, seed and every generating parameter; `namm data NAME --help` lists them",
        ]
    )


def main(arguments: list[str]) -> int:
    """Draw a dataset."""
    own, rest = pick(arguments, ("out",))
    name, rest = take_name(rest)
    if name is None:
        if not arguments or set(rest) & set(HELP):
            print(usage())
            return 0 if arguments else 2
        raise UsageError(f"which dataset? Its name comes first: namm data {'|'.join(drawable())}.")
    kind = drawable()[require_name(name, drawable(), "dataset")].data
    data = parse(kind, rest, prog=f"namm data {name}", description=f"Draw the dataset {name}.")
    if isinstance(data, int):
        return data
    path = Path(own.get("out", f"{name}.h5"))
    if path.suffix not in (".h5", ".hdf5"):
        raise UsageError(f"--out must name an HDF5 file, such as {name}.h5, not {path}: nothing would read it back.")

    from namm.datasets import write_store

    recipe = data.build()
    there = path.exists()
    write_store(path, recipe, data.sizes, seed=data.seed)
    counts = ", ".join(f"{n} {split}" for split, n in data.sizes.items())
    shape = "×".join(map(str, recipe.shape))
    print(
        f"{path} {'already holds' if there else 'holds'} {counts} images of {shape} ({recipe.name}, seed {data.seed})"
    )
    return 0
