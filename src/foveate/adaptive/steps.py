"""One step of a controller, in two forms: masked to be learned, gathered to be fast."""

from dataclasses import dataclass, field
from math import log

import torch
from torch import Tensor

from foveate.adaptive.allocation import among_images, settle
from foveate.adaptive.controller import Controller
from foveate.adaptive.fate import Fate, carry_out, place_of
from foveate.adaptive.soft_top_k import chance_to_stay, hard_top_k, straight_through_top_k
from foveate.adaptive.stand_ins import with_voices
from foveate.forward import Block, Place
from foveate.reduction.masked import ABSENT
from foveate.reduction.matching import ManyToOne, Prune, mean_keys
from foveate.reduction.regroup import NOTHING, Memory, regroup
from foveate.scoring.criteria import log_prefix_attention
from foveate.tokens import Tokens

__all__ = ["GatheredStep", "Ledger", "MaskedStep", "selection_score"]

_COUNTINGS = ("learned", "frozen", "images")


def selection_score(tokens: Tokens, block: Block, controller: Controller) -> Tensor:
    r"""Log of the attention that the controller's token pays to each patch.

    Its query and the patches' keys are the block's own, so there are no new weights, and
    only one row of attention is computed: T h d multiply-adds an image. With redundancy it
    is :math:`\log a_i - w \max_{j \ne i} \cos(k_i, k_j)` over the patches that are left, w
    one learned weight: what another patch can stand in for goes first. K^2 d more.

    Args:
        tokens: Tokens with K patches.
        block: Their block.
        controller: Says whose attention it is, and the weight.

    Returns:
        ``(B, K)``, float32; higher = keep.
    """
    # Autocast would round attention to eight bits, in which the close ones tie.
    with torch.autocast(tokens.x.device.type, enabled=False):
        score = log_prefix_attention(tokens, block, place_of(tokens, controller))
        if controller.redundancy is None:
            return score
        with torch.no_grad():
            nearest = _nearest_cosine(mean_keys(tokens, block), tokens.sizes() > 0.5)
        return score - controller.redundancy * nearest


def _nearest_cosine(keys: Tensor, alive: Tensor) -> Tensor:
    """Largest cosine of a patch's key with that of another that is left, ``(B, K)``."""
    cosine = (keys @ keys.mT).masked_fill(~alive[:, None], -1.0)
    itself = torch.eye(keys.shape[1], dtype=torch.bool, device=keys.device)
    return cosine.masked_fill(itself, -1.0).amax(-1)


@dataclass
class GatheredStep:
    """Remove a fixed number of patches, as the controller's token ranks them.

    Attributes:
        controller: Ranks, and says what comes back.
        index: Which of its depths.
        count: Patches to remove.
        needs_grid: Whether the task reads removed patches.
        place: Between attention and MLP, where projections are free.
    """

    controller: Controller
    index: int
    count: int
    needs_grid: bool
    place: Place = "between"

    def __call__(self, tokens: Tokens, block: Block) -> Tokens:
        """Tokens with ``count`` patches fewer."""
        if not self.count:
            return tokens
        merges = self.controller.pruning.action == "merge"
        # Autocast would round cosines to eight bits, in which the close ones tie.
        with torch.autocast(tokens.x.device.type, enabled=False):
            action = (
                ManyToOne(self._score) if merges else Prune(self._score, self.needs_grid)
            )
            grouping = action(tokens, block, tokens.num_patches - self.count)
            pruning = self.controller.pruning
            if self.needs_grid and pruning.stand_ins > 1:
                keys = mean_keys(tokens, block)
                grouping = with_voices(grouping, keys, pruning.stand_ins, pruning.blend)
        memory = NOTHING
        if self.needs_grid:
            state = tokens.x[:, place_of(tokens, self.controller)]
            memory = Memory(self.controller.alpha(state))
        return regroup(tokens, grouping, memory).with_(proportional=merges)

    def _score(self, tokens: Tokens, block: Block) -> Tensor:
        return selection_score(tokens, block, self.controller)


