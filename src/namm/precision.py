"""The names for how a GPU computes; `namm.numerics` says what they mean. Imports no torch, for the command line."""

from typing import Literal

Precision = Literal["auto", "fp32", "tf32", "bf16"]
