"""A small random network in the layout of VGGT, and its own forward over whole sequences.

Three stages of width 36 with three heads, patches of 4 pixels, four registers.
Written from a description of the layout: attribute names are those that the adapter reads.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from tests import tiny

STAGES, WIDTH, HEADS, PATCH, REGISTERS = 3, 36, 3, 4, 4


class Rope2D(nn.Module):
    """Half of the channels turn with the row, the other half with the column."""

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        halves = x.chunk(2, dim=-1)
        turned = [self._turn(h, pos[..., axis]) for axis, h in enumerate(halves)]
        return torch.cat(turned, dim=-1)

    def _turn(self, x: Tensor, position: Tensor) -> Tensor:
        channels = x.shape[-1]
        exponents = torch.arange(0, channels, 2, dtype=x.dtype) / channels
        angle = position[:, None, :, None] * 100.0**-exponents  # (B, 1, T, channels / 2)
        angle = torch.cat([angle, angle], dim=-1)
        first, second = x.chunk(2, dim=-1)
        return x * angle.cos() + torch.cat([-second, first], dim=-1) * angle.sin()


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, rope: nn.Module | None, qk_norm: bool):
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        norm = nn.LayerNorm if qk_norm else nn.Identity
        self.q_norm, self.k_norm = norm(width // heads), norm(width // heads)
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(width, width)
        self.proj_drop = nn.Dropout(0.0)
        self.rope = rope

    def forward(self, x: Tensor, pos: Tensor | None = None) -> Tensor:
        batch, count, width = x.shape
        packed = self.qkv(x).reshape(batch, count, 3, self.num_heads, -1)
        q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            q, k = self.rope(q, pos), self.rope(k, pos)
        dropout = self.attn_drop.p if self.training else 0.0
        mixed = scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        mixed = mixed.transpose(1, 2).reshape(batch, count, width)
        return self.proj_drop(self.proj(mixed))


class LayerScale(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.gamma = nn.Parameter(0.5 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Block(nn.Module):
    def __init__(self, width: int, heads: int, rope=None, qk_norm: bool = True):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, rope, qk_norm)
        self.ls1 = LayerScale(width)
        self.drop_path1 = nn.Identity()
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.ls2 = LayerScale(width)
        self.drop_path2 = nn.Identity()

    def forward(self, x: Tensor, pos: Tensor | None = None) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x), pos))
        return x + self.ls2(self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    """A strided convolution; as a dictionary it looks like a whole DINOv2."""

    def __init__(self, width: int, as_dictionary: bool):
        super().__init__()
        self.proj = nn.Conv2d(3, width, PATCH, PATCH)
        self.as_dictionary = as_dictionary

    def forward(self, images: Tensor):
        x = self.proj(images).flatten(2).transpose(1, 2)
        return {"x_norm_patchtokens": x} if self.as_dictionary else x


class Aggregator(nn.Module):
    def __init__(self, rotates: bool = True, as_dictionary: bool = False):
        super().__init__()
        self.patch_size = PATCH
        self.aa_order, self.aa_block_size = ["frame", "global"], 1
        self.patch_start_idx = 1 + REGISTERS
        self.patch_embed = PatchEmbed(WIDTH, as_dictionary)
        self.rope = Rope2D() if rotates else None
        self.frame_blocks, self.global_blocks = (
            nn.ModuleList([Block(WIDTH, HEADS, self.rope) for _ in range(STAGES)])
            for _ in range(2)
        )
        self.camera_token = nn.Parameter(torch.zeros(1, 2, 1, WIDTH))
        self.register_token = nn.Parameter(torch.zeros(1, 2, REGISTERS, WIDTH))

    def forward(self, images: Tensor) -> tuple[list[Tensor], int]:
        """Frames ``(B, S, 3, H, W)`` to a list of stages ``(B, S, T, 2 C)``."""
        batch, frames, _, height, width = images.shape
        mean = images.new_tensor((0.485, 0.456, 0.406)).view(3, 1, 1)
        std = images.new_tensor((0.229, 0.224, 0.225)).view(3, 1, 1)
        patches = self.patch_embed(((images - mean) / std).flatten(0, 1))
        if isinstance(patches, dict):
            patches = patches["x_norm_patchtokens"]
        slots = [min(s, 1) for s in range(frames)] * batch
        special = [t[0, slots] for t in (self.camera_token, self.register_token)]
        x = torch.cat([*special, patches], dim=1)  # (B S, T, C)
        pos = self._positions(height // PATCH, width // PATCH).expand(len(x), -1, -1)
        stages = []
        for frame_block, global_block in zip(
            self.frame_blocks, self.global_blocks, strict=True
        ):
            within = frame_block(x, pos)
            joint = within.reshape(batch, -1, WIDTH), pos.reshape(batch, -1, 2)
            across = global_block(*joint)
            x = across.reshape(within.shape)
            both = torch.cat([within, x], dim=-1)
            stages.append(both.unflatten(0, (batch, frames)))
        return stages, self.patch_start_idx

    def _positions(self, rows: int, columns: int) -> Tensor:
        """Row and column of each patch from 1; 0 for special tokens, ``(1, T, 2)``."""
        of_patches = [(r + 1, c + 1) for r in range(rows) for c in range(columns)]
        return torch.tensor([[(0, 0)] * self.patch_start_idx + of_patches])


class CameraHead(nn.Module):
    """Rounds of refinement from the camera token; the pose is detached in between."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.start = nn.Parameter(torch.zeros(1, 1, 9))
        self.embed = nn.Linear(9, 2 * WIDTH)
        self.trunk = Block(2 * WIDTH, HEADS, qk_norm=False)
        self.delta = nn.Linear(2 * WIDTH, 9)

    def forward(self, stages: list[Tensor], num_iterations: int = 4) -> list[Tensor]:
        tokens = self.norm(stages[-1][:, :, 0])  # (B, S, 2 C)
        pose, poses = None, []
        for _ in range(num_iterations):
            known = self.start.expand(*tokens.shape[:2], -1) if pose is None else pose
            x = self.trunk(tokens * (1 + self.embed(known.detach()).tanh()))
            pose = self.delta(x) if pose is None else pose.detach() + self.delta(x)
            poses.append(torch.cat([pose[..., :7], pose[..., 7:].relu()], dim=-1))
        return poses


