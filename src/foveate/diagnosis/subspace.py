"""An orthonormal basis of output space, grown towards what moves the output most."""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from foveate.diagnosis.output_metric import Jacobian

START = 4  # random directions at which the search starts, and which probe the spectrum
STEP = 4  # directions that one round of the search adds


class Basis:
    r"""Orthonormal directions Q of output space, and the Jacobian's rows there.

    The rows are :math:`Q^\top J`. All that is random is drawn for each image from its own
    source, so that it does not depend on the other images.

    Args:
        jacobian: Jacobian at the tap, for B images with M outputs and T tokens. firsts: For
            each question, the first token it is about: 0 for the whole Jacobian, the
            number of prefix tokens for its patch columns.
        capacity: Most directions it will hold, at most M.
        generators: One source of randomness on the CPU for each image.
    """

    def __init__(
        self,
        jacobian: Jacobian,
        firsts: Sequence[int],
        capacity: int,
        generators: Sequence[Generator],
    ) -> None:
        tokens, output = jacobian.tokens, jacobian.output
        self.jacobian = jacobian
        self.firsts = firsts
        self.generators = generators
        self.size = 0
        self._directions = output.new_empty(len(tokens), capacity, output.shape[1])
        self._rows = tokens.new_empty(len(tokens), capacity, *tokens.shape[1:])
        self._grams = [output.new_zeros(len(tokens), capacity, capacity) for _ in firsts]

    @property
    def directions(self) -> Tensor:
        """Q, transposed: ``(B, D, M)``."""
        return self._directions[:, : self.size]

    @property
    def rows(self) -> Tensor:
        """The Jacobian's rows in the basis, ``(B, D, T, C)``."""
        return self._rows[:, : self.size]

    def ritz(self, question: int) -> tuple[Tensor, Tensor]:
        """Energies, descending, ``(B, D)``, and vectors in the basis, ``(B, D, D)``."""
        gram = self._grams[question][:, : self.size, : self.size]
        energy, vectors = torch.linalg.eigh(gram.double())
        return energy.flip(1), vectors.flip(2)

    def draw(self, count: int) -> Tensor:
        """Normal directions, ``(B, count, M)``."""
        shape = (count, self._directions.shape[2])
        drawn = [torch.randn(shape, generator=g) for g in self.generators]
        return torch.stack(drawn).to(self._directions)

    def add(self, candidates: Tensor) -> None:
        """Make directions orthonormal to the basis, pull them back, and keep both.

        Cost: one VJP each.

        Args:
            candidates: ``(B, R, M)``. One that adds nothing is replaced by a random one.
        """
        spare = self.draw(candidates.shape[1])
        new = orthonormalise(candidates, self.directions, spare)
        here = slice(self.size, self.size + new.shape[1])
        self.size = here.stop
        self._directions[:, here] = new
        self._rows[:, here] = self.jacobian.vjp(new.transpose(0, 1)).transpose(0, 1)
        for gram, first in zip(self._grams, self.firsts, strict=True):
            all_rows, new_rows = (r[:, :, first:] for r in (self.rows, self._rows[:, here]))
            products = all_rows.flatten(2) @ new_rows.flatten(2).mT  # (B, D, R)
            gram[:, : self.size, here] = products
            gram[:, here, : self.size] = products.mT

    def multiply(self, vectors: Tensor, question: int) -> Tensor:
        r"""Apply :math:`J J^\top` of a question's tokens to directions in the basis.

        Cost: one JVP each.

        Args:
            vectors: Their coefficients in the basis, ``(B, D, R)``.
            question: Index of the question.

        Returns:
            ``(B, R, M)``.
        """
        pulled = vectors.mT.to(self._rows) @ self.rows.flatten(2)  # (B, R, T * C)
        pulled = pulled.unflatten(2, self._rows.shape[2:])
        pulled[:, :, : self.firsts[question]] = 0
        return self.jacobian.jvp(pulled.transpose(0, 1)).transpose(0, 1)

    def misses(self, count: int, question: int) -> Tensor:
        r"""Push random signs forward, and measure what leaves the basis.

        For signs s on the tokens of the question, :math:`\mathbb{E} \lVert (I - Q Q^\top) J
        s \rVert^2` is the energy outside the rows. Cost: ``count`` JVPs.

        Args:
            count: Number of sign vectors.
            question: Index of the question.

        Returns:
            The squared norm of each, ``(B, count)``, float64 on the CPU.
        """
        if count == 0:
            return torch.zeros(len(self.rows), 0, dtype=torch.float64)
        shape, bit = (count, *self._rows.shape[2:]), torch.int8
        drawn = [
            torch.randint(0, 2, shape, generator=g, dtype=bit) for g in self.generators
        ]
        signs = 2 * torch.stack(drawn).to(self._rows) - 1
        signs[:, :, : self.firsts[question]] = 0
        pushed = self.jacobian.jvp(signs.transpose(0, 1)).transpose(0, 1)  # (B, count, M)
        outside = pushed - pushed @ self.directions.mT @ self.directions
        return outside.double().square().sum(2).cpu()


