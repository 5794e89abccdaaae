"""Tokens of random numbers and a block that knows their heads: no network is needed."""

import torch

from foveate.backbones import Heads
from foveate.forward import Block
from foveate.tokens import Layout, Tokens

PREFIX, GRID, CHANNELS = 2, (3, 5), 6


def tokens(grid=GRID, *, sizes=False, positions=False, dtype=torch.float64, seed=0):
    """Two prefix tokens and a grid of patches, two images."""
    draw = torch.Generator().manual_seed(seed)
    num_patches = grid[0] * grid[1]
    x = torch.randn(2, PREFIX + num_patches, CHANNELS, generator=draw, dtype=dtype)
    size = torch.randint(1, 5, (2, num_patches), generator=draw).float()
    position = torch.randn(2, num_patches, 4, generator=draw, dtype=dtype)
    return Tokens(
        x,
        Layout(PREFIX, grid, (4 * grid[0], 4 * grid[1])),
        size=size if sizes else None,
        position=position if positions else None,
    )


def block(of, seed=1):
    """A block whose three heads of four channels are random."""
    draw = torch.Generator().manual_seed(seed)
    shape = (*of.x.shape[:1], 3, of.x.shape[1], 4)
    return Block(
        None, 1, Heads(*(torch.randn(shape, generator=draw).to(of.x) for _ in "qkv"))
    )


def scores(of, at=None):
    """The first channel in quarters, so that some tie, ``(B, K)``; usable as a score."""
    return (4 * of.patches[..., 0]).round() / 4