class DepthHead(nn.Module):
    """Reads two stages; depth and confidence of each pixel."""

    def __init__(self):
        super().__init__()
        self.intermediate_layer_idx = [0, 2]
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.levels = nn.ModuleList([nn.Linear(2 * WIDTH, 16) for _ in range(2)])
        self.pixels = nn.Linear(16, 2 * PATCH * PATCH)

    def forward(self, stages: list[Tensor], images: Tensor, patch_start_idx: int):
        batch, frames, _, height, width = images.shape
        x = sum(
            level(self.norm(stages[index][:, :, patch_start_idx:]))
            for index, level in zip(self.intermediate_layer_idx, self.levels, strict=True)
        )
        maps = self.pixels(x.tanh()).unflatten(2, (height // PATCH, width // PATCH))
        maps = maps.unflatten(4, (2, PATCH, PATCH))  # (B, S, rows, columns, 2, 4, 4)
        maps = maps.permute(0, 1, 2, 5, 3, 6, 4).reshape(batch, frames, height, width, 2)
        return maps[..., :1].exp(), 1 + maps[..., 1].exp()


class TinyVggt(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.aggregator = Aggregator(**options)
        self.camera_head = CameraHead()
        self.depth_head = DepthHead()
        self.point_head = None

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Poses ``(B, S, 9)`` and depth ``(B, S, H, W)`` of frames ``(B, S, 3, H, W)``."""
        stages, patch_start_idx = self.aggregator(images)
        depth, _ = self.depth_head(stages, images, patch_start_idx)
        return {"camera": self.camera_head(stages)[-1], "depth": depth[..., 0]}


def vggt(**options) -> TinyVggt:
    """All parameters random; both fields of view positive."""
    network = tiny.randomise(TinyVggt(**options))
    with torch.no_grad():
        network.camera_head.delta.bias[7:] += 3.0
    return network


def frames(dtype: torch.dtype = torch.float32) -> Tensor:
    """Two images of 5 x 7 patches with values in [0, 1], ``(2, 3, 20, 28)``."""
    return tiny.random_images(dtype=dtype).sigmoid()
