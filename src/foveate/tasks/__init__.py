"""Tokens to task output: what a decoder reads, and how."""

from typing import Protocol

from torch import Tensor

from foveate.backbones import Backbone
from foveate.tokens import Layout

__all__ = ["Task"]


class Task(Protocol):
    """A frozen decoder on top of a backbone. Implementations are ``nn.Module`` objects.

    Attributes:
        needs_grid: Whether the decoder reads patches, in their places on the full grid; if
            not, it reads prefix tokens alone and removed patches need not come back.
    """

    needs_grid: bool

    def taps(self, num_blocks: int) -> tuple[int, ...]:
        """Depths of the tokens it reads, ascending; ``num_blocks`` is the last output."""

    def decode(
        self, backbone: Backbone, features: tuple[Tensor, ...], layout: Layout
    ) -> Tensor:
        """Raw task output of the tokens at the taps, before the final norm.

        Each is ``(B, P + N, C)``; without ``needs_grid`` sequences may be shorter.
        """
