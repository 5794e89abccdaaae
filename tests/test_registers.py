"""Oracle: the plain backbone; attention written out in loops; an ordinary extra token."""

from math import sqrt

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from foveate.backbones import open_backbone
from foveate.backbones.registers import WithRegister, first_register
from foveate.forward import run
from foveate.tokens import Tokens
from tests import tiny

NETWORKS = ("timm-vit", "timm-dinov3", "timm-eva02", "timm-eva-rope", "hf-dinov2",
            "hf-dinov3")  # fmt: skip
EXACT = {torch.float32: 1e-6, torch.float64: 1e-12}

every_network = pytest.mark.parametrize("network", NETWORKS)
every_dtype = pytest.mark.parametrize("dtype", EXACT)


def backbones(network, dtype=torch.float64, one_way=False):
    """The plain backbone, and the same with a register."""
    plain = open_backbone(tiny.BACKBONES[network]()).to(dtype)
    draw = torch.Generator().manual_seed(3)
    register = nn.Parameter(torch.randn(tiny.WIDTH, generator=draw).to(dtype))
    return plain, WithRegister(plain, register, one_way)


def images_of(network, dtype):
    return tiny.random_images(dtype=dtype)


def without(x, at, dim=1):
    """Leave one token out, by a list of the others."""
    rest = [i for i in range(x.shape[dim]) if i != at]
    return x.index_select(dim, torch.tensor(rest))


def naive_row(heads, at, key_bias=None):
    """Attention of token ``at`` over all keys, head by head, ``(B, heads d)``."""
    rows = []
    for image in range(len(heads.query)):
        parts = []
        for q, k, v in zip(*(h[image].detach() for h in heads), strict=True):
            logits = [float(q[at] @ key) / sqrt(len(key)) for key in k]
            if key_bias is not None:
                logits = [
                    z + float(b) for z, b in zip(logits, key_bias[image], strict=True)
                ]
            weight = torch.tensor(logits, dtype=v.dtype).exp()
            parts.append((weight[:, None] * v).sum(0) / weight.sum())
        rows.append(torch.cat(parts))
    return torch.stack(rows)


@every_network
def test_one_more_prefix_token(network):
    plain, backbone = backbones(network)
    images = images_of(network, torch.float64)
    before, after = plain.embed(images), backbone.embed(images)
    at = before.layout.num_prefix
    assert after.layout.num_prefix == at + 1
    assert after.layout.grid == before.layout.grid == tiny.GRID
    assert torch.equal(after.x[:, at], backbone.register.expand(2, -1))
    assert torch.equal(after.prefix[:, :at], before.prefix)
    assert torch.equal(after.patches, before.patches)
    if before.position is not None:
        assert torch.equal(after.position, before.position)
    for name in (
        "num_blocks",
        "num_channels",
        "num_heads",
        "has_class_token",
        "patch_size",
    ):
        assert getattr(backbone, name) == getattr(plain, name)
    assert backbone.macs_per_token(1) == plain.macs_per_token(1)
    assert backbone.attention_channels(1) == plain.attention_channels(1)


@every_network
def test_projections(network):
    """All other tokens project as in the plain backbone; the register is not rotated."""
    plain, backbone = backbones(network)
    images = images_of(network, torch.float64)
    tokens = backbone.embed(images)
    at = tokens.layout.num_prefix - 1
    for depth in range(tiny.DEPTH):
        heads = backbone.project(depth, tokens)
        others = plain.project(depth, plain.embed(images))
        # Alone, without any positions: what a token projects to if nothing rotates it.
        alone = Tokens(tokens.x[:, at : at + 1], tokens.layout)
        bare = plain.project(depth, alone)
        for mine, theirs, unrotated in zip(heads, others, bare, strict=True):
            assert_close(without(mine, at, 2), theirs, rtol=0, atol=1e-12)
            assert_close(mine[:, :, at : at + 1], unrotated, rtol=0, atol=1e-12)


@pytest.mark.parametrize("network", ["timm-dinov3", "timm-eva-rope", "hf-dinov3"])
def test_patches_are_rotated_beside_it(network):
    """Else the test above would compare nothing."""
    _, backbone = backbones(network)
    tokens = backbone.embed(images_of(network, torch.float64))
    heads = backbone.project(0, tokens)
    still = backbone.project(0, tokens.with_(position=None))
    P = tokens.layout.num_prefix
    assert (heads.query[:, :, P:] - still.query[:, :, P:]).abs().amax() > 0.1
    assert torch.equal(heads.query[:, :, :P], still.query[:, :, :P])
    assert torch.equal(heads.key[:, :, :P], still.key[:, :, :P])


