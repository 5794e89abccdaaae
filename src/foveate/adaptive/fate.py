"""What becomes of patches that a step removes while they stay in their places."""

from typing import NamedTuple

import torch
from torch import Tensor

from foveate.adaptive.controller import Controller
from foveate.adaptive.stand_ins import blend_leads
from foveate.forward import Block
from foveate.reduction.masked import ABSENT, nearest_lead, remember
from foveate.reduction.matching import mean_keys
from foveate.reduction.regroup import sum_groups
from foveate.tokens import Tokens, widen

__all__ = ["Fate", "carry_out", "place_of"]


def place_of(tokens: Tokens, controller: Controller) -> int:
    """Index of the token that controls: the register, or the class token."""
    return 0 if controller.register is None else tokens.layout.num_prefix - 1


class Fate(NamedTuple):
    """What becomes of the patches in one step, ``(B, K)`` each.

    Attributes:
        mask: Whether a patch stays, 0 or 1 by value.
        alive: Whether it had been there.
        chance: With which it would stay, if it were there.
    """

    mask: Tensor
    alive: Tensor
    chance: Tensor

    def sizes(self, total: Tensor, before: Tensor) -> Tensor:
        """Sizes after the step, nearly zero for patches that are gone.

        Those gone before pass on, backwards, what they would have been worth; else the
        first step would look as if it cost nothing, and take the whole budget.

        Args:
            total: Sizes of those that stay.
            before: Sizes before the step.

        Returns:
            ``(B, K)``.
        """
        held = before.detach()
        here = total * self.mask + (1 - self.mask.detach()) * ABSENT * held
        gone = held + self.chance * (before - held)
        return torch.where(self.alive, here, gone)


def carry_out(
    tokens: Tokens, block: Block, controller: Controller, fate: Fate, needs_grid: bool
) -> tuple[Tokens, float | Tensor | None]:
    """Mask what is removed, and note how it is read back.

    Args:
        tokens: Tokens with K patches.
        block: Their block.
        controller: Says what comes back, and from whom.
        fate: Who stays.
        needs_grid: Whether the task reads removed patches.

    Returns:
        Tokens with K patches, and alpha; None if nothing is read back.
    """
    pruning = controller.pruning
    merges = pruning.action == "merge"
    if not merges and not needs_grid:
        return _masked(tokens, fate), None
    lead = fate.alive & (fate.mask > 0.5)
    # Autocast would round cosines to eight bits, in which the close ones tie.
    with torch.autocast(tokens.x.device.type, enabled=False):
        keys = mean_keys(tokens, block)
        voices, weight = _speakers(keys, lead, fate.alive), None
        changed = _merged(tokens, fate, voices[..., 0]) if merges else _masked(tokens, fate)
        if needs_grid and pruning.stand_ins > 1:
            voices, weight = blend_leads(keys, lead, pruning.stand_ins, pruning.blend)
    if not needs_grid:
        return changed, None
    alpha = controller.alpha(tokens.x[:, place_of(tokens, controller)])
    return remember(tokens, changed, voices, alpha, weight), alpha


@torch.no_grad()
def _speakers(keys: Tensor, lead: Tensor, alive: Tensor) -> Tensor:
    """Index of the patch that speaks for each, itself if it stays, ``(B, K, 1)``."""
    here = torch.arange(lead.shape[1], device=lead.device)
    return torch.where(alive & ~lead, nearest_lead(keys, lead), here)[..., None]


def _masked(tokens: Tokens, fate: Fate) -> Tokens:
    """Leave features, and the sizes of the patches that stay."""
    size = tokens.sizes()
    return tokens.with_(size=fate.sizes(size, size), proportional=True)


def _merged(tokens: Tokens, fate: Fate, speaker: Tensor) -> Tokens:
    """Add what goes to who speaks for it, by size."""
    x, size = widen(tokens.patches), tokens.sizes()
    # A patch that stays may give as well, backwards: its own stand-in is not known.
    gives = fate.alive & (fate.mask.detach() < 0.5)
    given = torch.where(gives, size * (1 - fate.mask), 0.0)  # (B, N)
    more = sum_groups(torch.cat([x, torch.ones_like(x[..., :1])], -1) * given[..., None],
                      speaker, x.shape[1])  # fmt: skip
    total = size + more[..., -1]
    moved = (x * size[..., None] + more[..., :-1]) / total[..., None]
    return tokens.with_(
        x=torch.cat([tokens.prefix, moved.to(tokens.x.dtype)], dim=1),
        size=fate.sizes(total, size),
        proportional=True,
    )
