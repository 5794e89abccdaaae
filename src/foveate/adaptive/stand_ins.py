"""Several patches that speak for a removed one, by how similar their keys are."""

from dataclasses import replace

import torch
from torch import Tensor

from foveate.reduction.regroup import Grouping

__all__ = ["blend_leads", "with_voices"]


def blend_leads(
    keys: Tensor, is_lead: Tensor, number: int, temperature: float
) -> tuple[Tensor, Tensor]:
    r"""Leads of most similar key to every patch, and how much each says of it.

    The weights of a patch's S leads are
    :math:`\mathrm{softmax}_s(\cos(k_i, k_s) / \tau)`; a lead speaks for itself alone. With
    fewer than S leads, what is missing has weight 0. Cost: K^2 d. No gradient.

    Args:
        keys: Unit keys of the patches, ``(B, K, d)``.
        is_lead: Patches that stay, ``(B, K)``, at least one an image.
        number: Leads a patch, S.
        temperature: In units of cosine; the lower, the more the nearest says.

    Returns:
        Indices below K and weights that sum to 1, ``(B, K, S)`` each, nearest first; S is
        at most K.
    """
    with torch.no_grad():
        cosine = (keys @ keys.mT).masked_fill(~is_lead[:, None], -torch.inf)
        best = cosine.topk(min(number, keys.shape[1]), dim=-1)
        weight = (best.values / temperature).softmax(-1)
        here = torch.arange(keys.shape[1], device=keys.device)[:, None]
        first = (torch.arange(weight.shape[-1], device=keys.device) == 0).to(weight.dtype)
        itself = is_lead[..., None]
        return torch.where(itself, here, best.indices), torch.where(itself, first, weight)


def with_voices(
    grouping: Grouping, keys: Tensor, number: int, temperature: float
) -> Grouping:
    """Let several groups speak for every patch that has not stayed.

    Args:
        grouping: Which patches stay.
        keys: Unit keys of the patches, ``(B, K, d)``.
        number: Groups that speak for a patch.
        temperature: Of their weights, see :func:`blend_leads`.

    Returns:
        The same groups, whose features stay as they were.
    """
    is_lead = torch.zeros_like(grouping.group, dtype=torch.bool)
    is_lead = is_lead.scatter(1, grouping.lead, True)
    index, weight = blend_leads(keys, is_lead, number, temperature)
    # What is no lead has weight 0, and any group will do.
    place = (is_lead.cumsum(1) - 1).clamp(min=0)
    voices = place.gather(1, index.flatten(1)).view_as(index)
    return replace(grouping, voices=voices, weight=weight)