@every_dtype
@every_network
def test_one_way_leaves_all_others_alone(network, dtype):
    plain, backbone = backbones(network, dtype, one_way=True)
    images = images_of(network, dtype)
    depths = tuple(range(tiny.DEPTH + 1))
    _, theirs = run(plain, plain.embed(images), 0, tiny.DEPTH, taps=depths)
    tokens = backbone.embed(images)
    _, mine = run(backbone, tokens, 0, tiny.DEPTH, taps=depths)
    at = tokens.layout.num_prefix - 1
    for depth in depths:
        scale = float(theirs[depth].x.abs().max())
        atol = EXACT[dtype] * scale
        assert_close(without(mine[depth].x, at), theirs[depth].x, rtol=0, atol=atol)
        assert mine[depth].layout == tokens.layout


@pytest.mark.parametrize("sizes", [False, True])
@pytest.mark.parametrize("one_way", [False, True])
@every_network
def test_row_of_the_register(network, one_way, sizes):
    """Attention of the register over all tokens, itself among them, in loops."""
    _, backbone = backbones(network, one_way=one_way)
    tokens = backbone.embed(images_of(network, torch.float64))
    if sizes:
        draw = torch.Generator().manual_seed(5)
        size = torch.randint(1, 5, (2, 35), generator=draw).float()
        tokens = tokens.with_(size=size, proportional=True)
    at = tokens.layout.num_prefix - 1
    for depth in range(tiny.DEPTH):
        heads = backbone.project(depth, tokens)
        bias = None if not sizes else tokens.key_bias()[:, 0, 0]
        mixed = naive_row(heads, at, bias)
        # What follows attention, of this row alone: the network's own layers.
        value = heads._replace(
            query=heads.query[:, :, at : at + 1],
            key=heads.key[:, :, :1],
            value=mixed.unflatten(-1, (tiny.HEADS, -1))[:, :, None],
        )
        row = Tokens(tokens.x[:, at : at + 1], tokens.layout)
        truth = backbone.inner.attend(depth, row, value).x[:, 0]
        found = backbone.attend(depth, tokens, heads)
        assert_close(found.x[:, at], truth, rtol=1e-10, atol=1e-10)
        tokens = backbone.transform(depth, found)


@every_network
def test_two_way_is_an_ordinary_token(network):
    """All rows of attention in loops: every token sees the register."""
    plain, backbone = backbones(network)
    images = images_of(network, torch.float64)
    tokens = backbone.embed(images)
    heads = backbone.project(0, tokens)
    found = backbone.attend(0, tokens, heads).x
    for at in (0, tokens.layout.num_prefix - 1, tokens.layout.num_prefix, 20):
        mixed = naive_row(heads, at)
        value = heads._replace(
            query=heads.query[:, :, :1],
            key=heads.key[:, :, :1],
            value=mixed.unflatten(-1, (tiny.HEADS, -1))[:, :, None],
        )
        truth = plain.attend(0, Tokens(tokens.x[:, at : at + 1], tokens.layout), value).x
        assert_close(found[:, at], truth[:, 0], rtol=1e-10, atol=1e-10)
    # And it matters that they see it.
    one_way = WithRegister(plain, backbone.register, one_way=True)
    assert (one_way.attend(0, tokens, heads).x - found).abs().max() > 1e-4


@pytest.mark.parametrize("one_way", [False, True])
def test_gradient_reaches_the_register(one_way):
    _, backbone = backbones("hf-dinov3", one_way=one_way)
    images = images_of("hf-dinov3", torch.float64)
    tokens, _ = run(backbone, backbone.embed(images), 0, tiny.DEPTH)
    at = tokens.layout.num_prefix - 1
    tokens.x[:, at].square().sum().backward()
    assert backbone.register.grad.abs().min() > 0
    backbone.register.grad = None
    tokens, _ = run(backbone, backbone.embed(images), 0, tiny.DEPTH)
    gradient = torch.autograd.grad(without(tokens.x, at).square().sum(), backbone.register)
    assert bool(gradient[0].abs().max() > 0) is not one_way


def test_finish_is_the_final_norm(double_images):
    plain, backbone = backbones("hf-dinov2")
    x = torch.randn(2, 5, tiny.WIDTH, dtype=torch.float64)
    assert torch.equal(backbone.finish(x), plain.finish(x))


def test_first_register_is_the_class_token(double_images):
    plain, _ = backbones("hf-dinov2")
    found = first_register(plain, double_images[:1])
    assert torch.equal(found, plain.embed(double_images).x[1, 0])
    assert not found.requires_grad


def test_first_register_without_class_token_is_the_mean_patch():
    plain = open_backbone(tiny.timm_vit_average())
    images = tiny.random_images()
    found = first_register(plain, images[:1])
    assert_close(found, plain.embed(images).patches[0].mean(0))


@pytest.mark.parametrize("shape", [(tiny.WIDTH + 1,), (1, tiny.WIDTH)])
def test_wrong_width_is_refused(shape):
    plain, _ = backbones("timm-vit")
    with pytest.raises(ValueError, match=r"register must have shape \(36,\); got"):
        WithRegister(plain, nn.Parameter(torch.zeros(shape)))
