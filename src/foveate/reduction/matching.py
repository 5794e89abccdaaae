"""Who goes with whom: actions that turn patches into groups, from scores and key cosines.

An action takes the tokens, the block they stand at and the number of patches to keep, which
is below the number there are, and returns a :class:`~foveate.reduction.regroup.Grouping`.
All are batched with static shapes.
B images, K patches now, K' after, C channels, h heads of d channels.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import elu, normalize

from foveate.forward import Block
from foveate.reduction.regroup import Grouping, lead_groups, pick
from foveate.scoring import Score
from foveate.tokens import Tokens, widen

_CHUNK = 2048  # rows of a similarity matrix held at once


class Action(Protocol):
    """Choose which patches stay and who speaks for the others."""

    def __call__(self, tokens: Tokens, block: Block, keep: int) -> Grouping:
        """Group K patches into ``keep``."""


@dataclass(frozen=True)
class Prune:
    """Keep the patches of highest score.

    Attributes:
        score: Higher = keep.
        stand_in: Whether the kept patch of most similar key (cosine) speaks for a dropped
            one; if not, nobody does.
    """

    score: Score
    stand_in: bool = False

    def __call__(self, tokens: Tokens, block: Block, keep: int) -> Grouping:
        """Group K patches into ``keep``. Cost beside the score: K^2 d with stand-ins."""
        is_lead = highest(self.score(tokens, block), keep)
        if not self.stand_in:
            here = torch.arange(tokens.num_patches, device=is_lead.device)
            target = torch.where(is_lead, here, -1)
            return Grouping(*lead_groups(is_lead, target, keep), "lead")
        lead, group = nearest_leads(tokens, block, is_lead, keep)
        return Grouping(lead, group, "lead", heard=is_lead)


@dataclass(frozen=True)
class ManyToOne:
    """Merge the patches of lowest score into the kept patches of most similar key.

    Attributes:
        score: Higher = keep.
    """

    score: Score

    def __call__(self, tokens: Tokens, block: Block, keep: int) -> Grouping:
        """Group K patches into ``keep``. Cost beside the score: K^2 d."""
        is_lead = highest(self.score(tokens, block), keep)
        return Grouping(*nearest_leads(tokens, block, is_lead, keep))


@dataclass(frozen=True)
class Fuse:
    """Keep the best patches and fuse the others into one token (EViT).

    The fused token is the sum of the others weighted by their score, not renormalised.

    Attributes:
        score: Attention of the class token in the publication; higher = keep.

    References:
        Liang et al., "Not all patches are what you need: expediting vision transformers via
        token reorganizations", ICLR 2022.
    """

    score: Score

    def __call__(self, tokens: Tokens, block: Block, keep: int) -> Grouping:
        """Group K patches into ``keep - 1`` of them and one fused token."""
        scores = self.score(tokens, block)
        best = highest(scores, keep - 1)
        first = (~best).byte().argmax(1, keepdim=True)  # a dropped patch gives its place
        here = torch.arange(scores.shape[1], device=scores.device)
        target = torch.where(best, here, first)
        share = torch.where(best, 1.0, scores)
        is_lead = best | (here == first)
        return Grouping(*lead_groups(is_lead, target, keep), share)


def bipartite(tokens: Tokens, block: Block, keep: int) -> Grouping:
    """Merge along the most similar edges between even and odd patches (ToMe).

    Every even patch proposes the odd patch of highest cosine between head-averaged keys.
    The best edges merge; several even patches may join one odd patch. Cost: K^2 d / 4.

    Args:
        tokens: Tokens with K patches.
        block: Their block.
        keep: Patches after the step.

    Returns:
        The grouping; of patches that merge, the odd one leads.

    Raises:
        ValueError: If ``keep`` is less than half of the patches.

    References:
        Bolya et al., "Token merging: your ViT but faster", ICLR 2023.
    """
    return match_halves(mean_keys(tokens, block), keep)


def match_halves(metric: Tensor, keep: int) -> Grouping:
    """Bipartite soft matching of even and odd rows of a metric.

    Args:
        metric: Unit vectors, ``(B, K, d)``; higher inner product = merge.
        keep: Patches after the step.

    Returns:
        The grouping; of rows that merge, the odd one leads.

    Raises:
        ValueError: If ``keep`` is less than half of the rows.
    """
    num_patches = metric.shape[1]
    check_pairwise(num_patches, keep)
    even = torch.arange(0, num_patches, 2, device=metric.device)
    odd = torch.arange(1, num_patches, 2, device=metric.device)
    similarity, partner = best_partner(metric[:, 0::2], metric[:, 1::2])
    return join(even, odd, similarity, partner, keep)


@dataclass(frozen=True)
class PiToMe:
    r"""Merge among the patches that have many similar ones, and protect the others.

    The energy :math:`e_i = \frac1K \sum_j \mathrm{ELU}(\cos_{ij} - \mathrm{margin})` of
    head-averaged keys says how redundant a patch is. The 2r patches of highest energy are
    dealt alternately into two halves, and each of the first merges into its most similar of
    the second. Cost: 2 K^2 d.

    Attributes:
        margin: Cosine below which a patch does not count as similar.

    References:
        Tran et al., "Accelerating transformers with spectrum-preserving token merging",
        NeurIPS 2024.
    """

    margin: float = 0.9

    def __call__(self, tokens: Tokens, block: Block, keep: int) -> Grouping:
        """Group K patches into ``keep``.

        Args:
            tokens: Tokens with K patches.
            block: Their block.
            keep: Patches after the step.

        Returns:
            The grouping.

        Raises:
            ValueError: If ``keep`` is less than half of the patches.
        """
        metric = mean_keys(tokens, block)
        num_patches = metric.shape[1]
        check_pairwise(num_patches, keep)
        most = 2 * (num_patches - keep)
        order = self.energy(metric).sort(dim=1, descending=True, stable=True).indices
        source = order[:, 0:most:2]
        target = order[:, 1:most:2].sort(dim=1).values  # ties go to the lower index
        _, partner = best_partner(pick(metric, source), pick(metric, target))
        here = torch.arange(num_patches, device=metric.device)
        into = target.gather(1, partner)
        pointer = here.expand(len(metric), -1).scatter(1, source, into)
        return Grouping(*lead_groups(pointer == here, pointer, keep))

    def energy(self, metric: Tensor) -> Tensor:
        """Redundancy of unit vectors, ``(B, K, d)`` to ``(B, K)``; 2048 rows at a time."""
        parts = metric.split(_CHUNK, dim=1)
        rows = [elu(part @ metric.mT - self.margin).mean(-1) for part in parts]
        return torch.cat(rows, dim=1)


def join(
    source: Tensor, target: Tensor, similarity: Tensor, partner: Tensor, keep: int
) -> Grouping:
    """Merge the most similar sources, each into its partner, until ``keep`` are left.

    Args:
        source: Index of the patches that may merge, ``(A,)``.
        target: Index of all others, ``(T,)``.
        similarity: Of every source to its partner, ``(B, A)``; higher = merge first, ties
            go to the lower position.
        partner: Position in ``target`` of every source's partner, ``(B, A)``.
        keep: Patches after the step, at least T.

    Returns:
        The grouping; targets lead.
    """
    num_patches = len(source) + len(target)
    here = torch.arange(num_patches, device=source.device)
    best = similarity.sort(dim=1, descending=True, stable=True).indices
    first = best[:, : num_patches - keep]
    into = target[partner.gather(1, first)]
    pointer = here.expand(len(similarity), -1).scatter(1, source[first], into)
    return Grouping(*lead_groups(pointer == here, pointer, keep))


def best_partner(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Highest inner product of every row and where it is, ``(B, A, d) x (B, T, d)``.

    Args:
        rows: Vectors that look for a partner.
        columns: Their candidates.

    Returns:
        The products and the positions, ``(B, A)`` each; never holds more than 2048 rows of
        the product.
    """
    found = [(part @ columns.mT).max(-1) for part in rows.split(_CHUNK, dim=1)]
    return torch.cat([f.values for f in found], 1), torch.cat([f.indices for f in found], 1)


