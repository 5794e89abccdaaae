"""Counts that differ between the images of a batch, gathered as far as shapes allow."""

from dataclasses import dataclass

import torch
from torch import Tensor

from foveate.adaptive.allocation import among_images
from foveate.adaptive.controller import Controller
from foveate.adaptive.fate import Fate, carry_out, place_of
from foveate.adaptive.soft_top_k import hard_top_k
from foveate.adaptive.steps import selection_score
from foveate.forward import Block, Place
from foveate.reduction.regroup import follow, pick
from foveate.tokens import Tokens

__all__ = ["PaddedStep", "pack"]


@dataclass
class PaddedStep:
    """Deal a batch's removals out among its images, and pad to the image that keeps most.

    An image that loses more than another has masked patches in the places left over, which
    no token sees; so its result, given its count, depends on nothing but the image.

    Attributes:
        controller: Ranks, and says how many and what comes back.
        index: Which of its depths.
        needs_grid: Whether the task reads removed patches.
        place: Between attention and MLP, where projections are free.
    """

    controller: Controller
    index: int
    needs_grid: bool
    place: Place = "between"

    def __call__(self, tokens: Tokens, block: Block) -> Tokens:
        """Tokens with as many patches as the image that keeps most."""
        alive = tokens.sizes() > 0.5
        there = alive.sum(1)
        state = tokens.x[:, place_of(tokens, self.controller)]
        score = selection_score(tokens, block, self.controller)
        left = there - self._counts(state, there).to(there.dtype)
        stays = hard_top_k(score, left, alive)
        mask = stays.to(score.dtype)
        fate = Fate(mask, alive, mask)
        changed, _ = carry_out(tokens, block, self.controller, fate, self.needs_grid)
        return pack(changed, stays)

    def _counts(self, state: Tensor, there: Tensor) -> Tensor:
        """How many patches of each image go, ``(B,)``."""
        fixed = self.controller.whole[self.index]
        if self.controller.allocate is None:
            return torch.full_like(there, fixed)
        share = self.controller.share(self.index, state)
        return among_images(share, fixed, (there - 1).tolist())


def pack(tokens: Tokens, stays: Tensor) -> Tokens:
    """Drop masked patches, as many as every image can spare.

    Args:
        tokens: K patches, some of them masked.
        stays: Those that are not, ``(B, K)``, bool.

    Returns:
        Tokens with K' patches, the most that stay of an image: what stays in the order of
        the grid, then, of other images, masked patches that nothing is read from.
    """
    most = int(stays.sum(1).max())
    slot = stays.byte().sort(dim=1, descending=True, stable=True).indices[:, :most]
    place = torch.where(stays, stays.cumsum(1) - 1, -1)[..., None]  # (B, K, 1)
    weight = None if tokens.weight is None else torch.ones_like(place, dtype=tokens.x.dtype)
    stand_in, weight = follow(tokens, place, weight, most)
    position = tokens.position
    return tokens.with_(
        x=torch.cat([tokens.prefix, pick(tokens.patches, slot)], dim=1),
        size=tokens.sizes().gather(1, slot),
        stand_in=stand_in,
        weight=weight,
        position=None if position is None else pick(position, slot),
        grid_position=position if tokens.grid_position is None else tokens.grid_position,
    )
