"""Oracle: timm and transformers running the same network by themselves."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from foveate.backbones import UnsupportedModelError, grid_of, open_backbone
from foveate.forward import run
from tests import tiny

EVERY = pytest.mark.parametrize("name", tiny.BACKBONES)
SIZES = (tiny.IMAGE, tiny.OTHER_IMAGE, (24, 24))
FIXED_SIZE = ("timm-vit-deit3",)
CASES = [
    (name, size)
    for name in tiny.BACKBONES
    for size in SIZES
    if size == tiny.IMAGE or name not in FIXED_SIZE
]


def final_tokens(backbone, images):
    tokens, _ = run(backbone, backbone.embed(images), 0, backbone.num_blocks)
    return backbone.finish(tokens.x)


@pytest.mark.parametrize(("name", "size"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_in_a_row_equal_the_network(name, size, dtype):
    network, images = tiny.BACKBONES[name]().to(dtype), tiny.random_images(size, dtype)
    truth = tiny.final_tokens(network, images)
    error = 1e-5 if dtype == torch.float32 else 1e-12
    assert_close(final_tokens(open_backbone(network), images), truth, rtol=0, atol=error)


@EVERY
def test_layout_and_counts(name, images):
    backbone = open_backbone(tiny.BACKBONES[name]())
    tokens = backbone.embed(images)
    assert tokens.layout.grid == tiny.GRID
    assert tokens.layout.image_size == tiny.IMAGE
    assert tokens.num_patches == 35
    assert (backbone.num_blocks, backbone.num_channels, backbone.num_heads) == (3, 36, 3)
    assert (tokens.position is not None) == (name in tiny.ROTARY)
    assert backbone.attention_channels(0) == 36
    assert tokens.layout.num_prefix >= backbone.has_class_token


@EVERY
def test_the_network_is_left_as_it_was(name, images):
    network = tiny.BACKBONES[name]()
    tiny.final_tokens(network, images)  # transformers adds hooks of its own at first use
    before = {key: value.clone() for key, value in network.state_dict().items()}
    classes = [type(m) for m in network.modules()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in network.modules()]
    final_tokens(open_backbone(network), images)
    assert [type(m) for m in network.modules()] == classes
    assert hooks == [
        len(m._forward_hooks) + len(m._forward_pre_hooks) for m in network.modules()
    ]
    after = network.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def masked_by_the_network(name, network, images, kept):
    """Final tokens of the full run in which removed patches are hidden from every query."""
    num_prefix = 5 if name.endswith("dinov3") else 1
    mask = torch.full((1, 1, 1, num_prefix + 35), -torch.inf, dtype=images.dtype)
    mask[..., :num_prefix] = 0
    mask[..., num_prefix + kept] = 0
    if name.startswith("timm"):
        return network.forward_features(images, attn_mask=mask)[:, num_prefix:][:, kept]
    x, turn = network.embeddings(images), network.rope_embeddings(images)
    for layer in network.model.layer:
        x = layer(x, attention_mask=mask, position_embeddings=turn)
    return network.norm(x)[:, num_prefix:][:, kept]


@pytest.mark.parametrize("name", tiny.ROTARY)
def test_kept_tokens_take_their_rotary_positions_along(name, double_images):
    network = tiny.BACKBONES[name]().double()
    kept = torch.tensor([2, 3, 11, 17, 30])
    truth = masked_by_the_network(name, network, double_images, kept)
    backbone = open_backbone(network)
    full = backbone.embed(double_images)
    x = torch.cat([full.prefix, full.patches[:, kept]], dim=1)
    few = full.with_(x=x, position=full.position[:, kept])
    found = backbone.finish(run(backbone, few, 0, 3)[0].patches)
    assert_close(found, truth, rtol=0, atol=1e-12)
    wrong = full.with_(x=x, position=full.position[:, kept.flip(0)])
    assert not torch.allclose(run(backbone, wrong, 0, 3)[0].patches, found, atol=1e-3)


@EVERY
def test_a_size_stands_for_repeated_tokens(name, double_images):
    backbone = open_backbone(tiny.BACKBONES[name]().double())
    full = backbone.embed(double_images)
    size = torch.ones(2, 35, dtype=torch.float64)
    size[:, 4], size[:, 9] = 3, 2
    copies = torch.tensor([4, 4, 9])
    again = full.with_(
        x=torch.cat([full.x, full.patches[:, copies]], dim=1),
        position=None
        if full.position is None
        else torch.cat([full.position, full.position[:, copies]], dim=1),
    )
    truth = run(backbone, again, 0, 3)[0].x[:, : full.x.shape[1]]
    sized = run(backbone, full.with_(size=size, proportional=True), 0, 3)[0].x
    assert_close(sized, truth, rtol=0, atol=1e-12)
    assert not torch.allclose(run(backbone, full, 0, 3)[0].x, truth, atol=1e-3)


@EVERY
def test_macs_are_those_of_every_linear_layer(name):
    network = tiny.BACKBONES[name]()
    backbone = open_backbone(network)
    blocks = [m for m in network.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    block = next(m for m in blocks if len(m) == 3)[1]
    truth = sum(m.weight.numel() for m in block.modules() if isinstance(m, nn.Linear))
    assert sum(backbone.macs_per_token(1)) == truth


@pytest.mark.parametrize("name", ["timm-vit", "hf-dinov2"])
def test_macs_of_a_plain_block_are_4_and_8_channels_squared(name):
    backbone = open_backbone(tiny.BACKBONES[name]())
    assert backbone.macs_per_token(0) == (4 * 36**2, 8 * 36**2)


@pytest.mark.parametrize("name", ["timm-vit-registers", "hf-vit", "hf-dinov2", "hf-dinov3"])
def test_training_mode_drops_what_the_network_drops(name, images):
    network = {
        "timm-vit-registers": lambda: tiny.timm_vit(attn_drop_rate=0.3, drop_path_rate=0.5),
        "hf-vit": lambda: tiny.hf_vit(
            attention_probs_dropout_prob=0.3, hidden_dropout_prob=0.2
        ),
        "hf-dinov2": lambda: tiny.hf_dinov2(drop_path_rate=0.5),
        "hf-dinov3": lambda: tiny.hf_dinov3(attention_dropout=0.3, drop_path_rate=0.5),
    }[name]()
    backbone = open_backbone(network).train()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        truth = tiny.final_tokens(network, images)
        torch.manual_seed(3)
        found = final_tokens(backbone, images)
    assert_close(found, truth)
    assert not torch.allclose(truth, tiny.final_tokens(network.eval(), images), atol=1e-3)


def test_gated_attention_equals_the_network(double_images):
    network = tiny.timm_vit()
    for block in network.blocks:
        block.attn.gate = nn.Linear(36, 36)
    network = tiny.randomise(network).double()
    truth = tiny.final_tokens(network, double_images)
    found = final_tokens(open_backbone(network), double_images)
    assert_close(found, truth, rtol=0, atol=1e-12)


def test_grouped_keys_and_values_equal_the_network(double_images):
    network = tiny.timm_eva(
        embed_dim=32, num_heads=4, num_kv_heads=2, attn_type="rope", qkv_fused=False
    ).double()
    truth = tiny.final_tokens(network, double_images)
    backbone = open_backbone(network)
    assert_close(final_tokens(backbone, double_images), truth, rtol=0, atol=1e-12)
    assert (backbone.num_heads, backbone.attention_channels(0)) == (4, 32)


def test_eva_with_a_fused_bias_equals_the_network(double_images):
    network = tiny.timm_eva(attn_type="eva", qkv_bias=True, rope_type="dinov3").double()
    truth = tiny.final_tokens(network, double_images)
    found = final_tokens(open_backbone(network), double_images)
    assert_close(found, truth, rtol=0, atol=1e-12)


def swin():
    from timm.models.swin_transformer import SwinTransformer

    return SwinTransformer(img_size=32, embed_dim=12, depths=(1,), num_heads=(3,))


def beit():
    from timm.models.beit import Beit

    return Beit(img_size=16, patch_size=4, embed_dim=12, depth=1, num_heads=3)


def timm_with_blocks(kind):
    import timm.models.vision_transformer as source

    return lambda: tiny.timm_vit(block_fn=getattr(source, kind))


def with_adapter():
    network = tiny.hf_dinov2()
    network.encoder.layer[1].attention.adapter = nn.Linear(36, 36)
    return network


def with_changed_block():
    network = tiny.timm_vit()
    network.blocks[2].attn.window = nn.Identity()
    return network


def hybrid_dpt():
    network = tiny.hf_dpt()
    network.config.is_hybrid = True
    return network


def text_model():
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=12
    )
    return BertModel(config)


REFUSED = {
    "swin": (swin, "got timm.models.swin_transformer.SwinTransformer"),
    "beit": (beit, "got timm.models.beit.Beit"),
    "norm behind": (timm_with_blocks("ResPostBlock"), r"blocks\.0 must be .*ResPostBlock"),
    "parallel": (timm_with_blocks("ParallelThingsBlock"), "got .*ParallelThingsBlock"),
    "differential": (lambda: tiny.timm_vit(attn_layer="diff"), r"blocks\.0\.attn .*DiffA"),
    "eva norm behind": (
        lambda: tiny.timm_eva(use_post_norm=True),
        r"blocks\.0 must be .*EvaBlockPostNorm",
    ),
    "mixed rotation": (
        lambda: tiny.timm_eva(rope_type="mixed"),
        "rope must be .*got .*RotaryEmbeddingMixed",
    ),
    "drops patches": (
        lambda: tiny.timm_vit(patch_drop_rate=0.5),
        "patch_drop must be absent.*PatchDropout",
    ),
    "window": (
        with_changed_block,
        r"unknown module 'blocks\.2\.attn\.window' \(Identity\)",
    ),
    "adapter": (with_adapter, r"unknown module 'attention\.adapter' \(Linear\)"),
    "hybrid": (hybrid_dpt, "got a hybrid DPT"),
    "text": (text_model, "network must be one of .*; got BertModel"),
    "torch": (lambda: nn.Linear(2, 2), "timm or transformers; got Linear from torch"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_adapter_knows_is_refused_by_name(name):
    build, message = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=message):
        open_backbone(build())


@EVERY
def test_images_that_patches_do_not_tile_are_refused(name):
    backbone = open_backbone(tiny.BACKBONES[name]())
    with pytest.raises(ValueError, match=r"patch size \(4, 4\); got 20 x 30 pixels"):
        backbone.embed(tiny.random_images((20, 30)))


def test_one_image_without_a_batch_is_refused():
    with pytest.raises(ValueError, match=r"shape \(B, 3, H, W\); got \(3, 8, 8\)"):
        grid_of(torch.zeros(3, 8, 8), (4, 4))


def test_a_network_of_fixed_size_names_it():
    backbone = open_backbone(tiny.timm_vit_deit3())
    with pytest.raises(ValueError, match=r"20 x 28 pixels .* got 28 x 12"):
        backbone.embed(tiny.random_images(tiny.OTHER_IMAGE))
