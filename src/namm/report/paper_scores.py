"""What the paper reports of a method, to stand beside what a run measures; imports nothing."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PaperScores:
    """One column of the paper's Table 1 and of its FID table."""

    cd: float
    mmd: float
    kid: float
    fid: float
