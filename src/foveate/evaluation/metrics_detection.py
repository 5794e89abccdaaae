"""Average precision of boxes and masks, as COCO defines it."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from foveate.data.coco import Objects, mask_api
from foveate.tasks.detection import Found

Kind = Literal["box", "mask"]

THRESHOLDS = np.linspace(0.5, 0.95, 10)
# By numpy as in COCO's code: torch rounds a few otherwise, and a recall may equal one.
RECALLS = torch.from_numpy(np.linspace(0, 1, 101))
MAX_DETECTIONS = 100  # per image and class
TINY = float(np.spacing(1))


class Matches(NamedTuple):
    """What of one image's detections was right, at each of T thresholds.

    Attributes:
        labels: Classes of the n detections that count, ``(n,)``.
        scores: Their confidence, ``(n,)``.
        hits: Whether an object was matched, ``(T, n)``.
        ignored: Whether it was a crowd, so that it is neither right nor wrong, ``(T, n)``.
        num_objects: Objects of each class that are to be found, ``(C,)``.
    """

    labels: Tensor
    scores: Tensor
    hits: Tensor
    ignored: Tensor
    num_objects: Tensor


@dataclass(frozen=True)
class Precision:
    """The scores ``KIND_ap``, ``KIND_ap50`` and ``KIND_ap75``.

    Attributes:
        matches: Of each image, N.
        kind: ``box`` or ``mask``.
    """

    matches: tuple[Matches, ...]
    kind: Kind

    @property
    def num_images(self) -> int:
        """Images."""
        return len(self.matches)

    def scores(self, weights: Tensor) -> dict[str, Tensor]:
        """Mean over classes that are to be found, thresholds and recalls.

        Args:
            weights: How often each image occurs, ``(R, N)``, float64.

        Returns:
            ``(R,)`` each, in [0, 1]; not a number where nothing is to be found.
        """
        totals = torch.stack([m.num_objects for m in self.matches]).double()  # (N, C)
        labels, scores, images = self._flat()
        hits, ignored = (
            torch.cat([m[i] for m in self.matches], dim=1).double() for i in (2, 3)
        )
        order = scores.argsort(descending=True, stable=True)
        by_class = []
        for index in range(totals.shape[1]):
            chosen = order[labels[order] == index]
            right = hits[:, chosen] * (1 - ignored[:, chosen])
            wrong = (1 - hits[:, chosen]) * (1 - ignored[:, chosen])
            weight = weights[:, None, images[chosen]]  # (R, 1, D)
            total = weights @ totals[:, index]
            by_class.append(average_precision(right * weight, wrong * weight, total))
        found = torch.stack(by_class, dim=2).nanmean(dim=2)  # (R, T)
        name = f"{self.kind}_ap"
        return {name: found.mean(dim=1), f"{name}50": found[:, 0], f"{name}75": found[:, 5]}

    def _flat(self) -> tuple[Tensor, Tensor, Tensor]:
        """Class, confidence and image of every detection."""
        counts = torch.tensor([len(m.labels) for m in self.matches])
        labels, scores = (torch.cat([m[i] for m in self.matches]) for i in (0, 1))
        return labels, scores, torch.arange(len(counts)).repeat_interleave(counts)


def average_precision(right: Tensor, wrong: Tensor, total: Tensor) -> Tensor:
    """Mean over 101 recalls of the best precision at that recall or above.

    Args:
        right: Weight of each detection if it is right, best first, ``(R, T, D)``.
        wrong: Weight of each if it is wrong, ``(R, T, D)``.
        total: Weight of all that is to be found, ``(R,)``.

    Returns:
        ``(R, T)``, float64; not a number where nothing is to be found.
    """
    true, false = right.cumsum(dim=2), wrong.cumsum(dim=2)
    precision = true / (true + false + TINY)
    best = precision.flip(2).cummax(dim=2).values.flip(2) if right.shape[2] else precision
    recall = (true / total[:, None, None]).nan_to_num(0.0).contiguous()
    wanted = RECALLS.expand(*recall.shape[:2], -1).contiguous()
    first = torch.searchsorted(recall, wanted)
    padded = torch.cat([best, torch.zeros_like(wanted[:, :, :1])], dim=2)
    found = padded.gather(2, first).mean(dim=2)
    return found.masked_fill((total == 0)[:, None], torch.nan)


def match(found: Found, objects: Objects, num_classes: int, kind: Kind) -> Matches:
    """Match the detections in one image to its objects, greedily from the best.

    A detection takes the free object of its class that it overlaps most, if by the
    threshold or more; if there is none, a crowd, which remains free. For a crowd, overlap
    is the share of the detection that lies in it.

    Args:
        found: Detections; of a class and image the best 100 count.
        objects: The truth.
        num_classes: C.
        kind: What has to overlap.

    Returns:
        Matches at the thresholds 0.5, 0.55, ..., 0.95.

    Raises:
        ValueError: If shapes do not fit, a class is out of range, a number is not finite,
            or masks are wanted and missing.
        ModuleNotFoundError: If faster-coco-eval is not installed.
    """
    _check(found, objects, num_classes, kind)
    plain = objects.labels[~objects.crowd]
    parts = [
        _match_class(found, objects, int(label), kind) for label in found.labels.unique()
    ]
    empty = torch.zeros(0, dtype=torch.int64)
    nothing = torch.zeros((len(THRESHOLDS), 0), dtype=torch.bool)
    chosen, hits, ignored = ([part[i] for part in parts] for i in range(3))
    index = torch.cat([empty, *chosen])
    return Matches(
        found.labels[index],
        found.scores[index].double(),
        torch.cat([nothing, *hits], dim=1),
        torch.cat([nothing, *ignored], dim=1),
        torch.bincount(plain, minlength=num_classes),
    )


def _match_class(
    found: Found, objects: Objects, label: int, kind: Kind
) -> tuple[Tensor, Tensor, Tensor]:
    """Index of the detections of a class, and whether each is a hit and ignored."""
    index = (found.labels == label).nonzero()[:, 0]
    order = found.scores[index].argsort(descending=True, stable=True)
    index = index[order[:MAX_DETECTIONS]]
    truth = (objects.labels == label).nonzero()[:, 0]
    shape = (len(THRESHOLDS), len(index))
    hits, ignored = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
    if len(truth):
        crowd = objects.crowd[truth].numpy()
        ious = _overlaps(found, objects, (index, truth), kind)
        free = np.ones((len(THRESHOLDS), len(truth)), dtype=bool)
        for d, row in enumerate(ious):
            hits[:, d], ignored[:, d] = _take(row, crowd, free)
    return index, torch.from_numpy(hits), torch.from_numpy(ignored)


def _take(
    row: np.ndarray, crowd: np.ndarray, free: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Let one detection take an object at each threshold; it is no longer free then."""
    enough = row >= np.minimum(THRESHOLDS, 1 - 1e-10)[:, None]  # (T, G)
    fits = np.where(enough & free & ~crowd, row, -1.0)
    last = fits.shape[1] - 1
    best = last - fits[:, ::-1].argmax(axis=1)  # of equal overlaps the last, as COCO's code
    hits = fits[np.arange(len(fits)), best] >= 0
    free[hits, best[hits]] = False
    ignored = ~hits & (enough & crowd).any(axis=1)
    return hits | ignored, ignored


