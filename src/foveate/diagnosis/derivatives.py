"""Derivatives of torch functions: which rule serves which function, and the short rules.

What a rule holds has been computed once, in the recorded run (normalised tokens, attention
weights, slopes of activations), so that a probe costs the matrix products of its tangent
and little else. A function without a rule is differentiated by ``torch.func``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.nn import functional as F
from torch.utils._pytree import tree_iter

from foveate.diagnosis.kernels import attention, convolution, layer_norm
from foveate.diagnosis.steps import Call, LinearMap, alike, linear, smooth

Rule = Callable[[Call, Any], LinearMap]
Function = Callable[..., Any]


def derivative(call: Call, value: Any) -> LinearMap:  # noqa: ANN401
    """Linear map of one step around its inputs.

    Args:
        call: The step.
        value: What it returned.

    Returns:
        The map, by the function's own rule if that holds for the arguments that vary.
    """
    rule, places = _RULES.get(call.function, (smooth, None))
    if places is not None and places != call.places:
        rule = smooth
    return rule(call, value)


def layer(call: Call, value: Tensor) -> LinearMap:
    """A linear layer: one matrix product for all probes, images and tokens."""
    weight = call.argument("weight", 1)
    return LinearMap(lambda t: F.linear(t, weight), lambda g: (g @ weight,), is_new=True)


def elementwise(call: Call, value: Tensor) -> LinearMap:
    """An activation: its slope is computed once, not once a probe."""
    if not alike(value, *call.inputs):
        return smooth(call, value)
    (slope,) = vjp(call, *call.inputs)[1](torch.ones_like(value))
    # The slope comes first so that the product lies in memory as the recorded value does.
    return LinearMap(
        lambda t: slope * t,
        lambda g: (slope * g,),
        is_new=True,
        in_place=lambda t: t.mul_(slope),
    )


def batch_norm(call: Call, value: Tensor) -> LinearMap:
    """With fixed statistics, an affine map of each element."""
    training = call.argument("training", 5, False)
    return smooth(call, value) if training else elementwise(call, value)


def softmax(call: Call, value: Tensor) -> LinearMap:
    r"""Softmax; :math:`J = \mathrm{diag}(p) - p p^\top` is symmetric."""
    dim = call.argument("dim", 1)
    if dim is None or not alike(value, *call.inputs):
        return smooth(call, value)
    dim = dim if dim < 0 else dim - value.ndim

    def apply(t: Tensor) -> Tensor:
        weighted = value * t
        return weighted - value * weighted.sum(dim, keepdim=True)

    return LinearMap(apply, lambda g: (apply(g),), is_new=True)


def add(call: Call, value: Tensor) -> LinearMap:
    """A sum of what varies, or with a constant, without broadcasting of what varies."""
    count = len(call.inputs)
    if call.kwargs or len(call.places) != count or not alike(value, *call.inputs):
        return smooth(call, value)
    return LinearMap(lambda *t: t[0] if count == 1 else t[0] + t[1], lambda g: (g,) * count)


def product(call: Call, value: Tensor) -> LinearMap:
    """A function that is linear in each of its first two arguments."""
    if len(call.places) == 1:
        return scale(call, value)
    if len(call.inputs) == 1 or call.places != (0, 1):  # a square
        return smooth(call, value)
    x, y = call.inputs
    if call.function not in _MATRIX_PRODUCTS and alike(value, x, y):
        return LinearMap(lambda s, t: s * y + x * t, lambda g: (g * y, g * x))
    push = vmap(lambda s, t: call(s, y) + call(x, t))
    return LinearMap(push, linear(call, value).pull)


def scale(call: Call, value: Tensor) -> LinearMap:
    """A product with a constant, or a quotient; its own adjoint if elementwise."""
    if call.kwargs:  # a rounding mode
        return smooth(call, value)
    if call.function in _MATRIX_PRODUCTS or not alike(value, *call.inputs):
        return linear(call, value)
    return LinearMap(call, lambda g: (call(g),), is_new=True)


def reshape(call: Call, value: Tensor) -> LinearMap:
    """The same elements in the same order."""
    (x,) = call.inputs
    if value.dtype != x.dtype:  # a view of the same bytes
        return smooth(call, value)
    before, after = x.shape, value.shape
    return LinearMap(
        lambda t: t.reshape(len(t), *after), lambda g: (g.reshape(len(g), *before),)
    )


def permute(call: Call, value: Tensor) -> LinearMap:
    """The same elements with the axes in another order."""
    (x,) = call.inputs
    marked = x.new_empty(*range(1, x.ndim + 1))  # axis i has i + 1 elements
    order = (0, *call(marked).shape)
    inverse = tuple(order.index(i) for i in range(x.ndim + 1))
    return LinearMap(lambda t: t.permute(order), lambda g: (g.permute(inverse),))


def join(call: Call, value: Tensor) -> LinearMap:
    """A concatenation, linear if nothing in it is constant."""
    parts = [t for t in tree_iter((call.args, call.kwargs)) if isinstance(t, Tensor)]
    return linear(call, value) if len(call.places) == len(parts) else smooth(call, value)


def _named(names: str) -> list[Function]:
    """Find the functions and methods of torch with these names."""
    spaces = (torch, Tensor, F)
    return [getattr(s, n) for n in names.split() for s in spaces if hasattr(s, n)]


_MATRIX_PRODUCTS = set(_named("matmul bmm mm __matmul__"))
_MATRIX_TRANSPOSE = Tensor.mT.__get__  # type: ignore[attr-defined]

# A rule, the places of the arguments that may vary for it (None: any), and its functions.
_TABLE: tuple[tuple[Rule, tuple[int, ...] | None, list[Function]], ...] = (
    (layer, (0,), _named("linear")),
    (attention, (0, 1, 2), _named("scaled_dot_product_attention")),
    (layer_norm, (0,), [F.layer_norm]),
    (convolution, (0,), _named("conv1d conv2d conv_transpose2d")),
    (softmax, (0,), _named("softmax")),
    (batch_norm, (0,), [F.batch_norm]),
    (
        elementwise,
        (0,),
        _named("gelu silu relu sigmoid tanh leaky_relu elu softplus exp log"),
    ),
    (add, None, _named("add __radd__")),
    (product, None, [*_named("mul multiply"), *_MATRIX_PRODUCTS]),
    (scale, (0,), _named("div true_divide neg")),
    (
        reshape,
        (0,),
        _named("reshape view flatten unflatten squeeze unsqueeze contiguous clone"),
    ),
    (permute, (0,), [*_named("transpose permute swapaxes movedim"), _MATRIX_TRANSPOSE]),
    (join, None, _named("cat concat stack")),
    (
        linear,
        (0,),
        [Tensor.__getitem__, *_named("chunk split unbind select narrow flip roll")],
    ),
    (
        linear,
        (0,),
        _named("sum mean expand expand_as repeat repeat_interleave to float double"),
    ),
    (
        linear,
        (0,),
        _named("index_select interpolate avg_pool2d adaptive_avg_pool2d unfold"),
    ),
)
_RULES = {f: (rule, places) for rule, places, functions in _TABLE for f in functions}
