"""Bytes that a call holds."""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["held_bytes", "peak_bytes"]


def held_bytes(module: nn.Module) -> int:
    """Bytes of all weights and buffers; shared ones count once."""
    storages = [t.untyped_storage() for t in (*module.parameters(), *module.buffers())]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Most memory that a call holds at once, beyond what was there before.

    On CUDA it is the peak of the caching allocator. On a CPU it is the most bytes of live
    tensor storages after any operator; what an operator needs inside, such as the scratch
    space of a matrix product, is not seen there.

    Args:
        call: What to run; its result counts as held.
        device: Where it computes.

    Returns:
        Bytes; None on a device that keeps no record.
    """
    if device.type == "cpu":
        with _Storages() as storages:
            call()
        return storages.peak
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


class _Storages(TorchDispatchMode):
    """Follows storages from the operator that makes them to their end."""

    def __init__(self) -> None:
        super().__init__()
        self.known: WeakSet[Any] = WeakSet()
        self.now = 0
        self.peak = 0

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - any operator
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        given = {t.untyped_storage() for t in tree_leaves((args, kwargs)) if _is_tensor(t)}
        made = func(*args, **(kwargs or {}))
        for tensor in filter(_is_tensor, tree_leaves(made)):
            storage = tensor.untyped_storage()
            if storage not in given and storage not in self.known:
                self.known.add(storage)
                self.now += storage.nbytes()
                finalize(storage, self._free, storage.nbytes()).atexit = False
        self.peak = max(self.peak, self.now)
        return made

    def _free(self, size: int) -> None:
        self.now -= size


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)
