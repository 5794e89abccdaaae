"""A function linearised once, so that many directions can go through it."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from foveate.diagnosis.derivatives import derivative
from foveate.diagnosis.steps import Call, LinearMap


class RecordingError(Exception):
    """The function does what a recording would get wrong; the message says what that is."""


class Step(NamedTuple):
    """A recorded step: numbers of the values that enter and leave, and its linear map."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    map: LinearMap


@dataclass(frozen=True)
class Linearization:
    """A function at one point: its value there, and products with its Jacobian.

    Attributes:
        output: The value.
        steps: The steps that depend on the input, in order.
        shapes: Shape of every value between the steps; value 0 is the input.
        result: Number of the value that is the output; None if it is constant.
    """

    output: Tensor
    steps: Sequence[Step]
    shapes: Sequence[torch.Size]
    result: int | None

    @property
    def largest(self) -> int:
        """Elements of the largest value."""
        return max(shape.numel() for shape in self.shapes)

    def push(self, tangents: Tensor) -> Tensor:
        """``J v``: ``(R, *input) -> (R, *output)``."""
        if self.result is None:
            return tangents.new_zeros(len(tangents), *self.output.shape)
        values = {0: tangents}
        last = {number: step for step in self.steps for number in step.inputs}
        for step in self.steps:
            push = step.map.push
            if step.map.in_place and step.inputs[0] in self._own_tangents:
                push = step.map.in_place
            outputs = push(*(values[i] for i in step.inputs))
            values.update(zip(step.outputs, _as_tuple(outputs), strict=True))
            for i in step.inputs:  # free what no later step reads
                if last[i] is step and i != self.result:
                    values.pop(i, None)
        return values[self.result]

    def pull(self, cotangents: Tensor) -> Tensor:
        """``J^T u``: ``(R, *output) -> (R, *input)``."""
        values = {} if self.result is None else {self.result: cotangents}
        for step in reversed(self.steps):
            if values.keys().isdisjoint(step.outputs):
                continue
            arriving = [
                values.pop(i) if i in values else self._zeros(i, cotangents)
                for i in step.outputs
            ]
            if step.map.in_place and step.outputs[0] in self._own_cotangents:
                leaving: tuple[Tensor, ...] = (step.map.in_place(*arriving),)
            else:
                leaving = step.map.pull(*arriving)
            for i, g in zip(step.inputs, leaving, strict=True):
                if i in values:
                    g = g.add_(values[i]) if step.map.is_new else g + values[i]
                values[i] = g
        return values[0] if 0 in values else self._zeros(0, cotangents)

    @cached_property
    def _own_tangents(self) -> set[int]:
        """Values whose tangent is new memory that one step alone reads."""
        readers = Counter(i for step in self.steps for i in step.inputs)
        new = {i for step in self.steps if step.map.is_new for i in step.outputs}
        return {i for i in new if readers[i] == 1 and i != self.result}

    @cached_property
    def _own_cotangents(self) -> set[int]:
        """Values whose cotangent is new memory, whichever steps contribute to it."""
        shared = {i for step in self.steps if not step.map.is_new for i in step.inputs}
        return set(range(len(self.shapes))) - shared - {self.result}

    def _zeros(self, number: int, like: Tensor) -> Tensor:
        return like.new_zeros(len(like), *self.shapes[number])


