"""Depth maps: neck and head of DPT and Depth Anything, on tokens of several depths."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from foveate.backbones import Backbone
from foveate.tokens import Layout


class Depth(nn.Module):
    """Predicted depth of each pixel, in the unit and direction the head was trained for.

    Args:
        neck: Takes the tokens of all taps and the rows and columns of the grid; reads the
            class token and the patches.
        head: Takes the maps of the neck, and rows and columns if ``head_knows_grid``.
        depths: Taps, ascending: the tokens that enter these blocks.
        normalised: Whether the neck reads tokens after the backbone's final norm.
        head_knows_grid: Whether ``head`` takes rows and columns, as Depth Anything's does.
        relative: Whether it predicts disparity up to scale and shift, and not metres.
    """

    kind = "depth"
    needs_grid = True

    def __init__(
        self,
        neck: nn.Module,
        head: nn.Module,
        depths: tuple[int, ...],
        *,
        normalised: bool,
        head_knows_grid: bool,
        relative: bool = True,
    ) -> None:
        super().__init__()
        self.neck = neck
        self.head = head
        self.depths = depths
        self.normalised = normalised
        self.head_knows_grid = head_knows_grid
        self.relative = relative

    def taps(self, num_blocks: int) -> tuple[int, ...]:
        """The depths it was built with."""
        return self.depths

    def decode(
        self, backbone: Backbone, features: tuple[Tensor, ...], layout: Layout
    ) -> Tensor:
        """Depth map before any resizing, ``(B, H', W')``."""
        if self.normalised:
            features = tuple(backbone.finish(x) for x in features)
        if layout.num_prefix > 1:  # the neck takes exactly one token off the front
            features = tuple(
                torch.cat([x[:, :1], x[:, layout.num_prefix :]], dim=1) for x in features
            )
        maps = self.neck(list(features), *layout.grid)
        return self.head(maps, *layout.grid) if self.head_knows_grid else self.head(maps)

    def predict(self, output: Tensor, layout: Layout) -> Sequence[Tensor]:
        """Map of each image, ``(H', W')``."""
        return list(output)
