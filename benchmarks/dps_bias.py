"""What DPS gets wrong, where the truth is known: white noise, half of it measured with noise.

Prior x ~ N(0, 1) in every pixel, m = x + n with n ~ N(0, σ²) in the measured ones. The true posterior of a measured
pixel is N(m/(1 + σ²), σ²/(1 + σ²)); the others know nothing. The prior's exact score is used: what is left is DPS.

    python benchmarks/dps_bias.py [--samples 1500] [--steps 1000] [--std 0.3]

Prints, for the measured pixels, the samples' spread over the true one, the slope of their mean against m over the true
one, 1/(1 + σ²), and χ² per measured value; the true posterior, the baseline, comes first.
"""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from namm.generative import Diffusion, Mirrored
from namm.inverse import AncestralSteps, Columns, DPSGuidance, GaussianNoise, sample_posterior
from namm.maps import IdentityMap

ZETAS = (0.003, 0.01, 0.03, 0.1, 0.3)


class WhiteNoise(nn.Module):
    """E[ε | y(t)] = s(t) y(t), since y(t) is white noise too."""

    def forward(self, y_t: Tensor, t: Tensor) -> Tensor:
        """(B, C, H, W), (B,) → (B, C, H, W)."""
        return torch.sqrt(-torch.expm1(-0.1 * t - 9.95 * t**2)).reshape(-1, 1, 1, 1) * y_t


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--std", type=float, default=0.3)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    prior = Mirrored(Diffusion(WhiteNoise(), (1, 1, 8)).double(), IdentityMap())
    seen, noise = Columns(range(4)), GaussianNoise(options.std)
    truth = torch.randn(1, 1, 1, 8, dtype=torch.double)
    measured = seen(truth) + noise.sample(seen(truth))
    slope = 1 / (1 + options.std**2)
    true_std = options.std * slope**0.5
    expected = float(((1 - slope) * measured / options.std).square().mean() + slope)
    print(f"{'':<16}{'spread':>8}{'slope':>8}{'χ²':>10}")
    print(f"{'true posterior':<16}{1:>8.2f}{1:>8.2f}{expected:>10.3f}")
    for zeta in ZETAS:
        posterior = sample_posterior(
            prior,
            measured,
            seen,
            noise,
            n=options.samples,
            guidance=DPSGuidance(zeta),
            steps=AncestralSteps(options.steps),
            batch_size=options.samples,
            generator=1,
            progress=False,
        )
        x = posterior.samples[0, ..., :4]
        spread = float(x.std(0).mean()) / true_std
        found = float((x.mean(0) * measured[0]).sum() / measured.square().sum()) / slope
        chi2 = float(posterior.chi2.mean()) / posterior.measured
        print(f"{f'DPS, ζ {zeta:g}':<16}{spread:>8.2f}{found:>8.2f}{chi2:>10.3f}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
