"""A class for every pixel: linear, or a small head on maps of several depths."""

from collections.abc import Sequence

import torch
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from foveate.backbones import Backbone
from foveate.data.labelled import IGNORED, Target
from foveate.tokens import Layout


class LinearSegmenter(nn.Module):
    """Batch norm and a 1 x 1 convolution on the maps, one beside the other, as DINOv2's.

    Args:
        channels: Channels of one map.
        num_maps: Maps.
        num_classes: Classes.
    """

    def __init__(self, channels: int, num_maps: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels * num_maps)
        self.classifier = nn.Conv2d(channels * num_maps, num_classes, 1)
        nn.init.normal_(self.classifier.weight, std=0.01)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Class logits of every patch, ``(B, classes, rows, columns)``."""
        return self.classifier(self.norm(torch.cat(list(maps), dim=1)))


class MultiScaleSegmenter(nn.Module):
    """Maps of several depths, added up and refined at twice and four times the resolution.

    Args:
        channels: Channels of one map.
        num_maps: Maps.
        num_classes: Classes.
        width: Channels within.
    """

    def __init__(
        self, channels: int, num_maps: int, num_classes: int, width: int = 64
    ) -> None:
        super().__init__()
        self.enter = nn.ModuleList(nn.Conv2d(channels, width, 1) for _ in range(num_maps))
        self.refine = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1), LayerNorm2d(width), nn.GELU()
            )
            for _ in range(2)
        )
        self.classifier = nn.Conv2d(width, num_classes, 1)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Class logits, ``(B, classes, 4 rows, 4 columns)``."""
        entered = [enter(x) for enter, x in zip(self.enter, maps, strict=True)]
        x = torch.stack(entered).sum(0)
        for refine in self.refine:
            x = interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
            x = x + refine(x)
        return self.classifier(x)


class Segmentation(nn.Module):
    """Class logits of every pixel.

    Args:
        decoder: Takes the patch maps after the final norm, gives logits of any resolution.
        depths: Taps, ascending; the last block's output if empty.
    """

    kind = "segmentation"
    needs_grid = True

    def __init__(self, decoder: nn.Module, depths: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.decoder = decoder
        self.depths = depths

    def taps(self, num_blocks: int) -> tuple[int, ...]:
        """The depths it was built with, or the end."""
        return self.depths or (num_blocks,)

    def decode(
        self, backbone: Backbone, features: tuple[Tensor, ...], layout: Layout
    ) -> Tensor:
        """Logits of every pixel, ``(B, classes, H, W)``."""
        maps = [as_map(backbone.finish(x), layout) for x in features]
        logits = self.decoder(maps)
        return interpolate(logits, layout.image_size, mode="bilinear", align_corners=False)

    def loss(self, output: Tensor, targets: Sequence[Target], layout: Layout) -> Tensor:
        """Cross-entropy over the pixels that count.

        Args:
            output: Logits, ``(B, classes, H, W)``.
            targets: Masks ``(H, W)``.
            layout: Not looked at.

        Returns:
            Mean over the pixels of all images, scalar; zero if none counts.

        Raises:
            ValueError: If a target has no mask.
        """
        masks = []
        for target in targets:
            if target.mask is None:
                raise ValueError("targets must have a mask for segmentation; one has none.")
            masks.append(target.mask.to(output.device))
        truth = torch.stack(masks)
        total = cross_entropy(output, truth, ignore_index=IGNORED, reduction="sum")
        return total / (truth != IGNORED).sum().clamp(min=1)

    def predict(self, output: Tensor, layout: Layout) -> Sequence[Tensor]:
        """Logits of each image, ``(classes, H, W)``; windows are averaged on logits."""
        return list(output)


def as_map(x: Tensor, layout: Layout) -> Tensor:
    """Patches as a map, ``(B, P + N, C) -> (B, C, rows, columns)``."""
    patches = x[:, layout.num_prefix :]
    return patches.transpose(1, 2).unflatten(2, layout.grid)
