"""Which tokens and directions a task depends on, measured on the user's images."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from foveate.diagnosis.jacobian import Products, TokenJacobian, check_adjoint, open_tap
from foveate.diagnosis.regime import Regime, advice, decide
from foveate.diagnosis.sensitivity import (
    block_norm,
    concentration,
    importance,
    leading_rows,
)
from foveate.diagnosis.sketch import (
    Budget,
    Sketch,
    exact_sketch,
    randomised_sketch,
    split_budget,
)
from foveate.diagnosis.spectrum import Spectrum, find_spectrum
from foveate.models import Model

Progress = Callable[[int, int], None]

DEFAULT_RANK = 20
ROUTES = ("auto", "always", "never")
SUMMARISED = (
    "kappa_cap",
    "cv",
    "rank_entropy",
    "rank_participation",
    "rank_stable",
    "rank_90",
    "rank_roy_vetterli",
)
_ROW_BYTES = 768 << 20  # rows of a batch of Jacobians held at once
_LANES = 32  # probes times images in one pass through the tail


@dataclass(frozen=True)
class Finding:
    """What one image's Jacobian says about some of its tokens.

    Attributes:
        spectrum: Singular values and their statistics.
        cv: Coefficient of variation over tokens of the energy of the leading directions.
        importance: Importance of each token in the leading directions, ``(T,)``.
        block_norm: Norm of each token's Jacobian block, ``(T,)``.
    """

    spectrum: Spectrum
    cv: float
    importance: Tensor
    block_norm: Tensor


@dataclass(frozen=True)
class Diagnosis:
    """What a task depends on.

    Attributes:
        model: Name of the model.
        task: Name of the task.
        depth: Block that the tokens enter.
        rank: Leading directions.
        route: ``exact`` or ``randomised``.
        num_outputs: Outputs of the task, M.
        grid: Rows and columns of patches.
        products: Products with the Jacobian of each image.
        adjoint_error: Largest disagreement of JVP and VJP over the images.
        images: For each image, what was found for ``all`` tokens and for ``patches``.
    """

    model: str
    task: str
    depth: int
    rank: int
    route: str
    num_outputs: int
    grid: tuple[int, int]
    products: Products
    adjoint_error: float
    images: tuple[dict[str, Finding], ...]

    @property
    def regime(self) -> Regime:
        """Regime of the patches, since they are what can be reduced."""
        mean = {k: v["mean"] for k, v in self.summary("patches").items()}
        return decide(mean["kappa_cap"], mean["cv"], mean["rank_entropy"])

    def summary(self, tokens: str) -> dict[str, dict[str, Any]]:
        """Mean and standard error over the images of each statistic.

        Args:
            tokens: ``all`` or ``patches``.

        Returns:
            ``{statistic: {"mean": ..., "standard_error": ...}}``; the error of one image's
            mean is None.
        """
        found = [_statistics(image[tokens]) for image in self.images]
        return {name: _mean([f[name] for f in found]) for name in SUMMARISED}

    def record(self, files: Sequence[str]) -> dict[str, Any]:
        """Everything as JSON.

        Args:
            files: Name of each image.

        Returns:
            Lists, texts and finite numbers.

        Raises:
            ValueError: If there is not one name for each image.
        """
        if len(files) != len(self.images):
            raise ValueError(
                f"files must name the {len(self.images)} images; got {len(files)} names."
            )
        grid = list(self.grid)
        return {
            "model": self.model,
            "task": self.task,
            "depth": self.depth,
            "rank": self.rank,
            "route": self.route,
            "num_images": len(self.images),
            "num_patches": self.grid[0] * self.grid[1],
            "num_outputs": self.num_outputs,
            "grid": grid,
            "products": {"jvp": self.products.jvp, "vjp": self.products.vjp},
            "adjoint_error": self.adjoint_error,
            "all": self.summary("all"),
            "patches": self.summary("patches"),
            "regime": str(self.regime),
            "advice": advice(self.regime),
            "images": [
                {
                    "file": str(file),
                    "grid": grid,
                    "all": _as_json(image["all"]),
                    "patches": _as_json(image["patches"]) | _per_patch(image["patches"]),
                }
                for file, image in zip(files, self.images, strict=True)
            ],
        }


def _mean(values: Sequence[float]) -> dict[str, float | None]:
    x = np.asarray(values)
    error = float(x.std(ddof=1) / len(x) ** 0.5) if len(x) > 1 else None
    return {"mean": float(x.mean()), "standard_error": error}


def _statistics(found: Finding) -> dict[str, float]:
    return {"cv": found.cv} | {k: e.value for k, e in found.spectrum.statistics.items()}


def _as_json(found: Finding) -> dict[str, Any]:
    spectrum = found.spectrum
    energies = spectrum.energies[: spectrum.num_found]
    caught = energies.cumsum(0) / spectrum.energies.sum()
    errors = {k: e.standard_error for k, e in spectrum.statistics.items()}
    return _statistics(found) | {
        "singular_values": energies.sqrt().tolist(),
        "energy": spectrum.energy.value,
        "cumulative": caught.tolist(),
        "standard_error": errors | {"energy": spectrum.energy.standard_error},
    }


def _per_patch(found: Finding) -> dict[str, Any]:
    return {
        "importance": found.importance.tolist(),
        "block_norm": found.block_norm.tolist(),
    }


def diagnose(
    model: Model,
    images: Tensor,
    task: str = "cls",
    depth: int = 10,
    rank: int = DEFAULT_RANK,
    probes: int = 100,
    iterations: int = 2,
    exact: str = "auto",
    seed: int = 0,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> Diagnosis:
    """Diagnose."""
    decoder = model.task(task)
    if exact not in ROUTES:
        raise ValueError(f"exact must be one of {', '.join(ROUTES)}; got '{exact}'.")
    if rank < 1:
        raise ValueError(f"rank must be at least 1; got {rank}.")
    tap = open_tap(model.backbone, decoder, images[:1], depth)
    _check_finite(model, images, tap.tokens.x)
    num_outputs = tap.tail(tap.tokens.x).shape[1]
    num_columns = tap.tokens.x[0].numel()
    budget = split_budget(rank, probes, iterations, num_outputs)
    num_rows = min(num_outputs, num_columns)
    is_exact = exact == "always" or (exact == "auto" and num_rows <= 2 * budget.total)
    largest = max(min(num_outputs, num_columns), DEFAULT_RANK)
    if rank > largest:
        raise ValueError(f"rank must be at most {largest}; got {rank}.")
    held = num_rows if is_exact else budget.search + budget.probes
    size = num_columns * tap.tokens.x.element_size()
    batch_size = max(1, min(batch_size, _ROW_BYTES // (held * size)))
    found: list[dict[str, Finding]] = []
    errors = []
    for first in range(0, len(images), batch_size):
        batch = images[first : first + batch_size]
        tap = open_tap(model.backbone, decoder, batch, depth)
        _check_finite(model, batch, tap.tokens.x)
        lanes = max(1, _LANES // len(batch))
        jacobian = TokenJacobian(tap.tail, tap.tokens.x, chunk_size=lanes)
        errors.append(
            check_adjoint(jacobian, Generator(device=tap.tokens.x.device).manual_seed(seed))
        )
        prefix = tap.tokens.layout.num_prefix
        generators = [
            Generator().manual_seed(_image_seed(seed, i))
            for i in range(first, first + len(batch))
        ]
        sketch = (
            exact_sketch(jacobian, prefix)
            if is_exact
            else randomised_sketch(jacobian, prefix, rank, budget, generators)
        )
        found += [_find(sketch, i, rank) for i in range(len(batch))]
        if progress:
            progress(first + len(batch), len(images))
    return Diagnosis(
        model.name,
        task,
        depth,
        rank,
        "exact" if is_exact else "randomised",
        num_outputs,
        tap.tokens.layout.grid,
        jacobian.products,
        max(errors),
        tuple(found),
    )


def _image_seed(seed: int, index: int) -> int:
    return int(np.random.SeedSequence((seed, index)).generate_state(1, np.uint64)[0] >> 1)


def _find(sketch: Sketch, image: int, rank: int) -> dict[str, Finding]:
    found = {}
    for name, part in sketch.parts.items():
        spectrum = find_spectrum(sketch, part, image, rank)
        rows = sketch.rows[image, :, part.first :]
        leading = leading_rows(rows, spectrum.vectors, rank)
        found[name] = Finding(
            spectrum,
            concentration(leading),
            importance(leading).cpu(),
            block_norm(rows, sketch.weight).cpu(),
        )
    return found


def _check_finite(model: Model, images: Tensor, tokens: Tensor) -> None:
    if not images.isfinite().all():
        raise ValueError("images must be finite; got NaN or infinity.")
    for name, p in model.named_parameters():
        if not p.isfinite().all():
            raise ValueError(f"weights must be finite; got NaN or infinity in {name}.")
    if not tokens.isfinite().all():
        raise ValueError("tokens must be finite; got NaN or infinity.")
