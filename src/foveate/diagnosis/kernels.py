"""Derivatives of attention, layer norm and convolution, written for their kernels."""

import torch
from torch import Tensor

from foveate.diagnosis.steps import Call, LinearMap, smooth

# Attention weights of about this size stay in a core's cache from one product to the next.
_TILE_BYTES = 2 << 20
_INPUT_ONLY = [True, False, False]  # no derivative for weight and bias


def layer_norm(call: Call, value: Tensor) -> LinearMap:
    r"""Layer norm.

    Its Jacobian is :math:`\mathrm{diag}(w) D` with the symmetric
    :math:`D t = (t - \bar t - \hat x\, \overline{\hat x t}) / \sigma`, which is what the
    backward kernel computes without a weight.

    Args:
        call: The step.
        value: What it returned.

    Returns:
        Its linear map.
    """
    shape, weight = call.argument("normalized_shape", 1), call.argument("weight", 2)
    x = call.inputs[0].contiguous()
    _, mean, rstd = torch.native_layer_norm(
        x, shape, None, None, call.argument("eps", 4, 1e-5)
    )

    def apply(t: Tensor, weight: Tensor | None) -> Tensor:
        backward = torch.ops.aten.native_layer_norm_backward
        at = (x, shape, mean, rstd, weight, None, _INPUT_ONLY)
        probes = [backward(probe, *at)[0] for probe in t]
        return torch.stack(probes) if len(probes) > 1 else probes[0][None]

    def push(t: Tensor) -> Tensor:
        out = apply(t, None)
        return out if weight is None else out.mul_(weight)

    return LinearMap(push, lambda g: (apply(g, weight),), is_new=True)


def convolution(call: Call, value: Tensor) -> LinearMap:
    """A convolution, transposed or not, of probes and images as one batch.

    Args:
        call: The step.
        value: What it returned.

    Returns:
        Its linear map: the convolution without bias, and the adjoint of that.
    """
    (x,) = call.inputs
    weight, padding = call.argument("weight", 1), call.argument("padding", 4, 0)
    if value.ndim != weight.ndim or isinstance(padding, str):
        return smooth(call, value)
    transposed = "transpose" in call.function.__name__
    groups = call.argument("groups", 6, 1)
    stride, padding, dilation, extra = (
        [a] * (value.ndim - 2) if isinstance(a, int) else list(a)
        for a in (
            call.argument("stride", 3, 1),
            padding,
            call.argument("dilation", 7 if transposed else 5, 1),
            call.argument("output_padding", 5, 0) if transposed else 0,
        )
    )
    how = (stride, padding, dilation, transposed, extra, groups)
    layout = _memory_format(x)

    def push(t: Tensor) -> Tensor:
        return torch.convolution(t.flatten(0, 1), weight, None, *how).unflatten(
            0, t.shape[:2]
        )

    def pull(g: Tensor) -> tuple[Tensor, ...]:
        # Only the layout of the recorded run is fast. Of x the kernel reads no value.
        rows = g.flatten(0, 1).contiguous(memory_format=layout)
        like = x.new_empty((0,)).resize_(len(rows), *x.shape[1:], memory_format=layout)
        back = torch.ops.aten.convolution_backward
        d = back(rows, like, weight, None, *how, _INPUT_ONLY)[0]
        return (d.unflatten(0, g.shape[:2]),)

    return LinearMap(push, pull, is_new=True)


def _memory_format(x: Tensor) -> torch.memory_format:
    last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return (
        torch.channels_last if last and not x.is_contiguous() else torch.contiguous_format
    )


