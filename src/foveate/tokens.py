"""The one value that flows through a backbone: tokens, and where the original ones went."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Geometry of a token sequence, fixed by the size of the images.

    Attributes:
        num_prefix: Class and register tokens at the front of the sequence; never reduced.
        grid: Rows and columns of the patch grid of the full model.
        image_size: Height and width of the images in pixels.
    """

    num_prefix: int
    grid: tuple[int, int]
    image_size: tuple[int, int]

    @property
    def num_patches(self) -> int:
        """Patches of the full model, N."""
        return self.grid[0] * self.grid[1]


@dataclass(frozen=True)
class Tokens:
    r"""A batch of token sequences, and where the original patches went.

    B images, P prefix tokens, N original patches, K patches now, C channels. Everything
    but ``x`` is about patches alone, since prefix tokens are never reduced. A field that is
    None says "nothing has happened yet", so that an unreduced forward pays for nothing.

    A removed patch n is read back as
    :math:`\hat x_n = \sum_s w_{ns} x_{\mathrm{stand\_in}(n,s)} + \mathrm{offset}_n`.
    A stand-in of -1 contributes zero: nobody speaks for the patch, and the offset alone is
    its feature.

    Attributes:
        x: Prefix and patch tokens, ``(B, P + K, C)``.
        layout: Geometry of the unreduced sequence.
        size: Original patches behind each patch, ``(B, K)``, float32; None while all are 1.
        stand_in: Index below K of the patches that speak for each original patch, or -1,
            ``(B, N, S)``; None while nothing has been removed.
        weight: Weight of each stand-in, ``(B, N, S)``; None while S is 1.
        offset: What a copy of the stand-in lacks, ``(B, N, C)``; None if not stored.
        position: Rotary embedding of each patch, ``(B, K, R)``; None without rotation.
        grid_position: ``position`` of the full grid, ``(B, N, R)``, once patches are gone.
        proportional: Whether attention weighs each key by its size.
    """

    x: Tensor
    layout: Layout
    size: Tensor | None = None
    stand_in: Tensor | None = None
    weight: Tensor | None = None
    offset: Tensor | None = None
    position: Tensor | None = None
    grid_position: Tensor | None = None
    proportional: bool = False

    @property
    def num_patches(self) -> int:
        """Patches in the sequence now, K."""
        return self.x.shape[1] - self.layout.num_prefix

    @property
    def prefix(self) -> Tensor:
        """Class and register tokens, ``(B, P, C)``."""
        return self.x[:, : self.layout.num_prefix]

    @property
    def patches(self) -> Tensor:
        """Patch tokens, ``(B, K, C)``."""
        return self.x[:, self.layout.num_prefix :]

    def sizes(self) -> Tensor:
        """Original patches behind each patch, ``(B, K)`` float32, ones if never merged."""
        if self.size is not None:
            return self.size
        shape = (self.x.shape[0], self.num_patches)
        return torch.ones(shape, device=self.x.device, dtype=torch.float32)

    def key_bias(self) -> Tensor | None:
        """Bias of proportional attention: the log size of each key.

        Returns:
            ``(B, 1, 1, P + K)`` in the dtype of ``x``. None while all sizes are 1 or when
            attention is not proportional, because any mask takes attention off its fastest
            kernel.
        """
        if self.size is None or not self.proportional:
            return None
        # In float64 the log of a float32 would be the only number that is not exact.
        size = self.size.to(torch.promote_types(self.size.dtype, self.x.dtype))
        bias = torch.nn.functional.pad(size.log(), (self.layout.num_prefix, 0))
        return bias.to(self.x.dtype)[:, None, None, :]

    def with_(self, **changes: Any) -> "Tokens":  # noqa: ANN401 - any field
        """Copy with some fields changed."""
        return replace(self, **changes)


def widen(x: Tensor) -> Tensor:
    """Raise half precision to float32, in which sums are taken; leave the rest."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
