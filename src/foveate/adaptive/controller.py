"""What a task register learns: itself, how many to remove where, and what comes back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from foveate.adaptive.allocation import Limits, split_evenly
from foveate.reduction.apportion import hamilton

__all__ = ["Controller", "Pruning"]

_FIRST_ALPHA = 0.8
_FIRST_REDUNDANCY = 5.0  # log attention spreads over about 1, cosines of keys over 0.3


@dataclass(frozen=True)
class Pruning:
    """What is removed, and by whom.

    Attributes:
        depths: Blocks with a step, ascending.
        remove: Patches to remove, over all depths.
        least: Fewest at each depth; zeros if empty.
        most: Most at each depth; ``remove`` if empty.
        action: ``prune`` drops a patch; ``merge`` adds it, by size, to its stand-in, with
            proportional attention.
        selection: Whose attention ranks patches: a ``register``'s or the ``class`` token's.
        allocation: Counts ``learned`` by a readout, or ``static``, as even as can be.
        recovery: Share of its offset that a removed patch gets back, ``learned`` by a
            readout or a number in [0, 1].
        stand_ins: Kept patches that a removed one is read back from, those of most similar
            key; over D depths a patch has up to ``stand_ins ** D``, or all that are left.
        blend: Temperature of their weights, a softmax of cosines.
        fuse_last: Blocks at the end that run on the full grid again.
        one_way: Whether the other tokens do not see the register.
        redundancy: Whether the ranking also weighs how close a patch's key is to another's,
            by a learned weight.
        temperature: Of the soft selection, in units of log attention.

    Raises:
        ValueError: If a number is out of range, or a budget cannot be met.
    """

    depths: tuple[int, ...]
    remove: int
    least: tuple[int, ...] = ()
    most: tuple[int, ...] = ()
    action: Literal["prune", "merge"] = "prune"
    selection: Literal["register", "class"] = "register"
    allocation: Literal["learned", "static"] = "learned"
    recovery: float | Literal["learned"] = "learned"
    stand_ins: int = 1
    blend: float = 0.1
    fuse_last: int = 0
    one_way: bool = False
    redundancy: bool = False
    temperature: float = 0.5

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not self.depths or list(self.depths) != sorted(set(self.depths)):
            raise ValueError(f"depths must ascend; got {list(self.depths)}.")
        choices: Mapping[str, tuple[str, ...]] = {
            "action": ("prune", "merge"),
            "selection": ("register", "class"),
            "allocation": ("learned", "static"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}; got "
                    f"'{getattr(self, name)}'."
                )
        alpha = self.recovery
        if alpha != "learned" and not (isinstance(alpha, int | float) and 0 <= alpha <= 1):
            raise ValueError(f"recovery must be 'learned' or from 0 to 1; got {alpha!r}.")
        if self.stand_ins < 1:
            raise ValueError(f"stand_ins must be at least 1; got {self.stand_ins}.")
        for name in ("temperature", "blend"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}.")
        _ = self.limits

    @property
    def limits(self) -> Limits:
        """The budget and its bounds.

        Returns:
            Both, with a number for every depth.

        Raises:
            ValueError: If numbers are missing, or no counts meet them.
        """
        number = len(self.depths)
        least = self.least or (0,) * number
        most = self.most or (self.remove,) * number
        if not len(least) == len(most) == number:
            raise ValueError(
                f"least and most must have a number for every depth, {number} of them; got "
                f"{len(least)} and {len(most)}."
            )
        return Limits(self.remove, least, most)


class Controller(nn.Module):
    """The trained parts of a task's pruning: C + 2 (C + 1) numbers, one for redundancy.

    The readouts see the state of the register (or of the class token) between attention
    and MLP, normalised without weights. At the start counts are even.

    Args:
        channels: Channels of a token, C.
        pruning: What is removed.
        register: Where the register starts, ``(C,)``; None for selection by class token.

    Raises:
        ValueError: If a register is missing or given in vain.
    """

    counts: Tensor
    whole: tuple[int, ...]  # the counts again: shapes follow from them, so none is traced

    def __init__(self, channels: int, pruning: Pruning, register: Tensor | None) -> None:
        super().__init__()
        if (register is None) != (pruning.selection == "class"):
            raise ValueError(
                "register must be given for selection 'register', and for no other; got "
                f"{register} for '{pruning.selection}'."
            )
        self.pruning = pruning
        self.register = None if register is None else nn.Parameter(register.clone().float())
        even = split_evenly(pruning.limits)
        self.register_buffer("counts", torch.tensor(even))
        self.whole = tuple(even)
        self.register_load_state_dict_post_hook(_read_counts)
        left = [pruning.remove - sum(even[:i]) for i in range(len(even))]
        ratio = torch.tensor([c / max(1, n) for c, n in zip(even, left, strict=True)])
        self.first = ratio.clamp(0.01, 0.99).logit().tolist()
        weight = torch.tensor(_FIRST_REDUNDANCY)
        self.redundancy = nn.Parameter(weight) if pruning.redundancy else None
        learned = pruning.allocation == "learned"
        self.allocate = _readout(channels, 0.0) if learned else None
        bias = torch.tensor(_FIRST_ALPHA).logit().item()
        self.recover = _readout(channels, bias) if pruning.recovery == "learned" else None

    def share(self, index: int, state: Tensor) -> Tensor:
        """Share of what remains to be removed that goes at one depth.

        Args:
            index: Which of the depths.
            state: Of the register there, ``(B, C)``.

        Returns:
            ``(B,)``, in (0, 1).

        Raises:
            ValueError: If allocation is static.
        """
        if self.allocate is None:
            raise ValueError("allocation must be 'learned' to have shares; it is 'static'.")
        logit = _read(self.allocate, state)[:, 0]
        return (logit + self.first[index]).sigmoid()

    def alpha(self, state: Tensor) -> float | Tensor:
        """Share of its offset that a patch removed at one depth gets back.

        Args:
            state: Of the register there, ``(B, C)``.

        Returns:
            ``(B, 1, 1)``, in (0, 1), or the number that is set.
        """
        if self.recover is None:
            return float(self.pruning.recovery)
        return _read(self.recover, state).sigmoid()[:, :, None]

    @torch.no_grad()
    def freeze(self, counts: Tensor) -> None:
        """Set the counts that inference runs with.

        Args:
            counts: Of calibration images, ``(M, depths)``; each row sums to the budget.

        Raises:
            ValueError: If a row sums to anything else: nothing is rescaled.
        """
        off = counts.sum(1) != self.pruning.remove
        if off.any():
            raise ValueError(
                f"counts must sum to {self.pruning.remove} in every row; got "
                f"{counts[off][0].tolist()}."
            )
        mean = counts.double().mean(0).tolist()
        limits = self.pruning.limits
        whole = hamilton(mean, limits.total, limits.least, limits.most)
        self.counts.copy_(torch.tensor(whole))
        self.whole = tuple(whole)

    def parameter_counts(self) -> dict[str, int]:
        """Numbers that are trained, by part."""
        parts: dict[str, Any] = {"allocation": self.allocate, "recovery": self.recover}
        found = {
            name: 0 if part is None else sum(p.numel() for p in part.parameters())
            for name, part in parts.items()
        }
        if self.redundancy is not None:
            found["redundancy"] = 1
        return {"register": 0 if self.register is None else len(self.register), **found}


def _read_counts(controller: Controller, _: Any) -> None:  # noqa: ANN401 - torch's
    controller.whole = tuple(controller.counts.tolist())


def _readout(channels: int, bias: float) -> nn.Linear:
    """Linear layer that says the same of every state at first."""
    layer = nn.Linear(channels, 1)
    nn.init.zeros_(layer.weight)
    nn.init.constant_(layer.bias, bias)
    return layer


def _read(readout: nn.Linear, state: Tensor) -> Tensor:
    """What a readout says of a state, in its own precision, whatever autocast says."""
    with torch.autocast(state.device.type, enabled=False):
        return readout(layer_norm(state.to(readout.weight.dtype), state.shape[-1:]))
