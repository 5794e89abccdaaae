"""Jacobian of a task output with respect to the tokens at one depth, through its products."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.func import jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from foveate.backbones import Backbone
from foveate.forward import run
from foveate.tasks import Task
from foveate.tokens import Tokens

Tail = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Tap:
    """Where a network is cut: tokens entering one block, and everything after them.

    Attributes:
        tokens: Tokens that enter the block.
        tail: What follows, ``(B, P + N, C) -> (B, M)``; flattened raw task output.
    """

    tokens: Tokens
    tail: Tail


def open_tap(backbone: Backbone, task: Task, images: Tensor, depth: int) -> Tap:
    """Cut a network at the tokens that enter block ``depth``.

    What the task reads from before the cut is held constant.

    Args:
        backbone: The network.
        task: Its decoder.
        images: ``(B, 3, H, W)``.
        depth: 0 <= depth < number of blocks; a dense task also takes the number of blocks.

    Returns:
        The tokens and the tail.

    Raises:
        ValueError: If ``depth`` is out of range for the task.
    """
    stop = backbone.num_blocks
    deepest = stop if task.needs_grid else stop - 1
    if not 0 <= depth <= deepest:
        raise ValueError(
            f"depth must be from 0 to {deepest} for this task on {stop} blocks; got {depth}."
        )
    taps = task.taps(stop)
    with torch.no_grad():
        tokens, early = run(backbone, backbone.embed(images), 0, depth, taps=taps)
    late = tuple(d for d in taps if d >= depth)

    def tail(x: Tensor) -> Tensor:
        start = tokens.with_(x=x)
        _, kept = run(backbone, start, depth, taps[-1], taps=late)
        features = tuple((kept if d in kept else early)[d].x for d in taps)
        return task.decode(backbone, features, tokens.layout).flatten(1)

    return Tap(tokens, tail)
