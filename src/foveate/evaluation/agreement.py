r"""How far tasks, depths and endpoints agree on drops of scores, with joint intervals.

T tasks, A = 2 endpoints of recovery, D depths, C criteria, R resamples. All numbers are
functions of one tensor, whose first row is the data set and whose others are resamples of
its images: the same for all tasks, so that every comparison is paired.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import erfc, isnan, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foveate.evaluation.metrics import Estimate, Statistics, estimate

__all__ = ["ALPHAS", "Drops", "Pair", "excludes_zero", "holm", "score_draws", "spearman"]

Place = tuple[int, int, int]  # indices of a task, an endpoint and a depth

ALPHAS = (0.0, 1.0)
"""Endpoints of recovery: a copy of the stand-in, and with all of the offset."""


class Pair(NamedTuple):
    """Two criteria held against each other.

    Attributes:
        task: Index of the task.
        alpha: Index of the endpoint.
        depth: Index of the depth.
        criteria: Their indices.
        difference: Drop of the first minus drop of the second; below 0 the first is better.
        p: Probability of such a difference if there is none.
        p_holm: The same, corrected for all pairs of the probe.
    """

    task: int
    alpha: int
    depth: int
    criteria: tuple[int, int]
    difference: Estimate
    p: float
    p_holm: float = 1.0

    def sign(self, level: float = 0.05) -> int:
        """Which is better beyond doubt: -1 the first, 1 the second, 0 neither."""
        if self.p_holm > level or not self.difference.value:
            return 0
        return 1 if self.difference.value > 0 else -1


@dataclass(frozen=True)
class Drops:
    """What pruning costs: full minus reduced score, so that more is worse.

    Attributes:
        drawn: On the data set and on resamples, ``(1 + R, T, 2, D, C)``, float64; not a
            number where a score is undefined.
        tasks: Their names.
        recovers: Whether each reads the grid; of one that does not, both endpoints are one.
        depths: Blocks with a step.
        criteria: Their names.

    Raises:
        ValueError: If names and numbers do not fit.
    """

    drawn: Tensor
    tasks: tuple[str, ...]
    recovers: tuple[bool, ...]
    depths: tuple[int, ...]
    criteria: tuple[str, ...]

    def __post_init__(self) -> None:
        """Check the shape."""
        shape = (len(self.tasks), len(ALPHAS), len(self.depths), len(self.criteria))
        if self.drawn.shape[1:] != shape or len(self.recovers) != len(self.tasks):
            raise ValueError(
                f"drawn must be (1 + R, {', '.join(map(str, shape))}); got "
                f"{tuple(self.drawn.shape)}."
            )

    def correlation(self, first: Place, second: Place) -> Estimate:
        """Rank correlation of the criteria's drops at two places.

        Args:
            first: Indices of a task, an endpoint and a depth.
            second: The same of the other place.

        Returns:
            Spearman's, with its interval; resamples blur ranks, hence the interval of two
            equal orders lies below 1.
        """
        (t, a, d), (u, b, e) = first, second
        return _joint(spearman(self.drawn[:, t, a, d], self.drawn[:, u, b, e]))

    def endpoints(self, *tasks: int) -> tuple[int, ...]:
        """Indices of the endpoints that differ for one of these tasks."""
        return (0, 1) if any(self.recovers[t] for t in tasks) else (0,)

    def cells(self) -> list[dict[str, Any]]:
        """Drop of every criterion at every depth, for every task and endpoint."""
        return [
            {
                "task": task,
                "alpha": alpha,
                "depth": depth,
                "criterion": criterion,
                "drop": _joint(self.drawn[:, t, a, d, c]).record(),
            }
            for t, task in enumerate(self.tasks)
            for a, alpha in enumerate(ALPHAS)
            for d, depth in enumerate(self.depths)
            for c, criterion in enumerate(self.criteria)
        ]

    def between_tasks(self) -> list[dict[str, Any]]:
        """Rank correlation of the criteria's drops, for each depth and pair of tasks."""
        return [
            {
                "depth": depth,
                "alpha": ALPHAS[a],
                "tasks": [self.tasks[t], self.tasks[u]],
                **self.correlation((t, a, d), (u, a, d)).record(),
            }
            for d, depth in enumerate(self.depths)
            for t, u in combinations(range(len(self.tasks)), 2)
            for a in self.endpoints(t, u)
        ]

    def between_depths(self) -> list[dict[str, Any]]:
        """Rank correlation of the criteria's drops, for each task and pair of depths."""
        return [
            {
                "task": task,
                "alpha": ALPHAS[a],
                "depths": [self.depths[d], self.depths[e]],
                **self.correlation((t, a, d), (t, a, e)).record(),
            }
            for t, task in enumerate(self.tasks)
            for a in self.endpoints(t)
            for d, e in combinations(range(len(self.depths)), 2)
        ]

    def recovery(self) -> list[dict[str, Any]]:
        """Drop with the offset minus drop without, for tasks that read the grid.

        Returns:
            For each task the mean over criteria and depths (depth None), then for each
            depth the mean over criteria. Below 0 the offset helps.
        """
        return [
            {
                "task": task,
                "depth": None if d is None else self.depths[d],
                **_joint(_gained(self.drawn, t, d)).record(),
            }
            for t, task in enumerate(self.tasks)
            if self.recovers[t]
            for d in (None, *range(len(self.depths)))
        ]

    def pairs(self) -> list[Pair]:
        """Every pair of criteria, for each task, endpoint and depth.

        The probability is that of a normal variable with the standard error of the
        resamples; 1 if they do not vary, since then they say nothing.

        Returns:
            Pairs, corrected by Holm's method for being so many.
        """
        found = []
        for t in range(len(self.tasks)):
            for a in self.endpoints(t):
                for d in range(len(self.depths)):
                    for i, j in combinations(range(len(self.criteria)), 2):
                        change = self.drawn[:, t, a, d, i] - self.drawn[:, t, a, d, j]
                        p = _p_value(change)
                        found.append(Pair(t, a, d, (i, j), _joint(change), p))
        corrected = holm([pair.p for pair in found])
        return [pair._replace(p_holm=p) for pair, p in zip(found, corrected, strict=True)]

    def record_pair(self, pair: Pair) -> dict[str, Any]:
        """A pair as JSON, with names."""
        return {
            "task": self.tasks[pair.task],
            "alpha": ALPHAS[pair.alpha],
            "depth": self.depths[pair.depth],
            "criteria": [self.criteria[c] for c in pair.criteria],
            "difference": pair.difference.record(),
            "excludes_zero": excludes_zero(pair.difference),
            "p": pair.p,
            "p_holm": pair.p_holm,
            "significant": pair.sign() != 0,
        }


