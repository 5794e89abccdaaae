"""One more prefix token around any backbone: the register of a task."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from foveate.backbones import Backbone, Heads
from foveate.tokens import Layout, Tokens

__all__ = ["WithRegister", "first_register"]


class WithRegister(nn.Module):
    """A backbone with a learned token behind its prefix tokens. The backbone is shared.

    The register takes part in every block like a class token; where the network rotates, a
    prefix token is not rotated. One-way, it attends to all tokens and none attends to it,
    so that theirs are those of the plain backbone; then its row of attention is computed
    apart, at the cost of a second, small call.

    Args:
        backbone: Any backbone.
        register: What enters block 0, ``(C,)``.
        one_way: Whether the other tokens do not see it.

    Raises:
        ValueError: If the register is of another width than the backbone.
    """

    def __init__(
        self, backbone: Backbone, register: nn.Parameter, one_way: bool = False
    ) -> None:
        super().__init__()
        if register.shape != (backbone.num_channels,):
            raise ValueError(
                f"register must have shape ({backbone.num_channels},); got "
                f"{tuple(register.shape)}."
            )
        self.inner: Any = backbone
        self.register = register
        self.one_way = one_way
        self.num_blocks = backbone.num_blocks
        self.num_channels = backbone.num_channels
        self.num_heads = backbone.num_heads
        self.has_class_token = backbone.has_class_token
        self.patch_size = backbone.patch_size

    def embed(self, images: Tensor) -> Tokens:
        """Tokens that enter block 0, the register last of the prefix tokens."""
        tokens = self.inner.embed(images)
        register = self.register.to(tokens.x.dtype).expand(len(tokens.x), 1, -1)
        x = torch.cat([tokens.prefix, register, tokens.patches], dim=1)
        return tokens.with_(x=x, layout=_with_prefix(tokens, 1))

    def project(self, depth: int, tokens: Tokens) -> Heads:
        """Queries, keys and values of block ``depth``, those of the register among them."""
        return self.inner.project(depth, tokens)

    def attend(self, depth: int, tokens: Tokens, heads: Heads) -> Tokens:
        """First half of block ``depth``: ``x + attention``."""
        if not self.one_way:
            return self.inner.attend(depth, tokens, heads)
        at = tokens.layout.num_prefix - 1
        others = self.without_register(tokens)
        plain = self.inner.attend(
            depth, others, Heads(*(_without(h, at, 2) for h in heads))
        )
        # One row of attention; added to all tokens by broadcasting, and read at its own.
        query = heads.query[:, :, at : at + 1]
        row = self.inner.attend(depth, tokens, heads._replace(query=query))
        x = torch.cat([plain.x[:, :at], row.x[:, at : at + 1], plain.x[:, at:]], dim=1)
        return tokens.with_(x=x)

    def transform(self, depth: int, tokens: Tokens) -> Tokens:
        """Second half of block ``depth``: ``x + mlp(norm(x))``."""
        return self.inner.transform(depth, tokens)

    def finish(self, x: Tensor) -> Tensor:
        """Apply the final norm."""
        return self.inner.finish(x)

    def without_register(self, tokens: Tokens) -> Tokens:
        """Tokens as the plain backbone has them, for decoders that pool all of them."""
        at = tokens.layout.num_prefix - 1
        return tokens.with_(x=_without(tokens.x, at, 1), layout=_with_prefix(tokens, -1))

    def macs_per_token(self, depth: int) -> tuple[int, int]:
        """Multiply-adds of a block's linear layers for one token: attention, MLP."""
        return self.inner.macs_per_token(depth)

    def attention_channels(self, depth: int) -> int:
        """Channels of all heads of block ``depth`` together."""
        return self.inner.attention_channels(depth)


@torch.no_grad()
def first_register(backbone: Backbone, image: Tensor) -> Tensor:
    """Where a register starts: at the class token, so that it first selects as that does.

    Args:
        backbone: The backbone.
        image: Any image it takes, ``(1, 3, H, W)``; a class token does not depend on it.

    Returns:
        What enters block 0 as class token, ``(C,)``; the mean patch without one.
    """
    tokens = backbone.embed(image)
    if backbone.has_class_token:
        return tokens.x[0, 0].clone()
    return tokens.patches[0].mean(0)


def _with_prefix(tokens: Tokens, more: int) -> Layout:
    return replace(tokens.layout, num_prefix=tokens.layout.num_prefix + more)


def _without(x: Tensor, at: int, dim: int) -> Tensor:
    """Leave one token out."""
    after = x.narrow(dim, at + 1, x.shape[dim] - at - 1)
    return torch.cat([x.narrow(dim, 0, at), after], dim=dim)
