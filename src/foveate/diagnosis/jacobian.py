"""Jacobian of a task output with respect to the tokens at a tap, through its products."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from foveate.backbones import Backbone
from foveate.diagnosis.linearize import (
    Functional,
    Linearization,
    RecordingError,
    linearize,
)
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
            f"depth must be from 0 to {deepest} for this task on {stop} blocks; "
            f"got {depth}."
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


@dataclass
class Products:
    """How many products with the Jacobian of each image have been taken."""

    jvp: int = 0
    vjp: int = 0


# Bytes of the largest tensor in a pass. On a CPU several tensors of this size fit the last
# cache, and the allocator hands them out again without asking the system for fresh pages.
_CPU_PASS, _OTHER_PASS = 8 << 20, 256 << 20


class TokenJacobian:
    r"""Per-image Jacobian of a task output with respect to the tokens at a tap.

    For image b this is :math:`J \in \mathbb{R}^{M \times (P + N) C}`, never formed.
    Products come in blocks of probes: one call serves all probes and all images, since no
    image acts on another.

    The tail is linearised once, when the object is made, and every product replays the
    linear maps of its steps (:mod:`foveate.diagnosis.linearize`). A tail that cannot be
    recorded is differentiated by ``torch.func`` in every product, to the same result;
    ``route`` says so. Cost: making the object takes about two forward passes of the tail, a
    JVP and a VJP of one probe together little more than two. Memory: what the maps hold, as
    much as a backward pass of the B images keeps, and a few tensors of the largest size in
    a pass.

    Args:
        tail: What follows the tap, ``(B, P + N, C) -> (B, M)``; deterministic, and treating
            images independently.
        tokens: Tokens at the tap, ``(B, P + N, C)``.
        chunk_size: Probes per pass through the tail. If None, as many as keep the largest
            tensor of a pass within 8 MiB on a CPU, 256 MiB elsewhere, and one at least.

    Attributes:
        route: ``recorded``, or ``torch.func`` and why the tail could not be recorded.

    Raises:
        ValueError: If the tail does not return ``(B, M)``, or ``chunk_size`` is below 1.
    """

    def __init__(self, tail: Tail, tokens: Tensor, chunk_size: int | None = None) -> None:
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1; got {chunk_size}.")
        self.tail = tail
        self.tokens = tokens.detach()
        self.products = Products()
        self.route = "recorded"
        # What torch.func differentiates itself must not meet fused attention: that has no
        # forward derivative, and no batching rule for its backward.
        with sdpa_kernel(SDPBackend.MATH):
            try:
                self._map: Linearization | Functional = linearize(tail, self.tokens)
            except RecordingError as error:
                self.route = f"torch.func: {error}"
                self._map = Functional(tail, self.tokens)
        self.output = self._map.output
        if self.output.ndim != 2 or len(self.output) != len(tokens):
            raise ValueError(
                f"tail must map (B, N, C) to (B, M) with B={len(tokens)}; "
                f"got an output of shape {tuple(self.output.shape)}."
            )
        largest = self._map.largest * self.tokens.element_size()
        limit = _CPU_PASS if tokens.device.type == "cpu" else _OTHER_PASS
        self.chunk_size = chunk_size or max(1, limit // largest)

    @property
    def num_outputs(self) -> int:
        """Outputs of the task, M."""
        return self.output.shape[1]

    def jvp(self, directions: Tensor) -> Tensor:
        """Push token directions forward.

        Args:
            directions: ``(R, B, P + N, C)`` with R >= 1.

        Returns:
            ``J v`` of every probe and image, ``(R, B, M)``.

        Raises:
            ValueError: If the shape is another.
        """
        _check_probes("directions", directions, self.tokens)
        self.products.jvp += len(directions)
        return self._in_chunks(self._map.push, directions, self.output)

    def vjp(self, cotangents: Tensor) -> Tensor:
        """Pull output directions back.

        Args:
            cotangents: ``(R, B, M)`` with R >= 1.

        Returns:
            ``J^T u`` of every probe and image, ``(R, B, P + N, C)``.

        Raises:
            ValueError: If the shape is another.
        """
        _check_probes("cotangents", cotangents, self.output)
        self.products.vjp += len(cotangents)
        return self._in_chunks(self._map.pull, cotangents, self.tokens)

    def _in_chunks(
        self, product: Callable[[Tensor], Tensor], probes: Tensor, like: Tensor
    ) -> Tensor:
        results = like.new_empty(len(probes), *like.shape)
        with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            for start in range(0, len(probes), self.chunk_size):
                part = slice(start, start + self.chunk_size)
                results[part] = product(probes[part])
        return results


def _check_probes(name: str, probes: Tensor, one: Tensor) -> None:
    if probes.shape[1:] != one.shape or len(probes) == 0:
        raise ValueError(
            f"{name} must be (R, {', '.join(map(str, one.shape))}) with R >= 1; "
            f"got {tuple(probes.shape)}."
        )


def check_adjoint(jacobian: TokenJacobian, generator: Generator) -> float:
    r"""Compare :math:`\langle J v, u \rangle` with :math:`\langle v, J^\top u \rangle`.

    A tail that detaches or runs under ``no_grad`` makes pull-backs zero without an error.
    Cost: one JVP and one VJP.

    Args:
        jacobian: The Jacobian to check.
        generator: Source of u and v.

    Returns:
        The largest relative disagreement over the images.

    Raises:
        ValueError: If it exceeds 1e-3, or if both products are zero.
    """
    tokens, output = jacobian.tokens, jacobian.output
    v = torch.randn(
        tokens.shape, generator=generator, dtype=tokens.dtype, device=tokens.device
    )
    u = torch.randn(
        output.shape, generator=generator, dtype=output.dtype, device=output.device
    )
    pushed, pulled = jacobian.jvp(v[None])[0], jacobian.vjp(u[None])[0]
    forward = (pushed * u).sum(1)
    backward = (pulled * v).flatten(1).sum(1)
    scale = pushed.norm(dim=1) * u.norm(dim=1) + pulled.flatten(1).norm(dim=1) * v.flatten(
        1
    ).norm(dim=1)
    if (scale == 0).any():
        raise ValueError(
            "tail must depend on the tokens; its Jacobian is zero (does it detach?)."
        )
    error = float(((forward - backward).abs() / scale).max())
    if not error < 1e-3:
        raise ValueError(
            "tail must be differentiable in both directions; JVP and VJP disagree by "
            f"{error:.1e} of their size (does the decoder detach or use no_grad?)."
        )
    return error
