"""A metric on camera poses that knows rotations, and what it changes in a diagnosis."""

from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from foveate.diagnosis.bounds import rank_match
from foveate.diagnosis.findings import Finding, examine
from foveate.diagnosis.output_metric import Jacobian, OutputMetric
from foveate.diagnosis.sketch import exact_sketch

__all__ = [
    "MetricComparison",
    "PoseWeights",
    "compare_metrics",
    "pose_factor",
    "rank_match",
]

_POSE = 9


@dataclass(frozen=True)
class PoseWeights:
    """Weights of the three parts of a squared pose change.

    Attributes:
        translation: Per squared unit of translation.
        rotation: Per squared radian of rotation.
        field_of_view: Per squared radian of field of view.

    Raises:
        ValueError: If a weight is not positive and finite.
    """

    translation: float = 1.0
    rotation: float = 1.0
    field_of_view: float = 1.0

    def __post_init__(self) -> None:
        """Refuse weights that would make a part free.

        Raises:
            ValueError: If a weight is not positive and finite.
        """
        for name, value in vars(self).items():
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} must be positive and finite; got {value}.")


def pose_factor(poses: Tensor, weights: PoseWeights | None = None) -> Tensor:
    r"""Factor L of the metric :math:`H = L^\top L` at each camera pose.

    A pose is translation t (3), quaternion q = (v, w), scalar w last, of any length (4),
    and two angles f of field of view. A small change of it has the squared length

    .. math:: \alpha \lVert dt \rVert^2 + \beta \, \theta^2 + \gamma \lVert df \rVert^2,
        \qquad \theta = \frac{2}{\lVert q \rVert} \lVert B \, dq \rVert,
        \quad B = \frac{1}{\lVert q \rVert} [\, w I - [v]_\times \mid -v \,],

    with :math:`\theta` the angle of the rotation between both quaternions, normalised. B
    takes the imaginary part of :math:`\bar q \, dq`; its rows are orthonormal, and B q = 0.
    So H has rank 8: it is positive definite on all changes but a scaling of q, which is no
    change of pose, and costs nothing. H is the same for q and -q; for c q it is that of q
    with changes of q divided by c.

    Args:
        poses: ``(B, 9)``.
        weights: :math:`\alpha, \beta, \gamma`; all 1 if None.

    Returns:
        ``(B, 8, 9)``, a factor for :class:`foveate.diagnosis.output_metric.OutputMetric`:
        rows 0-2 translation, 3-5 rotation, 6-7 field of view.

    Raises:
        ValueError: If poses have another shape, or a quaternion is zero or not finite.

    Example:
        >>> pose = torch.tensor([[0.0, 0, 0, 0, 0, 0, 1, 1, 1]])  # no rotation
        >>> pose_factor(pose)[0, 3:6, 3:7] + 0.0  # twice the imaginary part
        tensor([[2., 0., 0., 0.],
                [0., 2., 0., 0.],
                [0., 0., 2., 0.]])
    """
    if poses.ndim != 2 or poses.shape[1] != _POSE:
        raise ValueError(f"poses must have shape (B, 9); got {tuple(poses.shape)}.")
    weights = weights or PoseWeights()
    quaternion = poses[:, 3:7]
    length = quaternion.norm(dim=1, keepdim=True)
    bad = ~((length > 0) & length.isfinite())[:, 0]
    if bad.any():
        index = int(bad.nonzero()[0])
        raise ValueError(
            "poses must have a quaternion that is finite and not zero; got "
            f"{quaternion[index].tolist()} for image {index}."
        )
    factor = poses.new_zeros(len(poses), 8, _POSE)
    factor[:, :3, :3] = sqrt(weights.translation) * torch.eye(3).to(poses)
    turning = _imaginary_part(quaternion / length)
    factor[:, 3:6, 3:7] = 2 * sqrt(weights.rotation) * turning / length[..., None]
    factor[:, 6:, 7:] = sqrt(weights.field_of_view) * torch.eye(2).to(poses)
    return factor


def _imaginary_part(quaternion: Tensor) -> Tensor:
    """Matrix of ``p -> Im(conj(q) p)`` for unit q, ``(B, 4) -> (B, 3, 4)``."""
    x, y, z, w = quaternion.unbind(1)
    rows = [(w, z, -y, -x), (-z, w, x, -y), (y, -x, w, -z)]
    return torch.stack([torch.stack(row, dim=1) for row in rows], dim=1)


@dataclass(frozen=True)
class MetricComparison:
    """The same Jacobian under the Euclidean metric of poses and under that of rotations.

    Attributes:
        euclidean: For each image, what was found for ``all`` tokens and for ``patches``.
        rotation: The same through :func:`pose_factor`.
        rank_match: Spearman correlation of the two importances of the patches, ``(B,)``.
    """

    euclidean: tuple[dict[str, Finding], ...]
    rotation: tuple[dict[str, Finding], ...]
    rank_match: Tensor

    def record(self) -> list[dict[str, Any]]:
        """For each image and metric, ``kappa_cap``, ``cv`` and patches by importance."""
        return [
            {
                "euclidean": _record(plain["patches"]),
                "rotation": _record(turned["patches"]),
                "spearman": float(match),
            }
            for plain, turned, match in zip(
                self.euclidean, self.rotation, self.rank_match, strict=True
            )
        ]


def compare_metrics(
    jacobian: Jacobian, num_prefix: int, rank: int = 20, weights: PoseWeights | None = None
) -> MetricComparison:
    """Diagnose a camera pose under both metrics, and compare how they rank the patches.

    Cost: 17 VJPs. Memory: as many token sequences an image.

    Args:
        jacobian: Jacobian of poses, for B images with 9 outputs.
        num_prefix: Prefix tokens.
        rank: Leading directions.
        weights: Weights of the parts of a pose; all 1 if None.

    Returns:
        Both diagnoses.

    Raises:
        ValueError: If the outputs are no poses.
    """
    seen = OutputMetric(jacobian, pose_factor(jacobian.output, weights))
    plain, turned = (examine(exact_sketch(j, num_prefix), rank) for j in (jacobian, seen))
    pairs = zip(plain, turned, strict=True)
    match = [rank_match(a["patches"].importance, b["patches"].importance) for a, b in pairs]
    return MetricComparison(tuple(plain), tuple(turned), torch.stack(match))


def _record(finding: Finding) -> dict[str, Any]:
    """Statistics and the order of the patches, most important first."""
    order = finding.importance.argsort(descending=True, stable=True)
    values = finding.statistics()
    return {"kappa_cap": values["kappa_cap"], "cv": values["cv"], "order": order.tolist()}
