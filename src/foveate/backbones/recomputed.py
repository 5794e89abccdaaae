"""Less memory while training: what a half of a block holds is computed again backwards."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from foveate.backbones import Backbone, Heads
from foveate.tokens import Tokens

__all__ = ["Recomputed", "innermost"]


class Recomputed(nn.Module):
    """A backbone under gradient checkpoints: attention and MLP keep their input alone.

    Outputs and gradients are those of the backbone, bit for bit; training takes one more
    forward pass of every half block. The backbone is shared.

    Args:
        backbone: Any backbone.
    """

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.inner: Any = backbone
        self.num_blocks = backbone.num_blocks
        self.num_channels = backbone.num_channels
        self.num_heads = backbone.num_heads
        self.has_class_token = backbone.has_class_token
        self.patch_size = backbone.patch_size

    def embed(self, images: Tensor) -> Tokens:
        """Tokens that enter block 0."""
        return self.inner.embed(images)

    def project(self, depth: int, tokens: Tokens) -> Heads:
        """Queries, keys and values of block ``depth``."""
        return self.inner.project(depth, tokens)

    def attend(self, depth: int, tokens: Tokens, heads: Heads) -> Tokens:
        """First half of block ``depth``: ``x + attention``."""

        def half(x: Tensor, *parts: Tensor) -> Tensor:
            return self.inner.attend(depth, tokens.with_(x=x), Heads(*parts)).x

        if not torch.is_grad_enabled():
            return self.inner.attend(depth, tokens, heads)
        x: Any = checkpoint(half, tokens.x, *heads, use_reentrant=False)
        return tokens.with_(x=x)

    def transform(self, depth: int, tokens: Tokens) -> Tokens:
        """Second half of block ``depth``: ``x + mlp(norm(x))``."""

        def half(x: Tensor) -> Tensor:
            return self.inner.transform(depth, tokens.with_(x=x)).x

        if not torch.is_grad_enabled():
            return self.inner.transform(depth, tokens)
        x: Any = checkpoint(half, tokens.x, use_reentrant=False)
        return tokens.with_(x=x)

    def finish(self, x: Tensor) -> Tensor:
        """Apply the final norm."""
        return self.inner.finish(x)

    def macs_per_token(self, depth: int) -> tuple[int, int]:
        """Multiply-adds of a block's linear layers for one token: attention, MLP."""
        return self.inner.macs_per_token(depth)

    def attention_channels(self, depth: int) -> int:
        """Channels of all heads of block ``depth`` together."""
        return self.inner.attention_channels(depth)


def innermost(backbone: Any) -> Any:  # noqa: ANN401 - an adapter, within wrappers
    """Adapter that a backbone's wrappers are around."""
    while hasattr(backbone, "inner"):
        backbone = backbone.inner
    return backbone
