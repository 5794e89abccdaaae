"""Distributions of register tokens: Gaussian, and Power Spherical on unit spheres."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import lgamma, log, pi
from typing import Protocol

import torch
from torch import Generator, Tensor
from torch.nn.functional import normalize, softplus

__all__ = ["LATENTS", "Gaussian", "Latent", "PowerSpherical"]

_LOG_STD = -2.0  # of a Gaussian whose parameters are zero: noise well below the prior's
_CONCENTRATION = 64  # times d softplus(0) = 0.69: mean cosine 0.98 for parameters of zero


class Latent(Protocol):
    """Independent distributions of M register tokens with d channels, for B images."""

    @staticmethod
    def num_parameters(channels: int) -> int:
        """How many numbers describe the distribution of one token of d channels."""

    @classmethod
    def read(cls, parameters: Tensor) -> "Latent":
        """Distribution from what a network returns, ``(B, M, num_parameters)``."""

    @staticmethod
    def place(z: Tensor) -> Tensor:
        """Nearest point that tokens can take, ``(B, M, d)``; none moves that is one."""

    @staticmethod
    def num_free(channels: int) -> int:
        """Independent numbers of one token, at most d."""

    @staticmethod
    def scale(channels: int) -> float:
        """What makes the entries of a token about 1 in size under the prior."""

    def mode(self) -> Tensor:
        """The most likely tokens, ``(B, M, d)``."""

    def sample(self, generator: Generator) -> Tensor:
        """Draw tokens, ``(B, M, d)``, differentiable in the parameters."""

    def kl(self) -> Tensor:
        """Divergence of each token from its prior in nats, ``(B, M)``."""


@dataclass(frozen=True)
class Gaussian:
    """Independent normal entries; the prior is the standard normal.

    Attributes:
        mean: ``(B, M, d)``.
        log_std: Logarithm of the standard deviation, ``(B, M, d)``.
    """

    mean: Tensor
    log_std: Tensor

    @staticmethod
    def num_parameters(channels: int) -> int:
        """Mean and spread of every entry, 2 d."""
        return 2 * channels

    @classmethod
    def read(cls, parameters: Tensor) -> "Gaussian":
        """Mean, and log standard deviation plus 2, ``(B, M, 2 d)``."""
        mean, raw = parameters.chunk(2, dim=-1)
        return cls(mean, raw + _LOG_STD)

    @staticmethod
    def place(z: Tensor) -> Tensor:
        """Every point is one that tokens can take."""
        return z

    @staticmethod
    def num_free(channels: int) -> int:
        """All d of them."""
        return channels

    @staticmethod
    def scale(channels: int) -> float:
        """Entries have standard deviation 1 already."""
        return 1.0

    def mode(self) -> Tensor:
        """The mean, ``(B, M, d)``."""
        return self.mean

    def sample(self, generator: Generator) -> Tensor:
        """Mean plus standard deviation times normal noise, ``(B, M, d)``."""
        noise = torch.randn(
            self.mean.shape,
            generator=generator,
            device=generator.device,
            dtype=self.mean.dtype,
        )
        return self.mean + self.log_std.exp() * noise.to(self.mean.device)

    def kl(self) -> Tensor:
        r"""Divergence from the prior, closed form.

        :math:`\sum_i (\sigma_i^2 + \mu_i^2 - 1) / 2 - \log \sigma_i`.

        Returns:
            ``(B, M)``, in nats.
        """
        variance = (2 * self.log_std).exp()
        return (0.5 * (variance + self.mean.square() - 1) - self.log_std).sum(-1)


@dataclass(frozen=True)
class PowerSpherical:
    r"""Unit vectors around a direction; the prior is uniform on the sphere.

    The density on :math:`S^{d-1}` is proportional to
    :math:`(1 + \mu^\top x)^\kappa`. With :math:`\beta = (d - 1) / 2` and
    :math:`\alpha = \beta + \kappa`, :math:`(1 + \mu^\top x) / 2` is
    :math:`\mathrm{Beta}(\alpha, \beta)`, so that sampling needs no rejection and
    :math:`\mathbb{E}\, \mu^\top x = \kappa / (2 \beta + \kappa)`.

    Attributes:
        direction: Unit vectors :math:`\mu`, ``(B, M, d)``, d >= 2.
        concentration: :math:`\kappa \ge 0`, ``(B, M)``; 0 is the uniform distribution.

    Raises:
        ValueError: If the shapes do not fit.

    References:
        De Cao and Aziz, "The Power Spherical distribution", 2020, arXiv 2006.04437.
    """

    direction: Tensor
    concentration: Tensor

    def __post_init__(self) -> None:
        """Check the shapes."""
        shape = self.direction.shape
        if not shape or shape[-1] < 2 or shape[:-1] != self.concentration.shape:
            raise ValueError(
                "direction and concentration must be (..., d) with d >= 2 and (...); got "
                f"{tuple(shape)} and {tuple(self.concentration.shape)}."
            )

    @staticmethod
    def num_parameters(channels: int) -> int:
        """Direction and concentration, d + 1."""
        return channels + 1

    @classmethod
    def read(cls, parameters: Tensor) -> "PowerSpherical":
        """Direction before normalisation, and concentration before softplus."""
        direction, raw = parameters[..., :-1], parameters[..., -1]
        scale = _CONCENTRATION * direction.shape[-1]
        return cls(normalize(direction, dim=-1), scale * softplus(raw))

    @staticmethod
    def place(z: Tensor) -> Tensor:
        r"""Divide each token by its norm.

        A Jacobian of what follows is thereby restricted to the tangent space of the
        spheres, :math:`J (I - z z^\top)` for each token.

        Args:
            z: ``(B, M, d)``, without zero tokens.

        Returns:
            Unit vectors, ``(B, M, d)``.
        """
        return z / z.square().sum(-1, keepdim=True).sqrt()

    @staticmethod
    def num_free(channels: int) -> int:
        """One less than d, as the length is fixed."""
        return channels - 1

    @staticmethod
    def scale(channels: int) -> float:
        """Root of d, as entries of unit vectors have variance 1 / d."""
        return channels**0.5

    def mode(self) -> Tensor:
        """The direction, ``(B, M, d)``."""
        return self.direction

    def sample(self, generator: Generator) -> Tensor:
        r"""Draw unit vectors, differentiable in direction and concentration.

        :math:`t = \mu^\top x` comes from two gamma variables, whose derivatives in the
        shape are implicit, and the rest is uniform across; a reflection takes the axis
        :math:`\pm e_1` to :math:`\mu`. The sign is the one that is farther from
        :math:`\mu`, so that the reflection never divides by a small number. All of it is
        done in float64 where the generator lives, since float32 loses :math:`1 - t^2` as
        the concentration grows.

        Args:
            generator: Source of randomness.

        Returns:
            ``(B, M, d)`` in the dtype and on the device of the direction.
        """
        device, dtype = generator.device, torch.float64
        direction = self.direction.to(device, dtype)
        concentration = self.concentration.to(device, dtype)
        beta = (direction.shape[-1] - 1) / 2
        shape = concentration + beta  # alpha
        first = torch._standard_gamma(shape, generator=generator)
        second = torch._standard_gamma(torch.full_like(shape, beta), generator=generator)
        along = (first - second) / (first + second)  # t
        across = 2 * (first * second).sqrt() / (first + second)  # (1 - t^2)^(1/2)
        rest = direction[..., 1:].shape
        noise = torch.randn(rest, generator=generator, device=device, dtype=dtype)
        sign = torch.where(direction[..., :1] > 0, -1.0, 1.0).to(direction)
        tangent = across[..., None] * normalize(noise, dim=-1)
        x = torch.cat([sign * along[..., None], tangent], dim=-1)
        mirror = torch.cat([sign - direction[..., :1], -direction[..., 1:]], dim=-1)
        share = (mirror * x).sum(-1, keepdim=True) / mirror.square().sum(-1, keepdim=True)
        return (x - 2 * share * mirror).to(self.direction)

    def entropy(self) -> Tensor:
        r"""Differential entropy in nats, closed form.

        :math:`\log N - \kappa (\log 2 + \psi(\alpha) - \psi(\alpha + \beta))` with the
        normaliser :math:`\log N = (\alpha + \beta) \log 2 + \beta \log \pi +
        \log \Gamma(\alpha) - \log \Gamma(\alpha + \beta)`. Computed in float64, as the
        terms cancel.

        Returns:
            ``(B, M)`` in the dtype of the concentration.
        """
        return self._entropy().to(self.concentration)

    def kl(self) -> Tensor:
        """Log area of the sphere minus the entropy, ``(B, M)``; 0 if uniform."""
        d = self.direction.shape[-1]
        area = log(2) + d / 2 * log(pi) - lgamma(d / 2)
        return (area - self._entropy()).to(self.concentration)

    def _entropy(self) -> Tensor:
        concentration = self.concentration.double()
        beta = (self.direction.shape[-1] - 1) / 2
        alpha, total = beta + concentration, 2 * beta + concentration
        normaliser = total * log(2) + beta * log(pi) + alpha.lgamma() - total.lgamma()
        expected = log(2) + torch.digamma(alpha) - torch.digamma(total)
        return normaliser - concentration * expected


LATENTS: Mapping[str, type[Latent]] = {
    "gaussian": Gaussian,
    "power-spherical": PowerSpherical,
}