def mean_keys(tokens: Tokens, block: Block) -> Tensor:
    """Unit keys of the patches, averaged over heads, ``(B, K, d)``; zero stays zero."""
    key = block.project(tokens).key[:, :, tokens.layout.num_prefix :]
    return normalize(widen(key).mean(1), dim=-1)


def highest(scores: Tensor, keep: int) -> Tensor:
    """Mark the ``keep`` highest scores of an image, ties to the lower index, ``(B, K)``."""
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :keep]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, True)


def nearest_leads(
    tokens: Tokens, block: Block, is_lead: Tensor, keep: int
) -> tuple[Tensor, Tensor]:
    """Point every other patch at the lead of most similar key.

    Args:
        tokens: Tokens with K patches.
        block: Their block.
        is_lead: Patches that stay, ``(B, K)``, ``keep`` an image.
        keep: How many stay.

    Returns:
        Leads and groups as :func:`~foveate.reduction.regroup.lead_groups` gives them.
    """
    metric = mean_keys(tokens, block)
    here = torch.arange(metric.shape[1], device=metric.device)
    lead, _ = lead_groups(is_lead, here.expand(len(metric), -1), keep)
    _, nearest = best_partner(metric, pick(metric, lead))
    target = torch.where(is_lead, here, lead.gather(1, nearest))
    return lead_groups(is_lead, target, keep)


def check_pairwise(num_patches: int, keep: int) -> None:
    """Refuse to remove more patches than one step of pairs can.

    Args:
        num_patches: Patches now.
        keep: Patches asked for.

    Raises:
        ValueError: If ``keep`` is less than half of the patches, or more than all.
    """
    least = num_patches - num_patches // 2
    if not least <= keep <= num_patches:
        raise ValueError(
            f"keep must be from {least} to {num_patches} of {num_patches} patches for one "
            f"step of pairwise merging; got {keep}."
        )
