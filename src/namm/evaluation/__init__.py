"""How good samples are: how well they keep the rule, and how much they resemble the data."""

from namm.evaluation.features import Clipped, Extractor, Vorticity, fid, kid, picture_for
from namm.evaluation.inception import Inception, load_inception
from namm.evaluation.mmd import median_bandwidth, mmd, mmd2, mmd2_null, mmd_floor
from namm.evaluation.quality import DistanceSummary, Scores, compare, distance_summary, floor, total_variation

__all__ = [
    "Clipped",
    "DistanceSummary",
    "Extractor",
    "Inception",
    "Scores",
    "Vorticity",
    "compare",
    "distance_summary",
    "fid",
    "floor",
    "kid",
    "load_inception",
    "median_bandwidth",
    "mmd",
    "mmd2",
    "mmd2_null",
    "mmd_floor",
    "picture_for",
    "total_variation",
]
