"""How a picture becomes a model's input, and its output a number to hold against truth."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from foveate.data.folder import ImageTransform
from foveate.data.labelled import Example, LabelledImages
from foveate.evaluation import (
    metrics_classification,
    metrics_depth,
    metrics_segmentation,
)
from foveate.evaluation.metrics import Means, Statistics
from foveate.evaluation.scorers_detection import ObjectScorer
from foveate.tasks import LabelledTask
from foveate.tasks.depth import Depth
from foveate.tasks.detection import Detection

__all__ = ["Scorer", "find_scorer"]


class Scorer(Protocol):
    """The protocol of one kind of task. Images of a data set are scored one by one."""

    def inputs(self, picture: Image.Image) -> Tensor:
        """Inputs of one picture, ``(W, 3, h, w)``; several if it is looked at in parts."""

    def measure(self, outputs: Sequence[Any], example: Example) -> Any:  # noqa: ANN401
        """What is kept of one picture, from the task's predictions for its inputs."""

    def gather(self, parts: list[Any]) -> Statistics:
        """Put the pictures of a data set together in their order."""


@dataclass(frozen=True)
class ClassScorer:
    """Top-1 and top-5 of the central square (see :class:`ImageTransform`)."""

    transform: ImageTransform
    num_classes: int

    def inputs(self, picture: Image.Image) -> Tensor:
        """The central square."""
        return self.transform(picture)[None]

    def measure(self, outputs: Sequence[Tensor], example: Example) -> Means | None:
        """Whether the class is right; nothing for a picture without one."""
        if example.target.label is None:
            return None
        ks = (1, 5) if self.num_classes >= 5 else (1,)
        check_classes(outputs[0], self.num_classes)
        logits = outputs[0].double().cpu()
        return metrics_classification.accuracy(
            logits[None], torch.tensor([example.target.label]), ks
        )

    def gather(self, parts: list[Means | None]) -> Means:
        """Accuracy over the pictures with a class.

        Args:
            parts: Of each picture.

        Returns:
            Their accuracies.

        Raises:
            ValueError: If no picture has a class.
        """
        known = [part for part in parts if part is not None]
        if not known:
            raise ValueError("data must have a picture with a class; got none.")
        names = known[0].values
        nothing = Means({name: torch.full((1,), torch.nan) for name in names})
        return metrics_classification.gather([part or nothing for part in parts])


@dataclass(frozen=True)
class MaskScorer:
    """Mean IoU at the picture's own size, from square windows.

    The shorter side is resized to the model's input, windows slide along the longer one,
    two thirds of their side apart, the last shifted to the border; logits are averaged
    where windows overlap and resized (bilinear). A square picture has one window.
    """

    transform: ImageTransform
    num_classes: int

    def inputs(self, picture: Image.Image) -> Tensor:
        """Windows, from left or top."""
        side = self.transform.size
        size = shorter_to(side, picture.size)
        image = self.transform.whole(picture, size)
        return torch.stack([
            image[:, y : y + side, x : x + side] for y, x in windows_of(size, side)
        ])

    def measure(self, outputs: Sequence[Tensor], example: Example) -> Any:  # noqa: ANN401
        """Pixels by class.

        Args:
            outputs: Logits of the windows, ``(classes, side, side)``.
            example: The picture and its mask.

        Returns:
            What is in both masks, and in either.

        Raises:
            ValueError: If the picture has no mask.
        """
        mask = example.target.mask
        if mask is None:
            raise ValueError("data must have a mask for every picture; one has none.")
        check_classes(outputs[0], self.num_classes)
        logits = self._merge([o.float().cpu() for o in outputs], example.picture)
        sized = interpolate(logits[None], mask.shape, mode="bilinear", align_corners=False)
        return metrics_segmentation.overlap(sized[0].argmax(0), mask, self.num_classes)

    def _merge(self, windows: list[Tensor], picture: Image.Image) -> Tensor:
        if len(windows) == 1:
            return windows[0]
        side = self.transform.size
        size = shorter_to(side, picture.size)
        total = windows[0].new_zeros(self.num_classes, *size)
        count = total.new_zeros(size)
        for window, (y, x) in zip(windows, windows_of(size, side), strict=True):
            total[:, y : y + side, x : x + side] += window
            count[y : y + side, x : x + side] += 1
        return total / count

    def gather(self, parts: list[Any]) -> Statistics:
        """Pixels over the data set."""
        return metrics_segmentation.gather(parts)


