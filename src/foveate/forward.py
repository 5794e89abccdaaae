"""The only loop over the blocks: full forward, reduced forward and Jacobian tail alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from foveate.backbones import Backbone, Heads
from foveate.tokens import Tokens

Place = Literal["before", "between"]


@dataclass(frozen=True)
class Block:
    """What a step may look at: the block it stands at, and its projections if known.

    Attributes:
        backbone: The network.
        depth: The block's index.
        heads: The block's queries, keys and values of the tokens a step is given, free of
            charge between attention and MLP; None before the block.
        kept: Tokens kept at the taps so far, by depth.
        entering: What entered the block, of the tokens a step is given between attention
            and MLP; None before the block.
    """

    backbone: Backbone
    depth: int
    heads: Heads | None = None
    kept: Mapping[int, Tokens] = field(default_factory=dict)
    entering: Tokens | None = None

    def project(self, tokens: Tokens) -> Heads:
        """Queries, keys and values of ``tokens``; computed here if not known yet."""
        return self.heads or self.backbone.project(self.depth, tokens)


class Step(Protocol):
    """A change of the tokens at one block.

    Attributes:
        place: ``before`` the block, or ``between`` its attention and its MLP.
    """

    place: Place

    def __call__(self, tokens: Tokens, block: Block) -> Tokens:
        """Return the changed tokens."""


Steps = Mapping[int, Sequence[Step]]
NO_STEPS: Steps = {}


def run(
    backbone: Backbone,
    tokens: Tokens,
    start: int,
    stop: int,
    steps: Steps = NO_STEPS,
    taps: Sequence[int] = (),
) -> tuple[Tokens, dict[int, Tokens]]:
    """Run blocks ``start`` to ``stop - 1``.

    Args:
        backbone: The network.
        tokens: Tokens that enter block ``start``.
        start: First block to run.
        stop: First block not to run.
        steps: Per depth, the steps to take at that block.
        taps: Depths at which to keep the tokens that enter (before any step); ``stop``
            keeps what leaves the last block.

    Returns:
        The tokens after the last block, and the kept tokens by depth.

    Raises:
        ValueError: If these are not blocks of the network.
    """
    if not 0 <= start <= stop <= backbone.num_blocks:
        raise ValueError(
            f"start and stop must satisfy 0 <= start <= stop <= {backbone.num_blocks} "
            f"blocks; got {start} and {stop}."
        )
    kept: dict[int, Tokens] = {}
    for depth in range(start, stop):
        if depth in taps:
            kept[depth] = tokens
        here = steps.get(depth, ())
        tokens = _take(here, "before", tokens, Block(backbone, depth, None, kept))
        heads = backbone.project(depth, tokens)
        between = Block(backbone, depth, heads, kept, tokens)
        tokens = backbone.attend(depth, tokens, heads)
        tokens = _take(here, "between", tokens, between)
        tokens = backbone.transform(depth, tokens)
    if stop in taps:
        kept[stop] = tokens
    return tokens, kept


def _take(steps: Sequence[Step], place: Place, tokens: Tokens, block: Block) -> Tokens:
    for step in steps:
        if step.place == place:
            tokens = step(tokens, block)
            # They describe the tokens before the step.
            block = replace(block, heads=None, entering=None)
    return tokens
