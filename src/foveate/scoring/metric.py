r"""The Spectral Pullback Network: a task's metric on token space without back-propagation.

The pullback metric :math:`g = J^\top J` of a task is predicted from the tokens alone as
:math:`\sum_{j \le r} \lambda_j u_j u_j^\top + \varepsilon I`, and never formed.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import gelu, pad

from foveate.scoring.attention import (
    Standardise,
    TokenAttention,
    TokenMLP,
    check_tokens,
    initialise,
    log_softplus,
)
from foveate.scoring.orthonormal import cholesky_qr, full_precision
from foveate.tokens import widen

__all__ = ["PredictedMetric", "SpectralPullbackNetwork"]

Reach = Literal["all", "patches"]


@dataclass(frozen=True)
class PredictedMetric:
    r"""A metric of low rank for each of B images with T = P + K tokens of C channels.

    :math:`g = \sum_{j \le r} \lambda_j u_j u_j^\top + \varepsilon I` on
    :math:`\mathbb{R}^{TC}`. Sums are taken in float32 at least, under autocast too. Square
    roots have no gradient where they are zero.

    Attributes:
        directions: Orthonormal rows :math:`u_j`, ``(B, r, T, C)``.
        energies: :math:`\lambda_j`, positive, ``(B, r)``: squared singular values, in
            squared output units per squared token unit.
        eps: What every direction has besides, in the unit of the energies.
        num_prefix: Prefix tokens, P.
    """

    directions: Tensor
    energies: Tensor
    eps: float = 0.0
    num_prefix: int = 0

    def apply(self, v: Tensor) -> Tensor:
        r"""Squared length of a displacement of all tokens, :math:`v^\top g v`.

        Cost: r T C multiply-adds.

        Args:
            v: ``(B, T, C)``.

        Returns:
            ``(B,)``, in squared output units.

        Raises:
            ValueError: If v has another shape than the tokens.
        """
        expected = (len(self.directions), *self.directions.shape[2:])
        if v.shape != expected:
            raise ValueError(f"v must have shape {expected}; got {tuple(v.shape)}.")
        flat = v.to(self.directions).flatten(1)  # (B, T * C)
        with full_precision(flat):
            along = self.directions.flatten(2) @ flat[..., None]  # (B, r, 1)
            seen = (self.energies * along[..., 0].square()).sum(1)
        return seen + self.eps * flat.square().sum(1)

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        r"""How far the output moves between two feature maps, to first order.

        :math:`\sqrt{(a - b)^\top g (a - b)}`. Cost: that of :meth:`apply`.

        Args:
            a: ``(B, T, C)``.
            b: ``(B, T, C)``.

        Returns:
            ``(B,)``, in output units.
        """
        return self.apply(widen(a) - widen(b)).sqrt()

    def token_distances(self, x: Tensor) -> Tensor:
        r"""Distances between the patches of one map, in the mean of their two metrics.

        :math:`d_{ij}^2 = \tfrac12 (f_i - f_j)^\top (g_{ii} + g_{jj}) (f_i - f_j)`, where
        :math:`g_{ii}` is the C x C block of g at patch i: what moving one of them to the
        other would change. Cost: r K^2 C multiply-adds, memory K^2.

        Args:
            x: Tokens f, ``(B, T, C)``.

        Returns:
            ``(B, K, K)``, symmetric, in output units.

        Raises:
            ValueError: If x has other channels.
        """
        check_tokens(x, self.directions.shape[3], self.num_prefix)
        f = x[:, self.num_prefix :].to(self.directions)
        f = f - f.mean(1, keepdim=True)  # what all share would only cancel below
        total = (
            self.eps * torch.cdist(f, f, compute_mode="donot_use_mm_for_euclid_dist") ** 2
        )
        with full_precision(f):
            for row in self.sketch().unbind(2):  # (B, K, C)
                across = row @ f.mT  # (B, K, K): direction at i, feature of j
                at_i = (across.diagonal(dim1=1, dim2=2)[..., None] - across).square()
                total = total + (at_i + at_i.mT) / 2
        return total.sqrt()

    def importance(self) -> Tensor:
        r"""Importance of each token in the directions.

        :math:`\sqrt{\sum_j \lambda_j \lVert u_j^{(t)} \rVert^2}`, as the target
        :func:`foveate.diagnosis.sensitivity.importance` has it.

        Returns:
            ``(B, T)``, prefix tokens first, nonnegative, without the part of eps.
        """
        of_token = self.directions.square().sum(3)  # (B, r, T)
        return (self.energies[..., None] * of_token).sum(1).sqrt()

    def sketch(self) -> Tensor:
        r"""Rows :math:`\sqrt{\lambda_j} u_j` at each patch.

        The outer products of the rows, summed over j, are the patches' part of
        :math:`g - \varepsilon I`. (Pulled random probes have it as their mean instead:
        they are longer by the root of their number.)

        Returns:
            ``(B, K, r, C)``.
        """
        scaled = self.energies.sqrt()[..., None, None] * self.directions
        return scaled[:, :, self.num_prefix :].transpose(1, 2)


class SpectralPullbackNetwork(nn.Module):
    r"""Predicts a metric of rank r from the tokens.

    Tokens are standardised, normalised and projected to H channels, and pass two pre-norm
    blocks of attention and MLP. From there every token is projected to its C x r part of
    the directions, which :func:`cholesky_qr` makes orthonormal, and the mean over all
    tokens gives the energies through an MLP and a Softplus. Permuting patches permutes the
    directions and leaves the energies.

    Cost per image: :math:`T (CH + 16H^2 + CHr) + 4T^2H + 6TCr^2` multiply-adds for T
    tokens. Most parameters are the projection's, :math:`(H + 1) C r`.

    Call :meth:`calibrate` on some training data before training.

    Args:
        channels: Channels of a token, C.
        rank: Directions, r.
        hidden: Channels inside, H.
        num_heads: Attention heads, a divisor of H.
        eps: Energy that every direction has besides.
        reach: Tokens that the directions cover: ``all``, or ``patches`` alone, whose share
            of the energy the class token would otherwise leave no directions for. All
            tokens are read in both cases.
        generator: Source of the initial weights; None for the global one.

    Raises:
        ValueError: If a number or ``reach`` is out of range.

    References:
        The layers are those that "diagnosing the task-induced Riemannian metric of ViT
        feature space and learning it at low rank" gives; standardisation, the units of the
        energies and ``reach`` are ours.
    """

    log_unit: Tensor

    def __init__(
        self,
        channels: int,
        rank: int = 20,
        hidden: int = 128,
        num_heads: int = 4,
        *,
        eps: float = 1e-6,
        reach: Reach = "all",
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        _check(rank, eps, reach)
        self.channels, self.rank, self.eps, self.reach = channels, rank, eps, reach
        self.standardise = Standardise(channels)
        self.norm = nn.LayerNorm(channels)
        self.project = nn.Linear(channels, hidden)
        self.blocks = nn.Sequential(
            TokenAttention(hidden, num_heads),
            TokenMLP(hidden, 2 * hidden),
            TokenAttention(hidden, num_heads),
            TokenMLP(hidden, 2 * hidden),
            nn.LayerNorm(hidden),
        )
        self.coordinates = nn.Linear(hidden, channels * rank)
        self.pooled = nn.Linear(hidden, hidden)
        self.to_energies = nn.Linear(hidden, rank)
        self.register_buffer("log_unit", torch.zeros(rank))
        initialise(self, generator)

    @torch.no_grad()
    def calibrate(self, tokens: Tensor, energies: Tensor) -> None:
        """Fix the units: spread of each channel, geometric mean of each energy.

        Args:
            tokens: Tokens of some images, ``(S, T, C)``.
            energies: Their target energies, positive, ``(S, r)``.

        Raises:
            ValueError: If something is not finite or has another shape.
        """
        if energies.ndim != 2 or energies.shape[1] != self.rank:
            raise ValueError(
                f"energies must have shape (S, {self.rank}); got {tuple(energies.shape)}."
            )
        logs = energies.double().log()
        if not logs.isfinite().all():
            raise ValueError(
                "energies must be positive and finite; got values from "
                f"{float(energies.min())} to {float(energies.max())}."
            )
        self.standardise.fit(tokens)
        # Softplus is log 2 where the MLP starts, at about 0.
        self.log_unit.copy_(logs.mean(0) - math.log(math.log(2)))

    def forward(self, x: Tensor, num_prefix: int) -> PredictedMetric:
        """Predict the metric at some tokens.

        Args:
            x: Prefix and patch tokens, ``(B, P + K, C)``.
            num_prefix: Prefix tokens, P.

        Returns:
            The metric, float32 at least, under autocast too. With ``reach="patches"`` its
            directions are zero at the prefix tokens.

        Raises:
            ValueError: If the tokens have other channels, are not finite or fewer numbers
                than the rank, or if directions coincide.
        """
        check_tokens(x, self.channels, num_prefix)
        h = self.blocks(self.project(self.norm(self.standardise(x))))  # (B, T, H)
        hidden = num_prefix if self.reach == "patches" else 0
        raw = widen(self.coordinates(h[:, hidden:])).unflatten(2, (self.channels, -1))
        columns = cholesky_qr(raw.flatten(1, 2))  # (B, (T - hidden) * C, r)
        rows = columns.mT.unflatten(2, (-1, self.channels))  # (B, r, T - hidden, C)
        energies = self.to_energies(gelu(self.pooled(h.mean(1))))
        return PredictedMetric(
            pad(rows, (0, 0, hidden, 0)) if hidden else rows,
            (self.log_unit + log_softplus(widen(energies))).exp(),
            self.eps,
            num_prefix,
        )


def _check(rank: int, eps: float, reach: str) -> None:
    if rank < 1:
        raise ValueError(f"rank must be at least 1; got {rank}.")
    if not eps >= 0:
        raise ValueError(f"eps must not be negative; got {eps}.")
    if reach not in get_args(Reach):
        raise ValueError(f"reach must be one of {get_args(Reach)}; got '{reach}'.")
