"""A variational autoencoder in mirror space against the same one on plain data, at equal training time, over seeds.

A demo-size experiment, that of Burgers' equation unless another is named. The plain autoencoder trains for as long as
the map and the mirrored one together (paper App. A compares them so). The map is not the demo's: λ, of which it takes
half, trades the distance to the rule for that to the data.

    python benchmarks/mirror_vae.py [--experiment burgers] [--seeds 0 1 2] [--minutes 4] [--map-minutes 1.5]
                                    [--weight 0.5] [--n 2000] [--out runs/autoencoders]

What is complete in --out is not run again. The exit code is 1 unless mean ℓ is at least 30 % lower for every seed and
√MMD² no larger: its mean excess over the seeds is within one standard error of that mean.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

from rich.console import Console
from rich.table import Table

from namm.datasets import open_store
from namm.evaluation import Scores, compare
from namm.experiments.engine.run import run
from namm.experiments.engine.run_parts import RunParts
from namm.experiments.engine.settings import with_seed
from namm.experiments.engine.stages.data import images_file
from namm.experiments.presets import EXPERIMENTS, Preset, preset
from namm.maps import IdentityMap

SUBSET = 1000
MINUTES, MAP_MINUTES, WEIGHT = 4.0, 1.5, 0.5


def scores(chosen: Preset, folder: Path, n: int, subset: int) -> dict[str, Scores]:
    """Both autoencoders, trained first where they are not, and real images."""
    run(chosen, folder, until="vae", force=True)
    parts = RunParts.load(folder)
    sources = {"MVAE": parts.source("mvae", parts.mirror("map")), "VAE": parts.source("vae", IdentityMap())}
    seed = chosen.settings.evaluate.seed
    with open_store(images_file(folder / "data")) as store:
        images = {name: source.sample(n, generator=seed).cpu() for name, source in sources.items()}
        images["data"] = store["train"][:n]
        rule = parts.rule().cpu()
        return {name: compare(x, store["test"], rule, subsets=10, size=subset) for name, x in images.items()}


def demo(experiment: str, minutes: float, map_minutes: float, weight: float) -> Preset:
    """The preset `demo` with these trainings of the mirrored autoencoder and the map, and `weight` times its λ."""
    chosen = preset(experiment, "demo")
    s = chosen.settings
    weights = replace(s.map.weights, constraint=weight * s.map.weights.constraint)
    maps = replace(s.map, weights=weights, train=replace(s.map.train, budget=f"{map_minutes} minutes"))
    vae = replace(s.vae, train=replace(s.vae.train, budget=f"{minutes} minutes"))
    return replace(chosen, settings=replace(s, map=maps, vae=vae))


def main(arguments: Sequence[str] | None = None, base: Preset | None = None) -> int:
    """Run what is missing and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", choices=EXPERIMENTS, default="burgers")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=MINUTES, help="training of the mirrored autoencoder")
    parser.add_argument("--map-minutes", type=float, default=MAP_MINUTES, help="training of the map")
    parser.add_argument("--weight", type=float, default=WEIGHT, help="of the rule, in units of the preset's λ")
    parser.add_argument("--n", type=int, default=2000)
    parser.add_argument("--subset", type=int, default=SUBSET, help="images per subset of the √MMD²")
    parser.add_argument("--out", type=Path, default=Path("runs/autoencoders"))
    options = parser.parse_args(arguments)
    chosen = base or demo(options.experiment, options.minutes, options.map_minutes, options.weight)
    table = Table("seed", "", "mean ℓ", "√MMD²", "total variation", "spread")
    ratios, differences = [], []
    for seed in options.seeds:
        seeded = replace(chosen, settings=with_seed(chosen.settings, seed))
        found = scores(seeded, options.out / f"{chosen.experiment}-{chosen.name}-{seed}", options.n, options.subset)
        for name in ("data", "VAE", "MVAE"):
            s = found[name]
            figures = f"{s.distance.mean:.2e}", "{:.4f} ± {:.4f}".format(*s.mmd)
            table.add_row(str(seed), name, *figures, f"{s.total_variation:.3f}", f"{s.spread:.3f}")
        ratios.append(found["MVAE"].distance.mean / found["VAE"].distance.mean)
        differences.append(found["MVAE"].mmd.mean - found["VAE"].mmd.mean)
    Console(width=100).print(table)
    print(f"ℓ of MVAE / VAE: {', '.join(f'{ratio:.3f}' for ratio in ratios)}")
    error = stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    each = ", ".join(f"{difference:+.4f}" for difference in differences)
    print(f"√MMD² of MVAE − VAE: {mean(differences):+.4f} ± {error:.4f} ({each})")
    return 0 if max(ratios) <= 0.7 and mean(differences) <= error else 1


if __name__ == "__main__":
    raise SystemExit(main())
