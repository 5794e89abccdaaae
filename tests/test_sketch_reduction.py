"""Oracle: the materialised float64 Jacobian of every image."""

import copy
import pickle

import pytest
import torch
from torch.func import jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from foveate.forward import Block, run
from foveate.reduction.recover import recover
from foveate.reduction.regroup import Grouping, Memory, regroup
from foveate.reduction.sketch import PulledProbes, Sensitivity
from tests import tiny

DEPTH = 1
places = pytest.mark.parametrize("place", ["before", "between"])


class Weighted(torch.nn.Module):
    """One number of another task's output, so that a single sign is exact."""

    def __init__(self, task):
        super().__init__()
        self.task, self.needs_grid = task, task.needs_grid

    def taps(self, num_blocks):
        return self.task.taps(num_blocks)

    def decode(self, backbone, features, layout):
        y = self.task.decode(backbone, features, layout).flatten(1)
        return (y * torch.linspace(-1, 2, y.shape[1], dtype=y.dtype)).sum(1, keepdim=True)


class Levels(torch.nn.Module):
    """Reads the mean of all tokens that enter blocks 1 and 2, and of the last ones."""

    needs_grid = True

    def taps(self, num_blocks):
        return (1, 2, num_blocks)

    def decode(self, backbone, features, layout):
        return torch.cat([x.square().mean(1) for x in features], dim=1)


def entering(backbone, dtype=torch.float64):
    return run(backbone, backbone.embed(tiny.random_images(dtype=dtype)), 0, DEPTH)[0]


def merged(tokens, keep=12):
    """Merge patch n into group n mod ``keep``; attention becomes proportional."""
    group = torch.arange(tokens.num_patches).expand(len(tokens.x), -1) % keep
    lead = torch.arange(keep).expand(len(tokens.x), -1)
    return regroup(tokens, Grouping(lead, group), Memory(0.5)).with_(proportional=True)


def at(model, place, reduced=False, task=None):
    """Tokens at a place of block 1, and the block as the loop shows it to a step."""
    backbone = model.backbone
    tokens = entering(backbone)
    kept = {DEPTH: tokens}
    tokens = merged(tokens) if reduced else tokens
    if place == "before":
        return tokens, Block(backbone, DEPTH, None, kept)
    heads = backbone.project(DEPTH, tokens)
    return backbone.attend(DEPTH, tokens, heads), Block(backbone, DEPTH, heads, kept)


def image(tokens, b):
    """One image of a batch."""
    names = ("x", "size", "stand_in", "offset", "position", "grid_position")
    fields = {name: getattr(tokens, name) for name in names}
    return tokens.with_(**{k: v[b : b + 1] for k, v in fields.items() if v is not None})


def read(now, backbone, place, taps):
    """What the task reads, from the tokens at a place of block 1 on, step by step."""
    features = []
    if place == "before":
        now = backbone.attend(1, now, backbone.project(1, now))
    for depth in range(1, backbone.num_blocks):
        now = backbone.transform(depth, now)
        features += [now] if depth + 1 in taps else []
        if depth + 1 < backbone.num_blocks:
            heads = backbone.project(depth + 1, now)
            now = backbone.attend(depth + 1, now, heads)
    return features


def jacobians(task, tokens, block, place):
    """Exact Jacobian by the patches, ``(B, M, K, C)``; taps before them are constant."""
    found, backbone = [], block.backbone
    taps = task.taps(backbone.num_blocks)
    for b in range(len(tokens.x)):
        one = image(tokens, b)
        early = [image(block.kept[1], b)] if 1 in taps else []

        def tail(x, one=one, early=early):
            features = early + read(one.with_(x=x), backbone, place, taps)
            if task.needs_grid:
                features = [recover(f) for f in features]
            return task.decode(backbone, tuple(f.x for f in features), one.layout).flatten()

        with sdpa_kernel(SDPBackend.MATH):
            found.append(jacrev(tail)(one.x)[:, 0, one.layout.num_prefix :])
    return torch.stack(found)


@places
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("name", ["cls", "saliency", "levels"])
def test_one_output_is_pulled_back_exactly(double_model, name, reduced, place):
    task = Weighted(Levels() if name == "levels" else double_model.task(name))
    tokens, block = at(double_model, place, reduced)
    rows = PulledProbes(task, place, num_probes=3)(tokens, block)
    truth = jacobians(task, tokens, block, place)[:, 0] / tokens.sizes()[..., None]
    assert rows.shape == (2, tokens.num_patches, 3, tiny.WIDTH)
    for k in range(3):
        sign = (rows[0, 0, k] @ truth[0, 0]).sign()
        assert_close(rows[:, :, k], sign * truth)


