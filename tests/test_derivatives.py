"""Oracle: the Jacobian of the same function formed by ``torch.func.jacrev`` in float64."""

import pytest
import torch
from torch import nn
from torch.func import jacrev
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

from foveate.diagnosis.linearize import RecordingError, linearize

B, T, C = 2, 5, 6


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


W, V, BIAS = normal(C, C, seed=1), normal(B, T, C, seed=2), normal(C, seed=3)
GRID = normal(4, C, 3, 2, seed=4)  # weight of a convolution, (out, in, rows, columns)
UP = normal(C, 2, 3, 2, seed=5)  # of a transposed one: its groups have 2 outputs each
STATISTICS = (BIAS, BIAS.square() + 0.5)


def heads(x):
    """Three heads of two channels, ``(B, 3, T, 2)``, as queries, keys and values."""
    return [(x @ w).unflatten(-1, (3, 2)).transpose(1, 2) for w in (W, W.T, W @ W)]


def attend(x, **options):
    return F.scaled_dot_product_attention(*heads(x), **options).transpose(1, 2).flatten(2)


def grid(x):
    """Channels as the token axis first, ``(B, C, 5, 1)``; lies in memory channels last."""
    return x.transpose(1, 2).unflatten(2, (T, 1))


def fill(x):
    y = x.new_zeros(B, T + 1, C)
    y[:, 1:] = x
    return y


def read_twice(x):
    y = F.linear(x, W)
    return F.gelu(y) + (y + 1).relu() + y


def read_before_the_end(x):
    y = F.linear(x.sigmoid(), W)
    F.gelu(y)
    return y


def read_through_views(x):
    y = F.linear(x, W)
    return torch.stack([y.mT.tanh().mT, y.view(B, -1).relu().view(B, T, C), F.silu(y)])


# Functions with a rule: a product must not run the torch function again.
RULES = {
    "linear": lambda x: F.linear(x, W, BIAS),
    "linear, named": lambda x: F.linear(x, bias=BIAS, weight=W),
    "layer norm": lambda x: F.layer_norm(x, (C,), BIAS, BIAS, 1e-3),
    "layer norm, plain": lambda x: F.layer_norm(x.transpose(0, 1), (C,)),
    "layer norm, two axes": lambda x: F.layer_norm(x, (T, C), V[0], eps=1e-3),
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": lambda x: x.relu(),
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: x.softmax(-1),
    "softmax, first axis": lambda x: F.softmax(x, dim=0),
    "batch norm": lambda x: F.batch_norm(grid(x), *STATISTICS, BIAS, BIAS),
    "attention": attend,
    "attention, mask": lambda x: attend(x, attn_mask=normal(B, 1, 1, T, seed=6)),
    "attention, hidden": lambda x: attend(x, attn_mask=torch.ones(T, T).tril(1) > 0),
    "attention, causal": lambda x: attend(x, is_causal=True, scale=0.3),
    "conv": lambda x: F.conv2d(grid(x), GRID, BIAS[:4], (2, 1), (1, 1), (1, 2)),
    "conv, one side": lambda x: F.conv1d(x.mT, GRID[..., 0], padding=1),
    "conv, transposed": lambda x: F.conv_transpose2d(
        grid(x), UP, BIAS, 2, (1, 0), (1, 0), 3
    ),
    "scale": lambda x: 2 * x * BIAS / V,
    "negative": lambda x: -x,
    "read twice": read_twice,
    "read before the end": read_before_the_end,
    "read through views": read_through_views,
    "add": lambda x: 1 + x + V + (x + x.relu()),
    "reshape": lambda x: x.view(B, -1).reshape(-1, 3).unflatten(0, (B, -1)).unsqueeze(1),
    "permute": lambda x: x.permute(2, 0, 1).mT.swapaxes(0, 1).contiguous().movedim(0, 2),
}
# What the recorded run alone may call.
ONCE = {"layer_norm", "gelu", "silu", "relu", "sigmoid", "softmax", "batch_norm"} | {
    "scaled_dot_product_attention",
    "conv1d",
    "conv2d",
    "conv_transpose2d",
}
# Functions that are linear, or differentiated by torch.func: exact all the same.
OTHERS = {
    "identity": lambda x: x,
    "constant": lambda x: torch.ones_like(x),
    "detached": lambda x: x.detach() * x,
    "matmul": lambda x: W @ (x @ W).mT,
    "matmul, both": lambda x: x @ x.mT.relu(),
    "square": lambda x: x * x,
    "product": lambda x: x * x.sin(),
    "spread": lambda x: x[:, :1] * V + x[:, :, :1] / BIAS,
    "spread sum": lambda x: x[:, :1] + V,
    "quotient": lambda x: V / (3 + x.square()),
    "rounding": lambda x: torch.div(x, BIAS, rounding_mode="floor") + x,
    "difference": lambda x: (1 - x) - (x - V),
    "power": lambda x: (x**3).exp(),
    "attention, one tensor": lambda x: F.scaled_dot_product_attention(x, x, x),
    "attention, fixed query": lambda x: F.scaled_dot_product_attention(V, x, x.relu()),
    "attention, grouped": lambda x: F.scaled_dot_product_attention(
        heads(x)[0], *(h[:, :1] for h in heads(x)[1:]), enable_gqa=True
    ),
    "conv, same": lambda x: F.conv1d(x.mT, GRID[..., 0], padding="same"),
    "conv, one image": lambda x: F.conv2d(grid(x)[0], GRID, padding=2),
    "cat": lambda x: torch.cat([x, x.relu()], 1),
    "cat, constant": lambda x: torch.cat([V[:, :1], x], 1),
    "stack": lambda x: torch.stack([x, x.relu()], 1),
    "chunk": lambda x: x.chunk(3, -1)[1],
    "split": lambda x: x.split([2, 4], -1)[1].tanh(),
    "unbind": lambda x: x.unbind(1)[2] * x[:, 1],
    "index": lambda x: x[:, torch.tensor([0, 0, 3])],
    "rows": lambda x: torch.cat([row.cos() for row in x]),
    "mean": lambda x: x.mean(1) + x.sum((1, 2))[:, None],
    "expand": lambda x: x[:, :, None].expand(-1, -1, 4, -1),
    "flip": lambda x: x.flip(1).roll(1, 2).repeat(1, 2, 1),
    "interpolate": lambda x: F.interpolate(grid(x), (7, 3), mode="bilinear"),
    "bicubic": lambda x: F.interpolate(grid(x), (3, 2), mode="bicubic", antialias=True),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "rms norm": lambda x: F.rms_norm(x, (C,), BIAS, 1e-3),
    "group norm": lambda x: F.group_norm(x.mT, 3, BIAS),
    "where": lambda x: torch.where(x > 0, x, V),
    "gather": lambda x: x.gather(1, torch.tensor([[[1], [4]]]).expand(B, -1, C)),
    "dropout, off": lambda x: F.dropout(x, 0.5, training=False).cos(),
    "cast": lambda x: x.to(torch.float64).double().cos(),
    "statistics": lambda x: F.batch_norm(x.mT, None, None, training=True),
}