@dataclass
class Ledger:
    """What one pass has left of its budget; made anew for every pass.

    Attributes:
        remaining: Patches still to be removed from each image, ``(B,)``.
        there: Which patches there are, ``(B, N)``: 0 or 1 by value, probabilities
            backwards; None before the first depth.
        counts: What has been taken at each depth, ``(B,)`` each, differentiable.
        alphas: What each depth gives back.
        scores: What patches were ranked by at each depth, ``(B, N)``.
        masks: What was kept at each depth, ``(B, N)``.
    """

    remaining: Tensor
    there: Tensor | None = None
    counts: list[Tensor] = field(default_factory=list)
    alphas: list[float | Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    masks: list[Tensor] = field(default_factory=list)


@dataclass
class MaskedStep:
    """The same step with all patches in their places, differentiable in every choice.

    A removed patch has a vanishing size, so that no token sees it; masks are
    straight-through, so the forward values are those of :class:`GatheredStep`.

    Attributes:
        controller: Ranks, and says how many and what comes back.
        index: Which of its depths.
        ledger: What the pass has left.
        needs_grid: Whether the task reads removed patches.
        counting: ``learned``, alike for all images of a batch by their mean share;
            ``frozen``; or ``images``, the frozen count of a batch dealt out among them.
        place: Between attention and MLP.

    Raises:
        ValueError: If there is no such counting.
    """

    controller: Controller
    index: int
    ledger: Ledger
    needs_grid: bool
    counting: str = "learned"
    place: Place = "between"

    def __post_init__(self) -> None:
        """Check the name."""
        if self.counting not in _COUNTINGS:
            raise ValueError(
                f"counting must be one of {', '.join(_COUNTINGS)}; got '{self.counting}'."
            )

    def __call__(self, tokens: Tokens, block: Block) -> Tokens:
        """Mask what is removed. N patches come and go, ``(B, P + N, C)``."""
        alive = tokens.sizes().detach() > 0.5
        state = tokens.x[:, place_of(tokens, self.controller)]
        count = self._count(state, alive)
        score = selection_score(tokens, block, self.controller)
        ledger = self.ledger
        ledger.remaining = ledger.remaining - count
        ledger.counts.append(count)
        mask, chance = self._choose(score, alive)
        ledger.scores.append(score.detach())
        ledger.masks.append(mask.detach() > 0.5)
        fate = Fate(mask, alive, chance)
        changed, alpha = carry_out(tokens, block, self.controller, fate, self.needs_grid)
        if alpha is not None:
            ledger.alphas.append(alpha)
        return changed

    def _choose(self, score: Tensor, alive: Tensor) -> tuple[Tensor, Tensor]:
        """Mask of who stays, and the chance of each to, if it were there."""
        ledger, temperature = self.ledger, self.controller.pruning.temperature
        there = torch.ones_like(score) if ledger.there is None else ledger.there
        # By value as many as are alive but for this count; backwards, all counts matter.
        left = score.shape[1] - torch.stack(ledger.counts).sum(0).to(score.dtype)
        # What is gone has been scored by the log of its attention, which its size hides.
        would = torch.where(alive, score, score - log(ABSENT))
        chance = chance_to_stay(would, left, alive, temperature)
        stays = hard_top_k(score.detach(), left.detach(), alive).to(score.dtype)
        stays = torch.where(alive, stays, chance)
        # Backwards: one patch more, if it would stay now, takes the place of another.
        room = left - (stays * (there - there.detach())).sum(1)
        mask = straight_through_top_k(score, room, alive, temperature)
        ledger.there = there * torch.where(alive, mask, chance)
        return mask, chance

    def _count(self, state: Tensor, alive: Tensor) -> Tensor:
        """How many patches of each image go, ``(B,)``."""
        controller, index = self.controller, self.index
        fixed = controller.whole[index]
        remaining = self.ledger.remaining
        if self.counting == "frozen" or controller.allocate is None:
            return torch.full_like(remaining, float(fixed))
        share = controller.share(index, state)
        if self.counting == "images":
            most = (alive.sum(1) - 1).tolist()
            return among_images(share.detach(), fixed, most)
        mean = share.mean().expand_as(remaining)
        return settle(controller.pruning.limits, index, remaining, mean)
