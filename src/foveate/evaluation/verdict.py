"""What a probe says about the three claims behind task-adaptive pruning, by intervals."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, Literal, NamedTuple

from foveate.evaluation.agreement import ALPHAS, Drops, Pair, excludes_zero

__all__ = ["Verdict", "judge"]

Finding = Literal["confirmed", "refuted", "undecided"]
NOTHING = ", which takes at least two of each"


class Verdict(NamedTuple):
    """One claim.

    Attributes:
        claim: ``ranking``, ``depth`` or ``recovery``.
        finding: ``confirmed``, ``refuted`` or ``undecided``.
        sentence: Why, with figures; scores are in points of a hundred.
    """

    claim: str
    finding: Finding
    sentence: str


class _Meeting(NamedTuple):
    """The same two criteria in two places that a claim compares."""

    first: Pair
    second: Pair

    @property
    def is_reversed(self) -> bool:
        """Whether each place is sure, and they disagree."""
        return self.first.sign() * self.second.sign() < 0

    @property
    def is_shared(self) -> bool:
        """Whether each place is sure, and they agree."""
        return self.first.sign() * self.second.sign() > 0

    @property
    def is_open(self) -> bool:
        """Whether one place is sure and the other is not."""
        return bool(self.first.sign()) != bool(self.second.sign())

    @property
    def strength(self) -> float:
        """The smaller of the two differences."""
        return min(abs(self.first.difference.value), abs(self.second.difference.value))


def judge(drops: Drops, pairs: Sequence[Pair]) -> tuple[Verdict, Verdict, Verdict]:
    """Hold the three claims against a probe.

    *Ranking* (tasks order the criteria differently) and *depth* (the order changes with
    depth) are confirmed if two tasks, or two depths of a task, order a pair of criteria in
    opposite ways and both are significant after Holm's correction over all pairs of the
    probe; refuted if every pair that is significant in one place is significant and the
    same in the other; undecided otherwise. *Recovery* (tasks disagree about the offset) is
    confirmed if the offset lowers the mean drop of one task and raises that of another,
    both intervals without zero; refuted if all intervals are on one side of zero.

    Args:
        drops: What pruning costs.
        pairs: As of :meth:`Drops.pairs`.

    Returns:
        Ranking, depth and recovery.
    """
    return (
        _judge_order("ranking", "tasks order the criteria differently", drops, pairs),
        _judge_order("depth", "the order of the criteria changes with depth", drops, pairs),
        _judge_recovery(drops),
    )


def _judge_order(
    claim: Literal["ranking", "depth"], said: str, drops: Drops, pairs: Sequence[Pair]
) -> Verdict:
    met = [*(_between_tasks if claim == "ranking" else _between_depths)(drops, pairs)]
    opposite = [m for m in met if m.is_reversed]
    shared = sum(m.is_shared for m in met)
    unsure = sum(m.is_open for m in met)
    finding: Finding = "undecided"
    if opposite:
        finding = "confirmed"
    elif shared and not unsure:
        finding = "refuted"
    where = "two tasks" if claim == "ranking" else "two depths of a task"
    figures = (
        f"of {len(met)} comparisons of two criteria in {where}, {len(opposite)} are "
        f"reversed and {shared} the same, both sides significant (Holm over {len(pairs)} "
        f"pairs), and {unsure} significant on one side only"
    )
    if not met:
        figures = f"there is nothing to compare in {where}{NOTHING}"
    rows = drops.between_tasks() if claim == "ranking" else drops.between_depths()
    parts = [f"{said.capitalize()}: {finding}; {figures}"]
    parts += _range_of([row["value"] for row in rows])
    if opposite:
        strongest = max(opposite, key=lambda m: m.strength)
        parts.append(_example(drops, strongest))
    return Verdict(claim, finding, "; ".join(parts) + ".")


def _judge_recovery(drops: Drops) -> Verdict:
    rows = [row for row in drops.recovery() if row["depth"] is None]
    better = [row for row in rows if excludes_zero(row) and row["value"] < 0]
    worse = [row for row in rows if excludes_zero(row) and row["value"] > 0]
    finding: Finding = "undecided"
    if better and worse:
        finding = "confirmed"
    elif len(rows) > 1 and len(rows) in (len(better), len(worse)):
        finding = "refuted"
    figures = ", ".join(f"{row['task']} {_interval(row)}" for row in rows)
    figures = f"the offset changes the mean drop, in points, by {figures}"
    if len(rows) < 2:
        figures = f"{len(rows)} of the tasks read the grid, and it takes two"
    said = f"Tasks disagree on recovery: {finding}; {figures}."
    return Verdict("recovery", finding, said)


def _between_tasks(drops: Drops, pairs: Sequence[Pair]) -> Iterator[_Meeting]:
    at = {(p.task, p.alpha, p.depth, p.criteria): p for p in pairs}
    for t, u in combinations(range(len(drops.tasks)), 2):
        for a in drops.endpoints(t, u):
            for pair in pairs:
                if pair.task == t and pair.alpha == (a if drops.recovers[t] else 0):
                    other = a if drops.recovers[u] else 0
                    yield _Meeting(pair, at[u, other, pair.depth, pair.criteria])


def _between_depths(drops: Drops, pairs: Sequence[Pair]) -> Iterator[_Meeting]:
    at = {(p.task, p.alpha, p.depth, p.criteria): p for p in pairs}
    for pair in pairs:
        for later in range(pair.depth + 1, len(drops.depths)):
            yield _Meeting(pair, at[pair.task, pair.alpha, later, pair.criteria])


def _range_of(values: Sequence[float | None]) -> list[str]:
    known = [value for value in values if value is not None]
    if not known:
        return []
    return [f"rank correlations run from {min(known):.2f} to {max(known):.2f}"]


def _example(drops: Drops, met: _Meeting) -> str:
    names = [drops.criteria[c] for c in met.first.criteria]
    best = names if met.first.sign() < 0 else names[::-1]
    sides = [
        f"{drops.tasks[p.task]} at depth {drops.depths[p.depth]}, alpha "
        f"{ALPHAS[p.alpha]:g}, by {100 * abs(p.difference.value):.1f} points"
        for p in met
    ]
    return (
        f"most of all {best[0]} is better than {best[1]} for {sides[0]} and worse for "
        + (sides[1])
    )


def _interval(row: dict[str, Any]) -> str:
    if row["value"] is None or row["low"] is None:
        return "-"
    value, low, high = (100 * row[k] for k in ("value", "low", "high"))
    return f"{value:+.2f} ({low:+.2f} to {high:+.2f})"
