"""Oracle: the Jacobian of the whole batch, formed by ``torch.func.jacrev`` in float64."""

import pytest
import torch
from torch import nn
from torch.func import jacrev
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from foveate.diagnosis.jacobian import TokenJacobian, check_adjoint, open_tap
from foveate.models import open_model
from tests import tiny

B, T, C = 2, 4, 3

# Rotary positions, gated or normed MLPs, qk-norm, registers, grouped heads, and decoders.
CASES = [
    ("hf-vit-classifier", "logits"),
    ("hf-dinov2-registers", "cls"),
    ("hf-dinov3", "cls"),
    ("hf-clip", "cls"),
    ("hf-siglip", "cls"),
    ("hf-depth-anything", "depth"),
    ("timm-vit-registers", "cls"),
    ("timm-vit-siglip", "cls"),
    ("timm-eva-rope", "cls"),
    ("timm-eva02", "logits"),
]


def normal(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def materialise(tail, tokens):
    """Jacobian of each image, ``(B, M, T, C)``; images must not act on one another."""
    with sdpa_kernel(SDPBackend.MATH):
        whole = jacrev(tail)(tokens).transpose(1, 2)  # (B, B, M, T, C)
    own = torch.eye(len(tokens)).bool()
    assert whole[~own].abs().max() == 0
    return whole[own]


def narrow(tail, num_outputs=9):
    """The tail and a random projection, so that the matrix of a dense task stays small."""

    def projected(x):
        y = tail(x)
        return y @ normal(y.shape[1], num_outputs, seed=6).to(y) / y.shape[1] ** 0.5

    return projected


def expected(matrix, directions, cotangents):
    """``J v`` and ``J^T u``."""
    return (
        torch.einsum("bmtc,rbtc->rbm", matrix, directions),
        torch.einsum("bmtc,rbm->rbtc", matrix, cotangents),
    )


def check(jacobian, num_probes, tolerance=1e-10):
    tokens, output = jacobian.tokens, jacobian.output
    directions = normal(num_probes, *tokens.shape, seed=1, dtype=tokens.dtype)
    cotangents = normal(num_probes, *output.shape, seed=2, dtype=output.dtype)
    truth = expected(materialise(jacobian.tail, tokens), directions, cotangents)
    found = jacobian.jvp(directions), jacobian.vjp(cotangents)
    for ours, wanted in zip(found, truth, strict=True):
        assert ours.dtype == tokens.dtype
        assert_close(
            ours, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max())
        )


@pytest.fixture
def tail():
    """Two linear layers around an activation, ``(B, T, C) -> (B, 5)``."""
    first, last = normal(C, 7, seed=3), normal(7 * T, 5, seed=4)
    return lambda x: F.gelu(x @ first).flatten(1) @ last


@pytest.fixture
def tokens():
    return normal(B, T, C, seed=5)


@pytest.mark.parametrize(("name", "task"), CASES)
def test_products_on_real_architectures(name, task, double_images):
    model = open_model(tiny.NETWORKS[name]()).double()
    tap = open_tap(model.backbone, model.task(task), double_images, 1)
    jacobian = TokenJacobian(narrow(tap.tail), tap.tokens.x)
    assert jacobian.route == "recorded"
    check(jacobian, 3)


@pytest.mark.parametrize("task", ["cls", "saliency"])
@pytest.mark.parametrize(("depth", "num_probes"), [(0, 1), (2, 4)])
def test_products_at_every_depth(double_model, double_images, task, depth, num_probes):
    model = double_model
    tap = open_tap(model.backbone, model.task(task), double_images, depth)
    check(TokenJacobian(narrow(tap.tail), tap.tokens.x), num_probes)


def test_a_decoder_alone(double_model, double_images):
    """No block is left: the features are the tokens."""
    task = double_model.task("saliency")
    tap = open_tap(double_model.backbone, task, double_images, 3)
    check(TokenJacobian(narrow(tap.tail), tap.tokens.x), 2)


def test_float32_products_are_near(dense_model, images):
    tap = open_tap(dense_model.backbone, dense_model.task("saliency"), images, 1)
    check(TokenJacobian(narrow(tap.tail), tap.tokens.x), 2, tolerance=1e-4)


@pytest.mark.parametrize("depth", [-1, 3])
def test_a_tap_before_a_class_token_needs_a_block_after_it(dense_model, images, depth):
    task = dense_model.task("cls")
    with pytest.raises(ValueError, match=rf"depth must be from 0 to 2 .*; got {depth}\."):
        open_tap(dense_model.backbone, task, images, depth)


@pytest.mark.parametrize("num_probes", [1, 2, 5])
@pytest.mark.parametrize("chunk_size", [None, 1, 2, 5, 8])
def test_any_chunk_size_gives_the_same(tail, tokens, num_probes, chunk_size):
    check(TokenJacobian(tail, tokens, chunk_size), num_probes)


def test_the_default_chunk_keeps_the_largest_tensor_within_its_limit():
    tokens = normal(2, 8, 1 << 9, dtype=torch.float32)

    def tail(x):
        return x.repeat(1, 1, 16).mean(1)  # from 2 x 8 x 2^13 numbers of 4 bytes

    jacobian = TokenJacobian(tail, tokens)
    assert jacobian.chunk_size == 16
    assert TokenJacobian(tail, tokens.repeat(40, 1, 1)).chunk_size == 1


