"""Tasks of VGGT on single frames: camera pose and depth map, by the network's own heads.

A head reads stages: stage i is the output of frame block i beside that of global block i,
which are the tokens that enter blocks ``2 i + 1`` and ``2 i + 2``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from foveate.backbones import Backbone
from foveate.tokens import Layout

__all__ = ["CameraPose", "FrameDepth"]


class CameraPose(nn.Module):
    """Pose of the camera of each frame: nine numbers.

    Translation (3), quaternion XYZW with the scalar last (4, of any length), vertical and
    horizontal field of view in radians (2).

    The head refines the pose in rounds and detaches it in between. Here ``detach`` does
    nothing while the head runs: the output is the same, and a Jacobian is that of the map
    which is computed, not that of its last round alone.

    Args:
        head: Takes a list of stages ``(B, 1, T, 2 C)`` and ``num_iterations``; reads token
            0 of the last stage; returns a list of poses ``(B, 1, 9)``, of which the last
            counts.
        num_iterations: Rounds of refinement, at least 1.

    Raises:
        ValueError: If there is no round.
    """

    needs_grid = False

    def __init__(self, head: nn.Module, num_iterations: int = 4) -> None:
        super().__init__()
        if num_iterations < 1:
            raise ValueError(f"num_iterations must be at least 1; got {num_iterations}.")
        self.head = head
        self.num_iterations = num_iterations

    def taps(self, num_blocks: int) -> tuple[int, ...]:
        """Both halves of the last stage."""
        return (num_blocks - 1, num_blocks)

    def decode(
        self, backbone: Backbone, features: tuple[Tensor, ...], layout: Layout
    ) -> Tensor:
        """Pose of each frame, ``(B, 9)``."""
        stage = _join_stage([x[:, :1] for x in features])  # only the camera token is read
        with _IgnoreDetach():
            poses = self.head([stage], num_iterations=self.num_iterations)
        return poses[-1][:, 0]


class FrameDepth(nn.Module):
    """Predicted depth of each pixel, in the unit of the translation of the pose.

    Args:
        head: Takes a list of stages ``(B, 1, P + N, 2 C)``, images, of which it reads the
            shape alone, and P; returns depth ``(B, 1, H, W, 1)`` and its confidence.
        stages: Stages that the head reads, ascending.

    Raises:
        ValueError: If there is no stage, or they are not ascending.
    """

    needs_grid = True

    def __init__(self, head: nn.Module, stages: Sequence[int]) -> None:
        super().__init__()
        if not stages or list(stages) != sorted(set(stages)) or stages[0] < 0:
            raise ValueError(f"stages must ascend from 0 or more; got {list(stages)}.")
        self.head = head
        self.stages = tuple(stages)

    def taps(self, num_blocks: int) -> tuple[int, ...]:
        """Both halves of every stage that the head reads."""
        halves = {depth for i in self.stages for depth in (2 * i + 1, 2 * i + 2)}
        if max(halves) > num_blocks:
            raise ValueError(
                f"stages must be below {num_blocks // 2}, the number of stages; "
                f"got {self.stages[-1]}."
            )
        return tuple(sorted(halves))

    def decode(
        self, backbone: Backbone, features: tuple[Tensor, ...], layout: Layout
    ) -> Tensor:
        """Depth map of each frame, ``(B, H, W)``."""
        held: list[Tensor | None] = [None] * (backbone.num_blocks // 2)
        for index, stage in enumerate(self.stages):
            held[stage] = _join_stage(features[2 * index : 2 * index + 2])
        size = (len(features[0]), 1, 3, *layout.image_size)
        shape_alone = features[0].new_zeros(()).expand(size)
        depth, _ = self.head(held, shape_alone, layout.num_prefix)
        return depth[:, 0, :, :, 0]


def _join_stage(halves: Sequence[Tensor]) -> Tensor:
    """Frame and global output side by side, two ``(B, T, C) -> (B, 1, T, 2 C)``."""
    return torch.cat(list(halves), dim=-1)[:, None]


class _IgnoreDetach(TorchFunctionMode):
    """While it is active, ``tensor.detach()`` returns the tensor."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func in (Tensor.detach, torch.detach):
            return args[0]
        return func(*args, **(kwargs or {}))
