"""The theorems behind a diagnosis as numbers: what is bounded, beside the bound.

Rows are those of a materialised Jacobian, as of an exact
:class:`foveate.diagnosis.sketch.Sketch`: for one image ``(M, T, C)``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from foveate.diagnosis.jacobian import TokenJacobian
from foveate.diagnosis.sketch import exact_sketch

__all__ = [
    "Replacement",
    "captured",
    "factorised_length",
    "power_iteration_bound",
    "pullback_length",
    "rank_match",
    "replacement_bound",
    "subspace_tangent",
]

Norm = Literal["frobenius", "operator"]

_AT_ONCE = 16  # probes of the whole sequence held at once


def captured(rows: Tensor, metric: Tensor) -> float:
    r"""Share of a Jacobian's energy that a metric of low rank catches.

    For the metric :math:`A A^\top` and an orthonormal basis U of the range of A this is
    :math:`\lVert J U \rVert_F^2 / \lVert J \rVert_F^2`: the mean squared output change of
    what the metric sees of a random change, over that of the whole change. No metric of
    rank r catches more than the r leading right singular vectors do, which is
    :func:`foveate.diagnosis.statistics.kappa_cap` (Ky Fan).

    Args:
        rows: Rows of the Jacobian, ``(M, D)``.
        metric: A, ``(D, r)``. Columns may depend on each other; its scale does not matter.

    Returns:
        A number in [0, 1], up to rounding.

    Raises:
        ValueError: If the shapes do not fit, or either is zero.
    """
    if rows.ndim != 2 or metric.ndim != 2 or rows.shape[1] != metric.shape[0]:
        raise ValueError(
            "rows and metric must have shapes (M, D) and (D, r); got "
            f"{tuple(rows.shape)} and {tuple(metric.shape)}."
        )
    for name, value in (("rows", rows), ("metric", metric)):
        if not value.any():
            raise ValueError(f"{name} must not be zero; got only zeros.")
    basis, scale, _ = torch.linalg.svd(metric.double(), full_matrices=False)
    seen = basis[:, scale > scale[0] * 8 * torch.finfo(metric.dtype).eps]
    rows = rows.double()
    return float((rows @ seen).square().sum() / rows.square().sum())


def power_iteration_bound(
    singular_values: Tensor, rank: int, iterations: int, start: float = 1.0
) -> float:
    r"""Bound on the error of a subspace after power iterations.

    Each of q iterations multiplies a block of r directions by :math:`J^\top J` and makes it
    orthonormal again. The tangent of the largest angle to the leading right singular
    vectors (:func:`subspace_tangent`) is then at most
    :math:`(\sigma_{r+1} / \sigma_r)^{2 q}` times what it was.

    Args:
        singular_values: Of J, descending, ``(K,)``.
        rank: Directions in the block, r, from 1 to K - 1.
        iterations: q, at least 0.
        start: Tangent before the first iteration.

    Returns:
        The bound.

    Raises:
        ValueError: If a number is out of range.
    """
    if not 1 <= rank < len(singular_values):
        raise ValueError(
            f"rank must be from 1 to {len(singular_values) - 1} for "
            f"{len(singular_values)} singular values; got {rank}."
        )
    if iterations < 0:
        raise ValueError(f"iterations must be at least 0; got {iterations}.")
    after, last = (float(singular_values[i]) for i in (rank, rank - 1))
    if not last > 0:
        raise ValueError(f"singular value {rank} must be positive; got {last}.")
    return (after / last) ** (2 * iterations) * start


def subspace_tangent(basis: Tensor, truth: Tensor) -> float:
    r"""Tangent of the largest principal angle between two subspaces.

    :math:`\lVert (I - V V^\top) X (V^\top X)^{-1} \rVert_2` for X spanning one and an
    orthonormal basis V of the other.

    Args:
        basis: X, ``(D, r)``, of full rank.
        truth: V, ``(D, r)``, orthonormal.

    Returns:
        At least 0; infinity if a direction of ``truth`` is orthogonal to all of ``basis``.
    """
    inside = truth.T @ basis
    if torch.linalg.matrix_rank(inside) < inside.shape[1]:
        return float("inf")
    outside = basis - truth @ inside
    return float(torch.linalg.matrix_norm(torch.linalg.solve(inside.T, outside.T), 2))


@dataclass(frozen=True)
class Replacement:
    """What replacing single tokens does to the output, beside its bound; all ``(B, K)``.

    Attributes:
        bound: Norm of the token's Jacobian block times the residual.
        first_order: Change by the Jacobian, at most ``bound``.
        measured: Change of the output.
        remainder: Distance of the output from what the Jacobian says.
    """

    bound: Tensor
    first_order: Tensor
    measured: Tensor
    remainder: Tensor


def replacement_bound(
    jacobian: TokenJacobian,
    replacement: Tensor,
    tokens: Sequence[int] | None = None,
    norm: Norm = "frobenius",
    rows: Tensor | None = None,
) -> Replacement:
    r"""Replace one token at a time, and bound what that does to the output.

    To first order the output moves by :math:`J_t \delta_t`, and so by at most
    :math:`\lVert J_t \rVert \, \lVert \delta_t \rVert`, with the residual
    :math:`\delta_t = \hat x_t - x_t`. What is left falls with its square.

    Cost: M VJPs unless ``rows`` are given, a JVP and a forward pass of the tail for each
    token. Memory: the Jacobian.

    Args:
        jacobian: Jacobian at the tap, for B images with T tokens.
        replacement: What replaces each token, ``(B, T, C)``.
        tokens: The K tokens to replace; all if None.
        norm: Of a token's block: ``frobenius``, or ``operator``, which is tighter and
            needs the eigenvalues of a C x C matrix a token.
        rows: Rows of an exact sketch of ``jacobian``, ``(B, D, T, C)``.

    Returns:
        Bound and changes.

    Raises:
        ValueError: If ``norm`` is neither, or shapes or tokens do not fit.
    """
    x = jacobian.tokens
    if norm not in ("frobenius", "operator"):
        raise ValueError(f"norm must be frobenius or operator; got '{norm}'.")
    if replacement.shape != x.shape:
        raise ValueError(
            f"replacement must have the shape of the tokens, {tuple(x.shape)}; "
            f"got {tuple(replacement.shape)}."
        )
    chosen = list(range(x.shape[1])) if tokens is None else list(tokens)
    outside = [t for t in chosen if not 0 <= t < x.shape[1]]
    if outside or not chosen:
        raise ValueError(
            f"tokens must be from 0 to {x.shape[1] - 1}, and at least one; got {chosen}."
        )
    residual = replacement - x
    rows = exact_sketch(jacobian, 0).rows if rows is None else rows
    blocks = _block_norms(rows[:, :, chosen], norm)
    changes = [
        _changes(jacobian, residual, chosen[i : i + _AT_ONCE])
        for i in range(0, len(chosen), _AT_ONCE)
    ]
    bound = blocks * residual[:, chosen].double().norm(dim=2)
    first, measured, rest = (torch.cat(c, dim=1) for c in zip(*changes, strict=True))
    return Replacement(bound, first, measured, rest)


def _block_norms(rows: Tensor, norm: Norm) -> Tensor:
    """Norm of each token's block, ``(B, D, T, C) -> (B, T)``, float64."""
    if norm == "frobenius":
        return rows.double().square().sum((1, 3)).sqrt()
    norms = []
    for block in rows.unbind(2):  # (B, D, C)
        gram = block.double().mT @ block.double()
        norms.append(torch.linalg.eigvalsh(gram)[:, -1].clamp_min(0).sqrt())
    return torch.stack(norms, dim=1)


