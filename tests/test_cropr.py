"""Oracle: naive Cropr scores in ``reference_scoring``; a task that reads one patch."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from foveate.backbones import open_backbone
from foveate.data.folder import ImageTransform
from foveate.forward import Block, run
from foveate.models import Model, open_model
from foveate.reduction.presets import plan_for
from foveate.reduction.reduced_vit import reduce
from foveate.scoring import cropr
from foveate.scoring.cropr import Cropr, load_queries, save_queries, train_queries
from tests import reference_scoring as reference
from tests import tiny

GRID, HEADS = tiny.GRID, (tiny.HEADS, tiny.WIDTH // tiny.HEADS)


class OnePatch(nn.Module):
    """Reads the patch at one place after the last block."""

    needs_grid = True

    def __init__(self, place):
        super().__init__()
        self.place = place

    def taps(self, num_blocks):
        return (num_blocks,)

    def decode(self, backbone, features, layout):
        return features[0][:, layout.num_prefix + self.place]


@pytest.fixture
def queries(generator):
    """Five queries for the tiny models."""
    return torch.randn(5, *HEADS, generator=generator)


def entering(model, images, depth):
    """Tokens that enter a block, and the block."""
    tokens, _ = run(model.backbone, model.backbone.embed(images), 0, depth)
    return tokens, Block(model.backbone, depth)


def test_scores_are_the_naive_ones(double_model, double_images, queries):
    tokens, block = entering(double_model, double_images, 1)
    scores = Cropr(queries)(tokens, block)
    for image in range(2):
        key = block.project(tokens).key[image]
        expected = reference.cropr_scores(queries, key, num_prefix=1)
        assert_close(scores[image], torch.from_numpy(expected))


def test_without_queries_the_class_token_asks(double_model, double_images):
    tokens, block = entering(double_model, double_images, 2)
    scores = Cropr()(tokens, block)
    for image in range(2):
        query, key, _ = (part[image] for part in block.project(tokens))
        expected = reference.cropr_scores(query[:, 0][None], key, num_prefix=1)
        assert_close(scores[image], torch.from_numpy(expected))


def test_half_precision_is_summed_in_float32(dense_model, images, queries):
    model = copy.deepcopy(dense_model).to(torch.bfloat16)
    tokens, block = entering(model, images.to(torch.bfloat16), 1)
    assert Cropr(queries)(tokens, block).dtype == torch.float32


@pytest.mark.parametrize("shape", [(5, 2, 12), (5, 3, 13), (3, 12)])
def test_refuses_queries_of_another_shape(dense_model, images, shape):
    tokens, block = entering(dense_model, images, 1)
    with pytest.raises(ValueError, match=r"shape \(Q, 3, 12\).*; got \("):
        Cropr(torch.zeros(shape))(tokens, block)


def test_needs_queries_or_a_class_token(images):
    model = open_model(tiny.timm_vit_average())
    tokens, block = entering(model, images, 1)
    with pytest.raises(ValueError, match="without a class token; got None"):
        Cropr()(tokens, block)
    with pytest.raises(
        ValueError, match="'cropr' must be given a model with a class token"
    ):
        plan_for(model, "cropr", next(iter(model.tasks)), GRID, {1: 20})


def test_training_finds_the_patch_that_is_read():
    network = tiny.hf_dinov2()
    with torch.no_grad():  # keys that tell places apart
        network.embeddings.position_embeddings.mul_(4)
    tasks = {"patch": OnePatch(17)}
    model = Model("tiny", open_backbone(network), tasks, ImageTransform(20)).eval()
    images = torch.cat([tiny.random_images(seed=seed) for seed in range(16)])
    queries = train_queries(model, images, "patch", 2, steps=100)
    others = torch.cat([tiny.random_images(seed=seed) for seed in range(90, 94)])
    tokens, block = entering(model, others, 2)
    rank = Cropr(queries)(tokens, block).argsort(1, descending=True).argsort(1)
    assert rank[:, 17].float().mean() < 3  # 17 by chance


def test_training_looks_at_patches_alone(dense_model, images, monkeypatch):
    looked = []

    class Spy(cropr.AuxiliaryHead):
        def forward(self, key, value):
            looked.append((key, value))
            return super().forward(key, value)

    monkeypatch.setattr(cropr, "AuxiliaryHead", Spy)
    train_queries(dense_model, images[:1], "cls", 1, steps=1)
    tokens, block = entering(dense_model, images[:1], 1)
    heads = block.project(tokens)
    assert_close(looked[0], (heads.key[:, :, 1:], heads.value[:, :, 1:]))


@pytest.mark.parametrize("task", ["cls", "saliency"])
def test_training_repeats_and_leaves_the_model_alone(dense_model, images, task):
    dense_model.requires_grad_()
    before = copy.deepcopy(dense_model.state_dict())
    with torch.no_grad():
        first, second = (
            train_queries(dense_model, images, task, 1, num_queries=3, steps=2)
            for _ in range(2)
        )
    other = train_queries(dense_model, images, task, 1, num_queries=3, steps=2, seed=1)
    assert first.shape == (3, *HEADS)
    assert torch.equal(first, second)
    assert not torch.allclose(first, other)
    assert not first.requires_grad
    assert all(p.grad is None for p in dense_model.parameters())
    assert all(torch.equal(before[k], v) for k, v in dense_model.state_dict().items())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"depth": 3}, "depth must be from 0 to 2; got 3"),
        ({"depth": 1, "num_queries": 0}, "num_queries must be at least 1; got 0"),
        ({"depth": 1, "steps": 0}, "steps must be at least 1; got 0"),
    ],
)
def test_refuses_to_train(dense_model, images, given, message):
    with pytest.raises(ValueError, match=message):
        train_queries(dense_model, images, "cls", **given)


def test_queries_reach_the_model_through_a_file(dense_model, images, queries, tmp_path):
    file = tmp_path / "queries.safetensors"
    save_queries({1: queries, 2: -queries}, file)
    assert torch.equal(load_queries(file, 2), -queries)

    def kept(options):
        plan = plan_for(dense_model, "cropr", "saliency", GRID, {1: 20}, options=options)
        return reduce(dense_model, plan).tokens_at(images, (2,))[2].stand_in[..., 0] >= 0

    tokens, block = entering(dense_model, images, 1)
    for options, score in (({}, Cropr()), ({"queries": str(file)}, Cropr(queries))):
        best = score(tokens, block).topk(20).indices
        expected = torch.zeros(2, 35, dtype=torch.bool).scatter(1, best, True)
        assert torch.equal(kept(options), expected)


def test_refuses_files_without_these_queries(queries, tmp_path):
    file, text = tmp_path / "queries.safetensors", tmp_path / "text"
    save_queries({1: queries}, file)
    text.write_text("no tensors")
    with pytest.raises(ValueError, match=r"trained for depth 2; .* has \['1'\]"):
        load_queries(file, 2)
    for bad in (text, tmp_path / "missing"):
        with pytest.raises(ValueError, match=f"queries must be a safetensors file; {bad}"):
            load_queries(bad, 1)
