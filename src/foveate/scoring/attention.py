"""What the learned heads are built from: units of their input, attention, an MLP."""

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import softplus

from foveate.backbones import Heads, attention

__all__ = [
    "Standardise",
    "TokenAttention",
    "TokenMLP",
    "check_tokens",
    "initialise",
    "log_softplus",
]


class Standardise(nn.Module):
    r"""Channels in units of their own spread, :math:`(x_c - \mu_c) / \sigma_c`.

    In a residual stream a few channels are a hundred times the others, and LayerNorm alone
    leaves the others to vanish beside them. Both vectors are buffers, 0 and 1 until
    :meth:`fit`.

    Args:
        channels: Channels of a token, C.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("scale", torch.ones(channels))

    def fit(self, tokens: Tensor) -> None:
        """Take mean and spread over all tokens; a channel without spread keeps its unit.

        Args:
            tokens: ``(B, T, C)``.

        Raises:
            ValueError: If tokens have other channels or are not finite.
        """
        check_tokens(tokens, len(self.mean), 0)
        if not tokens.isfinite().all():
            raise ValueError("tokens must be finite; got NaN or infinity.")
        flat = tokens.detach().flatten(0, 1).double()
        spread = flat.std(0, correction=0)
        self.mean.copy_(flat.mean(0))
        self.scale.copy_(torch.where(spread > 1e-6 * flat.abs().amax(0), spread, 1.0))

    def forward(self, x: Tensor) -> Tensor:
        """Standardise ``(B, T, C)``, in the dtype of the buffers."""
        return (x.to(self.mean) - self.mean) / self.scale


class TokenAttention(nn.Module):
    """Pre-norm multi-head attention over all tokens with a residual, no positions.

    Args:
        channels: Channels of a token, H.
        num_heads: Attention heads.

    Raises:
        ValueError: If the heads do not divide the channels.
    """

    def __init__(self, channels: int, num_heads: int) -> None:
        super().__init__()
        if num_heads < 1 or channels % num_heads:
            raise ValueError(
                f"num_heads must divide the {channels} hidden channels; got {num_heads}."
            )
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(channels)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Tensor, key_bias: Tensor | None = None) -> Tensor:
        """Mix tokens, ``(B, T, H)``; the bias of each key is ``(B, 1, 1, T)``."""
        parts = self.qkv(self.norm(x)).unflatten(2, (3, self.num_heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # (B, heads, T, d) each
        bias = None if key_bias is None else key_bias.to(query)
        return x + self.out(attention(Heads(query, key, value), bias))


class TokenMLP(nn.Module):
    """Pre-norm MLP of every token with a residual.

    Args:
        channels: Channels of a token, H.
        hidden: Channels inside.
    """

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.rise = nn.Linear(channels, hidden)
        self.fall = nn.Linear(hidden, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(B, T, H)``."""
        return x + self.fall(nn.functional.gelu(self.rise(self.norm(x))))


def initialise(network: nn.Module, generator: Generator | None) -> None:
    r"""Draw all linear weights from a normal of variance 1 / inputs; zero their biases.

    Args:
        network: Its linear layers are set in place.
        generator: Source of the weights, on their device; None for the global one.
    """
    for layer in network.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5, generator=generator)
            nn.init.zeros_(layer.bias)


def log_softplus(x: Tensor) -> Tensor:
    r"""Logarithm of Softplus, :math:`\log \log (1 + e^x)`, finite wherever x is.

    Below -30 it is x itself, which is off by less than :math:`e^{-30}`, where Softplus
    would underflow.

    Args:
        x: Any shape.

    Returns:
        The same shape and dtype.
    """
    return torch.where(x < -30, x, softplus(x.clamp(min=-30)).log())


def check_tokens(x: Tensor, channels: int, num_prefix: int) -> None:
    """Refuse tokens of another width, or without patches.

    Args:
        x: Should be ``(B, T, C)``.
        channels: C.
        num_prefix: Prefix tokens, below T.

    Raises:
        ValueError: Naming what does not fit.
    """
    if x.ndim != 3 or x.shape[2] != channels:
        raise ValueError(f"x must have shape (B, T, {channels}); got {tuple(x.shape)}.")
    if not 0 <= num_prefix < x.shape[1]:
        raise ValueError(
            f"num_prefix must be from 0 to {x.shape[1] - 1}, so that a patch is left; "
            f"got {num_prefix}."
        )
