"""Tokens to task output: what a decoder reads, and how."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from foveate.backbones import Backbone
from foveate.data.labelled import Target
from foveate.tokens import Layout

__all__ = ["LabelledTask", "Task", "TrainableTask"]


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


@runtime_checkable
class LabelledTask(Protocol):
    """A :class:`Task` whose output can be held against labels.

    Attributes:
        kind: ``classification``, ``segmentation``, ``detection`` or ``depth``.
        needs_grid: As of a task.
    """

    kind: str
    needs_grid: bool

    def taps(self, num_blocks: int) -> tuple[int, ...]:
        """As of a task."""

    def decode(
        self, backbone: Backbone, features: tuple[Tensor, ...], layout: Layout
    ) -> Tensor:
        """As of a task."""

    def predict(self, output: Tensor, layout: Layout) -> Sequence[Any]:
        """What metrics compare with the truth, one an image."""


@runtime_checkable
class TrainableTask(LabelledTask, Protocol):
    """A task that can be learned from labels."""

    def loss(self, output: Tensor, targets: Sequence[Target], layout: Layout) -> Tensor:
        """Mean training loss of raw outputs ``(B, ...)``, scalar."""
