"""The oracle of all scores: how much the task output moves when one patch moves."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from foveate.diagnosis.jacobian import TokenJacobian
from foveate.forward import Block, run
from foveate.tasks import Task
from foveate.tokens import Tokens

__all__ = ["Sensitivity"]


@dataclass(frozen=True)
class Sensitivity:
    r"""Norm of a patch's Jacobian block, estimated by back-propagating random signs.

    :math:`\sqrt{\frac1R \sum_r \lVert (J^\top u_r)_t \rVert_2^2}` for R sign vectors u
    estimates :math:`\lVert J_t \rVert_F`, where :math:`J_t` is patch t's block of the
    Jacobian of the raw output with respect to the tokens that enter the block, reduced as
    they are. The relative standard error of the square is at most :math:`\sqrt{2/R}`. All
    images share the probes, so that no image depends on its batch-mates.

    Cost: one forward and R backward passes through the tail; memory of ``chunk_size``
    backward passes. Products are taken in the network's own dtype. Works under ``no_grad``;
    does not compile.

    Attributes:
        task: The decoder.
        num_probes: Sign vectors, R.
        seed: The same seed gives the same probes.
        recover: Fills the grid again before a task that ``needs_grid`` reads it. Not needed
            while no patch has been removed.
        chunk_size: Probes pulled back at once; all of them if None.

    Raises:
        ValueError: If ``num_probes`` is not positive.
    """

    task: Task
    num_probes: int = 16
    seed: int = 0
    recover: Callable[[Tokens], Tokens] | None = None
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        """Check the number of probes."""
        if self.num_probes < 1:
            raise ValueError(f"num_probes must be at least 1; got {self.num_probes}.")

    def __call__(self, tokens: Tokens, block: Block) -> Tensor:
        """Estimate the norms of the patches' Jacobian blocks.

        Args:
            tokens: Tokens that enter the block.
            block: The block; the tail is this block, all that follow it, and the decoder.

        Returns:
            Scores, ``(B, K)``, nonnegative, output units per token unit; comparable between
            the patches of one call.
        """
        check_tail(self, tokens, block)
        jacobian = TokenJacobian(self._tail(tokens, block), tokens.x, self.chunk_size)
        pulled = jacobian.vjp(self._probes(jacobian.output))  # (R, B, P + K, C)
        patches = pulled[:, :, tokens.layout.num_prefix :]
        wide = torch.promote_types(patches.dtype, torch.float32)
        return patches.to(wide).square().sum(-1).mean(0).sqrt()

    def _tail(self, tokens: Tokens, block: Block) -> Callable[[Tensor], Tensor]:
        """Task output of the tokens that enter the block, ``(B, P + K, C) -> (B, M)``."""
        backbone, recover = block.backbone, self.recover
        taps = self.task.taps(backbone.num_blocks)

        def tail(x: Tensor) -> Tensor:
            entering = tokens.with_(x=x)
            _, kept = run(backbone, entering, block.depth, taps[-1], taps=taps)
            read = [kept[depth] for depth in taps]
            if recover is not None and self.task.needs_grid:
                read = [recover(features) for features in read]
            features = tuple(r.x for r in read)
            return self.task.decode(backbone, features, tokens.layout).flatten(1)

        return tail

    def _probes(self, output: Tensor) -> Tensor:
        """Random signs, the same for all images, ``(R, B, M)``."""
        generator = torch.Generator().manual_seed(self.seed)
        bits = torch.randint(0, 2, (self.num_probes, output.shape[1]), generator=generator)
        return (2 * bits - 1).to(output)[:, None].expand(-1, len(output), -1)


def check_tail(score: Sensitivity, tokens: Tokens, block: Block) -> None:
    """Refuse a place whose tail cannot be run from the tokens alone.

    Args:
        score: The score.
        tokens: Tokens it is given.
        block: The block it is given.

    Raises:
        ValueError: If it stands between attention and MLP, if its task reads tokens from
            before the block, or if the task reads a grid that nothing would fill.
    """
    first = score.task.taps(block.backbone.num_blocks)[0]
    if block.heads is not None:
        raise ValueError(
            "sensitivity must be placed before a block; got the tokens between attention "
            f"and MLP of block {block.depth}."
        )
    if first < block.depth:
        raise ValueError(
            f"sensitivity must stand no deeper than the first tap of its task, {first}; "
            f"got depth {block.depth}."
        )
    if score.task.needs_grid and tokens.stand_in is not None and score.recover is None:
        raise ValueError(
            "recover must be given once patches are gone, as the task reads the full grid; "
            f"got None with {tokens.num_patches} of {tokens.layout.num_patches} patches."
        )
