"""Labelled pictures as a network is trained on them: square, and changed at random."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foveate.data.coco import Objects
from foveate.data.folder import ImageTransform
from foveate.data.labelled import Example, LabelledImages, Target

__all__ = ["View", "Views"]


class View(NamedTuple):
    """An image ``(3, size, size)``, normalised, and what is true of it, at that size."""

    image: Tensor
    target: Target


@dataclass(frozen=True)
class Views:
    """Square views of a labelled data set, deterministic in the seed and the index.

    View i is of picture i modulo their number. With ``augment``, a random part of the
    picture (its area and aspect ratio as in torchvision's ``RandomResizedCrop``) fills the
    square, every second one, at random, is mirrored, and boxes are those of what is seen of
    the masks; without, the picture is resized whole, so that one of that size passes
    unchanged. Depth is not supported.

    Attributes:
        data: The pictures.
        transform: The model's.
        num: Views; all pictures once if 0.
        augment: Whether pictures are changed at random.
        scale: Smallest and largest share of the area of a part.
        seed: The same seed gives the same views.
    """

    data: LabelledImages
    transform: ImageTransform
    num: int = 0
    augment: bool = False
    scale: tuple[float, float] = (0.35, 1.0)
    seed: int = 0

    def __len__(self) -> int:
        """Views."""
        return self.num or len(self.data)

    def __getitem__(self, index: int) -> View:
        """View ``index``.

        Args:
            index: From 0 to below the number of views.

        Returns:
            The view.

        Raises:
            IndexError: If there is no such view.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"index must be from 0 to {len(self) - 1}; got {index}.")
        example = self.data[index % len(self.data)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed((1_000_003 * self.seed + index) % 2**63)
            return self._view(example)

    def _view(self, example: Example) -> View:
        from torchvision.transforms import v2
        from torchvision.tv_tensors import BoundingBoxes, Image, Mask

        size = (self.transform.size, self.transform.size)
        change: Any = v2.Resize(size, v2.InterpolationMode.BICUBIC, antialias=True)
        if self.augment:
            crop = v2.RandomResizedCrop(
                size, self.scale, interpolation=v2.InterpolationMode.BICUBIC
            )
            change = v2.Compose([crop, v2.RandomHorizontalFlip()])
        target, picture = example.target, example.picture
        if picture.size == size and not self.augment:
            return View(self.transform(picture), target)
        seen: dict[str, Any] = {"image": Image(v2.functional.pil_to_tensor(picture))}
        if target.mask is not None:
            seen["mask"] = Mask(target.mask)
        if target.objects is not None:
            height, width = picture.size[::-1]
            seen["boxes"] = BoundingBoxes(
                target.objects.boxes, format="XYXY", canvas_size=(height, width)
            )
            seen["masks"] = Mask(target.objects.masks)
        moved = change(seen)
        image = self.transform.normalise(moved["image"].as_subclass(Tensor).float() / 255)
        return View(image, _moved(target, moved, self.augment))


def _moved(target: Target, moved: dict[str, Any], is_part: bool) -> Target:
    """What is true of what is seen, which may be a part of the picture."""
    if "mask" in moved:
        target = replace(target, mask=moved["mask"].as_subclass(Tensor))
    if target.objects is None:
        return target
    masks = moved["masks"].as_subclass(Tensor).bool()
    seen = masks.flatten(1).any(1)
    boxes, masks = moved["boxes"].as_subclass(Tensor)[seen], masks[seen]
    if is_part:  # of a covered object, the part of its box may be larger than its part
        boxes = _tight(masks).to(boxes)
    objects = Objects(boxes, target.objects.labels[seen], target.objects.crowd[seen], masks)
    return replace(target, objects=objects)


def _tight(masks: Tensor) -> Tensor:
    """Boxes of masks, at the edges of pixels, ``(n, H, W) -> (n, 4)``."""
    from torchvision.ops import masks_to_boxes

    return masks_to_boxes(masks) + masks.new_tensor([0, 0, 1, 1], dtype=torch.float32)
