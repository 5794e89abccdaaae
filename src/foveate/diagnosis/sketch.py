"""A few rows that stand for a whole Jacobian, found with a fixed number of products."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn.functional import one_hot

from foveate.diagnosis.output_metric import Jacobian
from foveate.diagnosis.subspace import START, Basis, search
from foveate.diagnosis.trace import Missed, estimate_missed

_CHUNK = 64  # rows of an exact Jacobian taken at once


@dataclass(frozen=True)
class Budget:
    """Where the products of the randomised route go, for each image.

    Attributes:
        total: JVPs, and as many VJPs, that may be spent.
        search: Directions of output space that are searched for; one VJP each.
        probes: Random directions outside them that measure what they miss; one VJP each.
    """

    total: int
    search: int
    probes: int


def split_budget(rank: int, probes: int, iterations: int, num_outputs: int) -> Budget:
    """Split ``rank * iterations + probes`` products of each kind.

    One VJP and one JVP go to the adjoint check. Two fifths of the probes, at least two,
    measure what the search misses; all other VJPs are the search. JVPs that the search
    leaves over are probes too. More iterations buy a better subspace, and so better leading
    directions; more probes buy a better total as well.

    Args:
        rank: Leading directions to find.
        probes: At least 1.
        iterations: At least 1.
        num_outputs: Outputs of the task, M.

    Returns:
        The budget; ``search`` and ``probes`` are at most M together.

    Raises:
        ValueError: If a number is too small.
    """
    for name, value in (("probes", probes), ("iterations", iterations)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}.")
    total = rank * iterations + probes
    rows, needed = min(total - 1, num_outputs), min(rank, num_outputs)
    outside = min(max(2, 2 * probes // 5), rows - needed)
    if rows < num_outputs and outside < 2:
        raise ValueError(
            f"probes must be at least {probes + 2 - outside} for rank {rank} and "
            f"{iterations} iterations; got {probes}."
        )
    return Budget(total, rows - outside, outside)


@dataclass(frozen=True)
class Part:
    """What a sketch knows about the Jacobian with respect to some of the tokens.

    Attributes:
        first: First of these tokens: 0 for all, the number of prefix tokens for patches.
        gram: Products of the rows over these tokens, ``(B, D, D)``, float64 on the CPU.
        missed: Energy of the Jacobian outside the rows.
    """

    first: int
    gram: Tensor
    missed: Missed


@dataclass(frozen=True)
class Sketch:
    r"""Rows :math:`Q^\top J` of each image's Jacobian, Q an orthonormal basis of D outputs.

    Attributes:
        rows: ``(B, D, T, C)`` for T tokens, prefix included. weight: What each row stands
            for in a sum over all outputs, ``(D,)``: 1 for a row that
            was searched for, more for a random one.
        num_start: Leading rows that are random and probe the spectrum; 0 if nothing is
            missed.
        num_outputs: Directions of output space, M.
        parts: What is known about ``all`` tokens and about the ``patches``.
    """

    rows: Tensor
    weight: Tensor
    num_start: int
    num_outputs: int
    parts: dict[str, Part]


def exact_sketch(jacobian: Jacobian, num_prefix: int) -> Sketch:
    """Take the whole Jacobian, by rows, or by columns where there are fewer of them.

    Cost: M VJPs, or T * C JVPs. Memory: the Jacobian of all B images. Where there are fewer
    columns than outputs the rows are those of the triangular QR factor, D = T * C.

    Args:
        jacobian: Jacobian at the tap, for B images.
        num_prefix: Prefix tokens.

    Returns:
        A sketch that misses nothing.
    """
    by_rows = jacobian.num_outputs <= jacobian.tokens[0].numel()
    rows = _all_rows(jacobian) if by_rows else _triangle(jacobian)
    nothing = Missed(*torch.zeros(2, len(rows), dtype=torch.float64))
    parts = {
        name: Part(first, row_products(rows, first), nothing)
        for name, first in (("all", 0), ("patches", num_prefix))
    }
    return Sketch(rows, rows.new_ones(rows.shape[1]), 0, rows.shape[1], parts)


def _all_rows(jacobian: Jacobian) -> Tensor:
    tokens, count = jacobian.tokens, jacobian.num_outputs
    rows = tokens.new_empty(len(tokens), count, *tokens.shape[1:])
    for index in torch.arange(count, device=tokens.device).split(_CHUNK):
        cotangents = one_hot(index, count).to(tokens)[:, None]  # (R, 1, M)
        pulled = jacobian.vjp(cotangents.expand(-1, len(tokens), -1))
        rows[:, index] = pulled.transpose(0, 1)
    return rows


def _triangle(jacobian: Jacobian) -> Tensor:
    tokens = jacobian.tokens
    identity = torch.eye(tokens[0].numel(), dtype=tokens.dtype, device=tokens.device)
    directions = identity.view(-1, 1, *tokens.shape[1:])
    columns = [
        jacobian.jvp(part.expand(-1, len(tokens), -1, -1))
        for part in directions.split(_CHUNK)
    ]
    matrix = torch.cat(columns).permute(1, 2, 0).double()  # (B, M, T * C)
    return torch.linalg.qr(matrix, "r").R.unflatten(2, tokens.shape[1:]).to(tokens)


def randomised_sketch(
    jacobian: Jacobian,
    num_prefix: int,
    rank: int,
    budget: Budget,
    generators: Sequence[Generator],
) -> Sketch:
    r"""Find rows that hold the leading directions of the Jacobian and of its patch columns.

    One orthonormal basis Q of output space serves both: a VJP gives a row for all tokens
    and, as a slice of it, for the patches; a JVP of a row, or of a row without its prefix
    tokens, extends the Krylov space of :math:`J J^\top` or of :math:`J_p J_p^\top`
    (:func:`foveate.diagnosis.subspace.search`). What Q misses is measured by a random frame
    outside it, whose rows are kept, and by JVPs of random signs
    (:func:`foveate.diagnosis.trace.estimate_missed`).

    Cost: ``budget.search + budget.probes`` VJPs and at most ``budget.total - 1`` JVPs.
    Memory: as many token sequences and outputs an image.

    Args:
        jacobian: Jacobian at the tap, for B images.
        num_prefix: Prefix tokens.
        rank: Leading directions to find.
        budget: How many products to spend.
        generators: One source of randomness on the CPU for each image.

    Returns:
        The sketch.
    """
    firsts = sorted({0, num_prefix})
    basis = Basis(jacobian, firsts, budget.search + budget.probes, generators)
    search(basis, rank, budget.search)
    if budget.probes:
        basis.add(basis.draw(budget.probes))
    outside = jacobian.num_outputs - budget.search
    num_start = num_signs = 0
    if outside > budget.probes:  # or else the basis is complete
        num_start = min(START, budget.search)
        num_signs = (budget.total - 1 - budget.search + num_start) // len(firsts)

    def know(question: int, first: int) -> Part:
        products = row_products(basis.rows, first)
        misses = basis.misses(num_signs, question)
        return Part(
            first, products, estimate_missed(products, budget.probes, outside, misses)
        )

    known = [know(question, first) for question, first in enumerate(firsts)]
    weight = basis.rows.new_ones(basis.size)
    weight[budget.search :] = outside / max(1, budget.probes)
    parts = {"all": known[0], "patches": known[-1]}
    return Sketch(basis.rows, weight, num_start, jacobian.num_outputs, parts)


def row_products(rows: Tensor, first: int) -> Tensor:
    r"""Products of rows over the tokens from ``first`` on, :math:`B B^\top`, in float64.

    In float32 all singular values below 2.4e-4 of the largest would be lost. The products
    of two float32 numbers are exact in float64, so that here the limit is 1e-8, less than
    the rounding errors of the rows themselves.

    Args:
        rows: ``(B, D, T, C)``.
        first: First token.

    Returns:
        ``(B, D, D)`` on the CPU.
    """
    total = rows.new_zeros(len(rows), rows.shape[1], rows.shape[1], dtype=torch.float64)
    for chunk in rows[:, :, first:].split(16, dim=2):
        x = chunk.flatten(2).double()  # (B, D, tokens * C)
        total += x @ x.mT
    return total.cpu()
