"""A linear latent: slow waves over the grid, in the channels that vary most."""

import torch
from torch import Tensor, nn

__all__ = ["Coarse", "cosines"]

_ALIASED = 1e-6  # of the largest wave: what is left of one that the grid is too coarse for


class Coarse(nn.Module):
    r"""Linear maps from patches to R register tokens and back, which training refines.

    Register j is the coefficient of the cosine wave :math:`\phi_j` over the picture,
    :math:`\mathrm{mean}_n\, \phi_j(n) x_n`, projected to d channels. Patches are rebuilt
    as the sum of the waves. It is where a bottleneck starts from, since attention alone
    takes thousands of updates to learn what lies where.

    Args:
        num_registers: Waves, R.
        num_features: Channels of a patch, F.
        num_channels: Channels of a register, d.
    """

    def __init__(self, num_registers: int, num_features: int, num_channels: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.zeros(num_channels, num_features))
        self.up = nn.Parameter(torch.zeros(num_features, num_channels))
        self.shift = nn.Parameter(torch.zeros(num_channels))
        self.size = nn.Parameter(torch.ones(num_registers))
        self.middle = nn.Parameter(torch.zeros(num_registers, num_features))

    def encode(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """Registers of patches, ``(B, N, F) -> (B, R, d)``."""
        centred = self.waves(patches, grid) - self.middle
        return centred @ self.down.T / self.size[:, None] + self.shift

    def decode(self, registers: Tensor, grid: tuple[int, int]) -> Tensor:
        """Patches from registers, ``(B, R, d) -> (B, N, F)``."""
        phi = cosines(len(self.size), grid).to(registers)
        of_wave = registers * self.size[:, None] @ self.up.T + self.middle
        return phi.T @ of_wave

    def waves(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """Coefficients of the waves, ``(B, N, F) -> (B, R, F)``."""
        return cosines(len(self.size), grid).to(patches) @ patches / patches.shape[1]

    @torch.no_grad()
    def start(self, coefficients: Tensor, num_free: int) -> None:
        """Take the channels that vary most.

        If the registers have fewer free numbers than channels, as unit vectors have, the
        last channel is constant, and as long as the others together are in the mean: their
        common size then survives a normalisation.

        Args:
            coefficients: Of training images, ``(B, R, F)``.
            num_free: Independent numbers of a register, d or less.
        """
        x = coefficients.double()
        middle = x.mean(0)
        rows = (x - middle).flatten(0, 1)
        axes = torch.linalg.eigh(rows.T @ rows).eigenvectors.flip(1)[:, :num_free]
        size = ((x - middle) @ axes).square().mean((0, 2)).sqrt()  # (R,)
        self.middle.copy_(middle)
        seen = size > _ALIASED * size.max()
        self.size.copy_(torch.where(seen, size, 1.0))
        count, channels = axes.shape[1], len(self.shift)
        is_free = num_free == channels
        for p in (self.down, self.up, self.shift):
            p.zero_()
        self.down[:count] = axes.T.to(self.down)
        self.up[:, :count] = (axes if is_free else (2 * count / channels) ** 0.5 * axes).to(
            self.up
        )
        if not is_free:
            self.shift[-1] = count**0.5


def cosines(count: int, grid: tuple[int, int]) -> Tensor:
    """The slowest cosine waves over a grid, as in a two-dimensional DCT.

    Args:
        count: How many, R.
        grid: Rows and columns, N patches.

    Returns:
        ``(R, N)``, float64, with mean square 1 and orthogonal where the grid is finer than
        the waves.
    """
    pairs = sorted(
        ((k, m) for k in range(count) for m in range(count // (k + 1) + 1)),
        key=lambda pair: (pair[0] ** 2 + pair[1] ** 2, pair),
    )[:count]
    sides = []
    for number in grid:
        centre = (torch.arange(number, dtype=torch.float64) + 0.5) / number
        turns = torch.pi * torch.arange(count + 1, dtype=torch.float64)
        wave = (turns[:, None] * centre).cos() * 2**0.5
        wave[0] = 1.0
        sides.append(wave)
    down, along = (torch.tensor(index) for index in zip(*pairs, strict=True))
    return (sides[0][down][:, :, None] * sides[1][along][:, None, :]).flatten(1)
