"""What the implicit step costs: ℓ of Burgers' and its gradient, Crank–Nicolson against forward Euler.

The baseline, measured in the same run, is the same constraint with the explicit Euler step, which is what the official
code computes in its place.

    python benchmarks/burgers.py [--batch 16] [--size 64] [--repeats 20] [--threads 1]
"""

import argparse
import statistics
import time
from collections.abc import Sequence

import torch

from namm.constraints import Burgers
from namm.simulators.burgers import crank_nicolson, euler


def milliseconds(rule: Burgers, x: torch.Tensor, repeats: int) -> float:
    """Median time of ℓ and its gradient."""
    times = []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        torch.autograd.grad(rule(x).sum(), x)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[3:])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("batch", 16), ("size", 64), ("repeats", 20), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    x = torch.rand(options.batch, 1, options.size, options.size, requires_grad=True)
    ours, baseline = (milliseconds(Burgers(step=step), x, options.repeats) for step in (crank_nicolson, euler))
    print(f"{options.batch} images of {options.size}×{options.size}, ℓ and its gradient, {options.threads} thread(s)")
    print(f"Crank–Nicolson {ours:.2f} ms, forward Euler {baseline:.2f} ms, ratio {ours / baseline:.1f}")
    return 0


if __name__ == "__main__":
    main()
