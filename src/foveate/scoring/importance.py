"""The importance head: how much a task depends on each patch, in one forward pass."""

import math

import torch
from torch import Generator, Tensor, nn

from foveate.scoring.attention import (
    Standardise,
    TokenAttention,
    check_tokens,
    initialise,
    log_softplus,
)
from foveate.tokens import widen

__all__ = ["ImportanceHead"]


class ImportanceHead(nn.Module):
    r"""Predicts the importance of each patch.

    The target is :math:`\sqrt{\sum_j \sigma_j^2 \lVert v_j^{(t)} \rVert^2}`, of
    :func:`foveate.diagnosis.sensitivity.importance`. Tokens are standardised, normalised
    and projected to H channels, look at each other in one pre-norm attention block, and
    pass an MLP of their own and a Softplus:

    .. math::
        h = W \,\mathrm{LN}(F), \quad
        h \leftarrow h + \mathrm{Attention}(\mathrm{LN}(h)), \quad
        \widehat{\mathrm{imp}} = c \,\mathrm{Softplus}(\mathrm{MLP}(\mathrm{LN}(h))) .

    It has no positions of its own, hence permuting patches permutes its scores.
    Parameters: :math:`7H^2 + H(C + 15) + 2C + 1`, whatever the number of tokens; 306,017
    for C = 768. Cost per image: :math:`T (CH + 7H^2) + 2T^2H` multiply-adds for T tokens.

    Call :meth:`calibrate` on some training data before training.

    Args:
        channels: Channels of a token, C.
        hidden: Channels inside, H.
        num_heads: Attention heads, a divisor of H.
        generator: Source of the initial weights; None for the global one.

    Raises:
        ValueError: If the heads do not divide the hidden channels.

    References:
        The layers are those that "diagnosing the task-induced Riemannian metric of ViT
        feature space and learning it at low rank" gives; standardisation and the unit c
        are ours.
    """

    log_unit: Tensor

    def __init__(
        self,
        channels: int,
        hidden: int = 160,
        num_heads: int = 4,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        self.channels = channels
        self.standardise = Standardise(channels)
        self.norm = nn.LayerNorm(channels)
        self.project = nn.Linear(channels, hidden)
        self.mix = TokenAttention(hidden, num_heads)
        self.mlp = nn.Sequential(
            nn.LayerNorm(hidden),
            nn.Linear(hidden, 3 * hidden),
            nn.GELU(),
            nn.Linear(3 * hidden, 1),
        )
        self.register_buffer("log_unit", torch.zeros(()))
        initialise(self, generator)

    @torch.no_grad()
    def calibrate(self, tokens: Tensor, log_target: Tensor) -> None:
        """Fix the units: spread of each channel, geometric mean of the importances.

        Args:
            tokens: Tokens of some images, ``(S, P + K, C)``.
            log_target: Their log-importances, ``(S, K)``.

        Raises:
            ValueError: If something is not finite or has another shape.
        """
        if not log_target.isfinite().all():
            raise ValueError(
                "log_target must be finite, with zeros replaced by a floor; got NaN or "
                "infinity."
            )
        self.standardise.fit(tokens)
        # Softplus is log 2 where the MLP starts, at about 0.
        self.log_unit.copy_(log_target.double().mean() - math.log(math.log(2)))

    def forward(self, x: Tensor, num_prefix: int, key_bias: Tensor | None = None) -> Tensor:
        """Predict the logarithm of the importance of each patch.

        Args:
            x: Prefix and patch tokens, ``(B, P + K, C)``.
            num_prefix: Prefix tokens, P; they are attended to and not rated.
            key_bias: Log size of each token, ``(B, 1, 1, P + K)``: a merged token is then
                attended to as its copies are, and rated as one of them.

        Returns:
            Log-importance, ``(B, K)``, float32 at least, finite; its exponential is
            positive, in the unit of the targets.

        Raises:
            ValueError: If the tokens have other channels, or all are prefix tokens.
        """
        check_tokens(x, self.channels, num_prefix)
        h = self.mix(self.project(self.norm(self.standardise(x))), key_bias)
        rated = self.mlp(h[:, num_prefix:])[..., 0]  # (B, K)
        return self.log_unit + log_softplus(widen(rated))