@dataclass(frozen=True)
class DepthScorer:
    """Errors of depth at the picture's own size; disparity is aligned image by image.

    The picture is resized as a whole, its shorter side to the model's input, both sides to
    multiples of the patch.
    """

    transform: ImageTransform
    patch_size: tuple[int, int]
    relative: bool

    def inputs(self, picture: Image.Image) -> Tensor:
        """The whole picture."""
        size = shorter_to(self.transform.size, picture.size)
        height, width = (
            max(1, round(n / p)) * p for n, p in zip(size, self.patch_size, strict=True)
        )
        return self.transform.whole(picture, (height, width))[None]

    def measure(self, outputs: Sequence[Tensor], example: Example) -> Tensor:
        """The five errors.

        Args:
            outputs: Depth or disparity.
            example: The picture and its depth.

        Returns:
            ``(5,)``.

        Raises:
            ValueError: If the picture has no depth.
        """
        depth, valid = example.target.depth, example.target.valid
        if depth is None or valid is None:
            raise ValueError("data must have depth for every picture; one has none.")
        predicted = outputs[0].float().cpu()
        if self.relative:
            predicted = metrics_depth.align_disparity(predicted, depth, valid)
        return metrics_depth.depth_errors(predicted, depth, valid)

    def gather(self, parts: list[Tensor]) -> Statistics:
        """Errors over the data set."""
        return metrics_depth.gather(parts)


def shorter_to(side: int, size: tuple[int, int]) -> tuple[int, int]:
    """Height and width after resizing the shorter side, from width and height."""
    short = min(size)
    width, height = (max(side, round(n * side / short)) for n in size)
    return height, width


def windows_of(size: tuple[int, int], side: int) -> list[tuple[int, int]]:
    """Top and left of every window; the last ones are shifted to the border."""
    stride = max(1, 2 * side // 3)
    tops, lefts = ([*range(0, length - side, stride), length - side] for length in size)
    return [(top, left) for top in tops for left in lefts]


def check_classes(logits: Tensor, num_classes: int) -> None:
    """Refuse a head for other classes than the data set's.

    Args:
        logits: Of one image, classes first.
        num_classes: Of the data set.

    Raises:
        ValueError: If there are more or fewer.
    """
    if len(logits) != num_classes:
        raise ValueError(
            f"data must have the {len(logits)} classes of the task's head; it has "
            f"{num_classes}."
        )


def find_scorer(
    task: LabelledTask,
    transform: ImageTransform,
    data: LabelledImages,
    patch: tuple[int, int],
) -> Scorer:
    """Protocol of a task on a data set.

    Args:
        task: The task.
        transform: The model's.
        data: The data set.
        patch: Height and width of a patch in pixels.

    Returns:
        The protocol.

    Raises:
        ValueError: If the data set has no labels of the task's kind.
    """
    num_classes = len(data.classes_for(task.kind))
    if isinstance(task, Depth):
        return DepthScorer(transform, patch, task.relative)
    if isinstance(task, Detection):
        kinds: Any = ("box", "mask") if task.with_masks else ("box",)
        return ObjectScorer(transform, num_classes, kinds)
    table: dict[str, Callable[[ImageTransform, int], Scorer]] = {
        "classification": ClassScorer,
        "segmentation": MaskScorer,
    }
    return table[task.kind](transform, num_classes)
