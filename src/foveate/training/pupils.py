"""What each kind of head learns: its batch, its loss, its measures."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import pad

from foveate.scoring.factors import FactorNetwork
from foveate.scoring.importance import ImportanceHead
from foveate.scoring.metric import SpectralPullbackNetwork
from foveate.training.factors import factor_loss, merge_costs
from foveate.training.loop import Batch, Objective
from foveate.training.measures import alignment, energy_error, metric_error, spearman
from foveate.training.objectives import importance_loss, log_importance, metric_loss

__all__ = ["Pupil", "pupil"]

# The paper's loss leaves open which direction an energy belongs to; this settles it.
COUPLING = 0.5


@dataclass(frozen=True)
class Pupil:
    """How a kind of head is taught.

    Attributes:
        prepare: Turns targets, as they are on disk, into a batch with ``tokens``.
        calibrate: Fixes the units of a network on such a batch.
        objective: Loss.
        measure: Measures by name, one number an image, higher is better for ``score``.
        score: The measure that training keeps the best of.
    """

    prepare: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    calibrate: Callable[[nn.Module, Batch], None]
    objective: Objective
    measure: Callable[[nn.Module, Batch], dict[str, Tensor]]
    score: str


def pupil(kind: str) -> Pupil:
    """How a kind of head is taught.

    Args:
        kind: One of the kinds of heads.

    Returns:
        The pupil.
    """
    if kind == "metric":
        return Pupil(
            _modes, _calibrate_metric, _metric_objective, _measure_metric, "alignment"
        )
    if kind == "factors":
        return Pupil(dict, _calibrate_factors, factor_loss, _measure_factors, "spearman")
    return Pupil(
        _importance,
        _calibrate_importance,
        _importance_objective,
        _measure_importance,
        "spearman",
    )


def _importance(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Exact importance where it is known, else the norm of the block."""
    name = "importance" if "importance" in found else "norm"
    return {"tokens": found["tokens"], "target": log_importance(found[name])}


def _modes(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Vectors of unit length over all tokens, zero at the prefix."""
    tokens, vectors = found["tokens"], found["vectors"]
    vectors = vectors / vectors.flatten(2).norm(dim=2)[..., None, None]
    prefix = tokens.shape[1] - vectors.shape[2]
    return {
        "tokens": tokens,
        "vectors": pad(vectors, (0, 0, prefix, 0)),
        "energies": found["energies"],
        "importance": found["importance"],
    }


def _prefix(batch: Batch, name: str) -> int:
    """Prefix tokens, which have no target."""
    return batch["tokens"].shape[1] - batch[name].shape[1]


def _calibrate_importance(network: nn.Module, batch: Batch) -> None:
    cast(ImportanceHead, network).calibrate(batch["tokens"], batch["target"])


def _calibrate_metric(network: nn.Module, batch: Batch) -> None:
    cast(SpectralPullbackNetwork, network).calibrate(batch["tokens"], batch["energies"])


def _calibrate_factors(network: nn.Module, batch: Batch) -> None:
    cast(FactorNetwork, network).calibrate(batch["tokens"])


def _importance_objective(network: nn.Module, batch: Batch, _: Generator) -> Tensor:
    predicted = network(batch["tokens"], _prefix(batch, "target"))
    return importance_loss(predicted, batch["target"])


def _metric_objective(network: nn.Module, batch: Batch, _: Generator) -> Tensor:
    predicted = network(batch["tokens"], _prefix(batch, "importance"))
    return metric_loss(predicted, batch["vectors"], batch["energies"], COUPLING)


def _measure_importance(network: nn.Module, batch: Batch) -> dict[str, Tensor]:
    predicted = network(batch["tokens"], _prefix(batch, "target"))
    return {"spearman": spearman(predicted, batch["target"])}


def _measure_metric(network: nn.Module, batch: Batch) -> dict[str, Tensor]:
    first = _prefix(batch, "importance")
    found: dict[str, list[Tensor]] = {}
    for i in range(len(batch["tokens"])):  # one at a time: directions are large
        one = {name: value[i : i + 1] for name, value in batch.items()}
        predicted = network(one["tokens"], first)
        vectors, energies = one["vectors"], one["energies"]
        measures = {
            "alignment": alignment(predicted.directions, vectors),
            "energy_error": energy_error(predicted, energies),
            "metric_error": metric_error(predicted, vectors, energies),
            "spearman": spearman(predicted.importance()[:, first:], one["importance"]),
        }
        for name, value in measures.items():
            found.setdefault(name, []).append(value)
    return {name: torch.cat(values) for name, values in found.items()}


def _measure_factors(network: nn.Module, batch: Batch) -> dict[str, Tensor]:
    true, predicted = merge_costs(network, batch)
    return {"spearman": spearman(predicted, true)}
