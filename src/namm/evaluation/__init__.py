"""How good samples are: how well they keep the rule, and how much they resemble the data."""

from namm.evaluation.features import Clipped, Extractor, Vorticity, fid, kid, picture_for
from namm.evaluation.inception import Inception, load_inception
from namm.evaluation.mmd import median_bandwidth, mmd, mmd2, mmd2_null, mmd_error, mmd_floor
from namm.evaluation.scores import DistanceSummary, Scores, compare, distance_summary, floor, total_variation
from namm.evaluation.verdict import Figures, Verdict, judge, judge_map

__all__ = [
    "Clipped",
    "DistanceSummary",
    "Extractor",
    "Figures",
    "Inception",
    "Scores",
    "Verdict",
    "Vorticity",
    "compare",
    "distance_summary",
    "fid",
    "floor",
    "judge",
    "judge_map",
    "kid",
    "load_inception",
    "median_bandwidth",
    "mmd",
    "mmd2",
    "mmd2_null",
    "mmd_error",
    "mmd_floor",
    "picture_for",
    "total_variation",
]
