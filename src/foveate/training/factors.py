"""The objective of factors: prices of merges, and shifts that cancel what they change."""

from typing import cast

import torch
from torch import Generator, Tensor, nn

from foveate.reduction.agglomerate import agglomerate, random_halves, round_counts
from foveate.reduction.costs import Clusters, cancel, cosine_cost, squared_effects
from foveate.reduction.regroup import Grouping, pick, sum_groups
from foveate.scoring.factors import FactorNetwork
from foveate.scoring.orthonormal import full_precision
from foveate.training.loop import Batch

__all__ = ["factor_loss", "merge_costs"]

ANCHORS = 64  # clusters of an image whose pairs with all others are priced
SHARES = (1.0, 1.0, 0.75, 0.5, 0.375, 0.25)  # of the patches that are left
FLOOR = 1e-5  # of the mean cost, below which costs count as equal
QUANTILE = 0.15  # of an anchor's pairs, which are the ones that merging is about
CANCEL, RIDGE = 0.5, 1.0


def factor_loss(network: nn.Module, batch: Batch, generator: Generator) -> Tensor:
    r"""Loss of a :class:`~foveate.scoring.factors.FactorNetwork`.

    A third of the batches is about patches, the others about clusters of them, merged by
    feature cosine to a random share, so that factors learn to add up. The first term is the
    squared error of the log of the cost of merging pairs,
    :math:`\log \tfrac1R \lVert (g_a - g_b)(f_a - f_b) \rVert^2`, weighed towards pairs that
    are cheap or are taken to be. The second, for clusters, is half the log of the share of
    the groups' true effect that is left after the shift that the predicted factors give
    (:func:`~foveate.reduction.costs.cancel`). Neither depends on the unit of an image.

    Args:
        network: The network.
        batch: ``tokens`` ``(B, P + N, C)`` and ``rows`` of pulled probes ``(B, N, R, C)``.
        generator: Draws the share, the clusters and the anchors.

    Returns:
        A number.
    """
    true, predicted = _both(network, batch)
    # Costs are differences of products, of which autocast would leave three digits.
    with full_precision(true.feature):
        return _loss(true, predicted, generator)


def _loss(true: Clusters, predicted: Clusters, generator: Generator) -> Tensor:
    draw = int(torch.randint(1 << 30, (1,), generator=generator))
    keep = max(2, round(SHARES[draw % len(SHARES)] * true.size.shape[1]))
    group = None
    if keep < true.size.shape[1]:
        with torch.no_grad():
            group = _cluster(true, keep, draw).group
    merged_true, merged = (
        c if group is None else c.join(group, keep) for c in (true, predicted)
    )
    anchors = torch.randperm(keep, generator=generator)[:ANCHORS]
    loss = _pair_loss(merged_true, merged, anchors)
    if group is None:
        return loss
    return loss + CANCEL * _cancel_loss(true, predicted, group, keep)


def merge_costs(network: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Costs of merging pairs of patches, true and predicted, ``(B, anchors * N)``."""
    clusters = _both(network, batch)
    anchors = torch.arange(0, clusters[0].size.shape[1], 4)
    costs = [
        squared_effects(a.seen(), a.sketch, b.seen(), b.sketch)
        for b in clusters
        for a in [b.select(anchors)]
        if a.sketch is not None and b.sketch is not None
    ]
    return costs[0].flatten(1), costs[1].flatten(1)


def _both(network: nn.Module, batch: Batch) -> tuple[Clusters, Clusters]:
    """One cluster a patch, with the probes' rows and with the factors."""
    tokens, rows = batch["tokens"], batch["rows"]
    first = tokens.shape[1] - rows.shape[1]
    feature = tokens[:, first:]
    size = torch.ones_like(feature[..., 0])
    factors = network(tokens, first)
    inner = getattr(network, "module", network)  # under the wrapper of several processes
    basis = cast(FactorNetwork, inner).basis
    return Clusters(feature, size, rows), Clusters(feature, size, factors, basis)


def _cluster(clusters: Clusters, keep: int, seed: int) -> Grouping:
    num = clusters.size.shape[1]
    counts = round_counts(num, keep, 4)
    plain = Clusters(clusters.feature, clusters.size)
    return agglomerate(plain, counts, random_halves(num, counts, seed), cosine_cost)


def _pair_loss(true: Clusters, predicted: Clusters, anchors: Tensor) -> Tensor:
    costs = []
    for clusters in (true, predicted):
        some = clusters.select(anchors)
        assert some.sketch is not None
        assert clusters.sketch is not None
        costs.append(
            squared_effects(some.seen(), some.sketch, clusters.seen(), clusters.sketch)
        )
    right, found = costs
    floor = FLOOR * right.mean((1, 2), keepdim=True)
    squares = ((right + floor).log() - (found + floor).log()).square()
    weight = _cheap(right) + _cheap(found.detach())
    itself = anchors[:, None] == torch.arange(right.shape[2])
    weight = weight.masked_fill(itself.to(weight.device), 0.0)
    return (squares * weight).sum() / weight.sum()


def _cheap(costs: Tensor) -> Tensor:
    """From 1 to 0, one half where 15 % of an anchor's pairs are cheaper, ``(B, A, K)``."""
    level = costs.quantile(QUANTILE, dim=-1, keepdim=True)
    return 1 / (1 + costs / level.clamp(min=1e-30))


def _cancel_loss(true: Clusters, predicted: Clusters, group: Tensor, keep: int) -> Tensor:
    """Log of the share of the groups' effect that the predicted shift leaves."""
    joined = true.join(group, keep)
    assert joined.sketch is not None
    assert true.sketch is not None
    moved = pick(joined.feature, group) - true.feature  # (B, K, C)
    effect = sum_groups((true.sketch * moved[:, :, None]).sum(-1), group, keep)
    lead = group.new_zeros(len(group), keep)  # which patch leads does not matter here
    shift = cancel(predicted, Grouping(lead, group), RIDGE)  # (B, K', C)
    summed = joined.sketch * joined.size[..., None, None]
    left = effect + (summed * shift[:, :, None]).sum(-1)
    before = effect.square().sum((1, 2)).clamp(min=1e-30)
    return (left.square().sum((1, 2)) / before + 1e-6).log().mean()
