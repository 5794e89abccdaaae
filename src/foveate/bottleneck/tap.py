"""A task read through the latent, and the Jacobian with respect to the latent."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from foveate.backbones import Backbone
from foveate.bottleneck.vae import Bottleneck, Rebuilt
from foveate.diagnosis.jacobian import Tail
from foveate.forward import run
from foveate.tasks import Task
from foveate.tokens import Layout

__all__ = [
    "Errors",
    "LatentTap",
    "Reading",
    "ThroughLatent",
    "errors_of",
    "open_latent",
    "read_depths",
    "stack_depths",
]


def stack_depths(features: tuple[Tensor, ...]) -> Tensor:
    """Put the tokens of all depths side by side, K times ``(B, T, C) -> (B, T, K * C)``."""
    return torch.cat(features, dim=-1)


class ThroughLatent(nn.Module):
    """A frozen task that sees only what a bottleneck rebuilds from its latent.

    It is a :class:`~foveate.tasks.Task` itself: in a model it is diagnosed, compared and
    run like the task. Every path from the tokens to the output leads through the mode of
    the latent, so that the Jacobian with respect to tokens at any depth has at most
    as many nonzero singular values as the latent has free numbers: ``num_registers`` times
    ``latent_channels``, one channel less for spherical ones.

    Args:
        task: The decoder.
        network: The bottleneck.
    """

    needs_grid = True

    def __init__(self, task: Task, network: Bottleneck) -> None:
        super().__init__()
        self.task = task
        self.network = network

    def taps(self, num_blocks: int) -> tuple[int, ...]:
        """Depths of the bottleneck.

        Args:
            num_blocks: Blocks of the backbone.

        Returns:
            Depths, ascending.

        Raises:
            ValueError: If the backbone lacks one, or the task reads another.
        """
        depths = self.network.shape.depths
        lacking = [d for d in self.task.taps(num_blocks) if d not in depths]
        if lacking or depths[-1] > num_blocks:
            raise ValueError(
                f"depths of the bottleneck must be at most {num_blocks} and hold those "
                f"that the task reads, {self.task.taps(num_blocks)}; got {depths}."
            )
        return depths

    def decode(
        self, backbone: Backbone, features: tuple[Tensor, ...], layout: Layout
    ) -> Tensor:
        """The task's output on the tokens rebuilt from the mode of the latent."""
        latent = self.network.encode(stack_depths(features), layout.grid)
        return self.read(backbone, latent.mode(), layout)

    def read(self, backbone: Backbone, z: Tensor, layout: Layout) -> Tensor:
        """The task's output on the tokens rebuilt from ``z``, ``(B, R, d)``."""
        rebuilt = self.network.split(self.network.decode(z, layout.grid))
        return self.decode_rebuilt(backbone, rebuilt, layout)

    def decode_rebuilt(
        self, backbone: Backbone, rebuilt: tuple[Tensor, ...], layout: Layout
    ) -> Tensor:
        """The task's output on rebuilt tokens, of which it takes the depths it reads."""
        at = dict(zip(self.taps(backbone.num_blocks), rebuilt, strict=True))
        taken = tuple(at[d] for d in self.task.taps(backbone.num_blocks))
        return self.task.decode(backbone, taken, layout)


@dataclass(frozen=True)
class Reading:
    """What a bottleneck encodes, and what the task says without it.

    Attributes:
        tokens: Tokens of all depths side by side, ``(B, P + N, K * C)``.
        output: Flattened output of the task itself, ``(B, M)``.
        layout: Geometry of the tokens.
    """

    tokens: Tensor
    output: Tensor
    layout: Layout


@torch.no_grad()
def read_depths(backbone: Backbone, task: ThroughLatent, images: Tensor) -> Reading:
    """Run a backbone and its task once, and keep what a bottleneck needs.

    Args:
        backbone: The network.
        task: A task through a bottleneck.
        images: ``(B, 3, H, W)``.

    Returns:
        Tokens and output.

    Raises:
        ValueError: If the bottleneck fits neither the backbone nor the task.
    """
    depths = task.taps(backbone.num_blocks)
    start = backbone.embed(images)
    _, kept = run(backbone, start, 0, depths[-1], taps=depths)
    own = tuple(kept[d].x for d in task.task.taps(backbone.num_blocks))
    output = task.task.decode(backbone, own, start.layout).flatten(1)
    tokens = stack_depths(tuple(kept[d].x for d in depths))
    return Reading(tokens, output, start.layout)


@dataclass(frozen=True)
class LatentTap:
    """A network cut at the latent.

    Attributes:
        z: Mode of the latent, ``(B, R, d)``; takes the place of tokens.
        tail: What follows, ``(B, R, d) -> (B, M)``; flattened raw task output.
        reading: What was encoded.
    """

    z: Tensor
    tail: Tail
    reading: Reading


def open_latent(backbone: Backbone, task: ThroughLatent, images: Tensor) -> LatentTap:
    """Cut a network at the latent of a bottleneck.

    ``TokenJacobian(tap.tail, tap.z)`` is the Jacobian with respect to the latent; sketches
    and spectra take it as they take one with respect to tokens, with no prefix tokens.

    Args:
        backbone: The network.
        task: A task through a bottleneck.
        images: ``(B, 3, H, W)``.

    Returns:
        The latent and the tail.

    Raises:
        ValueError: If the bottleneck fits neither the backbone nor the task.
    """
    reading = read_depths(backbone, task, images)
    with torch.no_grad():
        z = task.network.encode(reading.tokens, reading.layout.grid).mode()

    def tail(z: Tensor) -> Tensor:
        return task.read(backbone, z, reading.layout).flatten(1)

    return LatentTap(z, tail, reading)


class Errors(NamedTuple):
    """What a bottleneck loses, for each image; always look at both.

    Attributes:
        reconstruction: Mean squared error of the standardised tokens, ``(B,)``; 1 for the
            mean of the training data.
        task: Relative error of the task output, ``(B,)``.
        kl: Divergence from the prior in nats for each number of the latent, ``(B,)``.
    """

    reconstruction: Tensor
    task: Tensor
    kl: Tensor


def errors_of(
    backbone: Backbone, task: ThroughLatent, rebuilt: Rebuilt, reading: Reading
) -> Errors:
    r"""Compare what came through the latent with what went in.

    The error of the task output is :math:`\lVert \hat y - y \rVert / \lVert y \rVert`.

    Args:
        backbone: The network.
        task: A task through a bottleneck.
        rebuilt: What the bottleneck returned.
        reading: What it was given.

    Returns:
        Errors of each image, differentiable in what was rebuilt.
    """
    y = reading.output
    output = task.decode_rebuilt(backbone, rebuilt.features, reading.layout).flatten(1)
    squared = (rebuilt.standardised - rebuilt.target).square().mean((1, 2))
    relative = (output - y).norm(dim=1) / y.norm(dim=1)
    return Errors(
        squared, relative, rebuilt.kl.mean(1) / task.network.shape.latent_channels
    )
