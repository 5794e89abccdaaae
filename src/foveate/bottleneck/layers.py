"""Layers of the bottleneck: attention to a memory, and vectors for the tokens' places."""

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

_HARMONICS = 16  # of each axis: as fine as a grid of 16 patches


class Positions(nn.Module):
    """A vector for every token: learned for a prefix token, a function of a patch's place.

    Args:
        num_prefix: Prefix tokens, P.
        width: Channels.
    """

    def __init__(self, num_prefix: int, width: int) -> None:
        super().__init__()
        self.prefix = nn.Parameter(torch.empty(num_prefix, width))
        self.project = nn.Sequential(
            nn.Linear(4 * _HARMONICS, width), nn.GELU(), nn.Linear(width, width)
        )

    def forward(self, grid: tuple[int, int]) -> Tensor:
        """Vectors of all tokens, ``(P + N, width)``."""
        return torch.cat([self.prefix, self.project(waves(grid).to(self.prefix))])


def waves(grid: tuple[int, int]) -> Tensor:
    """Sines and cosines of where each patch's centre lies between the grid's sides.

    Args:
        grid: Rows and columns.

    Returns:
        ``(rows * columns, 64)``, float64, row by row.
    """
    turns = torch.pi * torch.arange(1, _HARMONICS + 1, dtype=torch.float64)
    sides = []
    for count in grid:
        centre = (torch.arange(count, dtype=torch.float64) + 0.5) / count
        angle = centre[:, None] * turns
        sides.append(torch.cat([angle.sin(), angle.cos()], dim=1))  # (count, 32)
    rows, columns = grid
    down = sides[0].repeat_interleave(columns, dim=0)
    return torch.cat([down, sides[1].repeat(rows, 1)], dim=1)


class AttentionBlock(nn.Module):
    """Pre-norm attention to a memory, then an MLP, each with a residual.

    Args:
        width: Channels.
        num_heads: Heads.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm, self.memory_norm, self.mlp_norm = (nn.LayerNorm(width) for _ in range(3))
        self.query, self.key, self.value, self.project = (
            nn.Linear(width, width) for _ in range(4)
        )
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """Change ``(B, T, width)`` by what a memory ``(B, S, width)`` holds."""
        memory = self.memory_norm(memory)
        heads = (self.query(self.norm(x)), self.key(memory), self.value(memory))
        split = (h.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for h in heads)
        mixed = scaled_dot_product_attention(*split)  # (B, heads, T, width / heads)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


def read_out(width: int, num_outputs: int) -> nn.Sequential:
    """A norm and a linear layer."""
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, num_outputs))


def initialise(module: nn.Module, generator: Generator) -> None:
    """Draw weights: linear layers keep the variance, tables have variance 1, no biases."""
    for name, p in module.named_parameters():
        if p.ndim > 1:
            is_table = not name.endswith("weight")
            spread = 1.0 if is_table else p.shape[1] ** -0.5
            nn.init.normal_(p, std=spread, generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(p)
