"""Mean intersection over union of a data set."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

IGNORED = 255


class Overlap(NamedTuple):
    """Pixels of one image by class, ``(C,)`` both: in both masks, and in either."""

    intersection: Tensor
    union: Tensor


@dataclass(frozen=True)
class Overlaps:
    """The score ``miou``: pixels are added up over all images first.

    Attributes:
        intersections: Pixels that are of a class in both masks, ``(N, C)``.
        unions: Pixels that are of it in either, ``(N, C)``.
    """

    intersections: Tensor
    unions: Tensor

    @property
    def num_images(self) -> int:
        """Images."""
        return len(self.intersections)

    def scores(self, weights: Tensor) -> dict[str, Tensor]:
        """Mean over the classes that occur in the truth or the prediction.

        Args:
            weights: How often each image occurs, ``(R, N)``.

        Returns:
            ``miou``, ``(R,)``, in [0, 1]; not a number where no class occurs.
        """
        ratios = (weights @ self.intersections.double()) / (weights @ self.unions.double())
        return {"miou": ratios.nanmean(dim=1)}  # 0 / 0 for a class that is in neither


def overlap(predicted: Tensor, target: Tensor, num_classes: int) -> Overlap:
    """Compare the masks of one image.

    Args:
        predicted: Class of each pixel, ``(H, W)``, at the size of the target.
        target: True class of each pixel, ``(H, W)``; 255 is left out.
        num_classes: C.

    Returns:
        Pixels by class.

    Raises:
        ValueError: If the sizes differ, or a number is not a class.
        ModuleNotFoundError: If torchmetrics is not installed.
    """
    if predicted.shape != target.shape:
        raise ValueError(
            f"predicted must have the target's size {tuple(target.shape)}; got "
            f"{tuple(predicted.shape)}."
        )
    counted = target != IGNORED
    for name, mask in (("predicted", predicted), ("target", target[counted])):
        if mask.numel() and not 0 <= int(mask.min()) <= int(mask.max()) < num_classes:
            raise ValueError(
                f"{name} must hold classes 0 to {num_classes - 1}; got {int(mask.min())} "
                f"to {int(mask.max())}."
            )
    table = _confusion(predicted[counted], target[counted], num_classes)
    intersection = table.diagonal()
    return Overlap(intersection, table.sum(dim=0) + table.sum(dim=1) - intersection)


def gather(parts: list[Overlap]) -> Overlaps:
    """Put the images of a data set together in their order."""
    return Overlaps(*(torch.stack(each) for each in zip(*parts, strict=True)))


def _confusion(predicted: Tensor, target: Tensor, num_classes: int) -> Tensor:
    try:
        from torchmetrics.functional.classification import multiclass_confusion_matrix
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "mIoU needs torchmetrics: pip install 'foveate[train]'."
        ) from error
    return multiclass_confusion_matrix(predicted, target, num_classes, validate_args=False)