def _changes(
    jacobian: TokenJacobian, residual: Tensor, chosen: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """First-order change, measured change and their distance, ``(B, K)`` each."""
    alone = residual.new_zeros(len(chosen), *residual.shape)
    for probe, token in zip(alone, chosen, strict=True):
        probe[:, token] = residual[:, token]
    predicted = jacobian.jvp(alone)  # (K, B, M)
    with torch.no_grad():
        moved = [jacobian.tail(jacobian.tokens + probe) for probe in alone]
    measured = torch.stack(moved) - jacobian.output
    norms = [t.double().norm(dim=2).T for t in (predicted, measured, measured - predicted)]
    return norms[0], norms[1], norms[2]


def pullback_length(rows: Tensor, changes: Tensor) -> Tensor:
    r"""First-order output change of changes of many tokens at once.

    :math:`\lVert \sum_t J_t \delta_t \rVert`, with what cancels between tokens. On the
    leading rows (:func:`foveate.diagnosis.sensitivity.leading_rows`) it is the length by a
    metric of that rank, across tokens.

    Args:
        rows: ``(M, T, C)``.
        changes: K changes, ``(K, T, C)``.

    Returns:
        ``(K,)``.
    """
    return (changes.flatten(1) @ rows.flatten(1).T).norm(dim=1)


def factorised_length(rows: Tensor, changes: Tensor) -> Tensor:
    r"""The same by a metric that treats every token by itself.

    :math:`\sqrt{\sum_t \lVert J_t \delta_t \rVert^2}`: the diagonal blocks of
    :math:`J^\top J`, of all block-diagonal metrics the nearest in Frobenius norm. It sees
    no cancellation, and where that is what decides (Theorem 2), it says nothing.

    Args:
        rows: ``(M, T, C)``.
        changes: K changes, ``(K, T, C)``.

    Returns:
        ``(K,)``.
    """
    alone = torch.einsum("mtc,ktc->kmt", rows, changes)
    return alone.square().sum((1, 2)).sqrt()


def rank_match(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's rank correlation of two lists, tied values sharing their mean rank.

    Args:
        a: ``(K,)``.
        b: ``(K,)``.

    Returns:
        A number in [-1, 1], float64; NaN if all values of one list are equal, since they
        then have no order.
    """
    ranks = torch.stack([_mean_ranks(a), _mean_ranks(b)])
    centred = ranks - ranks.mean(1, keepdim=True)
    return (centred[0] * centred[1]).sum() / centred.norm(dim=1).prod()


def _mean_ranks(x: Tensor) -> Tensor:
    _, group, count = x.unique(return_inverse=True, return_counts=True)
    last = count.cumsum(0).double()
    return (last - (count - 1) / 2)[group]