def orthonormalise(candidates: Tensor, basis: Tensor, spare: Tensor) -> Tensor:
    """Make vectors orthonormal to a basis and to each other.

    Args:
        candidates: ``(B, R, M)``.
        basis: Orthonormal, ``(B, D, M)`` with D + R <= M.
        spare: Random vectors, ``(B, R, M)``. They replace candidates that lie, up to the
            square root of the machine's precision, in the span of the basis and of the
            candidates before them.

    Returns:
        ``(B, R, M)``.
    """

    def project(x: Tensor) -> Tensor:
        for _ in range(2):  # once leaves rounding errors of the size of what was taken out
            x = x - x @ basis.mT @ basis
        return x

    def unit(x: Tensor) -> Tensor:
        return x / x.norm(dim=2, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)

    x = project(unit(candidates))
    pivots = torch.linalg.qr(x.mT).R.diagonal(dim1=1, dim2=2).abs()  # (B, R)
    is_new = pivots > torch.finfo(x.dtype).eps ** 0.5
    x = project(unit(torch.where(is_new[..., None], x, spare)))
    x = project(torch.linalg.qr(x.mT).Q.mT)
    return torch.linalg.qr(x.mT).Q.mT


def search(basis: Basis, rank: int, size: int) -> None:
    r"""Grow an empty basis until it holds the leading directions of all its questions.

    It starts at a few random directions, multiplied by :math:`J J^\top` once for each
    question. Then the questions take turns: each multiplies those of its ``rank`` leading
    Ritz vectors that have most energy in directions found since its last turn, since they
    are the least settled. With one question this is a block Krylov method with full
    re-orthonormalisation; with two, each also feeds the other. Cost: ``size`` VJPs and
    ``size - START`` JVPs.

    Args:
        basis: Empty; it holds ``size`` directions afterwards.
        rank: Leading directions to find.
        size: Directions to spend.
    """
    basis.add(basis.draw(min(START, size)))
    start, since = basis.size, []
    for question in range(len(basis.firsts)):
        since.append(basis.size)
        count = min(start, size - basis.size)
        if count:
            drawn = torch.eye(
                basis.size, count, dtype=torch.float64
            )  # they come first in Q
            basis.add(basis.multiply(drawn.expand(len(basis.rows), -1, -1), question))
    turn = 0
    while basis.size < size:
        question = turn % len(basis.firsts)
        vectors = _unsettled(basis, question, since[question], rank)
        since[question] = basis.size
        basis.add(basis.multiply(vectors[:, :, : size - basis.size], question))
        turn += 1


def _unsettled(basis: Basis, question: int, since: int, rank: int) -> Tensor:
    energy, vectors = basis.ritz(question)
    fresh = energy * vectors[:, since:].square().sum(1)  # (B, D)
    leading = fresh[:, : max(rank, STEP)]
    chosen = leading.topk(min(STEP, leading.shape[1])).indices
    return vectors.gather(2, chosen[:, None].expand(-1, basis.size, -1))
