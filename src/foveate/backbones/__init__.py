"""Images to tokens, one block at a time: what every supported network looks like."""

from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from foveate.tokens import Tokens

__all__ = [
    "Backbone",
    "Heads",
    "UnsupportedModelError",
    "attention",
    "check_children",
    "grid_of",
    "linear_macs",
    "open_backbone",
]


class Heads(NamedTuple):
    """Queries, keys and values of one block, each ``(B, heads, P + K, head channels)``."""

    query: Tensor
    key: Tensor
    value: Tensor


class UnsupportedModelError(ValueError):
    """The network holds a module that no adapter knows, so running it would be a guess."""


class Backbone(Protocol):
    """A frozen Vision Transformer, seen as four steps.

    Implementations are ``nn.Module`` objects that hold the user's network, never edited.

    Attributes:
        num_blocks: Transformer blocks.
        num_channels: Channels of a token, C.
        num_heads: Attention heads of a block.
        has_class_token: Whether token 0 is a class token.
        patch_size: Height and width of a patch in pixels.
    """

    num_blocks: int
    num_channels: int
    num_heads: int
    has_class_token: bool
    patch_size: tuple[int, int]

    def embed(self, images: Tensor) -> Tokens:
        """Tokens that enter block 0, ``(B, 3, H, W) -> (B, P + N, C)``."""

    def project(self, depth: int, tokens: Tokens) -> Heads:
        """Queries, keys and values of block ``depth``, normalised and rotated."""

    def attend(self, depth: int, tokens: Tokens, heads: Heads) -> Tokens:
        """First half of block ``depth``: ``x + attention``, keys biased by log size."""

    def transform(self, depth: int, tokens: Tokens) -> Tokens:
        """Second half of block ``depth``: ``x + mlp(norm(x))``."""

    def finish(self, x: Tensor) -> Tensor:
        """Apply the final norm, ``(B, T, C) -> (B, T, C)``."""

    def macs_per_token(self, depth: int) -> tuple[int, int]:
        """Multiply-adds of a block's linear layers for one token: attention, MLP."""

    def attention_channels(self, depth: int) -> int:
        """Channels of all heads of block ``depth`` together."""


def attention(heads: Heads, key_bias: Tensor | None, dropout: float = 0.0) -> Tensor:
    r"""Multi-head attention with a bias per key.

    :math:`\mathrm{softmax}(QK^\top/\sqrt{d} + b) V`, where b is the log size of each key,
    so that a merged token counts as often as the patches behind it.

    Args:
        heads: Queries, keys and values, ``(B, heads, T, d)``.
        key_bias: ``(B, 1, 1, T)`` or None; with None the fastest kernel is used.
        dropout: Share of attention weights set to zero; 0 outside training.

    Returns:
        Concatenated heads, ``(B, T, heads * d)``.
    """
    mixed = scaled_dot_product_attention(*heads, attn_mask=key_bias, dropout_p=dropout)
    return mixed.transpose(1, 2).flatten(2)  # (B, heads, T, d) -> (B, T, heads * d)


def grid_of(images: Tensor, patch_size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of the patch grid.

    Args:
        images: ``(B, 3, H, W)``.
        patch_size: Height and width of a patch in pixels.

    Returns:
        Rows and columns.

    Raises:
        ValueError: If patches do not tile the images, or there is no batch.
    """
    if images.ndim != 4:
        raise ValueError(f"images must have shape (B, 3, H, W); got {tuple(images.shape)}.")
    (height, width), (high, wide) = images.shape[-2:], patch_size
    if height % high or width % wide or not height or not width:
        raise ValueError(
            f"images must have sides divisible by the patch size ({high}, {wide}); "
            f"got {height} x {width} pixels."
        )
    return height // high, width // wide


def check_children(
    module: nn.Module, paths: tuple[str, ...], kind: str, at: str = ""
) -> None:
    """Refuse a child module that none of ``paths`` leads to or through.

    Args:
        module: Where to look.
        paths: Dotted paths to every module the adapter runs.
        kind: Class name for the message.
        at: Path of ``module`` with a dot behind it, for the message.

    Raises:
        UnsupportedModelError: Naming the first unknown child.
    """
    heads = {path.partition(".")[0] for path in paths}
    for name, child in module.named_children():
        if name not in heads:
            raise UnsupportedModelError(
                f"{kind} must consist of {', '.join(sorted(heads))}; got the unknown "
                f"module '{at}{name}' ({type(child).__name__})."
            )
        below = tuple(p.partition(".")[2] for p in paths if p.startswith(f"{name}."))
        if below:
            check_children(child, below, kind, f"{at}{name}.")


def linear_macs(module: nn.Module) -> int:
    """Multiply-adds per token of all linear layers inside ``module``."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))


def open_backbone(network: nn.Module) -> Any:  # noqa: ANN401 - a Backbone that is an nn.Module
    """Wrap a timm or transformers network in the adapter that knows it.

    Args:
        network: A module of timm or transformers. It is kept as it is.

    Returns:
        The adapter, a :class:`Backbone`.

    Raises:
        UnsupportedModelError: If no adapter knows the network or one of its modules.
    """
    package = type(network).__module__.partition(".")[0]
    if package == "timm":
        from foveate.backbones.timm import TimmBackbone

        return TimmBackbone(network)
    if package == "transformers":
        from foveate.backbones.huggingface import HuggingFaceBackbone

        return HuggingFaceBackbone(network)
    raise UnsupportedModelError(
        f"network must come from timm or transformers; got {type(network).__qualname__} "
        f"from {type(network).__module__}."
    )
