"""What merging any two patches would change, predicted in one forward pass."""

import math

import torch
from torch import Generator, Tensor, nn

from foveate.scoring.attention import (
    Standardise,
    TokenAttention,
    TokenMLP,
    check_tokens,
    initialise,
)
from foveate.scoring.orthonormal import cholesky_qr
from foveate.tokens import widen

__all__ = ["FactorNetwork"]


class FactorNetwork(nn.Module):
    r"""Predicts a factor of the Jacobian at every patch, made for pricing merges.

    Moving patch i by x changes the task's output, up to a rotation of output space, by
    :math:`A_i P^\top x`: the factors :math:`A_i \in \mathbb{R}^{R \times D}` are predicted,
    the orthonormal columns :math:`P \in \mathbb{R}^{C \times D}` are shared by all patches
    and images. So the cost of every pair is a product of small matrices; under merging the
    factors add up as the Jacobian's blocks do. They are in the convention of pulled probes:
    the mean over the R rows of :math:`(A_i P^\top x)^2` stands for the squared change, in
    a unit of its own for each image, on which no choice between merges depends.

    Tokens are standardised, normalised and projected to H channels, pass pre-norm blocks of
    attention and MLP, and are projected to their factor, whose magnitude has an exponential
    of its own because sensitivities spread over decades.

    Cost per image: :math:`T (CH + 8 L H^2 + H R D) + 2 L T^2 H` multiply-adds for T tokens
    and L blocks.

    Call :meth:`calibrate` on some training data before training.

    Args:
        channels: Channels of a token, C.
        rows: Rows of a factor, R.
        dims: Columns of a factor, D.
        hidden: Channels inside, H.
        blocks: Blocks of attention and MLP, L.
        num_heads: Attention heads, a divisor of H.
        generator: Source of the initial weights; None for the global one.

    Raises:
        ValueError: If a number is out of range.
    """

    def __init__(
        self,
        channels: int,
        rows: int = 8,
        dims: int = 32,
        hidden: int = 128,
        blocks: int = 1,
        *,
        num_heads: int = 4,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        if min(rows, blocks) < 1 or not 1 <= dims <= channels:
            raise ValueError(
                f"rows and blocks must be at least 1 and dims from 1 to {channels}; got "
                f"{rows}, {blocks} and {dims}."
            )
        self.channels, self.rows, self.dims = channels, rows, dims
        self.standardise = Standardise(channels)
        self.norm = nn.LayerNorm(channels)
        self.project = nn.Linear(channels, hidden)
        mixers = [TokenAttention(hidden, num_heads) for _ in range(blocks)]
        self.mixers = nn.ModuleList(mixers)
        self.mlps = nn.ModuleList(TokenMLP(hidden, 2 * hidden) for _ in range(blocks))
        self.last = nn.LayerNorm(hidden)
        self.factors = nn.Linear(hidden, rows * dims)
        self.magnitude = nn.Linear(hidden, 1)
        initialise(self, generator)
        nn.init.zeros_(self.magnitude.weight)
        # Rows start with the length of probes whose entries have a mean square of one.
        nn.init.constant_(self.magnitude.bias, 0.5 * math.log(channels / dims))
        columns = torch.empty(channels, dims)
        self.columns = nn.Parameter(nn.init.normal_(columns, generator=generator))

    @torch.no_grad()
    def calibrate(self, tokens: Tensor) -> None:
        """Fix the unit of each channel.

        Args:
            tokens: Tokens of some images, ``(S, T, C)``.

        Raises:
            ValueError: If they have other channels or are not finite.
        """
        self.standardise.fit(tokens)

    @property
    def basis(self) -> Tensor:
        """The shared columns P, orthonormal, ``(C, D)``, float32 at least."""
        return cholesky_qr(widen(self.columns)[None])[0]

    def forward(self, x: Tensor, num_prefix: int, key_bias: Tensor | None = None) -> Tensor:
        """Predict the factor of each patch.

        Args:
            x: Prefix and patch tokens, ``(B, P + K, C)``.
            num_prefix: Prefix tokens, P; they are attended to and have no factor.
            key_bias: Log size of each token, ``(B, 1, 1, P + K)``: a merged token is then
                attended to as its copies are, and its factor is that of one of them.

        Returns:
            Factors in the coordinates of :attr:`basis`, ``(B, K, R, D)``.

        Raises:
            ValueError: If the tokens have other channels, or all are prefix tokens.
        """
        check_tokens(x, self.channels, num_prefix)
        h = self.project(self.norm(self.standardise(x)))
        for mix, mlp in zip(self.mixers, self.mlps, strict=True):
            h = mlp(mix(h, key_bias))
        h = self.last(h[:, num_prefix:])
        scaled = widen(self.factors(h)) * widen(self.magnitude(h)).exp()
        return scaled.unflatten(-1, (self.rows, self.dims))