def score_draws(statistics: Statistics, name: str, weights: Sequence[Tensor]) -> Tensor:
    """One score on the data set and on resamples.

    Args:
        statistics: Of each image.
        name: The score.
        weights: How often each image occurs, ``(R_i, N)`` each.

    Returns:
        One after the other, ``(sum of R_i,)``, float64.
    """
    return torch.cat([statistics.scores(w)[name] for w in weights]).double()


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Rank correlation of rows, ties sharing their mean rank.

    Args:
        a: ``(R, C)``.
        b: ``(R, C)``.

    Returns:
        ``(R,)``, float64; not a number where a row is constant or holds no number.
    """
    x, y = (_ranks(each) for each in (a, b))
    x, y = (each - each.mean(-1, keepdim=True) for each in (x, y))
    both = x.square().sum(-1) * y.square().sum(-1)
    return torch.where(both > 0, (x * y).sum(-1) / both.sqrt(), torch.nan)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct probabilities for being many, by Holm's step-down method.

    Args:
        p_values: One a test.

    Returns:
        Corrected ones in the same order, at most 1; the chance that any of those below q is
        there by accident is at most q, however the tests depend on each other.

    References:
        Holm, "A simple sequentially rejective multiple test procedure", Scand. J. Stat.
        6(2), 1979.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * p_values[index]))
        corrected[index] = highest
    return corrected


def excludes_zero(found: Estimate | Mapping[str, float | None]) -> bool:
    """Whether zero is outside an interval; not if it is undefined."""
    ends = found if isinstance(found, Mapping) else found.record()
    low, high = ends["low"], ends["high"]
    return low is not None and high is not None and (low > 0 or high < 0)


def _joint(drawn: Tensor) -> Estimate:
    """A number on the data set and on resamples, ``(1 + R,)``, with its interval."""
    return estimate(drawn[0], drawn[1:])


def _gained(drawn: Tensor, task: int, depth: int | None) -> Tensor:
    """Mean drop with the offset minus that without, ``(1 + R,)``."""
    change = drawn[:, task, 1] - drawn[:, task, 0]  # (1 + R, D, C)
    return change.mean((1, 2)) if depth is None else change[:, depth].mean(1)


def _ranks(x: Tensor) -> Tensor:
    """Ranks of the entries of a row, ``(R, C)``, float64; not a number if one is none."""
    below = (x[..., None, :] < x[..., None]).sum(-1)
    equal = (x[..., None, :] == x[..., None]).sum(-1)
    ranks = below + (equal + 1) / 2
    return ranks.double().masked_fill(x.isnan().any(-1, keepdim=True), torch.nan)


def _p_value(drawn: Tensor) -> float:
    """Two-sided, of a normal variable with the spread of the resamples."""
    value, spread = float(drawn[0]), drawn[1:][~drawn[1:].isnan()]
    if isnan(value) or len(spread) < 2 or spread.min() == spread.max():
        return 1.0
    return erfc(abs(value) / (float(spread.std()) * sqrt(2)))
