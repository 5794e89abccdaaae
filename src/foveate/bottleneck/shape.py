"""How large a bottleneck is, and which tokens it rebuilds."""

from collections.abc import Sequence
from dataclasses import dataclass

from foveate.bottleneck.latents import LATENTS

__all__ = ["Shape", "choose_depths"]


@dataclass(frozen=True)
class Shape:
    """Sizes of a bottleneck. The latent has ``num_registers * latent_channels`` numbers.

    Attributes:
        depths: Taps whose tokens it rebuilds, ascending; the number of blocks is the last
            output.
        num_channels: Channels of a token, C.
        num_prefix: Prefix tokens, P.
        num_registers: Register tokens of the latent, R.
        latent_channels: Channels of a register token, d.
        width: Channels inside encoder and decoder.
        num_heads: Attention heads inside; divides ``width``.
        latent: ``gaussian`` or ``power-spherical``.

    Raises:
        ValueError: If a field is out of range.
    """

    depths: tuple[int, ...]
    num_channels: int
    num_prefix: int
    num_registers: int = 32
    latent_channels: int = 128
    width: int = 384
    num_heads: int = 6
    latent: str = "power-spherical"

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.latent not in LATENTS:
            raise ValueError(
                f"latent must be one of {', '.join(LATENTS)}; got '{self.latent}'."
            )
        if not self.depths or list(self.depths) != sorted(set(self.depths)):
            raise ValueError(f"depths must ascend; got {self.depths}.")
        if self.num_registers < 1 or self.latent_channels < 2:
            raise ValueError(
                "num_registers must be at least 1 and latent_channels at least 2; got "
                f"{self.num_registers} and {self.latent_channels}."
            )
        if self.num_heads < 1 or self.width < 1 or self.width % self.num_heads:
            raise ValueError(
                "width must be a positive multiple of num_heads; got "
                f"{self.width} and {self.num_heads}."
            )

    @property
    def num_features(self) -> int:
        """Channels of the tokens of all depths together."""
        return len(self.depths) * self.num_channels


def choose_depths(read: Sequence[int], count: int = 4) -> tuple[int, ...]:
    """Taps to rebuild: what a decoder of several depths reads, or evenly spaced ones.

    Args:
        read: Taps of the task, ascending.
        count: How many to space evenly, the last at the end of the task's own taps; fewer
            if there are not so many blocks.

    Returns:
        Depths, ascending; those of the task are among them.

    Raises:
        ValueError: If ``count`` is not positive.

    Example:
        >>> choose_depths((12,))
        (3, 6, 9, 12)
        >>> choose_depths((2, 5, 8, 11))
        (2, 5, 8, 11)
    """
    if count < 1:
        raise ValueError(f"count must be at least 1; got {count}.")
    if len(read) >= count:
        return tuple(read)
    last = read[-1]
    even = {-(-last * step // count) for step in range(1, count + 1)}
    return tuple(sorted(even | set(read)))
