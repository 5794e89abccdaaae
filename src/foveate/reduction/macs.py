r"""Multiply-adds of the encoder, from the true number of tokens at every block.

A block whose attention sees :math:`N_a` tokens and whose MLP sees :math:`N_m`, prefix
tokens included, takes :math:`N_a W_a + 2 N_a^2 C + N_m W_m` multiply-adds, with :math:`W_a`
and :math:`W_m` the weights of its linear layers and C the channels of all heads. For an
ordinary block at MLP ratio 4 that is :math:`4 N C^2 + 2 N^2 C + 8 N C^2`. One multiply-add
is two FLOPs. Left out are patch embedding, final norm and decoder, which no reduction
changes, and biases, norms, softmax and rotations, which are small.
"""

from collections.abc import Mapping, Sequence

from foveate.backbones import Backbone
from foveate.forward import Place
from foveate.tokens import Layout

__all__ = ["BlockCounts", "block_macs", "encoder_macs", "token_counts"]

BlockCounts = Sequence[tuple[int, int]]
"""For every block the tokens in its attention and in its MLP, prefix tokens included."""


def block_macs(backbone: Backbone, depth: int, attended: int, transformed: int) -> int:
    """Multiply-adds of one block for one image.

    Args:
        backbone: The network.
        depth: The block's index.
        attended: Tokens in its attention, prefix tokens included.
        transformed: Tokens in its MLP, prefix tokens included.

    Returns:
        Multiply-adds.
    """
    projections, mlp = backbone.macs_per_token(depth)
    mixing = 2 * attended**2 * backbone.attention_channels(depth)  # Q K^T, and A V
    return attended * projections + mixing + transformed * mlp


def encoder_macs(backbone: Backbone, counts: BlockCounts, extra: int = 0) -> int:
    """Multiply-adds of all blocks for one image.

    Args:
        backbone: The network.
        counts: For every block the tokens in its attention and in its MLP, prefix tokens
            included, as :func:`token_counts` gives them.
        extra: Multiply-adds of scoring, matching and recovery, added as they are.

    Returns:
        Multiply-adds.

    Raises:
        ValueError: If there is not one pair for each block.
    """
    if len(counts) != backbone.num_blocks:
        raise ValueError(
            f"counts must have one pair for each of {backbone.num_blocks} blocks; "
            f"got {len(counts)}."
        )
    blocks = (block_macs(backbone, depth, *pair) for depth, pair in enumerate(counts))
    return sum(blocks) + extra


def token_counts(
    num_blocks: int,
    layout: Layout,
    schedule: Mapping[int, int],
    place: Place = "between",
    restore_depth: int | None = None,
) -> list[tuple[int, int]]:
    """Tokens in the attention and in the MLP of every block under a schedule.

    Args:
        num_blocks: Blocks of the backbone.
        layout: Geometry of the unreduced sequence.
        schedule: Patches after the step at each depth; empty for the full model.
        place: Where the steps stand: ``before`` a block, or ``between`` its attention,
            which then still sees the patches from before the step, and its MLP.
        restore_depth: First block that runs on the full grid again; None if none does.

    Returns:
        One pair for every block, prefix tokens included.

    Raises:
        ValueError: If a depth is not a block or not below ``restore_depth``, or a count is
            not between 1 and the count before it.
    """
    _check(num_blocks if restore_depth is None else restore_depth, num_blocks, schedule)
    now, counts = layout.num_patches, []
    for depth in range(num_blocks):
        before = layout.num_patches if depth == restore_depth else now
        now = schedule.get(depth, before)
        if not 1 <= now <= before:
            raise ValueError(
                f"schedule must keep 1 to {before} patches at depth {depth}; got {now}."
            )
        attended = before if place == "between" else now
        counts.append((layout.num_prefix + attended, layout.num_prefix + now))
    return counts


def _check(last: int, num_blocks: int, schedule: Mapping[int, int]) -> None:
    """Refuse steps that no reduced block would follow."""
    if not 0 <= last <= num_blocks:
        raise ValueError(f"restore_depth must be in 0 to {num_blocks}; got {last}.")
    outside = sorted(depth for depth in schedule if not 0 <= depth < last)
    if outside:
        raise ValueError(f"schedule must have depths in 0 to {last - 1}; got {outside[0]}.")
