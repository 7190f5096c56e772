"""What the paper reports in its Table 2; imports no torch.

Means over 10 000 samples of the mirrored model without finetuning. CD is with the λ that the paper chose for each
experiment, not with that of the row.
"""

from namm.experiments.paper.runs_needed import SIGMAS, WEIGHTS

Triple = tuple[float, float, float]

_TABLE: dict[str, tuple[tuple[Triple, ...], ...]] = {
    "flux": (
        ((0.66, 0.0517, 0.0386), (0.55, 0.0549, 0.0078), (0.66, 0.0757, 0.0062)),
        ((0.03, 1.1723, 0.4372), (0.02, 1.1723, 0.5275), (0.22, 1.1727, 0.6396)),
        ((0.07, 1.1721, 0.5052), (0.03, 1.1722, 0.5191), (0.11, 1.1727, 0.6151)),
    ),
    "burgers": (
        ((0.20, 0.0488, 0.0483), (0.27, 0.0631, 0.1111), (0.26, 0.0945, 0.1142)),
        ((0.20, 0.0784, 0.0434), (0.20, 0.0682, 0.0495), (0.18, 0.1069, 0.0499)),
        ((0.20, 0.1159, 0.0494), (0.07, 0.1092, 0.0026), (0.17, 0.2169, 0.0144)),
    ),
    "divergence": (
        ((4.17, 0.0493, 0.0007), (5.17, 0.0484, 0.0029), (6.01, 0.0522, 0.0062)),
        ((3.37, 0.0593, 0.0029), (3.16, 0.0569, 0.0009), (3.56, 0.0588, 0.0020)),
        ((2.42, 0.0554, 0.0031), (2.28, 0.0548, 0.0031), (2.61, 0.0593, 0.0029)),
    ),
    "periodic": (
        ((0.25, 0.2133, 0.0215), (0.28, 0.0484, 0.0006), (0.30, 0.0507, 0.0019)),
        ((0.35, 0.0795, 0.0054), (0.15, 0.0621, 0.0015), (0.35, 0.1013, 0.0044)),
        ((0.30, 0.1092, 0.0049), (0.05, 0.0856, 0.0044), (0.00, 0.7822, 0.8408)),
    ),
    "count": (
        ((0.73, 0.0715, 0.0084), (0.65, 0.0449, 0.0514), (0.61, 0.2119, 0.0266)),
        ((0.13, 0.1773, 0.5006), (0.59, 0.0884, 0.0594), (0.52, 0.0520, 0.0086)),
        ((0.01, 0.6346, 0.4995), (0.02, 0.6774, 0.4957), (0.03, 0.7988, 0.4786)),
    ),
}
"""CD, MMD and KID: a line for each λ_constr, in it one for each σ_max."""

TABLE2: dict[str, dict[tuple[float, float], Triple]] = {
    experiment: {
        (sigma, weight): triple
        for weight, line in zip(WEIGHTS, lines, strict=True)
        for sigma, triple in zip(SIGMAS, line, strict=True)
    }
    for experiment, lines in _TABLE.items()
}
"""CD, MMD and KID of each experiment by (σ_max, λ_constr)."""