def _overlaps(
    found: Found, objects: Objects, index: tuple[Tensor, Tensor], kind: Kind
) -> np.ndarray:
    """Intersection over union of detections and objects, ``(D, G)``."""
    api, (mine, truth) = mask_api(), index
    crowd = objects.crowd[truth].int().tolist()
    if kind == "box":
        pair = (_as_sides(found.boxes[mine]), _as_sides(objects.boxes[truth]))
    else:
        assert found.masks is not None
        pair = tuple(
            api.encode(np.asfortranarray(masks.permute(1, 2, 0).numpy().astype(np.uint8)))
            for masks in (found.masks[mine], objects.masks[truth])
        )
    return np.asarray(api.iou(*pair, crowd)).reshape(len(mine), len(truth))


def _as_sides(boxes: Tensor) -> np.ndarray:
    """Left, top, width, height."""
    corners = boxes.double()
    return torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], dim=1).numpy()


def _check(found: Found, objects: Objects, num_classes: int, kind: Kind) -> None:
    num = len(found.labels)
    if found.boxes.shape != (num, 4) or found.scores.shape != (num,):
        raise ValueError(
            f"found must have boxes ({num}, 4) and scores ({num},) for its {num} labels; "
            f"got {tuple(found.boxes.shape)} and {tuple(found.scores.shape)}."
        )
    if not (found.boxes.isfinite().all() and found.scores.isfinite().all()):
        raise ValueError("found must have finite boxes and scores; one is not.")
    for name, labels in (("found", found.labels), ("objects", objects.labels)):
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
            raise ValueError(
                f"{name} must have labels 0 to {num_classes - 1}; got "
                f"{int(labels.min())} to {int(labels.max())}."
            )
    size = tuple(objects.masks.shape[1:])
    if kind == "mask" and (found.masks is None or found.masks.shape != (num, *size)):
        came = None if found.masks is None else tuple(found.masks.shape)
        raise ValueError(f"found must have masks {(num, *size)}; got {came}.")
