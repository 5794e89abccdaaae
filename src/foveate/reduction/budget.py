"""How many patches to keep where: exact integers, so that a budget is met, not approached.

A *schedule* maps each depth to the patches after the step there, ascending depths, counts
never rising. Nothing is clamped: what cannot be had raises :class:`ValueError`.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from math import floor

from foveate.backbones import Backbone
from foveate.forward import Place
from foveate.reduction.apportion import hamilton, webster
from foveate.reduction.macs import encoder_macs, token_counts
from foveate.tokens import Layout

__all__ = [
    "Ratio",
    "constant_schedule",
    "hamilton",
    "keep_count",
    "linear_schedule",
    "list_schedule",
    "macs_schedule",
    "ratio_schedule",
    "webster",
]

Ratio = float | Decimal | Fraction


def keep_count(num_patches: int, keep_ratio: Ratio) -> int:
    r"""Patches that a keep ratio stands for: :math:`\lfloor r N + 1/2 \rfloor`.

    The ratio is read as the decimal it is written as, so that 0.35 of 10 is exactly 3.5 and
    rounds up, although the float 0.35 is a little less.

    Args:
        num_patches: Patches of the full model, N.
        keep_ratio: Share to keep, in (0, 1].

    Returns:
        A count between 1 and ``num_patches``.

    Raises:
        ValueError: If the ratio is outside (0, 1], or keeps no patch at all.
    """
    count = floor(_share(keep_ratio) * num_patches + Fraction(1, 2))
    if count < 1:
        raise ValueError(
            f"keep_ratio must keep at least 1 of {num_patches} patches; got {keep_ratio}."
        )
    return count


def list_schedule(
    num_patches: int, depths: Sequence[int], removed: Sequence[int]
) -> dict[int, int]:
    """Schedule that removes a given number of patches at each depth.

    Args:
        num_patches: Patches before the first step.
        depths: Blocks with a step, ascending.
        removed: Patches to remove at each of them.

    Returns:
        Patches after the step at each depth.

    Raises:
        ValueError: If the depths do not ascend, the lengths differ, a number is negative,
            or fewer than one patch would be left.
    """
    _check_depths(depths)
    if len(removed) != len(depths):
        raise ValueError(
            f"removed must have one number for each of {len(depths)} depths; "
            f"got {len(removed)}."
        )
    if min(removed) < 0:
        raise ValueError(f"removed must not be negative; got {min(removed)}.")
    if sum(removed) >= num_patches:
        raise ValueError(
            f"removed must leave at least 1 of {num_patches} patches; got {sum(removed)} "
            "in all."
        )
    left = [num_patches - sum(removed[: i + 1]) for i in range(len(removed))]
    return dict(zip(depths, left, strict=True))


def constant_schedule(
    num_patches: int, depths: Sequence[int], removed: int
) -> dict[int, int]:
    """Schedule that removes the same number of patches at every depth, as ToMe's r.

    Args:
        num_patches: Patches before the first step.
        depths: Blocks with a step, ascending.
        removed: Patches to remove at each of them.

    Returns:
        Patches after the step at each depth.
    """
    return list_schedule(num_patches, depths, [removed] * len(depths))


def linear_schedule(
    num_patches: int, depths: Sequence[int], removed: int, inflection: float
) -> dict[int, int]:
    """Schedule whose removals go linearly from r (1 - i) at the first depth to r (1 + i).

    Removals are rounded by :func:`hamilton`, so that r times the number of depths are
    removed in all, whatever i; rounding each of them down would lose some.

    Args:
        num_patches: Patches before the first step.
        depths: Blocks with a step, ascending, at least two.
        removed: Mean number of patches to remove at a depth, r.
        inflection: i in [-1, 1]; -1 removes most at the start, 1 at the end.

    Returns:
        Patches after the step at each depth.

    Raises:
        ValueError: If ``inflection`` is outside [-1, 1], there are fewer than two depths,
            or the removals are impossible.
    """
    if not -1 <= inflection <= 1:
        raise ValueError(f"inflection must be in [-1, 1]; got {inflection}.")
    if len(depths) < 2:
        raise ValueError(f"depths must be at least two for a slope; got {list(depths)}.")
    if removed < 0:
        raise ValueError(f"removed must not be negative; got {removed}.")
    slope, last = Fraction(str(inflection)), len(depths) - 1
    ramp = [1 - slope + 2 * slope * i / last for i in range(len(depths))]
    return list_schedule(num_patches, depths, hamilton(ramp, removed * len(depths)))


def ratio_schedule(
    num_patches: int, depths: Sequence[int], keep_ratio: Ratio
) -> dict[int, int]:
    r"""Schedule that keeps a share of the original patches, in equal relative steps.

    After the i-th of n steps :math:`r^{i/n} N` patches are left, rounded half up, exactly.
    A ratio outside (0, 1] or that keeps no patch raises :class:`ValueError`.

    Args:
        num_patches: Patches of the full model, N.
        depths: Blocks with a step, ascending.
        keep_ratio: Share of the original patches after the last step, r in (0, 1].

    Returns:
        Patches after the step at each depth; the last is :func:`keep_count`.
    """
    _check_depths(depths)
    keep_count(num_patches, keep_ratio)  # refuses a ratio that keeps nothing
    share, steps = _share(keep_ratio), len(depths)

    def left(i: int) -> int:
        # The most patches c with c - 1/2 <= r^(i/n) N: integer powers need no rounding.
        return bisect_right(
            range(1, num_patches + 1),
            share**i,
            key=lambda c: Fraction(2 * c - 1, 2 * num_patches) ** steps,
        )

    return {depth: left(i) for i, depth in enumerate(depths, 1)}


def macs_schedule(
    backbone: Backbone,
    layout: Layout,
    depths: Sequence[int],
    mac_ratio: Ratio,
    place: Place = "between",
    restore_depth: int | None = None,
    extra: int = 0,
) -> dict[int, int]:
    """Schedule that keeps the most patches within a budget of multiply-adds.

    The candidates are the schedules of :func:`ratio_schedule` for every possible number of
    patches at the end. Cost: a bisection, no forward pass.

    Args:
        backbone: The network.
        layout: Geometry of the unreduced sequence.
        depths: Blocks with a step, ascending.
        mac_ratio: Multiply-adds of the full encoder over those of the reduced, at least.
        place: Where the steps stand.
        restore_depth: First block that runs on the full grid again; None if none does.
        extra: Multiply-adds of scoring, matching and recovery.

    Returns:
        Patches after the step at each depth.

    Raises:
        ValueError: If the ratio is out of reach; the message names the range.
    """
    _check_depths(depths)
    num_patches = layout.num_patches

    def schedule(last: int) -> dict[int, int]:
        return ratio_schedule(num_patches, depths, Fraction(last, num_patches))

    def macs(plan: dict[int, int]) -> int:
        counts = token_counts(backbone.num_blocks, layout, plan, place, restore_depth)
        return encoder_macs(backbone, counts, extra)

    full = macs(schedule(num_patches)) - extra
    target = Fraction(str(mac_ratio))
    most, least = Fraction(full, macs(schedule(1))), Fraction(full, full + extra)
    if not least <= target <= most:
        raise ValueError(
            f"mac_ratio must be in [{float(least):.4f}, {float(most):.4f}] for depths "
            f"{list(depths)}; got {mac_ratio}."
        )
    last = _largest(num_patches, lambda c: macs(schedule(c)) * target <= full)
    return schedule(last)


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """Largest of 1 to ``limit`` that fits, if all below one that fits do too."""
    return bisect_right(range(1, limit + 1), False, key=lambda c: not fits(c))


def _share(ratio: Ratio) -> Fraction:
    """The decimal a ratio is written as, exactly."""
    if not 0 < ratio <= 1:
        raise ValueError(f"keep_ratio must be in (0, 1]; got {ratio}.")
    return Fraction(str(ratio))


def _check_depths(depths: Sequence[int]) -> None:
    ascending = all(a < b for a, b in pairwise(depths))
    if not depths or not ascending or depths[0] < 0:
        raise ValueError(f"depths must be nonnegative and ascend; got {list(depths)}.")
