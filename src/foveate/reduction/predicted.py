"""What learned heads say about the tokens of a step: scores and sketches in one pass."""

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from foveate.forward import Block, Place
from foveate.scoring.factors import FactorNetwork
from foveate.scoring.heads import Head
from foveate.scoring.metric import SpectralPullbackNetwork
from foveate.tokens import Tokens, widen

__all__ = ["LearnedImportance", "PredictedFactors", "PredictedModes"]


class _Reader(nn.Module):
    """A head that reads the tokens it was trained on, wherever the step stands.

    Args:
        head: The head. One trained on what enters a block also serves a step between its
            attention and its MLP, since the patches are the same.
        place: Where the step stands.

    Raises:
        ValueError: If the head reads what has not been computed where the step stands.
    """

    def __init__(self, head: Head, place: Place) -> None:
        super().__init__()
        if head.place == "between" and place == "before":
            raise ValueError(
                "place must be 'between', where the head was trained; got 'before'."
            )
        self.network = head.network
        # The patches before the block are those that entered it.
        self.looks_back = head.place == "before" and place == "between"

    def read(self, tokens: Tokens, block: Block) -> Tokens:
        """Tokens that the head is meant for, with sizes as they are now."""
        if not self.looks_back:
            return tokens
        if block.entering is None:
            raise ValueError(
                f"steps before the head's at block {block.depth} must not change the "
                "tokens; got tokens that have been reduced between attention and MLP."
            )
        return replace(block.entering, size=tokens.size, proportional=tokens.proportional)


class LearnedImportance(_Reader):
    """Score: importance as an :class:`~foveate.scoring.importance.ImportanceHead` says."""

    @torch.no_grad()
    def forward(self, tokens: Tokens, block: Block) -> Tensor:
        """Log-importance of the patches, ``(B, K)``, float32."""
        seen = self.read(tokens, block)
        return self.network(seen.x, seen.layout.num_prefix, seen.key_bias())


class PredictedFactors(_Reader):
    """Sketch: factors as a :class:`~foveate.scoring.factors.FactorNetwork` says."""

    columns: Tensor

    def __init__(self, head: Head, place: Place) -> None:
        super().__init__(head, place)
        # Once and not in every pass: they are the same for all images.
        columns = cast(FactorNetwork, head.network).basis.detach()
        self.register_buffer("columns", columns)

    @property
    def basis(self) -> Tensor:
        """The network's shared columns, ``(C, D)``, float32 at least."""
        return widen(self.columns)

    @torch.no_grad()
    def forward(self, tokens: Tokens, block: Block) -> Tensor:
        """Factors for one copy of every patch, ``(B, K, R, D)``."""
        seen = self.read(tokens, block)
        return self.network(seen.x, seen.layout.num_prefix, seen.key_bias())


class PredictedModes(_Reader):
    r"""Sketch: the modes of a :class:`~foveate.scoring.metric.SpectralPullbackNetwork`.

    Its rows :math:`\sqrt{r \lambda_j} u_j` have the metric as the mean of their outer
    products, as pulled probes do.
    """

    basis = None

    @torch.no_grad()
    def forward(self, tokens: Tokens, block: Block) -> Tensor:
        """Modes for one copy of every patch, ``(B, K, r, C)``."""
        seen = self.read(tokens, block)
        network = cast(SpectralPullbackNetwork, self.network)
        rows = network(seen.x, seen.layout.num_prefix).sketch() * network.rank**0.5
        return rows / tokens.sizes()[..., None, None]
