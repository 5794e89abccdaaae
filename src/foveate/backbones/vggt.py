"""Adapter for the aggregator of VGGT: frame and global attention as blocks in turn.

A stage of the aggregator is a frame block, in which each frame attends to itself, and a
global block, in which all frames attend to all. Block ``2 i`` is the frame block of stage
i and block ``2 i + 1`` its global block, so the two halves of what stage i hands to the
heads are the tokens that enter blocks ``2 i + 1`` and ``2 i + 2``.

An image of a batch is a sequence of one frame, the first, so both kinds of blocks see the
same tokens. Longer sequences are refused: reduced frames would have to stay apart in the
frame blocks, which neither one sequence of tokens with one grid nor its cost can say.
"""

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

__all__ = ["VggtBackbone"]

# The network normalises images itself, by these.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_PARTS = ("patch_embed", "rope", "position_getter", "frame_blocks", "global_blocks")
_ATTENTION = ("qkv", "q_norm", "k_norm", "rope", "attn_drop", "proj", "proj_drop")
_BLOCK = (
    *("norm1", "ls1", "drop_path1", "norm2", "mlp", "ls2", "drop_path2"),
    *(f"attn.{name}" for name in _ATTENTION),
)


class VggtBackbone(nn.Module):
    """The aggregator of a VGGT behind the protocol of backbones, for single frames.

    It is known by its attributes, not by its class: ``patch_embed``, ``frame_blocks``,
    ``global_blocks``, ``camera_token`` and ``register_token`` with a slot for the first
    frame and one for all others, ``patch_start_idx``, ``patch_size``, ``aa_order`` and
    ``aa_block_size``. The camera token stands where others have a class token. Patch
    embedding may be a whole network; as everywhere, its cost is not counted.

    Args:
        aggregator: The aggregator, kept as it is.

    Raises:
        UnsupportedModelError: If an attribute is missing, the blocks come in another
            order, or a block holds a module that this adapter does not run.
    """

    def __init__(self, aggregator: nn.Module) -> None:
        super().__init__()
        check_aggregator(aggregator)
        self.aggregator: Any = aggregator
        parts: Any = aggregator
        self.num_blocks = 2 * len(parts.frame_blocks)
        self.num_channels = int(parts.camera_token.shape[-1])
        self.num_heads = int(parts.frame_blocks[0].attn.num_heads)
        self.has_class_token = True
        self.patch_size = (int(parts.patch_size),) * 2

    def block(self, depth: int) -> Any:  # noqa: ANN401 - a block of the user's network
        """Block ``depth``: frame blocks are even, global blocks odd."""
        stage, is_global = divmod(depth, 2)
        blocks = (
            self.aggregator.global_blocks if is_global else self.aggregator.frame_blocks
        )
        return blocks[stage]

    def embed(self, images: Tensor) -> Tokens:
        """Turn single frames into the tokens that enter block 0.

        Args:
            images: Values in [0, 1], ``(B, 3, H, W)`` or ``(B, 1, 3, H, W)``.

        Returns:
            Camera token, registers and patches of each frame, ``(B, P + N, C)``. The
            position of a patch is its row and column, from 1.

        Raises:
            ValueError: If sequences have more than one frame, or patches do not tile them.
        """
        if images.ndim == 5:
            if images.shape[1] != 1:
                raise ValueError(
                    "images must be sequences of one frame, (B, 3, H, W) or "
                    f"(B, 1, 3, H, W); got {images.shape[1]} frames."
                )
            images = images[:, 0]
        grid = grid_of(images, self.patch_size)
        mean, std = (images.new_tensor(v).view(3, 1, 1) for v in (_MEAN, _STD))
        patches = self.aggregator.patch_embed((images - mean) / std)
        if isinstance(patches, dict):  # a whole DINOv2
            patches = patches["x_norm_patchtokens"]
        special = (self.aggregator.camera_token, self.aggregator.register_token)
        first_frame = [t[:, 0].expand(len(patches), -1, -1) for t in special]
        x = torch.cat([*first_frame, patches], dim=1)
        num_prefix = int(self.aggregator.patch_start_idx)
        layout = Layout(num_prefix, grid, (images.shape[-2], images.shape[-1]))
        return Tokens(x, layout, position=self._positions(grid, x))

    def _positions(self, grid: tuple[int, int], x: Tensor) -> Tensor | None:
        if self.block(0).attn.rope is None:
            return None
        axes = [torch.arange(1, n + 1, device=x.device) for n in grid]
        return torch.cartesian_prod(*axes).expand(len(x), -1, -1)  # (B, N, 2)

    def project(self, depth: int, tokens: Tokens) -> Heads:
        """Queries, keys and values of block ``depth``, normalised and rotated."""
        block = self.block(depth)
        packed = block.attn.qkv(block.norm1(tokens.x)).chunk(3, dim=-1)
        query, key, value = (
            y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in packed
        )
        query, key = block.attn.q_norm(query), block.attn.k_norm(key)
        if tokens.position is not None:
            query, key = (_rotate(y, tokens, block.attn.rope) for y in (query, key))
        return Heads(query, key, value)

    def attend(self, depth: int, tokens: Tokens, heads: Heads) -> Tokens:
        """First half of block ``depth``: ``x + attention``."""
        block = self.block(depth)
        dropout = block.attn.attn_drop.p if self.training else 0.0
        x = block.attn.proj(attention(heads, tokens.key_bias(), dropout))
        return tokens.with_(x=tokens.x + block.ls1(block.attn.proj_drop(x)))

    def transform(self, depth: int, tokens: Tokens) -> Tokens:
        """Second half of block ``depth``: ``x + mlp(norm(x))``."""
        block = self.block(depth)
        return tokens.with_(x=tokens.x + block.ls2(block.mlp(block.norm2(tokens.x))))

    def finish(self, x: Tensor) -> Tensor:
        """Return the tokens as they are: the heads hold the final norms."""
        return x

    def macs_per_token(self, depth: int) -> tuple[int, int]:
        """Multiply-adds of a block's linear layers for one token: attention, MLP."""
        block = self.block(depth)
        return linear_macs(block.attn), linear_macs(block.mlp)

    def attention_channels(self, depth: int) -> int:
        """Channels of all heads of block ``depth`` together."""
        return int(self.block(depth).attn.proj.in_features)