def attention(call: Call, value: Tensor) -> LinearMap:
    r"""Scaled dot-product attention, :math:`O = P V` with :math:`P = \mathrm{softmax}(S)`.

    With :math:`dS = (dQ\,K^\top + Q\,dK^\top) / \sqrt{d}` and :math:`E = P \circ dS`,

    .. math::
        dO = E V + P\,dV - \mathrm{rowsum}(E) \circ O.

    With :math:`\bar S = P \circ (G V^\top - \mathrm{rowsum}(G \circ O))`, a cotangent G
    goes to :math:`(\bar S K, \bar S^\top Q) / \sqrt{d}` and :math:`P^\top G`.

    Args:
        call: The step.
        value: What it returned, ``(B, heads, T, d)``.

    Returns:
        Its linear map. P is held, ``(B, heads, T, S)``.
    """
    other = (
        call.argument("dropout_p", 4, 0.0),
        call.kwargs.get("enable_gqa", False),
        len(call.inputs) != 3,
        value.ndim != 4,
    )
    if any(other):
        return smooth(call, value)
    weights = _Attention(call, value)
    return LinearMap(weights.push, weights.pull, is_new=True)


class _Attention:
    """Attention at one point, image by image, so that an image's weights stay in cache."""

    def __init__(self, call: Call, value: Tensor) -> None:
        self.shapes = [x.shape[1:] for x in (value, *call.inputs)]
        q, k, v = call.inputs
        scale = call.kwargs.get("scale")
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        weights = _attention_weights(call, scale)
        p = _aligned(weights).copy_(weights)
        images = len(p)
        if p.device.type == "cpu":
            images = max(1, _TILE_BYTES // (p[0].numel() * p.element_size()))
        self.tiles = [slice(b, b + images) for b in range(0, len(p), images)]
        # Scaled q and k, v, p, value: the images of a tile and their heads are one axis.
        held = (q * scale, k * scale, v, p, value)
        self.held = [[x[tile].flatten(0, 1) for x in held] for tile in self.tiles]

    def push(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        out = _token_major(dq, self.shapes[0])
        scratch = _aligned(self.held[0][3])
        for tile, (q, k, v, p, o) in zip(self.tiles, self.held, strict=True):
            e = scratch[: len(p)]
            for i in range(len(dq)):
                s, t, u = (x[i, tile].flatten(0, 1) for x in (dq, dk, dv))
                torch.bmm(s, k.mT, out=e).baddbmm_(q, t.mT).mul_(p)
                d = torch.bmm(e, v).add_(torch.bmm(p, u)).sub_(e.sum(-1, keepdim=True) * o)
                out[i, tile] = d.view_as(out[i, tile])
        return out

    def pull(self, cotangents: Tensor) -> tuple[Tensor, ...]:
        outs = tuple(_token_major(cotangents, shape) for shape in self.shapes[1:])
        scratch = _aligned(self.held[0][3])
        for tile, (q, k, v, p, o) in zip(self.tiles, self.held, strict=True):
            s = scratch[: len(p)]
            for i in range(len(cotangents)):
                g = cotangents[i, tile].flatten(0, 1)
                torch.bmm(g, v.mT, out=s).sub_((g * o).sum(-1, keepdim=True)).mul_(p)
                parts = (torch.bmm(s, k), torch.bmm(s.mT, q), torch.bmm(p.mT, g))
                for out, d in zip(outs, parts, strict=True):
                    out[i, tile] = d.view_as(out[i, tile])
        return outs


def _aligned(like: Tensor) -> Tensor:
    """Empty tensor of the same shape whose rows start at multiples of 64 bytes."""
    step = 64 // like.element_size()
    columns = like.shape[-1]
    return like.new_empty(*like.shape[:-1], -(-columns // step) * step)[..., :columns]


def _attention_weights(call: Call, scale: float) -> Tensor:
    q, k, _ = call.inputs
    mask = call.argument("attn_mask", 3)
    if call.argument("is_causal", 5, False):
        mask = torch.ones(
            q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device
        ).tril()
    scores = (q * scale) @ k.mT  # (B, heads, T, S)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1)


def _token_major(like: Tensor, shape: torch.Size) -> Tensor:
    """Empty ``(R, B, heads, T, d)`` that lies in memory as ``(R, B, T, heads, d)``."""
    heads, tokens, channels = shape
    return like.new_empty(*like.shape[:2], tokens, heads, channels).transpose(2, 3)
