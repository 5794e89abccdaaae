"""The statistics of a diagnosis in words, and numbers as they are shown."""

from collections.abc import Mapping
from typing import NamedTuple


class Statistic(NamedTuple):
    """Short name and meaning of one statistic."""

    name: str
    meaning: str


# By their keys in a record, in the order in which they are shown.
STATISTICS = {
    "kappa_cap": Statistic(
        "κ_cap",
        "Share of all sensitivity that lies in the leading directions, up to the rank.",
    ),
    "cv": Statistic(
        "CV over tokens",
        "Spread of that sensitivity over tokens; 0 if all tokens have the same.",
    ),
    "rank_entropy": Statistic(
        "Entropy rank", "Exponential of the entropy of the squared singular values."
    ),
    "rank_participation": Statistic(
        "Participation ratio", "Number of equal directions with the same sum of squares."
    ),
    "rank_stable": Statistic(
        "Stable rank", "All sensitivity over that of the first direction."
    ),
    "rank_90": Statistic("Rank for 90 %", "Directions that hold 90 % of all sensitivity."),
}


def in_figures(estimate: Mapping[str, float | None]) -> str:
    """Mean and standard error of an estimate, ``0.485 ± 0.012``; a dash if unknown."""
    mean, error = estimate["mean"], estimate["standard_error"]
    shown = "-" if mean is None else f"{mean:.3g}"
    return shown if error is None else f"{shown} ± {error:.2g}"