@places
def test_squared_changes_are_within_their_stated_error(double_model, place, generator):
    task, num_probes = double_model.task("cls"), 400
    tokens, block = at(double_model, place, reduced=True)
    rows = PulledProbes(task, place, num_probes, seed=5)(tokens, block)
    shape = (2, tokens.num_patches, tiny.WIDTH)
    move = torch.randn(shape, generator=generator, dtype=torch.float64)
    exact = torch.einsum("bmkc,bkc->bm", jacobians(task, tokens, block, place), move)
    each = torch.einsum("bkrc,bkc,bk->br", rows, move, tokens.sizes().double())
    truth = exact.square().sum(1)
    assert_close(each.square().mean(1), truth, rtol=4 * (2 / num_probes) ** 0.5, atol=0)


@places
@pytest.mark.parametrize("name", ["cls", "saliency"])
def test_sensitivity_of_one_output_is_exact(double_model, name, place):
    task = Weighted(double_model.task(name))
    tokens, block = at(double_model, place, reduced=True)
    with torch.no_grad():
        found = Sensitivity(PulledProbes(task, place, 1))(tokens, block)
    truth = jacobians(task, tokens, block, place).square().sum((1, 3)).sqrt()
    assert_close(found, truth)


def test_sensitivity_is_within_its_stated_error(double_model):
    task, num_probes = double_model.task("cls"), 400
    tokens, block = at(double_model, "between")
    probes = PulledProbes(task, "between", num_probes, seed=5, chunk_size=100)
    found = Sensitivity(probes)(tokens, block).square()
    truth = jacobians(task, tokens, block, "between").square().sum((1, 3))
    assert_close(found, truth, rtol=4 * (2 / num_probes) ** 0.5, atol=0)


def test_probes_belong_to_seed_and_depth_and_serve_all_images(double_model):
    task = double_model.task("cls")
    tokens, block = at(double_model, "between")
    probes = PulledProbes(task, "between", 3)
    together = probes(tokens, block)
    assert torch.equal(together, probes(tokens, block))
    assert not torch.equal(
        together, PulledProbes(task, "between", 3, seed=1)(tokens, block)
    )
    here, deeper = (probes._probes(tokens.x[..., 0], depth) for depth in (1, 2))
    assert not torch.equal(here, deeper)
    for b in range(2):
        assert_close(probes(image(tokens, b), block), together[b : b + 1])


def test_chunks_change_nothing(double_model):
    task = double_model.task("saliency")
    tokens, block = at(double_model, "between")
    whole, parts = (PulledProbes(task, "between", 5, chunk_size=c) for c in (8, 2))
    assert_close(whole(tokens, block), parts(tokens, block))


def test_probes_give_no_gradients_and_need_none(double_model):
    double_model.requires_grad_(True)
    tokens, block = at(double_model, "between")
    score = Sensitivity(PulledProbes(double_model.task("cls"), "between", 2))
    with torch.no_grad():
        quiet = score(tokens, block)
    found = score(tokens, block)
    assert not found.requires_grad
    assert torch.equal(found, quiet)
    assert found.min() > 0


def test_probes_refuse_a_tap_that_was_not_kept(double_model):
    tokens, block = at(double_model, "between")
    blind = Block(block.backbone, DEPTH, block.heads)
    wrong = r"taps must hold the depths \[1\], which .* before block 1; .* kept at \[\]\."
    with pytest.raises(ValueError, match=wrong):
        PulledProbes(Levels())(tokens, blind)


@pytest.mark.parametrize("field", ["num_probes", "chunk_size"])
def test_counts_below_one_are_refused(field):
    with pytest.raises(ValueError, match=rf"{field} must be at least 1; got 0\."):
        PulledProbes(Levels(), **{field: 0})


def test_half_precision_gives_wide_rows(dense_model):
    model = dense_model.to(torch.bfloat16)
    tokens = entering(model.backbone, torch.bfloat16)
    rows = PulledProbes(model.task("cls"), "before", 2)(tokens, Block(model.backbone, 1))
    assert rows.dtype == torch.float32
    assert rows.isfinite().all()


def test_probes_survive_copies_and_pickles(double_model):
    tokens, block = at(double_model, "between")
    score = Sensitivity(PulledProbes(double_model.task("cls"), "between", 2))
    truth = score(tokens, block)
    for twin in (copy.deepcopy(score), pickle.loads(pickle.dumps(score))):
        assert torch.equal(twin(tokens, block), truth)
