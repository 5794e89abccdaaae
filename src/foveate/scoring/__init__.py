"""Which patches to keep: one number a patch, higher = keep."""

from typing import Protocol

from torch import Tensor

from foveate.forward import Block
from foveate.tokens import Tokens

__all__ = ["Score"]


class Score(Protocol):
    """Rates the patches there are now. Functions and frozen dataclasses alike."""

    def __call__(self, tokens: Tokens, block: Block) -> Tensor:
        """Scores, ``(B, K)``, float32 or float64; an image's depend on that image alone."""
