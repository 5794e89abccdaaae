"""What a probe prunes by, and how it resamples."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foveate.reduction.sketch import PulledProbes, Sensitivity
from foveate.scoring import Score, criteria
from foveate.tasks import Task

__all__ = ["CRITERIA", "SENSITIVITY", "Conditions", "must_differ", "score_of"]

SENSITIVITY = "sensitivity"
_SCORES: dict[str, Score] = {
    "norm": criteria.feature_norm,
    "attention": criteria.class_attention,
    "received": criteria.received_attention,
    "coverage": criteria.coverage,
    "redundancy": criteria.key_redundancy,
}
CRITERIA = ("random", *_SCORES, SENSITIVITY)
"""Criteria by name; the last is the only one that looks at the task."""


@dataclass(frozen=True)
class Conditions:
    """How a probe prunes and resamples.

    Attributes:
        criteria: Names from :data:`CRITERIA`.
        keep: Share of the patches that stay, in (0, 1].
        seed: Of random scores, of probes and of the resamples.
        num_resamples: Resamples of the images, at least 2.
        num_probes: Of ``sensitivity``.

    Raises:
        ValueError: If one is out of range, or a criterion is unknown or comes twice.
    """

    criteria: tuple[str, ...] = CRITERIA[:-1]
    keep: float = 0.5
    seed: int = 0
    num_resamples: int = 200
    num_probes: int = 16

    def __post_init__(self) -> None:
        """Check the fields."""
        object.__setattr__(self, "criteria", tuple(self.criteria))
        unknown = [name for name in self.criteria if name not in CRITERIA]
        if unknown:
            raise ValueError(
                f"criteria must be from {', '.join(CRITERIA)}; got '{unknown[0]}'."
            )
        must_differ("criteria", self.criteria)
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep must be in (0, 1]; got {self.keep}.")
        for name, least in (("num_resamples", 2), ("num_probes", 1)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"{name} must be at least {least}; got {getattr(self, name)}."
                )


def score_of(criterion: str, task: Task, wanted: Conditions) -> Score:
    """Score of a criterion.

    Args:
        criterion: One of :data:`CRITERIA`.
        task: What ``sensitivity`` is of; no other looks at it.
        wanted: Seed and number of probes.

    Returns:
        The score.
    """
    if criterion == "random":
        return criteria.Random(wanted.seed)
    if criterion != SENSITIVITY:
        return _SCORES[criterion]
    probes = PulledProbes(task, num_probes=wanted.num_probes, seed=wanted.seed)
    return Sensitivity(probes)


def must_differ(name: str, values: Sequence[Any]) -> None:
    """Refuse an empty list, or one with doubles.

    Args:
        name: What it lists, for the message.
        values: The list.

    Raises:
        ValueError: If it is one of these.
    """
    if not values or len(set(values)) < len(values):
        raise ValueError(f"{name} must be at least one, and each once; got {[*values]}.")
