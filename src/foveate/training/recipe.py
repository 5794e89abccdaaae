"""How long and how fast to learn."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Recipe:
    """How long and how fast to learn.

    AdamW with a linear warm-up and a cosine decay to zero.

    Attributes:
        steps: Updates.
        batch_size: Examples an update, over all processes.
        learning_rate: Peak.
        weight_decay: Of matrices; vectors have none.
        warmup: Share of the steps until the peak.
        clip: Largest norm of a gradient.
        accumulate: Passes an update is the mean of.
        precision: ``no``, ``bf16`` or ``fp16``.
        seed: Order of the examples, and what the objective draws.
        validate_every: Updates between validations, at which the state is saved as well.
        patience: Validations without a better score after which to stop; None for never.
        factors: Factor of the rate, by the beginning of a parameter's name; the longest
            that fits counts.

    Raises:
        ValueError: If a number is out of range.
    """

    steps: int
    batch_size: int = 8
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    warmup: float = 0.05
    clip: float = 1.0
    accumulate: int = 1
    precision: str = "no"
    seed: int = 0
    validate_every: int = 250
    patience: int | None = None
    factors: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("steps", "batch_size", "accumulate", "validate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}.")
        for name in ("learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}.")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup must be from 0 to below 1; got {self.warmup}.")

    def factor(self, name: str) -> float:
        """Factor of the rate of a parameter."""
        fits = [prefix for prefix in self.factors if name.startswith(prefix)]
        return self.factors[max(fits, key=len)] if fits else 1.0

    def rate(self, step: int) -> float:
        """Learning rate of update ``step``, from 0."""
        rise = self.warmup * self.steps
        if step < rise:
            return self.learning_rate * (step + 1) / (rise + 1)
        turn = (step - rise) / max(1.0, self.steps - rise)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, turn)))
