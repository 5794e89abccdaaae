r"""Pullback agglomeration: merge pairs whose Jacobians and features differ least together.

Under proportional attention a merged token acts as its s copies, so its block of the
Jacobian is the sum of its members' blocks. With :math:`g_i` the block of one copy (a sketch
of R rows) and :math:`f_i` the feature, merging a and b into their size-weighted mean changes
the sketched output, to first order and with all cancellation, by

.. math::
    e_{ab} = \frac{s_a s_b}{s_a + s_b} \, (g_a - g_b)(f_a - f_b) \in \mathbb{R}^R .

Features and sketches merge by the same weighted mean, so the cost of every later merge is
known without going back to the network.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn.functional import normalize

from foveate.forward import Block
from foveate.reduction.regroup import Grouping, sum_groups
from foveate.tokens import Tokens


@dataclass(frozen=True)
class Clusters:
    """Patches on their way to fewer, K clusters of B images.

    Attributes:
        feature: Size-weighted mean of the members, ``(B, K, C)``, float32.
        size: Original patches in each cluster, ``(B, K)``.
        sketch: R rows of the Jacobian for one copy of each cluster, ``(B, K, R, C)``; None
            for a cost that does not ask for it.
    """

    feature: Tensor
    size: Tensor
    sketch: Tensor | None = None

    def select(self, index: Tensor) -> "Clusters":
        """Some clusters of every image, by index ``(A,)``."""
        sketch = None if self.sketch is None else self.sketch[:, index]
        return Clusters(self.feature[:, index], self.size[:, index], sketch)

    def join(self, group: Tensor, keep: int) -> "Clusters":
        """Merge clusters into ``keep`` groups, ``(B, K)``."""
        weight = self.size[..., None]
        total = sum_groups(weight, group, keep)  # (B, keep, 1)
        feature = sum_groups(self.feature * weight, group, keep) / total
        if self.sketch is None:
            return Clusters(feature, total[..., 0])
        flat = sum_groups(self.sketch.flatten(2) * weight, group, keep) / total
        return Clusters(feature, total[..., 0], flat.unflatten(2, self.sketch.shape[2:]))


PairCost = Callable[[Clusters, Clusters], Tensor]
Sketch = Callable[[Tokens, Block], Tensor]


def pullback_cost(a: Clusters, b: Clusters) -> Tensor:
    r"""First-order cost of merging every cluster of a with every one of b.

    :math:`\frac1R \lVert e_{ab} \rVert^2` with :math:`e_{ab}` as in this module's head. With
    R rows of normal cotangents this is an unbiased estimate of the squared change of the
    output, of relative standard error :math:`\sqrt{2 / R}`. Cost: 2 A T R C.

    Args:
        a: A clusters with sketches.
        b: T clusters with sketches.

    Returns:
        Costs, ``(B, A, T)``, in squared output units.
    """
    assert a.sketch is not None
    assert b.sketch is not None
    total = a.feature.new_zeros(len(a.feature), a.size.shape[1], b.size.shape[1])
    for row in range(a.sketch.shape[2]):
        g_a, g_b = a.sketch[:, :, row], b.sketch[:, :, row]  # (B, A, C), (B, T, C)
        own_a, own_b = (g_a * a.feature).sum(-1), (g_b * b.feature).sum(-1)
        crossed = g_a @ b.feature.transpose(1, 2) + a.feature @ g_b.transpose(1, 2)
        total += (own_a[:, :, None] + own_b[:, None] - crossed).square()
    s_a, s_b = a.size[:, :, None], b.size[:, None]
    return total * (s_a * s_b / (s_a + s_b)).square() / a.sketch.shape[2]


def cosine_cost(a: Clusters, b: Clusters) -> Tensor:
    """One minus the cosine of features: the control that knows no task, ``(B, A, T)``."""
    unit_a, unit_b = normalize(a.feature, dim=-1), normalize(b.feature, dim=-1)
    return 1 - unit_a @ unit_b.transpose(1, 2)


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

    In a round every cluster of one half finds its cheapest partner in the other, and as many
    as are due merge, cheapest first; several may join one. The number of rounds and all
    shapes are fixed beforehand, and nothing loops over pairs.

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
        joined = _pair_up(clusters, keep, order.to(group.device), cost)
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


def _pair_up(clusters: Clusters, keep: int, order: Tensor, cost: PairCost) -> Tensor:
    """One round: new group of every cluster, ``(B, K)``, numbered below ``keep``."""
    num_clusters = len(order)
    searching, waiting = order[: num_clusters // 2], order[num_clusters // 2 :]
    best = cost(clusters.select(searching), clusters.select(waiting)).min(-1)
    first = best.values.argsort(dim=1, stable=True)[:, : num_clusters - keep]
    into = waiting[best.indices.gather(1, first)]
    here = torch.arange(num_clusters, device=order.device)
    target = here.expand(len(into), -1).scatter(1, searching[first], into)
    number = (target == here).cumsum(1) - 1
    return number.gather(1, target)


class Agglomerate(torch.nn.Module):
    """The action: agglomeration in a fixed number of rounds.

    Args:
        num_patches: Patches before the step.
        keep: Patches after it.
        rounds: Rounds; fewer are cheaper, more come closer to taking all pairs at once.
        sketch: Gives the rows of the Jacobian; None compares features by cosine.
        seed: Source of the random halves.
    """

    def __init__(
        self, num_patches: int, keep: int, rounds: int, sketch: Sketch | None, seed: int = 0
    ) -> None:
        super().__init__()
        self.counts = round_counts(num_patches, keep, rounds)
        self.sketch = sketch
        for index, order in enumerate(random_halves(num_patches, self.counts, seed)):
            self.register_buffer(f"order{index}", order, persistent=False)

    def forward(self, tokens: Tokens, block: Block, keep: int) -> Grouping:
        """Group K patches into ``keep``."""
        sketch = None if self.sketch is None else self.sketch(tokens, block)
        clusters = Clusters(tokens.patches.float(), tokens.sizes(), sketch)
        halves = [self.get_buffer(f"order{i}") for i in range(len(self.counts))]
        cost = cosine_cost if sketch is None else pullback_cost
        return agglomerate(clusters, self.counts, halves, cost)
