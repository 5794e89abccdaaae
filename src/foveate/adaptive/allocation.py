"""How many patches to remove at each depth: whole numbers that sum to the budget."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foveate.reduction.apportion import hamilton

__all__ = ["Limits", "among_images", "settle", "split_evenly"]


@dataclass(frozen=True)
class Limits:
    """A budget, and least and most of it at every depth.

    Attributes:
        total: Patches to remove, over all depths.
        least: Fewest at each depth.
        most: Most at each depth.

    Raises:
        ValueError: If no counts meet the limits.
    """

    total: int
    least: tuple[int, ...]
    most: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check that the budget can be met."""
        if len(self.least) != len(self.most) or not self.least:
            raise ValueError(
                "least and most must have a number for every depth; got "
                f"{len(self.least)} and {len(self.most)}."
            )
        if any(not 0 <= a <= b for a, b in zip(self.least, self.most, strict=True)):
            raise ValueError(
                "least must be from 0 to most at every depth; got "
                f"{list(self.least)} and {list(self.most)}."
            )
        if not sum(self.least) <= self.total <= sum(self.most):
            raise ValueError(
                f"total must be from {sum(self.least)} to {sum(self.most)} for these least "
                f"and most; got {self.total}."
            )

    def range(self, index: int, remaining: Tensor) -> tuple[Tensor, Tensor]:
        """Fewest and most at one depth that leave the later depths a way.

        Args:
            index: Which depth.
            remaining: What is left of the budget, ``(B,)``.

        Returns:
            Both, ``(B,)``.
        """
        later_most = sum(self.most[index + 1 :])
        later_least = sum(self.least[index + 1 :])
        low = (remaining - later_most).clamp(min=self.least[index])
        high = (remaining - later_least).clamp(max=self.most[index])
        return low, high


def settle(limits: Limits, index: int, remaining: Tensor, share: Tensor) -> Tensor:
    """Break a count off what remains of a budget.

    ``share * remaining``, rounded (half to even) within what keeps the rest feasible; so
    the last depth gets what is left, and the counts sum to the budget, whatever the shares.

    Args:
        limits: The budget.
        index: Which depth.
        remaining: What is left of it, ``(B,)``; whole numbers by value.
        share: Share of it to take, ``(B,)``, in [0, 1].

    Returns:
        Counts, ``(B,)``: whole numbers by value; backwards, ``share * remaining``, and
        where there is but one feasible count, as at the last depth, that count: a share
        that decides nothing gets no gradient.
    """
    wanted = share * remaining
    low, high = limits.range(index, remaining)
    count = torch.minimum(torch.maximum(wanted.round(), low), high).detach()
    free = torch.where(low < high, wanted, low)
    return count + (free - free.detach())


def split_evenly(limits: Limits) -> list[int]:
    """Equal counts at every depth, as far as the limits let them be."""
    ones = [1] * len(limits.least)
    return hamilton(ones, limits.total, limits.least, limits.most)


def among_images(shares: Tensor, count: int, most: Sequence[int]) -> Tensor:
    """Deal a batch's removals at one depth out among its images.

    Args:
        shares: How much each image can spare, ``(B,)``, positive.
        count: Removals an image, on average.
        most: Most of each image.

    Returns:
        Counts, ``(B,)``, whole, whose sum is ``B * count``: the largest remainders of the
        shares. Given its count, an image's result depends on nothing but the image.

    Raises:
        ValueError: If the images together cannot spare so many.
    """
    weights = shares.double().tolist()
    dealt = hamilton(weights, count * len(weights), None, list(most))
    return torch.tensor(dealt, device=shares.device, dtype=shares.dtype)
