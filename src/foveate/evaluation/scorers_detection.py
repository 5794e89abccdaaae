"""How a picture becomes a detector's input, and what it finds is held against truth."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate, pad

from foveate.data.folder import ImageTransform
from foveate.data.labelled import Example
from foveate.evaluation import metrics_detection
from foveate.evaluation.metrics import Statistics
from foveate.tasks.detection import Found

__all__ = ["ObjectScorer", "Precisions"]


@dataclass(frozen=True)
class Precisions:
    """Average precision of boxes and of masks, side by side."""

    parts: tuple[metrics_detection.Precision, ...]

    @property
    def num_images(self) -> int:
        """Images."""
        return self.parts[0].num_images

    def scores(self, weights: Tensor) -> dict[str, Tensor]:
        """Scores of resamples, ``(R, N) -> (R,)`` each."""
        return {k: v for part in self.parts for k, v in part.scores(weights).items()}


@dataclass(frozen=True)
class ObjectScorer:
    """Average precision at the picture's own size.

    The longer side is resized to the model's input, and the rest of the square, to the
    right or below, is grey (zero after normalisation).
    """

    transform: ImageTransform
    num_classes: int
    kinds: tuple[metrics_detection.Kind, ...]

    def inputs(self, picture: Image.Image) -> Tensor:
        """The whole picture in a square."""
        side, (width, height) = self.transform.size, self._shown(picture.size)
        image = self.transform.whole(picture, (height, width))
        return pad(image, (0, side - width, 0, side - height))[None]

    def _shown(self, size: tuple[int, int]) -> tuple[int, int]:
        """Width and height in the square of a picture of this width and height."""
        width, height = (max(1, round(n * self.transform.size / max(size))) for n in size)
        return width, height

    def measure(self, outputs: Sequence[Found], example: Example) -> Any:  # noqa: ANN401
        """What of the detections is right.

        Args:
            outputs: Objects found in the square.
            example: The picture and its objects.

        Returns:
            Matches, for each kind of overlap.

        Raises:
            ValueError: If the picture has no list of objects.
        """
        objects = example.target.objects
        if objects is None:
            raise ValueError("data must list objects for every picture; one has no list.")
        found = self._as_picture(outputs[0], example.picture.size)
        return [
            metrics_detection.match(found, objects, self.num_classes, k) for k in self.kinds
        ]

    def _as_picture(self, found: Found, size: tuple[int, int]) -> Found:
        """Found in the square, in pixels of the picture of this width and height."""
        side, (width, height) = self.transform.size, self._shown(size)
        if size == (side, side):
            return found
        ratio = found.boxes.new_tensor([size[0] / width, size[1] / height] * 2)
        boxes = (found.boxes * ratio).minimum(found.boxes.new_tensor([*size, *size]))
        masks = found.masks
        if masks is not None and len(masks):
            seen = masks[:, None, :height, :width].float()
            masks = interpolate(seen, size[::-1], mode="bilinear")[:, 0] > 0.5
        elif masks is not None:
            masks = masks.new_zeros(0, size[1], size[0])
        return Found(boxes, found.labels, found.scores, masks)

    def gather(self, parts: list[Any]) -> Statistics:
        """Matches over the data set."""
        by_kind = zip(*parts, strict=True)
        return Precisions(
            tuple(
                metrics_detection.Precision(tuple(matches), kind)
                for matches, kind in zip(by_kind, self.kinds, strict=True)
            )
        )
