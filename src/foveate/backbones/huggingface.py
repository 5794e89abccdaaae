"""Adapter for the Vision Transformers of ``transformers``: tables of names, four steps."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
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


@dataclass(frozen=True)
class BlockNames:
    """Where one block keeps its parts. A tuple is applied from left to right."""

    norm1: str
    query: str
    key: str
    value: str
    dropout: str  # a number, the share of attention weights dropped in training
    after_attention: tuple[str, ...]
    norm2: str
    mlp: tuple[str, ...]


@dataclass(frozen=True)
class TrunkNames:
    """Where one network keeps its blocks, and the norms around them."""

    blocks: str
    norm: str
    embed: tuple[str, ...] = ("embeddings",)
    rotary: str | None = None
    has_class_token: bool = True
    resizes_on_demand: bool = False  # positions follow the image size only when asked
    ignored: tuple[str, ...] = ()


_QKV = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
_CLIP = BlockNames(
    "layer_norm1",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.dropout",
    ("self_attn.out_proj",),
    "layer_norm2",
    ("mlp",),
)
_DINO = BlockNames(
    "norm1",
    *_QKV,
    "attention.attention_dropout",
    ("attention.o_proj", "layer_scale1", "drop_path"),
    "norm2",
    ("mlp", "layer_scale2", "drop_path"),
)
_BLOCKS = {
    "Dinov2Layer": _DINO,
    "Dinov2WithRegistersLayer": _DINO,
    "DINOv3ViTLayer": replace(_DINO, dropout="attention.dropout"),
    "CLIPEncoderLayer": _CLIP,
    "SiglipEncoderLayer": _CLIP,
    "ViTLayer": BlockNames(
        "layernorm_before",
        *_QKV,
        "attention.attention_dropout",
        ("attention.o_proj", "dropout"),
        "layernorm_after",
        ("mlp", "dropout"),
    ),
    "DPTViTLayer": BlockNames(
        "layernorm_before",
        "attention.attention.query",
        "attention.attention.key",
        "attention.attention.value",
        "attention.attention.dropout_prob",
        ("attention.output.dense", "attention.output.dropout"),
        "layernorm_after",
        ("intermediate", "output.dense", "output.dropout"),
    ),
}
_DINO_TRUNK = TrunkNames("encoder.layer", "layernorm")
_DINO3_TRUNK = TrunkNames("model.layer", "norm", rotary="rope_embeddings")
TRUNKS = {
    "Dinov2Model": _DINO_TRUNK,
    "Dinov2Backbone": _DINO_TRUNK,
    "Dinov2WithRegistersModel": _DINO_TRUNK,
    "Dinov2WithRegistersBackbone": _DINO_TRUNK,
    "DINOv3ViTModel": _DINO3_TRUNK,
    "DINOv3ViTBackbone": _DINO3_TRUNK,
    "ViTModel": TrunkNames(
        "layers", "layernorm", ignored=("pooler",), resizes_on_demand=True
    ),
    "DPTModel": TrunkNames("encoder.layer", "layernorm", ignored=("pooler",)),
    "CLIPVisionModel": TrunkNames(
        "encoder.layers",
        "post_layernorm",
        embed=("embeddings", "pre_layrnorm"),
        resizes_on_demand=True,
    ),
    "SiglipVisionModel": TrunkNames(
        "encoder.layers",
        "post_layernorm",
        has_class_token=False,
        ignored=("head",),
        resizes_on_demand=True,
    ),
}


class HuggingFaceBackbone(nn.Module):
    """A bare Vision Transformer of ``transformers`` behind the protocol of backbones.

    Args:
        network: One of the classes named in this module's table of trunks.

    Raises:
        UnsupportedModelError: If the class, or a module inside one of its blocks, is not in
            the tables; the message names it.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        kind = type(network).__name__
        if kind not in TRUNKS:
            raise UnsupportedModelError(
                f"network must be one of {', '.join(sorted(TRUNKS))}; got {kind}."
            )
        self.trunk = TRUNKS[kind]
        self.network = network
        config: Any = network.config
        if getattr(config, "is_hybrid", False):
            raise UnsupportedModelError(
                "network must embed patches by itself; got a hybrid DPT, which embeds them "
                "through a convolutional network (config.is_hybrid)."
            )
        blocks = network.get_submodule(self.trunk.blocks)
        assert isinstance(blocks, nn.ModuleList)
        self.block_kind = check_blocks(blocks)
        check_children(network, _trunk_paths(self.trunk), kind)
        self.num_blocks = len(blocks)
        self.num_channels = int(config.hidden_size)
        self.num_heads = int(config.num_attention_heads)
        self.has_class_token = self.trunk.has_class_token
        self.patch_size = _pair(config.patch_size)
        self.native_size = _pair(config.image_size)

    def block(self, depth: int) -> nn.Module:
        """Block ``depth`` of the network."""
        return self.network.get_submodule(f"{self.trunk.blocks}.{depth}")

    def embed(self, images: Tensor) -> Tokens:
        """Turn images into the tokens that enter block 0."""
        grid = grid_of(images, self.patch_size)
        x = self._embeddings(images)
        for path in self.trunk.embed[1:]:
            x = self.network.get_submodule(path)(x)
        size = (images.shape[-2], images.shape[-1])
        layout = Layout(x.shape[1] - grid[0] * grid[1], grid, size)
        position = None
        if self.trunk.rotary is not None:
            cos, sin = self.network.get_submodule(self.trunk.rotary)(images)
            position = torch.cat([cos, sin], dim=-1).expand(len(x), -1, -1)  # (B, N, 2 d)
        return Tokens(x, layout, position=position)

    def _embeddings(self, images: Tensor) -> Tensor:
        embeddings = self.network.get_submodule(self.trunk.embed[0])
        if self.trunk.resizes_on_demand:
            resized = tuple(images.shape[-2:]) != self.native_size
            return embeddings(images, interpolate_pos_encoding=resized)
        x = embeddings(images)
        return getattr(x, "last_hidden_states", x)  # DPT wraps its tokens

    def project(self, depth: int, tokens: Tokens) -> Heads:
        """Queries, keys and values of block ``depth``, rotated where the network does."""
        block, names = self.block(depth), _BLOCKS[self.block_kind]
        x = block.get_submodule(names.norm1)(tokens.x)
        query, key, value = (
            block.get_submodule(path)(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for path in (names.query, names.key, names.value)
        )
        if tokens.position is not None:
            num_prefix = tokens.layout.num_prefix
            query = rotate(query, tokens.position, num_prefix)
            key = rotate(key, tokens.position, num_prefix)
        return Heads(query, key, value)

    def attend(self, depth: int, tokens: Tokens, heads: Heads) -> Tokens:
        """First half of block ``depth``: ``x + attention``."""
        names = _BLOCKS[self.block_kind]
        dropout = attrgetter(names.dropout)(self.block(depth)) if self.training else 0.0
        x = attention(heads, tokens.key_bias(), dropout)
        return self._residual(depth, tokens, x, names.after_attention)

    def transform(self, depth: int, tokens: Tokens) -> Tokens:
        """Second half of block ``depth``: ``x + mlp(norm(x))``."""
        names = _BLOCKS[self.block_kind]
        x = self.block(depth).get_submodule(names.norm2)(tokens.x)
        return self._residual(depth, tokens, x, names.mlp)

    def _residual(
        self, depth: int, tokens: Tokens, x: Tensor, paths: tuple[str, ...]
    ) -> Tokens:
        block = self.block(depth)
        for path in paths:
            x = block.get_submodule(path)(x)
        return tokens.with_(x=tokens.x + x)

    def finish(self, x: Tensor) -> Tensor:
        """Apply the final norm."""
        return self.network.get_submodule(self.trunk.norm)(x)

    def macs_per_token(self, depth: int) -> tuple[int, int]:
        """Multiply-adds of a block's linear layers for one token: attention, MLP."""
        names, block = _BLOCKS[self.block_kind], self.block(depth)
        attention_paths = (names.query, names.key, names.value, *names.after_attention)
        in_attention, in_mlp = (
            sum(linear_macs(block.get_submodule(path)) for path in paths)
            for paths in (attention_paths, names.mlp)
        )
        return in_attention, in_mlp

    def attention_channels(self, depth: int) -> int:
        """Channels of all heads of block ``depth`` together."""
        value: Any = self.block(depth).get_submodule(_BLOCKS[self.block_kind].value)
        return int(value.out_features)

    def attention_layers(self, depth: int) -> tuple[str, ...]:
        """Paths of a block's linear layers for queries, keys, values and output."""
        names = _BLOCKS[self.block_kind]
        here = (names.query, names.key, names.value, names.after_attention[0])
        return tuple(f"{self.trunk.blocks}.{depth}.{path}" for path in here)


def check_blocks(blocks: Iterable[nn.Module]) -> str:
    """Name the class that all blocks share, refusing what the table does not know.

    Args:
        blocks: The transformer blocks of one network.

    Returns:
        The class name, a key of the table of blocks.

    Raises:
        UnsupportedModelError: If a block's class or one of its children is unknown.
    """
    kinds = {type(block).__name__ for block in blocks}
    unknown = sorted(kinds - _BLOCKS.keys())
    if unknown or len(kinds) != 1:
        raise UnsupportedModelError(
            f"blocks must all be one of {', '.join(sorted(_BLOCKS))}; got "
            f"{', '.join(sorted(kinds))}."
        )
    kind = kinds.pop()
    names = _BLOCKS[kind]
    paths = (names.norm1, names.query, names.key, names.value, names.norm2)
    for block in blocks:
        check_children(block, (*paths, *names.after_attention, *names.mlp), kind)
    return kind


def rotate(x: Tensor, position: Tensor, num_prefix: int) -> Tensor:
    """Rotate the patches of queries or keys by their rotary embedding.

    Args:
        x: Queries or keys, ``(B, heads, P + K, d)``.
        position: Cosines and sines, ``(B, K, 2 d)``.
        num_prefix: Tokens at the front that are not rotated, P.

    Returns:
        ``(B, heads, P + K, d)``.
    """
    cos, sin = position[:, None].chunk(2, dim=-1)  # (B, 1, K, d)
    prefix, patches = x[:, :, :num_prefix], x[:, :, num_prefix:]
    low, high = patches.chunk(2, dim=-1)
    turned = patches * cos + torch.cat([-high, low], dim=-1) * sin
    return torch.cat([prefix, turned], dim=2)


def _trunk_paths(trunk: TrunkNames) -> tuple[str, ...]:
    rotary = (trunk.rotary,) if trunk.rotary else ()
    return (trunk.blocks, trunk.norm, *trunk.embed, *rotary, *trunk.ignored)


def _pair(size: int | Iterable[int]) -> tuple[int, int]:
    if isinstance(size, int):
        return (size, size)
    rows, columns = size
    return (rows, columns)
