"""A variational autoencoder of a frozen network's tokens: a few register tokens between."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from foveate.bottleneck.coarse import Coarse
from foveate.bottleneck.latents import LATENTS, Latent
from foveate.bottleneck.layers import AttentionBlock, Positions, initialise, read_out
from foveate.bottleneck.shape import Shape

__all__ = ["Bottleneck", "Rebuilt", "load_bottleneck", "save_bottleneck"]

_ENCODER_BLOCKS = 2  # each of cross-attention to the tokens, then among the registers
_DECODER_BLOCKS = 3  # of cross-attention to the registers
_CONSTANT = 1e-6  # spread over size below which a channel counts as constant


class Rebuilt(NamedTuple):
    """What a pass through the latent returns.

    Attributes:
        target: Standardised tokens of all depths, ``(B, P + N, K * C)``.
        standardised: The same, rebuilt.
        features: The rebuilt tokens of each depth as the network has them, K times
            ``(B, P + N, C)``.
        kl: Divergence of each register token from the prior in nats, ``(B, R)``.
    """

    target: Tensor
    standardised: Tensor
    features: tuple[Tensor, ...]
    kl: Tensor


class Bottleneck(nn.Module):
    """Tokens of several depths, narrowed to R register tokens and rebuilt from them alone.

    Tokens of all depths are concatenated on channels and standardised. Learned registers
    attend to them and give the parameters of the latent. Queries made of positions attend
    to a draw of it and give the tokens back. Both add to a linear latent, the coarse
    picture (:class:`~foveate.bottleneck.coarse.Coarse`), so that training refines one that
    works from the start. Prefix tokens are encoded and rebuilt like patches, each with a
    learned vector for a position, so that no path goes past the latent. Patches know their
    place in units of the grid's sides, so that a grid of another size or shape spans the
    same picture, as with interpolated position embeddings.

    Args:
        shape: Sizes.
        generator: Source of the initial weights.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, shape: Shape, generator: Generator) -> None:
        super().__init__()
        self.shape = shape
        self.kind = LATENTS[shape.latent]
        width, heads = shape.width, shape.num_heads
        statistics = (shape.num_prefix + 1, shape.num_features)
        self.register_buffer("mean", torch.zeros(statistics))
        self.register_buffer("std", torch.ones(statistics))
        self.inlet = nn.Linear(shape.num_features, width)
        self.place_in, self.place_out = (
            Positions(shape.num_prefix, width) for _ in range(2)
        )
        self.registers = nn.Parameter(torch.empty(shape.num_registers, width))
        self.names = nn.Parameter(torch.empty(shape.num_registers, width))
        self.gather, self.settle = (
            nn.ModuleList(AttentionBlock(width, heads) for _ in range(_ENCODER_BLOCKS))
            for _ in range(2)
        )
        num_parameters = self.kind.num_parameters(shape.latent_channels)
        self.to_latent = read_out(width, num_parameters)
        self.coarse = Coarse(shape.num_registers, shape.num_features, shape.latent_channels)
        self.from_latent = nn.Linear(shape.latent_channels, width)
        self.unfold = AttentionBlock(width, heads)
        self.spread = nn.ModuleList(
            AttentionBlock(width, heads) for _ in range(_DECODER_BLOCKS)
        )
        self.outlet = read_out(width, shape.num_features)
        initialise(self, generator)
        with torch.no_grad():  # start near the linear latent, and learn from there
            for last in (self.to_latent, self.outlet):
                last.get_parameter("1.weight").mul_(0.1)

    def forward(
        self, tokens: Tensor, grid: tuple[int, int], generator: Generator | None = None
    ) -> Rebuilt:
        """Encode, draw and rebuild.

        Args:
            tokens: Of all depths side by side, ``(B, P + N, K * C)``.
            grid: Rows and columns, with N patches.
            generator: Source of the draw; without one the mode is taken.

        Returns:
            Target, what was rebuilt, and the divergence from the prior.
        """
        target = self.standardise(tokens)
        latent = self.encode(tokens, grid)
        z = latent.mode() if generator is None else latent.sample(generator)
        standardised = self.decode(z, grid)
        return Rebuilt(target, standardised, self.split(standardised), latent.kl())

    def encode(self, tokens: Tensor, grid: tuple[int, int]) -> Latent:
        """Distribution of the register tokens.

        Args:
            tokens: Of all depths side by side, ``(B, P + N, K * C)``.
            grid: Rows and columns, with N patches.

        Returns:
            The latent of each image, R tokens with d channels.

        Raises:
            ValueError: If tokens and grid do not fit the shape.
        """
        rows, columns = grid
        expected = (self.shape.num_prefix + rows * columns, self.shape.num_features)
        if tokens.shape[1:] != expected:
            raise ValueError(
                f"tokens must be (B, {expected[0]}, {expected[1]}) for a grid of {rows} x "
                f"{columns} and depths {self.shape.depths}; got {tuple(tokens.shape)}."
            )
        standardised = self.standardise(tokens)
        memory = self.inlet(standardised) + self.place_in(grid)
        x = self.registers.expand(len(tokens), -1, -1)
        for gather, settle in zip(self.gather, self.settle, strict=True):
            x = gather(x, memory)
            x = settle(x, x)
        coarse = self.coarse.encode(standardised[:, self.shape.num_prefix :], grid)
        parameters = self.to_latent(x)
        rest = parameters[..., self.shape.latent_channels :]
        first = parameters[..., : self.shape.latent_channels] + coarse
        return self.kind.read(torch.cat([first, rest], dim=-1))

    def decode(self, z: Tensor, grid: tuple[int, int]) -> Tensor:
        """Standardised tokens from register tokens, of any grid.

        Args:
            z: Register tokens, ``(B, R, d)``; spherical ones are normalised first.
            grid: Rows and columns, with N patches.

        Returns:
            ``(B, P + N, K * C)``.
        """
        z = self.kind.place(z) * self.kind.scale(self.shape.latent_channels)
        coarse = self.coarse.decode(z, grid)
        memory = self.from_latent(z) + self.names
        memory = self.unfold(memory, memory)
        x = self.place_out(grid).expand(len(z), -1, -1)
        for spread in self.spread:
            x = spread(x, memory)
        fine = self.outlet(x)
        prefix = self.shape.num_prefix
        return torch.cat([fine[:, :prefix], fine[:, prefix:] + coarse], dim=1)

    def standardise(self, tokens: Tensor) -> Tensor:
        """Subtract the mean and divide by the deviation of each channel."""
        rows = self._rows(tokens)
        return (tokens - self.mean[rows]) / self.std[rows]

    def split(self, standardised: Tensor) -> tuple[Tensor, ...]:
        """Undo the standardisation, and part the depths, K times ``(B, P + N, C)``."""
        rows = self._rows(standardised)
        tokens = standardised * self.std[rows] + self.mean[rows]
        return tokens.split(self.shape.num_channels, dim=-1)

    @torch.no_grad()
    def measure(self, batches: Iterable[Tensor], grid: tuple[int, int]) -> None:
        """Take mean and deviation of each channel from training data, and start there.

        Patches share one pair; every prefix token has its own. A channel that does not
        vary (its deviation is below 1e-6 of its size) keeps deviation 1. The linear latent
        takes the channels that vary most in slow waves. Cost: that of the eigenvectors of a
        ``(K * C, K * C)`` matrix. Memory: R tokens of every image.

        Args:
            batches: Tokens of all depths side by side, ``(B, P + N, K * C)`` each.
            grid: Rows and columns, with N patches.

        Raises:
            ValueError: If there is none.
        """
        prefix, coefficients = self.shape.num_prefix, []
        count = torch.zeros(prefix + 1, 1)
        sums = torch.zeros(2, *self.mean.shape, dtype=torch.float64)
        for tokens in batches:
            x = tokens.cpu().double()
            for power, total in enumerate(sums, 1):
                total[:prefix] += x[:, :prefix].pow(power).sum(0)
                total[prefix] += x[:, prefix:].pow(power).sum((0, 1))
            count[:prefix] += len(x)
            count[prefix] += x[:, prefix:, 0].numel()
            coefficients.append(self.coarse.waves(x[:, prefix:], grid))
        if not coefficients:
            raise ValueError("batches must hold at least one image; got none.")
        mean, square = sums / count
        std = (square - mean.square()).clamp_min(0).sqrt()  # rounding goes below zero
        std = torch.where(std > _CONSTANT * square.sqrt(), std, 1.0)
        self.mean.copy_(mean)
        self.std.copy_(std)
        shift = self.coarse.waves(mean[prefix].expand(1, grid[0] * grid[1], -1), grid)
        standardised = (torch.cat(coefficients) - shift) / std[prefix]
        self.coarse.start(standardised, self.kind.num_free(self.shape.latent_channels))

    def _rows(self, tokens: Tensor) -> Tensor:
        """Row of the statistics for each token, ``(P + N,)``."""
        index = torch.arange(tokens.shape[1], device=self.mean.device)
        return index.clamp_max(self.shape.num_prefix)


def save_bottleneck(network: Bottleneck, file: Path) -> None:
    """Write weights, statistics and shape into one safetensors file."""
    from safetensors.torch import save_file

    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    state = {k: v.detach().cpu().contiguous() for k, v in network.state_dict().items()}
    save_file(state, partial, {"shape": json.dumps(asdict(network.shape))})
    partial.replace(file)


def load_bottleneck(file: Path) -> Bottleneck:
    """Read what :func:`save_bottleneck` wrote.

    Args:
        file: A safetensors file.

    Returns:
        The bottleneck in eval mode, on the CPU.

    Raises:
        ValueError: If the file is not one of a bottleneck.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as stored:
            fields = json.loads((stored.metadata() or {})["shape"])
            state = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        shape = Shape(**fields | {"depths": tuple(fields["depths"])})
        network = Bottleneck(shape, Generator())
        network.load_state_dict(state)
    except (OSError, SafetensorError, KeyError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"file must be one that save_bottleneck wrote; got '{file}': {reason}."
        ) from error
    return network.eval()
