r"""One step of a recorded computation, and its derivative as a pair of functions.

Tangents and cotangents carry R probes in front of the step's own shape. ``smooth`` and
``linear`` differentiate any step by ``torch.func`` at its recorded input, which is exact;
special rules are faster.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.func import jvp, vjp, vmap
from torch.utils._pytree import tree_iter, tree_map


class LinearMap(NamedTuple):
    r"""Derivative of one step at one point.

    Attributes:
        push: Tangents of the inputs to tangents of the outputs, :math:`J v`.
        pull: Cotangents of the outputs to a tuple for the inputs, :math:`J^\top u`.
        is_new: Whether both return tensors that share no memory with others.
        in_place: Both at once for a diagonal Jacobian, writing over the argument.
    """

    push: Callable[..., Any]
    pull: Callable[..., tuple[Tensor, ...]]
    is_new: bool = False
    in_place: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Call:
    """One step: a torch function, and those of its arguments that vary.

    Attributes:
        function: The function.
        args: Its positional arguments.
        kwargs: Its named arguments.
        inputs: The tensors among the arguments that vary, each once.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Tensor, ...]

    def __call__(self, *inputs: Tensor) -> Any:  # noqa: ANN401 - what the function returns
        """Call the function with other tensors in place of those that vary."""
        new = {id(old): x for old, x in zip(self.inputs, inputs, strict=True)}
        args, kwargs = tree_map(lambda a: new.get(id(a), a), (self.args, self.kwargs))
        return self.function(*args, **kwargs)

    @property
    def places(self) -> tuple[int, ...]:
        """Positions of the arguments that vary; -1 for one that is named."""
        ids = {id(x) for x in self.inputs}
        found = [i for i, a in enumerate(self.args) for t in tree_iter(a) if id(t) in ids]
        return (*found, *(-1 for t in tree_iter(self.kwargs) if id(t) in ids))

    def argument(self, name: str, place: int, default: Any = None) -> Any:  # noqa: ANN401
        """Look an argument up, by position or by name."""
        return (
            self.args[place] if place < len(self.args) else self.kwargs.get(name, default)
        )


def smooth(call: Call, value: Any) -> LinearMap:  # noqa: ANN401
    """Any differentiable function; a push computes the function again."""

    def push(*tangents: Tensor) -> Any:  # noqa: ANN401
        return vmap(lambda *t: jvp(call, call.inputs, t)[1])(*tangents)

    return LinearMap(push, linear(call, value).pull)


def linear(call: Call, value: Any) -> LinearMap:  # noqa: ANN401
    """A function that is linear in all that varies, taken together."""
    pull_back = vjp(call, *call.inputs)[1]
    one = isinstance(value, Tensor)

    def pull(*cotangents: Tensor) -> tuple[Tensor, ...]:
        return vmap(lambda *g: pull_back(g[0] if one else type(value)(g)))(*cotangents)

    return LinearMap(vmap(call.__call__), pull)


def alike(value: Tensor, *inputs: Tensor) -> bool:
    """Whether all have one shape and one dtype, so that nothing is broadcast or cast."""
    return all(x.shape == value.shape and x.dtype == value.dtype for x in inputs)
