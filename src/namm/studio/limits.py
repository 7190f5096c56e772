"""What may be asked of a studio: ranges that a small machine answers in seconds to minutes, and values within them."""

from namm.errors import UsageError

MOST_SAMPLES, MOST_POSTERIOR = 16, 8
"""Samples drawn together, from the model and behind a measurement."""
LEAST_STEPS, MOST_STEPS = 2, 200
"""Evaluations of the network for a sample."""
LARGEST_SEED = 2**31 - 1
REACH = 4.0
"""The largest σ, in σ_max of the map."""
LEAST_NOISE, MOST_NOISE = 1e-6, 1e6
"""Standard deviations of the noise on observations."""


def whole(name: str, value: object, least: int, most: int) -> int:
    """A whole number within its range; refused otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UsageError(f"{name} must be a whole number from {least} to {most}, not {str(value)[:40]}.")
    return value


def real(name: str, value: object, least: float, most: float) -> float:
    """A number within its range, which neither NaN nor an infinity is; refused otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise UsageError(f"{name} must be a number from {least:.4g} to {most:.4g}, not {str(value)[:40]}.")
    return float(value)
