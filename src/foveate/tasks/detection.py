"""Boxes and masks of objects: a feature pyramid made of the last map, and Mask R-CNN."""

from collections import OrderedDict
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads, paste_masks_in_image
from torchvision.models.detection.rpn import AnchorGenerator, RegionProposalNetwork, RPNHead
from torchvision.ops import MultiScaleRoIAlign

from foveate.backbones import Backbone
from foveate.data.labelled import Target
from foveate.tasks.segmentation import as_map
from foveate.tokens import Layout

PATCH = 16  # side of a patch in the detector's own pixels, in which all strides are powers
SCALES = (2.0, 1.0, 0.5)
LIMIT = 50  # objects an image


class Found(NamedTuple):
    """What a model found in one image, n objects.

    Attributes:
        boxes: Left, top, right, bottom in pixels of the original image, ``(n, 4)``.
        labels: Classes from 0, ``(n,)``.
        scores: Confidence, ``(n,)``, higher first.
        masks: ``(n, H, W)``, bool, at the original size; None if only boxes are found.
    """

    boxes: Tensor
    labels: Tensor
    scores: Tensor
    masks: Tensor | None = None


class SimpleFeaturePyramid(nn.Module):
    """Maps of several resolutions made of one, each by itself, as in ViTDet.

    Args:
        channels: Channels of the patch map.
        width: Channels of every level.
        scales: Resolution of each level over the patch map's, from 4, 2, 1 and 0.5.

    Raises:
        ValueError: If a scale is another, or they do not descend.

    References:
        Li et al., "Exploring plain vision transformer backbones for object detection",
        ECCV 2022.
    """

    def __init__(self, channels: int, width: int, scales: Sequence[float]) -> None:
        super().__init__()
        if not scales or set(scales) - {4, 2, 1, 0.5} or sorted(scales)[::-1] != [*scales]:
            raise ValueError(
                f"scales must descend and be from 4, 2, 1 and 0.5; got {list(scales)}."
            )
        self.scales = tuple(float(scale) for scale in scales)
        self.levels = nn.ModuleList(_level(channels, width, s) for s in self.scales)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Maps of even height and width at scale 1, ``(B, width, h, w)`` each."""
        odd = (x.shape[3] % 2, x.shape[2] % 2)
        x = pad(x, (0, odd[0], 0, odd[1])) if any(odd) else x
        return [level(x) for level in self.levels]

    def sizes(self, grid: tuple[int, int]) -> list[tuple[int, int]]:
        """Rows and columns of every level."""
        rows, columns = (n + n % 2 for n in grid)
        return [(int(rows * s), int(columns * s)) for s in self.scales]


class Detection(nn.Module):
    """Boxes and instance masks by torchvision's Mask R-CNN on a simple feature pyramid.

    The raw output is the pyramid, since that is all that detector and masks are read from.
    Inside, a patch is 16 pixels wide, whatever it is in the image: torchvision takes
    strides for powers of two.

    Args:
        channels: Channels of the patch map.
        num_classes: Classes, without background.
        width: Channels of the pyramid.
        scales: Its levels' resolution over the patch map's.
        hidden: Channels of the box head.
        proposals: Proposals an image that reach the box head.
        with_masks: Whether masks are found as well.
    """

    kind = "detection"
    needs_grid = True

    def __init__(
        self,
        channels: int,
        num_classes: int,
        width: int = 96,
        scales: Sequence[float] = SCALES,
        hidden: int = 256,
        proposals: int = 100,
        with_masks: bool = True,
    ) -> None:
        super().__init__()
        self.pyramid = SimpleFeaturePyramid(channels, width, scales)
        self.num_classes, self.width, self.with_masks = num_classes, width, with_masks
        self.rpn = _proposer(width, self.pyramid.scales, proposals)
        self.roi_heads = _roi_heads(width, hidden, num_classes, len(scales))
        if with_masks:
            self.roi_heads.mask_roi_pool = _pool(len(scales), 14)
            layers = (width, width)
            self.roi_heads.mask_head = MaskRCNNHeads(width, layers, 1)
            self.roi_heads.mask_predictor = MaskRCNNPredictor(width, width, num_classes + 1)

    def taps(self, num_blocks: int) -> tuple[int, ...]:
        """Tokens after the last block."""
        return (num_blocks,)

    def decode(
        self, backbone: Backbone, features: tuple[Tensor, ...], layout: Layout
    ) -> Tensor:
        """The pyramid, level after level, ``(B, width, positions)``."""
        maps = self.pyramid(as_map(backbone.finish(features[0]), layout))
        return torch.cat([level.flatten(2) for level in maps], dim=2)

    def loss(self, output: Tensor, targets: Sequence[Target], layout: Layout) -> Tensor:
        """Sum of Mask R-CNN's five losses; which regions are sampled is random.

        Args:
            output: The pyramid.
            targets: Objects; crowds are left out.
            layout: Geometry of the images.

        Returns:
            Scalar; without masks three losses.

        Raises:
            ValueError: If a target has no objects, or the detector is in eval mode.
        """
        if not self.training:
            raise ValueError("detection must be in training mode for its loss; got eval.")
        images, maps = self._inside(output, layout)
        truth = [self._truth(target, layout, output) for target in targets]
        proposals, found = self.rpn(images, maps, truth)
        _, more = self.roi_heads(maps, proposals, images.image_sizes, truth)
        return torch.stack([*found.values(), *more.values()]).sum()

    @torch.no_grad()
    def predict(self, output: Tensor, layout: Layout) -> Sequence[Found]:
        """Objects of each image in pixels of the image, by descending confidence."""
        images, maps = self._inside(output, layout)
        proposals, _ = self.rpn(images, maps)
        found, _ = self.roi_heads(maps, proposals, images.image_sizes)
        return [self._found(each, layout) for each in found]

    @torch.no_grad()
    def boxes(self, output: Tensor, layout: Layout) -> Sequence[Found]:
        """As :meth:`predict`, without masks, which take longer than all the rest."""
        images, maps = self._inside(output, layout)
        proposals, _ = self.rpn(images, maps)
        heads: Any = self.roi_heads
        regions = heads.box_head(heads.box_roi_pool(maps, proposals, images.image_sizes))
        found = heads.postprocess_detections(
            *heads.box_predictor(regions), proposals, images.image_sizes
        )
        sides = _pixel(layout).to(output.dtype)
        return [
            Found(boxes.cpu() * sides, labels.cpu() - 1, scores.cpu())
            for boxes, scores, labels in zip(*found, strict=True)
        ]

    def _inside(self, output: Tensor, layout: Layout) -> tuple[ImageList, Any]:
        """The pyramid's levels, and images in the detector's own pixels."""
        sizes = self.pyramid.sizes(layout.grid)
        parts = output.split([prod(size) for size in sizes], dim=2)
        levels = [part.unflatten(2, size) for part, size in zip(parts, sizes, strict=True)]
        maps = OrderedDict((str(i), level) for i, level in enumerate(levels))
        side = [PATCH * (n + n % 2) for n in layout.grid]  # as the pyramid has been padded
        blank = output.new_empty(1).expand(len(output), 1, *side)
        true = (PATCH * layout.grid[0], PATCH * layout.grid[1])
        return ImageList(blank, [true] * len(output)), maps

    def _truth(self, target: Target, layout: Layout, output: Tensor) -> dict[str, Tensor]:
        if target.objects is None:
            raise ValueError("targets must have objects for detection; one has none.")
        kept = ~target.objects.crowd & (_smallest_side(target.objects.boxes) > 0)
        boxes = target.objects.boxes[kept] / _pixel(layout)
        truth = {"boxes": boxes.to(output), "labels": target.objects.labels[kept] + 1}
        truth["labels"] = truth["labels"].to(output.device)
        if self.with_masks:
            size = [PATCH * n for n in layout.grid]
            masks = target.objects.masks[kept][:, None].float()
            sized = (
                interpolate(masks, size)[:, 0] if len(masks) else masks.new_zeros(0, *size)
            )
            truth["masks"] = sized.to(output.device, torch.uint8)
        return truth

    def _found(self, found: dict[str, Tensor], layout: Layout) -> Found:
        boxes = found["boxes"].cpu() * _pixel(layout).to(found["boxes"].dtype)
        masks = None
        if self.with_masks:
            probabilities = found["masks"].float().cpu()
            pasted = paste_masks_in_image(probabilities, boxes, layout.image_size)
            masks = pasted[:, 0] > 0.5
        return Found(boxes, found["labels"].cpu() - 1, found["scores"].cpu(), masks)


def _pixel(layout: Layout) -> Tensor:
    """Image pixels in one of the detector's own, for each side of a box, ``(4,)``."""
    height, width = (
        n / (PATCH * cells) for n, cells in zip(layout.image_size, layout.grid, strict=True)
    )
    return torch.tensor([width, height, width, height], dtype=torch.float64)


