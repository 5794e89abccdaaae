"""Scores of a data set with bootstrap intervals: one model, or two on the same images."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isnan
from typing import NamedTuple, Protocol

import torch
from torch import Generator, Tensor

CHUNK = 32  # resamples at a time; memory grows with it


class Statistics(Protocol):
    """What is kept of each image, so that any resample of the images can be scored."""

    @property
    def num_images(self) -> int:
        """Images."""

    def scores(self, weights: Tensor) -> dict[str, Tensor]:
        """Score resamples.

        Args:
            weights: How often each image occurs in each resample, ``(R, N)``, float64.

        Returns:
            For each score ``(R,)``, float64; not a number where it is undefined.
        """


class Estimate(NamedTuple):
    """A score on all images, with its interval; not a number where it is undefined."""

    value: float
    low: float
    high: float

    def record(self) -> dict[str, float | None]:
        """The three numbers for JSON; None where undefined."""
        return {k: None if isnan(v) else v for k, v in self._asdict().items()}


@dataclass(frozen=True)
class Means:
    """Scores that are means over images.

    Attributes:
        values: For each score its value on every image, ``(N,)``; not a number on an image
            that does not count.

    Raises:
        ValueError: If there is no score or image, or a value is infinite.
    """

    values: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        """Check the values."""
        shapes = {v.shape for v in self.values.values()}
        if len(shapes) != 1 or len(shape := next(iter(shapes))) != 1 or not shape[0]:
            raise ValueError(
                f"values must be one number per image; got shapes {sorted(shapes)}."
            )
        for name, values in self.values.items():
            if values.isinf().any():
                raise ValueError(f"values of {name} must not be infinite; one is.")

    @property
    def num_images(self) -> int:
        """Images."""
        return len(next(iter(self.values.values())))

    def scores(self, weights: Tensor) -> dict[str, Tensor]:
        """Weighted means over the images that count, ``(R, N) -> (R,)`` each."""
        return {
            name: _mean(values.double(), weights) for name, values in self.values.items()
        }


def intervals(
    statistics: Statistics, seed: int = 0, num_resamples: int = 1000, level: float = 0.95
) -> dict[str, Estimate]:
    """Score a data set, with percentile bootstrap intervals over its images.

    Args:
        statistics: What is kept of each image.
        seed: The same seed gives the same intervals.
        num_resamples: Resamples, each of as many images as there are, with replacement.
        level: Probability within an interval.

    Returns:
        By name, the score on all images and the quantiles ``(1 ± level) / 2`` of the
        resamples on which it is defined. With a single image both are the score itself.
        Cost: ``num_resamples`` scorings of statistics, no model runs.

    Raises:
        ValueError: If there is no image, fewer than 2 resamples, or the level is not
            within (0, 1).

    References:
        Efron and Tibshirani, "An Introduction to the Bootstrap", chapter 13, 1993.

    Example:
        >>> intervals(Means({"top1": torch.tensor([1.0, 1.0, 1.0])}))
        {'top1': Estimate(value=1.0, low=1.0, high=1.0)}
    """
    _check(statistics, num_resamples, level)
    num = statistics.num_images
    chunks = [statistics.scores(w) for w in resamples(num, num_resamples, seed)]
    values = statistics.scores(once(num))
    return {
        name: estimate(value, torch.cat([chunk[name] for chunk in chunks]), level)
        for name, value in values.items()
    }


def paired_intervals(
    full: Statistics,
    reduced: Statistics,
    seed: int = 0,
    num_resamples: int = 1000,
    level: float = 0.95,
) -> dict[str, dict[str, Estimate]]:
    """Score two models on the same images, and their difference, with paired intervals.

    Args:
        full: Statistics of the full model.
        reduced: Statistics of the reduced model, of the same images in the same order.
        seed: The same seed gives the same intervals.
        num_resamples: Resamples; both models are scored on the same ones.
        level: Probability within an interval.

    Returns:
        ``full`` and ``reduced`` as :func:`intervals` with this seed, and ``difference``:
        reduced minus full.

    Raises:
        ValueError: As :func:`intervals`, or if the number of images or the names of the
            scores differ.
    """
    _check(full, num_resamples, level)
    num = full.num_images
    if reduced.num_images != num:
        raise ValueError(
            f"full and reduced must be of the same images; got {num} and "
            f"{reduced.num_images}."
        )
    pairs = [
        (full.scores(w), reduced.scores(w)) for w in resamples(num, num_resamples, seed)
    ]
    values = (full.scores(once(num)), reduced.scores(once(num)))
    if values[0].keys() != values[1].keys():
        raise ValueError(
            f"full and reduced must have the same scores; got {[*values[0]]} and "
            f"{[*values[1]]}."
        )
    found: dict[str, dict[str, Estimate]] = {"full": {}, "reduced": {}, "difference": {}}
    for name in values[0]:
        before, after = (torch.cat([pair[i][name] for pair in pairs]) for i in (0, 1))
        found["full"][name] = estimate(values[0][name], before, level)
        found["reduced"][name] = estimate(values[1][name], after, level)
        change = values[1][name] - values[0][name]
        found["difference"][name] = estimate(change, after - before, level)
    return found


def resamples(num_images: int, num_resamples: int, seed: int) -> Iterator[Tensor]:
    """Draw images with replacement.

    Args:
        num_images: N, images to draw from, and how many each resample draws.
        num_resamples: Resamples.
        seed: The same seed gives the same ones.

    Yields:
        How often each image was drawn, ``(R, N)``, float64, for at most 32 resamples.
    """
    generator = Generator().manual_seed(seed)
    for start in range(0, num_resamples, CHUNK):
        shape = (min(CHUNK, num_resamples - start), num_images)
        drawn = torch.randint(num_images, shape, generator=generator)
        ones = torch.ones(shape, dtype=torch.float64)
        yield torch.zeros(shape, dtype=torch.float64).scatter_add_(1, drawn, ones)


def _check(statistics: Statistics, num_resamples: int, level: float) -> None:
    if statistics.num_images < 1:
        raise ValueError("statistics must be of at least one image; got none.")
    if num_resamples < 2:
        raise ValueError(f"num_resamples must be at least 2; got {num_resamples}.")
    if not 0 < level < 1:
        raise ValueError(f"level must be within (0, 1); got {level}.")


def once(num_images: int) -> Tensor:
    """Weights of the data set itself, ``(1, N)``."""
    return torch.ones(1, num_images, dtype=torch.float64)


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    counts = ~values.isnan()
    return weights @ values.nan_to_num(0.0) / (weights @ counts.double())


def estimate(value: Tensor, drawn: Tensor, level: float = 0.95) -> Estimate:
    """Put a number and its resamples together.

    Args:
        value: On all images, ``()`` or ``(1,)``.
        drawn: On resamples, ``(R,)``, float64; not a number where undefined.
        level: Probability within the interval.

    Returns:
        The number and the quantiles ``(1 ± level) / 2`` of what is defined.
    """
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = drawn.nanquantile(ends).tolist()
    return Estimate(float(value), low, high)