class Spy(TorchFunctionMode):
    """Notes the names of the torch functions that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.add(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def check(function, x, num_probes=3):
    """Compare products of a few probes with the matrix; give back what the products ran."""
    with sdpa_kernel(SDPBackend.MATH):
        map_ = linearize(function, x)
        truth = jacrev(function)(x).reshape(-1, x.numel())
        v = normal(num_probes, *x.shape, seed=7)
        u = normal(num_probes, *map_.output.shape, seed=8)
        with Spy() as spy:
            pushed, pulled = map_.push(v), map_.pull(u)
    assert_close(map_.output, function(x))
    assert_close(pushed.flatten(1), v.flatten(1) @ truth.T, rtol=1e-10, atol=1e-10)
    assert_close(pulled.flatten(1), u.flatten(1) @ truth, rtol=1e-10, atol=1e-10)
    assert pushed.shape[1:] == map_.output.shape
    assert pulled.shape[1:] == x.shape
    return spy.names


@pytest.mark.parametrize("function", RULES.values(), ids=RULES)
@pytest.mark.parametrize("num_probes", [1, 3])
def test_products_by_a_rule(function, num_probes):
    ran = check(function, normal(B, T, C), num_probes)
    assert not ran & ONCE


@pytest.mark.parametrize("function", OTHERS.values(), ids=OTHERS)
def test_products_without_a_rule(function):
    check(function, normal(B, T, C))


@pytest.mark.parametrize("function", [RULES["conv"], RULES["batch norm"]])
def test_a_contiguous_map_in_place_of_one_with_channels_last(function):
    check(lambda x: function(x.mT.contiguous().mT), normal(B, T, C))


class Doubled(torch.autograd.Function):
    """Passes twice the derivative of what it computes, as a straight-through trick does."""

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return 2 * g


def edited_view(x):
    y = x * 1
    y.view(-1).add_(1)
    return y


def edited_behind(x):
    y = x.cos()
    y.detach().mul_(2)
    return y.sin()


def without_grad(x):
    with torch.no_grad():
        return x.sin() * x


def through_numpy(x):
    return x * torch.from_numpy(x.numpy())


def with_index(x):
    return x.topk(2).values


REFUSED = {
    "filled": (fill, "__setitem__ changes a tensor in place"),
    "in place": (lambda x: F.relu(x.sin(), inplace=True), "relu changes a tensor in place"),
    "view": (edited_view, "add_ changes a tensor in place"),
    "behind": (edited_behind, "a tensor is changed in place"),
    "no_grad": (without_grad, "sin runs under no_grad"),
    "custom": (Doubled.apply, "sin runs under no_grad"),
    "numpy": (through_numpy, "numpy leaves torch"),
    "index": (with_index, "topk returns more than differentiable tensors"),
}


@pytest.mark.parametrize(("function", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses_what_a_recording_would_get_wrong(function, message):
    with pytest.raises(RecordingError, match=message):
        linearize(function, normal(B, T, C))


def test_refuses_a_function_whose_operations_it_cannot_see():
    scripted = torch.jit.script(nn.Sequential(nn.Tanh()))
    with pytest.raises(RecordingError, match=r"tanh.* is called where it cannot be seen"):
        linearize(scripted, normal(B, T, C))


def test_refuses_inference_mode_and_autocast():
    x = normal(B, T, C)
    with torch.inference_mode(), pytest.raises(RecordingError, match="inference mode"):
        linearize(F.gelu, x)
    with torch.autocast("cpu"), pytest.raises(RecordingError, match="autocast"):
        linearize(F.gelu, x)


def test_the_recorder_is_gone_after_a_refusal():
    with pytest.raises(RecordingError, match="in place"):
        linearize(fill, normal(B, T, C))
    check(F.gelu, normal(B, T, C))


def test_products_leave_their_arguments_and_weights_alone():
    weight = W.clone().requires_grad_(True)
    map_ = linearize(lambda x: F.linear(x.relu() + 1, weight) + x, normal(B, T, C))
    v = normal(2, B, T, C, seed=1)
    kept = v.clone()
    with torch.no_grad():
        pushed, pulled = map_.push(v), map_.pull(v)
    assert torch.equal(v, kept)
    assert not map_.output.requires_grad
    assert not pushed.requires_grad
    assert not pulled.requires_grad
