"""Pullback agglomeration: merge pairs whose Jacobians and features differ least together.

The costs stand in :mod:`foveate.reduction.costs`; the same loop with the cosine of features
is the control that knows no task.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Generator, Tensor

from foveate.forward import Block
from foveate.reduction.costs import Clusters, PairCost, PullbackCost, cancel, cosine_cost
from foveate.reduction.matching import join
from foveate.reduction.regroup import Grouping
from foveate.tokens import Tokens, widen


class Sketch(Protocol):
    """Where rows of the Jacobian come from.

    Attributes:
        basis: Orthonormal columns in which the rows are coordinates, ``(C, D)``; None if
            they are in the features' own.
    """

    @property
    def basis(self) -> Tensor | None:
        """See above."""

    def __call__(self, tokens: Tokens, block: Block) -> Tensor:
        """Rows for one copy of every patch, ``(B, K, R, D)``."""


def round_counts(num_patches: int, keep: int, rounds: int) -> list[int]:
    """Patches left after each round, the removals spread evenly, at most half a round.

    Args:
        num_patches: Patches before the first round.
        keep: Patches after the last.
        rounds: Rounds wanted; more are taken where half of the patches is not enough.

    Returns:
        Descending counts, the last one ``keep``.

    Raises:
        ValueError: If ``keep`` is not from 1 to ``num_patches`` or ``rounds`` is below 1.
    """
    if not 1 <= keep <= num_patches:
        raise ValueError(f"keep must be from 1 to {num_patches} patches; got {keep}.")
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1; got {rounds}.")
    counts, left = [], num_patches
    for done in range(1, rounds + 1):
        goal = num_patches - (num_patches - keep) * done // rounds
        while left > goal:
            left = max(goal, left - left // 2)
            counts.append(left)
    return counts


def random_halves(num_patches: int, counts: Sequence[int], seed: int) -> list[Tensor]:
    """A shuffle of the patches for every round; its first half looks for partners.

    Args:
        num_patches: Patches before the first round.
        counts: Patches left after each round.
        seed: The same seed gives the same shuffles; they serve all images.

    Returns:
        One permutation a round, of the patches there are.
    """
    generator = Generator().manual_seed(seed)
    before = [num_patches, *counts][:-1]
    return [torch.randperm(k, generator=generator) for k in before]


def agglomerate(
    clusters: Clusters, counts: Sequence[int], halves: Sequence[Tensor], cost: PairCost
) -> Grouping:
    """Merge patches in rounds, each time the cheapest pairs between two halves.

    In a round every cluster of one half finds its cheapest partner in the other, and as
    many as are due merge, cheapest first; several may join one. The number of rounds and
    all shapes are fixed beforehand, and nothing loops over pairs.

    Args:
        clusters: One cluster a patch.
        counts: Clusters left after each round, descending.
        halves: A permutation of the clusters for every round.
        cost: Cost of merging two clusters.

    Returns:
        Which patches end up together; the first patch of a group leads it.
    """
    group = torch.arange(clusters.size.shape[1], device=clusters.size.device)
    group = group.expand(len(clusters.size), -1)
    for keep, order in zip(counts, halves, strict=True):
        searching, waiting = order.to(group.device).tensor_split([len(order) // 2])
        best = cost(clusters.select(searching), clusters.select(waiting)).min(-1)
        joined = join(searching, waiting, -best.values, best.indices, keep).group
        clusters = clusters.join(joined, keep)
        group = joined.gather(1, group)
    return first_leads(group, counts[-1])


def first_leads(group: Tensor, keep: int) -> Grouping:
    """Let the first patch of every group lead it, and order the groups by their leads.

    Args:
        group: Group of every patch in any numbering, ``(B, K)``.
        keep: Number of groups.

    Returns:
        The grouping.
    """
    here = torch.arange(group.shape[1], device=group.device).expand_as(group)
    first = here.new_full((len(group), keep), group.shape[1])
    first = first.scatter_reduce(1, group, here, "amin")
    lead, order = first.sort(dim=1)
    number = torch.empty_like(order).scatter(1, order, here[:, :keep])
    return Grouping(lead, number.gather(1, group))


class Agglomerate(torch.nn.Module):
    """The action: agglomeration in a fixed number of rounds.

    Args:
        num_patches: Patches before the step.
        keep: Patches after it.
        rounds: Rounds; more come closer to taking the cheapest of all pairs each time.
        sketch: Gives the rows of the Jacobian; None compares features by cosine.
        seed: Source of the random halves.
        damping: Weight of the damping term of :class:`PullbackCost`.
        ridge: Regulariser of :func:`cancel`; None leaves groups at their mean.
    """

    def __init__(
        self,
        num_patches: int,
        keep: int,
        rounds: int,
        sketch: Sketch | None = None,
        seed: int = 0,
        damping: float = 0.0,
        ridge: float | None = None,
    ) -> None:
        super().__init__()
        self.counts = round_counts(num_patches, keep, rounds)
        self.sketch = sketch
        self.damping = damping
        self.ridge = ridge
        for index, order in enumerate(random_halves(num_patches, self.counts, seed)):
            self.register_buffer(f"order{index}", order, persistent=False)

    def forward(self, tokens: Tokens, block: Block, keep: int) -> Grouping:
        """Group K patches into ``keep``."""
        sketch = basis = None
        if self.sketch is not None:
            sketch, basis = self.sketch(tokens, block), self.sketch.basis
        clusters = Clusters(widen(tokens.patches), tokens.sizes(), sketch, basis)
        halves = [self.get_buffer(f"order{i}") for i in range(len(self.counts))]
        cost: PairCost = cosine_cost
        if sketch is not None:
            cost = PullbackCost.of(clusters, self.damping)
        grouping = agglomerate(clusters, self.counts, halves, cost)
        if sketch is None or self.ridge is None:
            return grouping
        return replace(grouping, shift=cancel(clusters, grouping, self.ridge))
