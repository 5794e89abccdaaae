"""Adapter for timm's ``VisionTransformer`` and ``Eva``: learned or rotary positions."""

from typing import Any

import torch
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from torch import Tensor, nn

from foveate.backbones import (
    Heads,
    UnsupportedModelError,
    attention,
    check_children,
    grid_of,
    linear_macs,
)
from foveate.tokens import Layout, Tokens

# What the forward of each class runs. Everything else is refused by name: windows, relative
# position biases, distillation tokens, norms behind the branches, parallel branches.
_VIT = "timm.models.vision_transformer.VisionTransformer"
_EVA = "timm.models.eva.Eva"
_HEAD = ("norm", "attn_pool", "fc_norm", "head_drop", "head")
_TRUNKS = {
    _VIT: ("patch_embed", "pos_drop", "patch_drop", "norm_pre", "blocks", *_HEAD),
    _EVA: ("patch_embed", "pos_drop", "rope", "norm_pre", "blocks", *_HEAD),
}
_HALVES = ("norm1", "attn", "drop_path1", "norm2", "mlp", "drop_path2")
_BLOCKS: dict[str, dict[str, tuple[str, ...]]] = {
    _VIT: {"timm.models.vision_transformer.Block": ("ls1", "ls2", *_HALVES)},
    _EVA: {"timm.models.eva.EvaBlock": _HALVES},
}
_AFTER = ("q_norm", "k_norm", "attn_drop", "norm", "gate", "proj", "proj_drop")
_SPLIT = ("qkv", "q_proj", "k_proj", "v_proj", *_AFTER)
_ATTENTIONS = {
    "timm.layers.attention.Attention": ("qkv", *_AFTER),
    "timm.layers.attention.AttentionRope": _SPLIT,
    "timm.models.eva.EvaAttention": _SPLIT,
}
# ``RotaryEmbeddingMixed`` is not here: its rows differ per block and head.
_ROPES = dict.fromkeys(
    f"timm.layers.pos_embed_sincos.RotaryEmbedding{kind}"
    for kind in ("Cat", "DinoV3", "MRope")
)
_PATCHES = {"timm.layers.patch_embed.PatchEmbed": ("proj", "norm")}


class TimmBackbone(nn.Module):
    """A Vision Transformer of timm behind the protocol of backbones.

    Args:
        network: A ``VisionTransformer`` or an ``Eva``.

    Raises:
        UnsupportedModelError: If the class of the network or of one of its parts is not in
            this module's tables; the message names it.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        check_network(network)
        self.network: Any = network
        parts: Any = network
        self.num_blocks = len(parts.blocks)
        self.num_channels = int(parts.embed_dim)
        self.num_heads = int(parts.blocks[0].attn.num_heads)
        self.has_class_token = parts.cls_token is not None
        self.patch_size: tuple[int, int] = tuple(parts.patch_embed.patch_size)
        self._is_eva = _name(network) == _EVA

    def embed(self, images: Tensor) -> Tokens:
        """Turn images into the tokens that enter block 0.

        Args:
            images: ``(B, 3, H, W)``.

        Returns:
            Tokens ``(B, P + N, C)``, with a rotary row per patch where the network rotates.

        Raises:
            ValueError: If the network does not take images of this size.
        """
        network, size = self.network, (images.shape[-2], images.shape[-1])
        grid = grid_of(images, self.patch_size)
        built_for = network.patch_embed.img_size
        if network.patch_embed.strict_img_size and built_for not in (None, size):
            raise ValueError(
                f"images must be {built_for[0]} x {built_for[1]} pixels for a network "
                f"created without dynamic_img_size=True; got {size[0]} x {size[1]}."
            )
        x, rope = network._pos_embed(network.patch_embed(images)), None
        if self._is_eva:
            x, rope = x
        x = network.norm_pre(x)
        position = None if rope is None else rope.expand(len(x), -1, -1)  # (B, N, 2 d)
        return Tokens(x, Layout(network.num_prefix_tokens, grid, size), position=position)

    def project(self, depth: int, tokens: Tokens) -> Heads:
        """Queries, keys and values of block ``depth``, normalised and rotated."""
        block = self.network.blocks[depth]
        query, key, value = project_heads(block.attn, block.norm1(tokens.x))
        if tokens.position is not None:
            half = block.attn.rotate_half
            query, key = (
                rotate(x, tokens.position, tokens.layout.num_prefix, half)
                for x in (query, key)
            )
        groups = query.shape[1] // key.shape[1]  # heads that share keys and values
        if groups > 1:
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        return Heads(query, key, value)

    def attend(self, depth: int, tokens: Tokens, heads: Heads) -> Tokens:
        """First half of block ``depth``: ``x + attention``."""
        block = self.network.blocks[depth]
        attn = block.attn
        dropout = attn.attn_drop.p if self.training else 0.0
        x = attn.norm(attention(heads, tokens.key_bias(), dropout))
        gate = getattr(attn, "gate", None)
        if gate is not None:
            x = x * gate(block.norm1(tokens.x)).sigmoid()
        x = attn.proj_drop(attn.proj(x))
        return self._residual(depth, tokens, x, half=1)

    def transform(self, depth: int, tokens: Tokens) -> Tokens:
        """Second half of block ``depth``: ``x + mlp(norm(x))``."""
        block = self.network.blocks[depth]
        return self._residual(depth, tokens, block.mlp(block.norm2(tokens.x)), half=2)

    def _residual(self, depth: int, tokens: Tokens, x: Tensor, half: int) -> Tokens:
        block = self.network.blocks[depth]
        if self._is_eva:
            gamma = getattr(block, f"gamma_{half}")
            x = x if gamma is None else gamma * x
        else:
            x = getattr(block, f"ls{half}")(x)
        return tokens.with_(x=tokens.x + getattr(block, f"drop_path{half}")(x))

    def finish(self, x: Tensor) -> Tensor:
        """Apply the final norm; the identity in a network that normalises after pooling."""
        return self.network.norm(x)

    def macs_per_token(self, depth: int) -> tuple[int, int]:
        """Multiply-adds of a block's linear layers for one token: attention, MLP."""
        block = self.network.blocks[depth]
        return linear_macs(block.attn), linear_macs(block.mlp)

    def attention_channels(self, depth: int) -> int:
        """Channels of all heads of block ``depth`` together."""
        return int(self.network.blocks[depth].attn.proj.in_features)

    def attention_layers(self, depth: int) -> tuple[str, ...]:
        """Paths of a block's linear layers for queries, keys, values and output."""
        split = self.network.blocks[depth].attn.qkv is None
        inner = ("q_proj", "k_proj", "v_proj") if split else ("qkv",)
        return tuple(f"blocks.{depth}.attn.{name}" for name in (*inner, "proj"))


