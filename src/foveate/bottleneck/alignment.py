"""How well a few random probes find the directions that a task depends on."""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from foveate.diagnosis.output_metric import Jacobian
from foveate.diagnosis.sensitivity import leading_rows
from foveate.diagnosis.sketch import Sketch

__all__ = ["alignment", "leading_subspace", "probe_subspace", "random_subspace"]


def alignment(found: Tensor, reference: Tensor) -> Tensor:
    r"""Share of a subspace that another one covers, :math:`V_1`.

    :math:`V_1 = \lVert U^\top V \rVert_F^2 / r`, the mean squared cosine of the principal
    angles: 1 for equal subspaces, r / n in the mean for a random one of n dimensions.

    Args:
        found: Orthonormal U, ``(B, r, n)``.
        reference: Orthonormal V, ``(B, r, n)``.

    Returns:
        ``(B,)``, float64, from 0 to 1.

    Raises:
        ValueError: If the shapes differ.
    """
    if found.shape != reference.shape or found.ndim != 3:
        raise ValueError(
            "found and reference must both be (B, r, n); got "
            f"{tuple(found.shape)} and {tuple(reference.shape)}."
        )
    products = found.double() @ reference.double().mT
    return products.square().sum((1, 2)) / found.shape[1]


def random_subspace(like: Tensor, rank: int, generators: Sequence[Generator]) -> Tensor:
    """Span of normal vectors, where randomised iterations start.

    Args:
        like: Tokens, ``(B, T, C)``.
        rank: Dimensions, r.
        generators: One source of randomness on the CPU for each image.

    Returns:
        Orthonormal, ``(B, r, T * C)``, in the dtype and on the device of ``like``.
    """
    shape = (rank, like[0].numel())
    drawn = torch.stack([torch.randn(shape, generator=g) for g in generators])
    return _orthonormal(drawn.to(like))


def probe_subspace(
    jacobian: Jacobian,
    rank: int,
    width: int,
    iterations: int,
    generators: Sequence[Generator],
) -> Tensor:
    r"""Leading right singular vectors by randomised subspace iteration.

    Normal vectors, then q times :math:`\Omega \leftarrow \mathrm{orth}(J^\top J \Omega)`.
    If ``width`` exceeds ``rank``, the leading directions within the span are taken, from
    the singular values of :math:`J \Omega`. Cost: ``width * iterations`` VJPs and JVPs, and
    ``width`` JVPs more if it exceeds ``rank``.

    Args:
        jacobian: Jacobian for B images.
        rank: Directions to return, r.
        width: Directions to iterate, at least r; ``width - rank`` are oversampling.
        iterations: Rounds, q.
        generators: One source of randomness on the CPU for each image.

    Returns:
        Orthonormal, ``(B, r, T * C)``.

    Raises:
        ValueError: If ``width`` or ``iterations`` is out of range.

    References:
        Halko, Martinsson and Tropp, "Finding structure with randomness", SIAM Review
        53(2), 2011.
    """
    tokens = jacobian.tokens
    if not rank <= width <= tokens[0].numel() or rank < 1 or iterations < 1:
        raise ValueError(
            f"rank, width and iterations must satisfy 1 <= rank <= width <= "
            f"{tokens[0].numel()} and iterations >= 1; got {rank}, {width}, {iterations}."
        )
    found = random_subspace(tokens, width, generators)
    for _ in range(iterations):
        pulled = jacobian.vjp(_push(jacobian, found))
        found = _orthonormal(pulled.transpose(0, 1).flatten(2))
    if width == rank:
        return found
    pushed = _push(jacobian, found).transpose(0, 1)  # (B, width, M)
    left = torch.linalg.svd(pushed.double(), full_matrices=False).U
    return left[:, :, :rank].mT.to(found) @ found


def leading_subspace(sketch: Sketch, rank: int) -> Tensor:
    """Leading right singular vectors of the rows of a sketch, over all tokens.

    Args:
        sketch: Rows of each image's Jacobian, ``(B, D, T, C)``; of an exact one these are
            the singular vectors themselves.
        rank: Directions, r <= D.

    Returns:
        Orthonormal, ``(B, r, T * C)``.

    Raises:
        ValueError: If the sketch has fewer rows.
    """
    if not 1 <= rank <= sketch.rows.shape[1]:
        raise ValueError(
            f"rank must be from 1 to the {sketch.rows.shape[1]} rows of the sketch; "
            f"got {rank}."
        )
    vectors = torch.linalg.eigh(sketch.parts["all"].gram).eigenvectors.flip(2)
    found = [
        leading_rows(rows, v, rank).flatten(1)
        for rows, v in zip(sketch.rows, vectors, strict=True)
    ]
    return _orthonormal(torch.stack(found))


def _push(jacobian: Jacobian, directions: Tensor) -> Tensor:
    """``J v`` of ``(B, R, T * C)``, as ``(R, B, M)``."""
    shape = jacobian.tokens.shape[1:]
    return jacobian.jvp(directions.transpose(0, 1).unflatten(2, shape))


def _orthonormal(rows: Tensor) -> Tensor:
    return torch.linalg.qr(rows.mT).Q.mT.contiguous()