def check_aggregator(aggregator: nn.Module) -> None:
    """Refuse an aggregator that this adapter would have to guess about.

    Args:
        aggregator: The aggregator of a VGGT.

    Raises:
        UnsupportedModelError: Naming what is missing, unknown, or in another order.
    """
    kind, parts = type(aggregator).__name__, aggregator
    needed = ("patch_embed", "frame_blocks", "global_blocks", "camera_token")
    for name in (*needed, "register_token", "patch_start_idx", "patch_size"):
        if not hasattr(parts, name):
            raise UnsupportedModelError(f"aggregator must have '{name}'; got a {kind}.")
    order = [*getattr(parts, "aa_order", ("frame", "global"))]
    group = getattr(parts, "aa_block_size", 1)
    if order != ["frame", "global"] or group != 1:
        raise UnsupportedModelError(
            "aggregator must run one frame and one global block in turn (aa_order "
            f"['frame', 'global'], aa_block_size 1); got {order} and {group}."
        )
    check_children(parts, _PARTS, kind)
    frames, everyone = (parts.get_submodule(f"{at}_blocks") for at in ("frame", "global"))
    for at, blocks in (("frame_blocks", frames), ("global_blocks", everyone)):
        for depth, block in enumerate(blocks.children()):
            _check_block(block, f"{at}.{depth}")


def _check_block(block: nn.Module, at: str) -> None:
    check_children(block, _BLOCK, type(block).__name__, f"{at}.")
    for name in ("drop_path1", "drop_path2"):
        path = getattr(block, name, None)
        if not isinstance(path, nn.Identity | None):
            raise UnsupportedModelError(
                f"{at}.{name} must be an Identity, since VGGT drops no branch; "
                f"got {type(path).__name__}."
            )


def _rotate(x: Tensor, tokens: Tokens, rope: nn.Module) -> Tensor:
    """Rotate the patches of queries or keys, ``(B, heads, P + K, d)``, by the network."""
    # Camera and register tokens are at position 0, where the rotation is the identity.
    num_prefix = tokens.layout.num_prefix
    turned = rope(x[:, :, num_prefix:], tokens.position)
    return torch.cat([x[:, :, :num_prefix], turned], dim=2)