def check_network(network: nn.Module) -> None:
    """Refuse a network that holds a part this adapter would have to guess.

    Args:
        network: A network of timm.

    Raises:
        UnsupportedModelError: Naming the first unknown class or module.
    """
    _check(network, _TRUNKS, "network", "")
    parts: Any = network
    _check(parts.patch_embed, _PATCHES, "patch_embed", "patch_embed.")
    if getattr(parts, "rope", None) is not None:
        _check(parts.rope, _ROPES, "rope", "rope.")
    for depth, block in enumerate(parts.blocks):
        at = f"blocks.{depth}"
        _check(block, _BLOCKS[_name(network)], at, f"{at}.")
        _check(block.attn, _ATTENTIONS, f"{at}.attn", f"{at}.attn.")
    if not isinstance(parts.patch_drop, nn.Identity | None):
        raise UnsupportedModelError(
            "patch_drop must be absent, since the network would drop patches by itself; "
            f"got {type(parts.patch_drop).__name__}."
        )


def _check(module: nn.Module, table: dict[str, Any], label: str, at: str) -> None:
    name = _name(module)
    if name not in table:
        raise UnsupportedModelError(
            f"{label} must be {' or '.join(sorted(table))}; got {name}."
        )
    if table[name] is not None:
        check_children(module, table[name], name.rpartition(".")[2], at)


def _name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def project_heads(attn: Any, x: Tensor) -> Heads:  # noqa: ANN401 - one of three classes
    """Queries, keys and values of one attention module, before any rotation.

    Args:
        attn: ``Attention``, ``AttentionRope`` or ``EvaAttention``.
        x: Normalised tokens, ``(B, T, C)``.

    Returns:
        Each ``(B, heads, T, d)``; keys and values of grouped attention have fewer heads.
    """
    packed: tuple[Tensor, ...]
    if attn.qkv is None:
        packed = (attn.q_proj(x), attn.k_proj(x), attn.v_proj(x))
    elif getattr(attn, "q_bias", None) is None:
        packed = attn.qkv(x).chunk(3, dim=-1)
    else:  # EvaAttention keeps the bias of the fused layer in parts, that of keys zero
        bias = torch.cat([attn.q_bias, attn.k_bias, attn.v_bias])
        packed = (attn.qkv(x) + bias).chunk(3, dim=-1)  # the layer may have been wrapped
    query, key, value = (
        y.unflatten(-1, (-1, attn.head_dim)).transpose(1, 2) for y in packed
    )
    return Heads(attn.q_norm(query), attn.k_norm(key), value)


def rotate(x: Tensor, position: Tensor, num_prefix: int, half: bool) -> Tensor:
    """Rotate the patches of queries or keys by their rotary embedding.

    Args:
        x: Queries or keys, ``(B, heads, P + K, d)``.
        position: Sines and cosines of each patch, ``(B, K, 2 d)``.
        num_prefix: Tokens at the front that are not rotated, P.
        half: Whether channel c turns with channel c + d/2 rather than with its neighbour.

    Returns:
        ``(B, heads, P + K, d)``.
    """
    prefix, patches = x[:, :, :num_prefix], x[:, :, num_prefix:]
    turned = apply_rot_embed_cat(patches, position[:, None], half=half)
    return torch.cat([prefix, turned], dim=2)
