"""Oracle: the whole model of timm or transformers, run by itself."""

import pytest
import torch
from torch import nn
from torch.nn.functional import interpolate
from torch.testing import assert_close

from foveate.diagnosis.jacobian import open_tap
from foveate.models import open_model
from foveate.tasks.classification import class_token_and_mean_patch, mean_patch
from foveate.tasks.saliency import SaliencyDecoder
from tests import tiny

TIMM = [name for name in tiny.BACKBONES if name.startswith("timm")]


@pytest.mark.parametrize("name", TIMM)
def test_logits_of_timm_are_its_own(name, images):
    network = tiny.NETWORKS[name]()
    assert torch.equal(open_model(network)(images, "logits"), network(images))


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("timm-vit", lambda n, x: n.forward_features(x)[:, 0]),
        ("timm-dinov3", lambda n, x: n.forward_features(x)[:, 0]),
        ("timm-vit-average", lambda n, x: n.fc_norm(n.forward_features(x).mean(dim=1))),
        ("timm-vit-siglip", lambda n, x: n.attn_pool(n.forward_features(x))),
        ("timm-eva02", lambda n, x: n.fc_norm(n.forward_features(x)[:, 1:].mean(dim=1))),
        (
            "hf-vit",
            lambda n, x: n(x, interpolate_pos_encoding=True).last_hidden_state[:, 0],
        ),
        ("hf-dinov2-registers", lambda n, x: n(x).pooler_output),
        ("hf-dinov3", lambda n, x: n(x).pooler_output),
        ("hf-clip", lambda n, x: n(x, interpolate_pos_encoding=True).pooler_output),
        ("hf-siglip", lambda n, x: n(x, interpolate_pos_encoding=True).pooler_output),
        (
            "hf-clip-projection",
            lambda n, x: n(x, interpolate_pos_encoding=True).image_embeds,
        ),
    ],
)
def test_embedding_is_what_the_network_reads(name, read, images):
    network = tiny.NETWORKS[name]()
    assert_close(open_model(network)(images), read(network, images), rtol=0, atol=1e-5)


def test_a_class_token_needs_no_grid_and_no_patches(images):
    model = open_model(tiny.hf_vit_classifier())
    tokens = model.backbone.embed(images)
    for name in ("cls", "logits"):
        task = model.task(name)
        assert not task.needs_grid
        assert task.taps(3) == (3,)
        short = task.decode(model.backbone, (tokens.x[:, :7],), tokens.layout)
        full = task.decode(model.backbone, (tokens.x,), tokens.layout)
        assert_close(short, full)


@pytest.mark.parametrize("name", ["timm-vit-average", "timm-vit-siglip", "hf-siglip"])
def test_pooling_needs_the_grid(name):
    assert open_model(tiny.NETWORKS[name]()).task("cls").needs_grid


def clip_classifier():
    from transformers import CLIPConfig, CLIPForImageClassification

    return CLIPForImageClassification(CLIPConfig(**two_towers(), num_labels=10))


def siglip_classifier():
    from transformers import SiglipConfig, SiglipForImageClassification

    return SiglipForImageClassification(SiglipConfig(**two_towers(), num_labels=10))


def registers_classifier():
    from transformers import (
        Dinov2WithRegistersConfig,
        Dinov2WithRegistersForImageClassification,
    )

    shape = tiny.shape(num_register_tokens=4, num_labels=10)
    return Dinov2WithRegistersForImageClassification(Dinov2WithRegistersConfig(**shape))


def two_towers():
    text = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3}
    return {
        "vision_config": tiny.shape(intermediate_size=48),
        "text_config": {**text, "intermediate_size": 12, "vocab_size": 20},
    }