def test_images_are_apart(tail, tokens):
    other = torch.stack([tokens[0], tokens[1].flip(0)])
    directions, cotangents = normal(3, B, T, C, seed=1), normal(3, B, 5, seed=2)
    pairs = [
        (jacobian.jvp(directions), jacobian.vjp(cotangents))
        for jacobian in (TokenJacobian(tail, tokens), TokenJacobian(tail, other))
    ]
    for before, after in zip(*pairs, strict=True):
        assert_close(after[:, 0], before[:, 0])
        assert not torch.allclose(after[:, 1], before[:, 1])


def test_products_are_counted_by_the_probe(tail, tokens):
    jacobian = TokenJacobian(tail, tokens, chunk_size=2)
    jacobian.jvp(normal(3, B, T, C))
    jacobian.vjp(normal(4, B, 5))
    jacobian.vjp(normal(1, 1, 5).expand(1, B, 5))
    assert (jacobian.products.jvp, jacobian.products.vjp) == (3, 5)
    assert jacobian.num_outputs == 5


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_grad_mode_of_the_caller_does_not_matter(tail, tokens, mode):
    directions, cotangents = normal(2, B, T, C, seed=1), normal(2, B, 5, seed=2)
    truth = expected(materialise(tail, tokens), directions, cotangents)
    with mode():
        jacobian = TokenJacobian(tail, tokens)
        found = jacobian.jvp(directions), jacobian.vjp(cotangents)
    assert_close(found, truth)
    assert not any(t.requires_grad for t in found)


def test_no_graph_grows_on_weights_and_tokens_that_are_trained(tokens):
    layer = nn.Linear(C, 5).double()
    jacobian = TokenJacobian(lambda x: layer(x.tanh()).mean(1), tokens.requires_grad_(True))
    found = jacobian.jvp(normal(1, B, T, C)), jacobian.vjp(normal(1, B, 5)), jacobian.output
    assert not any(t.requires_grad for t in found)


def test_a_tail_that_cannot_be_recorded_takes_the_other_route(tail, tokens):
    def in_place(x):
        return tail(F.relu(x * 1, inplace=True))

    jacobian = TokenJacobian(in_place, tokens)
    assert jacobian.route == "torch.func: relu changes a tensor in place"
    check(jacobian, 3)


def test_the_adjoint_check_passes_both_routes(tail, tokens, generator):
    assert check_adjoint(TokenJacobian(tail, tokens), generator) < 1e-14
    other = TokenJacobian(lambda x: tail(x.clone().mul_(2)), tokens)
    assert other.route.startswith("torch.func")
    assert check_adjoint(other, generator) < 1e-14


def test_the_adjoint_check_names_a_tail_that_detaches(tail, tokens, generator):
    jacobian = TokenJacobian(lambda x: tail(x.detach()), tokens)
    with pytest.raises(ValueError, match=r"its Jacobian is zero \(does it detach\?\)"):
        check_adjoint(jacobian, generator)


def test_the_adjoint_check_names_a_tail_without_grad(tail, tokens, generator):
    jacobian = TokenJacobian(torch.no_grad()(tail), tokens)
    assert jacobian.route == "torch.func: matmul runs under no_grad"
    with pytest.raises(ValueError, match=r"JVP and VJP disagree .* use no_grad\?\)"):
        check_adjoint(jacobian, generator)


def test_a_constant_part_is_constant(tail, tokens):
    """What is detached counts as a constant in both products, as in autograd."""
    check(TokenJacobian(lambda x: tail(x.detach() * x), tokens), 2)


@pytest.mark.parametrize("bad", [lambda x: x, lambda x: x[0], lambda x: x.sum()])
def test_rejects_a_tail_of_another_shape(tokens, bad):
    with pytest.raises(
        ValueError, match=r"to \(B, M\) with B=2; got an output of shape \("
    ):
        TokenJacobian(bad, tokens)


@pytest.mark.parametrize("chunk_size", [0, -2])
def test_rejects_a_chunk_that_is_not_positive(tail, tokens, chunk_size):
    with pytest.raises(
        ValueError, match=f"chunk_size must be at least 1; got {chunk_size}"
    ):
        TokenJacobian(tail, tokens, chunk_size)


@pytest.mark.parametrize("shape", [(B, T, C), (2, B, T, C + 1), (0, B, T, C)])
def test_rejects_directions_of_another_shape(tail, tokens, shape):
    with pytest.raises(
        ValueError, match=r"directions must be \(R, 2, 4, 3\) with R >= 1; "
    ):
        TokenJacobian(tail, tokens).jvp(normal(*shape))


@pytest.mark.parametrize("shape", [(B, 5), (2, B, 4), (0, B, 5), (2, 1, 5)])
def test_rejects_cotangents_of_another_shape(tail, tokens, shape):
    with pytest.raises(ValueError, match=r"cotangents must be \(R, 2, 5\) with R >= 1; "):
        TokenJacobian(tail, tokens).vjp(normal(*shape))
