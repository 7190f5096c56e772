"""`namm data`: draw a dataset into an HDF5 file."""

from pathlib import Path

from namm.cli.help_text import format_usage
from namm.cli.options import drawable, parse, pick, require_first, require_hdf5
from namm.experiments.presets import EXPERIMENTS, find, require_name


def usage() -> str:
    """The help text that needs no dataset."""
    known = map(find, EXPERIMENTS)
    return format_usage(
        "namm data NAME [--out FILE] [--n-train N] [--n-val N] [--n-test N] [--SETTING VALUE]",
        "Draw a dataset into an HDF5 file with the splits train, val and test. Interrupted, it goes on where it "
        "stopped; a complete file of the same settings is left alone, one of others is never overwritten.",
        {
            "NAME": ", ".join(f"{each.dataset} (or {each.name})" if each.dataset else each.name for each in known),
            "--out FILE": "where to write (default: NAME.h5)",
            "--SETTING": "sizes, seed and every generating parameter; `namm data NAME --help` shows them, "
            "`namm data NAME --help-all` says all of each",
        },
    )


def main(arguments: list[str]) -> None:
    """Draw a dataset."""
    picked, rest = pick(arguments, ("out",))
    question = f"which dataset? Its name comes first: namm data {'|'.join(drawable())}."
    name, rest = require_first(rest, usage(), question)
    kind = drawable()[require_name(name, drawable(), "dataset")].data
    data = parse(kind, rest, f"namm data {name}", description=f"Draw the dataset {name}.")
    path = Path(picked.get("out", f"{name}.h5"))
    require_hdf5(path, "--out", f"{name}.h5")

    from namm.datasets import write_store

    recipe = data.build()
    holds = "already holds" if path.exists() else "holds"
    write_store(path, recipe, data.sizes, seed=data.seed)
    counts = ", ".join(f"{n} {split}" for split, n in data.sizes.items())
    shape = "×".join(map(str, recipe.shape))
    print(f"{path} {holds} {counts} images of {shape} ({recipe.name}, seed {data.seed})")