@pytest.mark.parametrize(
    "build",
    [
        tiny.hf_vit_classifier,
        tiny.hf_dinov2_classifier,
        clip_classifier,
        siglip_classifier,
        registers_classifier,
    ],
)
def test_logits_of_transformers_are_its_own(build):
    network, images = tiny.randomise(build()), tiny.random_images((24, 24))
    truth = network(images).logits
    assert_close(open_model(network)(images, "logits"), truth, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_the_image_tower_of_a_pair_is_taken_out(kind):
    import transformers

    config = getattr(transformers, f"{kind}Config")(**two_towers())
    network = tiny.randomise(getattr(transformers, f"{kind}Model")(config))
    images = tiny.random_images()
    truth = network.get_image_features(images, interpolate_pos_encoding=True).pooler_output
    assert_close(open_model(network)(images), truth, rtol=0, atol=1e-5)


def dpt_on_dinov2(normalised=True):
    from transformers import Dinov2Config, DPTConfig, DPTForDepthEstimation

    backbone = Dinov2Config(
        **tiny.shape(num_hidden_layers=4, layerscale_value=0.5),
        out_indices=[1, 2, 3],
        reshape_hidden_states=False,
        apply_layernorm=normalised,
    )
    config = DPTConfig(backbone_config=backbone, fusion_hidden_size=16, **tiny.NECK)
    return tiny.randomise(DPTForDepthEstimation(config))


DEPTH = {
    "depth-anything": (tiny.hf_depth_anything, tiny.IMAGE, (2, 3, 4)),
    "dpt": (tiny.hf_dpt_depth, (24, 24), (1, 3, 4)),
    "dpt on dinov2": (dpt_on_dinov2, tiny.IMAGE, (1, 2, 3)),
    "dpt on dinov2, raw": (lambda: dpt_on_dinov2(False), tiny.IMAGE, (1, 2, 3)),
}


@pytest.mark.parametrize("name", DEPTH)
def test_depth_is_the_predicted_depth_bit_for_bit_from_every_depth(name):
    build, size, taps = DEPTH[name]
    network, images = build(), tiny.random_images(size)
    truth = network(images).predicted_depth
    model = open_model(network)
    task = model.task("depth")
    assert task.needs_grid
    assert task.taps(4) == taps
    assert torch.equal(model(images, "depth"), truth)
    for depth in range(taps[-1] + 1):
        tap = open_tap(model.backbone, task, images, depth)
        assert torch.equal(tap.tail(tap.tokens.x), truth.flatten(1))


def test_depth_reads_all_its_taps():
    network, images = tiny.hf_depth_anything(), tiny.random_images()
    model = open_model(network)
    layout = model.backbone.embed(images).layout
    features = [torch.randn(2, 36, 36) for _ in range(3)]
    whole = model.task("depth").decode(model.backbone, tuple(features), layout)
    for i in range(3):
        changed = [x.flip(1) if j == i else x for j, x in enumerate(features)]
        other = model.task("depth").decode(model.backbone, tuple(changed), layout)
        assert not torch.allclose(whole, other)


def test_depth_leaves_out_all_prefix_tokens_but_the_first():
    network, images = tiny.hf_depth_anything(), tiny.random_images()
    model = open_model(network)
    task, tokens = model.task("depth"), model.backbone.embed(images)
    longer = torch.cat([tokens.x[:, :1], torch.randn(2, 3, 36), tokens.x[:, 1:]], dim=1)
    layout = type(tokens.layout)(4, tokens.layout.grid, tokens.layout.image_size)
    assert torch.equal(
        task.decode(model.backbone, (longer,) * 3, layout),
        task.decode(model.backbone, (tokens.x,) * 3, tokens.layout),
    )


def test_saliency_is_the_decoder_on_the_normalised_patch_map(dense_model, images):
    network = dense_model.backbone.network
    patches = network(images).last_hidden_state[:, 1:]
    maps = patches.transpose(1, 2).reshape(2, 36, *tiny.GRID)
    decoder = dense_model.task("saliency").decoder
    truth = interpolate(decoder(maps), tiny.IMAGE, mode="bilinear")
    assert truth.shape == (2, 1, *tiny.IMAGE)
    assert_close(dense_model(images, "saliency"), truth)


def test_saliency_decoder_is_its_three_stages():
    decoder = tiny.randomise(SaliencyDecoder((6, 5, 4, 3)))
    x = torch.randn(2, 6, 3, 2)
    stages = [
        nn.Sequential(
            decoder.get_submodule(f"upconv{i}"), decoder.get_submodule(f"bn{i}"), nn.ReLU()
        )
        for i in (1, 2, 3)
    ]
    truth = nn.Sequential(*stages, decoder.final_conv)(x)
    assert truth.shape == (2, 1, 24, 16)
    assert_close(decoder(x), truth)


def test_pools_leave_registers_out():
    x = torch.arange(12.0).view(1, 4, 3)  # tokens (0 1 2) (3 4 5) (6 7 8) (9 10 11)
    assert mean_patch(x, 2).tolist() == [[7.5, 8.5, 9.5]]
    assert class_token_and_mean_patch(x, 2).tolist() == [[0, 1, 2, 7.5, 8.5, 9.5]]
