"""What a diagnosis found, and its record as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from foveate.diagnosis.jacobian import Products
from foveate.diagnosis.regime import Regime, advise, decide
from foveate.diagnosis.sensitivity import (
    block_norm,
    concentration,
    importance,
    leading_rows,
)
from foveate.diagnosis.sketch import Sketch
from foveate.diagnosis.spectrum import Spectrum, find_spectrum

__all__ = ["Diagnosis", "Finding", "examine"]

_SUMMARISED = (
    "kappa_cap",
    "cv",
    "rank_entropy",
    "rank_roy_vetterli",
    "rank_participation",
    "rank_stable",
    "rank_90",
)


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

    def statistics(self) -> dict[str, float]:
        """Values by name, without their errors."""
        values = {name: e.value for name, e in self.spectrum.statistics.items()}
        return {"cv": self.cv} | values

    def record(self) -> dict[str, Any]:
        """Spectrum and statistics as JSON."""
        spectrum = self.spectrum
        errors = {name: e.standard_error for name, e in spectrum.statistics.items()}
        return self.statistics() | {
            "standard_error": errors | {"energy": spectrum.energy.standard_error},
            "energy": spectrum.energy.value,
            "singular_values": spectrum.found.sqrt().tolist(),
            "cumulative": (spectrum.found.cumsum(0) / spectrum.energies.sum()).tolist(),
        }


def examine(sketch: Sketch, rank: int) -> list[dict[str, Finding]]:
    """Take everything a diagnosis reports from the sketch of a batch.

    Args:
        sketch: Rows of the Jacobians of B images.
        rank: Leading directions.

    Returns:
        For each image, what was found for ``all`` tokens and for ``patches``.
    """

    def find(image: int, name: str) -> Finding:
        part = sketch.parts[name]
        spectrum = find_spectrum(sketch, part, image, rank)
        rows = sketch.rows[image, :, part.first :]
        leading = leading_rows(rows, spectrum.vectors, rank)
        return Finding(
            spectrum,
            concentration(leading),
            importance(leading).cpu(),
            block_norm(rows, sketch.weight).cpu(),
        )

    return [{name: find(i, name) for name in sketch.parts} for i in range(len(sketch.rows))]


@dataclass(frozen=True)
class Diagnosis:
    """What a task depends on, over a set of images.

    Attributes:
        model: Name of the model.
        task: Name of the task.
        depth: Block that the tokens enter.
        rank: Leading directions, r.
        route: ``exact`` or ``randomised``.
        num_outputs: Outputs of the task, M.
        grid: Rows and columns of patches.
        products: Products with the Jacobian of each image, those of the adjoint check too.
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

    def summary(self, tokens: str) -> dict[str, dict[str, float | None]]:
        """Mean of each statistic over the images, and the standard error of the mean.

        Args:
            tokens: ``all`` or ``patches``.

        Returns:
            ``{name: {"mean": ..., "standard_error": ...}}``; the error is None for one
            image.
        """
        values = [image[tokens].statistics() for image in self.images]
        return {name: _mean([v[name] for v in values]) for name in _SUMMARISED}

    @property
    def regime(self) -> Regime:
        """Regime of the patches, since they are what can be reduced."""
        values = [image["patches"].statistics() for image in self.images]
        mean = {name: float(np.mean([v[name] for v in values])) for name in _SUMMARISED}
        return decide(mean["kappa_cap"], mean["cv"], mean["rank_entropy"])

    @property
    def advice(self) -> str:
        """What to run next."""
        return advise(self.regime, self.task, self.depth)

    def record(self, files: Sequence[str]) -> dict[str, Any]:
        """Turn the diagnosis into JSON.

        Args:
            files: Name of each image.

        Returns:
            Texts, finite numbers, lists and mappings. For each image and its tokens,
            ``energy`` is the squared Frobenius norm of the Jacobian, ``singular_values``
            are the largest ones, and ``cumulative`` is the share of the energy in the
            leading ones.

        Raises:
            ValueError: If there is not one name for each image.
        """
        if len(files) != len(self.images):
            raise ValueError(
                f"files must name {len(self.images)} images; got {len(files)} names."
            )
        grid = list(self.grid)
        images = [
            {"file": str(file), "grid": grid, **_image(found)}
            for file, found in zip(files, self.images, strict=True)
        ]
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
            "advice": self.advice,
            "images": images,
        }


def _mean(values: Sequence[float]) -> dict[str, float | None]:
    x = np.asarray(values)
    error = float(x.std(ddof=1) / len(x) ** 0.5) if len(x) > 1 else None
    return {"mean": float(x.mean()), "standard_error": error}


def _image(found: dict[str, Finding]) -> dict[str, Any]:
    patches = found["patches"]
    of_patch = {
        "importance": patches.importance.tolist(),
        "block_norm": patches.block_norm.tolist(),
    }
    return {"all": found["all"].record(), "patches": patches.record() | of_patch}