class Functional:
    """The same products by ``torch.func``, which runs the function again for every pass.

    Args:
        function: A function of one tensor.
        x: Where to differentiate it.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self.function = function
        self.x = x
        self.output, self._pull_back, *_ = vjp(function, x)

    @property
    def largest(self) -> int:
        """Elements of the largest value that is known, the input or the output."""
        return max(self.x.numel(), self.output.numel())

    def push(self, tangents: Tensor) -> Tensor:
        """``J v``: ``(R, *input) -> (R, *output)``."""
        return vmap(lambda v: jvp(self.function, (self.x,), (v,))[1])(tangents)

    def pull(self, cotangents: Tensor) -> Tensor:
        """``J^T u``: ``(R, *output) -> (R, *input)``."""
        return vmap(lambda u: self._pull_back(u)[0])(cotangents)


def linearize(function: Callable[[Tensor], Tensor], x: Tensor) -> Linearization:
    """Run a function once and keep the linear map of every step that depends on its input.

    Branches and shapes are those of this run. Memory: what the maps hold, about as much as
    autograd would keep for one backward pass.

    Args:
        function: A function of one tensor, made of torch operations.
        x: Where to linearise it.

    Returns:
        Its linearisation at ``x``.

    Raises:
        RecordingError: If the function changes tensors in place, runs under ``no_grad``,
            inference mode or autocast, hands values to NumPy, or calls code whose
            operations cannot be seen, as a scripted function.
    """
    if torch.is_inference_mode_enabled() or torch.is_autocast_enabled(x.device.type):
        raise RecordingError("inference mode or autocast is on")
    recorder = _Recorder(x)
    with torch.enable_grad(), _Guard(recorder), recorder:
        output = function(x)
    recorder.check()
    shapes = [value.shape for value in recorder.values]
    result = recorder.numbers.get(id(output))
    return Linearization(output.detach(), recorder.steps, shapes, result)


class _Recorder(TorchFunctionMode):
    """Is told of every call of a torch function; records those that depend on the input."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.values: list[Tensor] = []  # all of them, so that no id is used twice
        self.versions: list[int] = []
        self.numbers: dict[int, int] = {}  # id of a tensor -> number of its value
        self.inside = False
        self.unseen = ""
        self._number(x)

    def _number(self, value: Tensor) -> int:
        self.numbers[id(value)] = len(self.values)
        self.values.append(value)
        self.versions.append(_version(value))
        return self.numbers[id(value)]

    def check(self) -> None:
        """Refuse if anything went past the recorder."""
        if self.unseen:
            raise RecordingError(f"{self.unseen} is called where it cannot be seen")
        # A value may have been changed through a view that was not recorded.
        if [_version(value) for value in self.values] != self.versions:
            raise RecordingError("a tensor is changed in place")

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        if self.unseen:  # lost already; and the guard's own call comes by here
            return func(*args, **kwargs)
        found = {id(t): t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
        inputs = tuple(t for i, t in found.items() if i in self.numbers)
        self.inside = True
        try:
            if not inputs or func in _CONSTANT:
                return func(*args, **kwargs)
            return self._record(Call(func, args, kwargs, inputs), tuple(found.values()))
        finally:
            self.inside = False

    def _record(self, call: Call, tensors: Sequence[Tensor]) -> Any:  # noqa: ANN401
        name = getattr(call.function, "__name__", str(call.function))
        if call.function in _FOREIGN:
            raise RecordingError(f"{name} leaves torch")
        versions = [_version(t) for t in tensors]
        with torch.no_grad():
            value = call.function(*call.args, **call.kwargs)
        if [_version(t) for t in tensors] != versions:
            raise RecordingError(f"{name} changes a tensor in place")
        new = [
            t
            for t in tree_iter(value)
            if isinstance(t, Tensor) and t.is_floating_point() and id(t) not in self.numbers
        ]
        if not new:
            return value
        if len(new) != len(_as_tuple(value)):
            raise RecordingError(f"{name} returns more than differentiable tensors")
        if not torch.is_grad_enabled():
            raise RecordingError(f"{name} runs under no_grad")
        with torch.no_grad():
            map_ = derivative(call, value)
        inputs = tuple(self.numbers[id(t)] for t in call.inputs)
        self.steps.append(Step(inputs, tuple(self._number(t) for t in new), map_))
        return value


class _Guard(TorchDispatchMode):
    """Sees the operations below; notes one that the recorder was not told of.

    It must not raise: a script interpreter would turn that into an error of its own.
    """

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        known = self.recorder.numbers
        if not self.recorder.inside and any(
            id(t) in known for t in tree_iter((args, kwargs))
        ):
            self.recorder.unseen = str(func)
        return func(*args, **kwargs)


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


def _as_tuple(value: Any) -> tuple[Any, ...]:  # noqa: ANN401
    return tuple(value) if isinstance(value, tuple | list) else (value,)


_CONSTANT = {Tensor.detach, Tensor.data.__get__}  # type: ignore[attr-defined]
_CONSTANT |= {torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like}
_CONSTANT |= {Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full}
_FOREIGN = {Tensor.numpy, Tensor.__array__, Tensor.tolist}