def _smallest_side(boxes: Tensor) -> Tensor:
    return (boxes[:, 2:] - boxes[:, :2]).amin(dim=1)


def _level(channels: int, width: int, scale: float) -> nn.Module:
    layers: list[nn.Module] = []
    inner = channels
    if scale == 0.5:
        layers.append(nn.MaxPool2d(2))
    while scale > 1:
        layers.append(nn.ConvTranspose2d(inner, inner // 2, 2, 2))
        inner, scale = inner // 2, scale / 2
        if scale > 1:
            layers += [LayerNorm2d(inner), nn.GELU()]
    return nn.Sequential(
        *layers,
        nn.Conv2d(inner, width, 1, bias=False),
        LayerNorm2d(width),
        nn.Conv2d(width, width, 3, padding=1, bias=False),
        LayerNorm2d(width),
    )


def _proposer(width: int, scales: Sequence[float], proposals: int) -> RegionProposalNetwork:
    """Anchors eight strides wide on every level, of three shapes."""
    sizes = tuple((int(8 * PATCH / scale),) for scale in scales)
    anchors = AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(sizes))
    head = RPNHead(width, 3)
    before, after = dict.fromkeys(("training", "testing"), 4 * proposals), proposals
    return RegionProposalNetwork(
        anchors,
        head,
        0.7,
        0.3,
        256,
        0.5,
        before,
        {"training": after, "testing": after},
        0.7,
    )


def _roi_heads(width: int, hidden: int, num_classes: int, num_levels: int) -> RoIHeads:
    head = TwoMLPHead(width * 7 * 7, hidden)
    predictor = FastRCNNPredictor(hidden, num_classes + 1)
    pool = _pool(num_levels, 7)
    return RoIHeads(pool, head, predictor, 0.5, 0.5, 64, 0.25, None, 0.05, 0.5, LIMIT)


def _pool(num_levels: int, size: int) -> MultiScaleRoIAlign:
    names = [str(level) for level in range(num_levels)]
    return MultiScaleRoIAlign(names, output_size=size, sampling_ratio=2)
