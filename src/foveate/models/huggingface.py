"""Open a network of ``transformers``: its trunk, its tasks, its images."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from foveate.backbones import UnsupportedModelError
from foveate.backbones.huggingface import TRUNKS
from foveate.data.folder import ImageTransform
from foveate.models.loading import one_line_errors
from foveate.tasks import Task
from foveate.tasks.classification import (
    Logits,
    Pool,
    class_token,
    class_token_and_mean_patch,
    mean_patch,
)
from foveate.tasks.depth import Depth
from foveate.tasks.embedding import ClassToken, PooledPatches


class Classifier(NamedTuple):
    """Where a classification model keeps its trunk, and what its classifier reads."""

    trunk: str
    pool: Pool
    needs_grid: bool = True
    normalised: bool = True


_CLASSIFIERS = {
    "ViTForImageClassification": Classifier("vit", class_token, needs_grid=False),
    "Dinov2ForImageClassification": Classifier("dinov2", class_token_and_mean_patch),
    "Dinov2WithRegistersForImageClassification": Classifier(
        "dinov2_with_registers", class_token_and_mean_patch
    ),
    "CLIPForImageClassification": Classifier("vision_model", mean_patch, normalised=False),
    "SiglipForImageClassification": Classifier("vision_model", mean_patch),
}
_PROJECTED = ("CLIPModel", "CLIPVisionModelWithProjection")
_DEPTH = ("DPTForDepthEstimation", "DepthAnythingForDepthEstimation")
ARCHITECTURES = tuple(sorted((*TRUNKS, *_CLASSIFIERS, *_PROJECTED, *_DEPTH, "SiglipModel")))

_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_OPENAI = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_NORMALISATION = {  # of the model types whose processors do not take ImageNet's
    "vit": _HALF,
    "dpt": _HALF,
    "siglip": _HALF,
    "siglip_vision_model": _HALF,
    "clip": _OPENAI,
    "clip_vision_model": _OPENAI,
}
# Parameters that the forward never reads and published weights therefore lack.
_UNREAD = ("pooler.", "mask_token", "neck.fusion_stage.layers.0.residual_layer1.")


def load_huggingface(source: str | Path) -> nn.Module:
    """Load a network in float32 with the class that its ``config.json`` names.

    Args:
        source: A directory written by ``save_pretrained``, read without network, or the
            name of a repository.

    Returns:
        The network.

    Raises:
        ValueError: If the source cannot be read, or lacks weights.
        UnsupportedModelError: If no adapter knows the architecture.
    """
    import transformers

    local = Path(source).is_dir()
    label = str(source) if local else f"hf:{source}"
    if local and not (Path(source) / "config.json").is_file():
        held = sorted(f.name for f in Path(source).iterdir()) or ["nothing"]
        raise ValueError(
            f"model directory must hold config.json; got {', '.join(held[:5])}."
        )
    with one_line_errors(label):
        config = transformers.AutoConfig.from_pretrained(source, local_files_only=local)
    kind = (config.architectures or ["none"])[0]
    if kind not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"architecture in config.json must be one of {', '.join(ARCHITECTURES)}; "
            f"got {kind}."
        )
    with one_line_errors(label), _quiet_unless_watched():
        network, report = getattr(transformers, kind).from_pretrained(
            source, local_files_only=local, dtype=torch.float32, output_loading_info=True
        )
    missing = sorted(
        name for name in report["missing_keys"] if not any(u in name for u in _UNREAD)
    )
    if missing:
        raise ValueError(
            f"weights must hold every parameter of {kind}; got none for '{missing[0]}' and "
            f"{len(missing) - 1} more."
        )
    return network


@contextmanager
def _quiet_unless_watched() -> Iterator[None]:
    """Show the progress bars of transformers on a terminal alone."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def take_apart(network: nn.Module) -> tuple[nn.Module, dict[str, Task]]:
    """Separate the trunk of a network from the tasks that read it.

    Args:
        network: A model of ``transformers``, with or without a head.

    Returns:
        The trunk, which may still prove to be unsupported, and its tasks by name.
    """
    kind, parts = type(network).__name__, _parts(network)
    if kind in _CLASSIFIERS:
        names = _CLASSIFIERS[kind]
        trunk = network.get_submodule(names.trunk)
        tasks = take_apart(trunk)[1]
        if not isinstance(parts.classifier, nn.Identity):
            tasks["logits"] = Logits(
                parts.classifier,
                names.pool,
                needs_grid=names.needs_grid,
                normalised=names.normalised,
            )
        return trunk, tasks
    if kind in _PROJECTED:
        return parts.vision_model, {"cls": ClassToken(parts.visual_projection)}
    if kind == "SiglipModel":
        return take_apart(parts.vision_model)
    if kind == "SiglipVisionModel":
        return network, {"cls": PooledPatches(parts.head)} if parts.use_head else {}
    if kind in _DEPTH:
        return _take_depth_apart(network)
    return network, {"cls": ClassToken()}


def _take_depth_apart(network: nn.Module) -> tuple[nn.Module, dict[str, Task]]:
    parts = _parts(network)
    trunk = getattr(parts, "backbone", None)
    if trunk is None:  # a DPT with its own ViT, whose indices count blocks from 0
        trunk = parts.dpt
        depths = tuple(sorted(i + 1 for i in parts.config.backbone_out_indices))
        normalised = False
    else:
        if type(trunk).__name__ != "Dinov2Backbone" or trunk.config.reshape_hidden_states:
            raise UnsupportedModelError(
                "backbone of a depth model must be a Dinov2Backbone with "
                f"reshape_hidden_states=False; got {type(trunk).__name__}."
            )
        read = trunk.out_features
        depths = tuple(i for i, stage in enumerate(trunk.stage_names) if stage in read)
        normalised = bool(trunk.config.apply_layernorm)
    depth = Depth(
        parts.neck,
        parts.head,
        depths,
        normalised=normalised,
        head_knows_grid=type(network).__name__ == "DepthAnythingForDepthEstimation",
        relative=getattr(parts.config, "depth_estimation_type", "relative") == "relative",
    )
    return trunk, {"cls": ClassToken(), "depth": depth}


def huggingface_transform(
    network: nn.Module, trunk: nn.Module, source: str | Path | None = None
) -> ImageTransform:
    """Input size and normalisation of a network.

    Args:
        network: The whole model.
        trunk: Its Vision Transformer.
        source: Where it was loaded from; its ``preprocessor_config.json`` is read if there
            is one.

    Returns:
        The transform. What no file states is the size the trunk was built for and the
        normalisation of its model type.
    """
    saved: dict[str, Any] = {}
    if source is not None:
        with one_line_errors(source):
            saved = _saved_processor(source)
    model_type = _parts(network).config.model_type
    mean, std = _NORMALISATION.get(model_type, (ImageTransform.mean, ImageTransform.std))
    mean, std = saved.get("image_mean", mean), saved.get("image_std", std)
    if saved.get("do_normalize") is False:
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    crop = saved.get("crop_size") if saved.get("do_center_crop") else None
    size = _side(crop) or _side(saved.get("size")) or _side(_parts(trunk).config.image_size)
    return ImageTransform(size, _three(mean), _three(std))


def _saved_processor(source: str | Path) -> dict[str, Any]:
    """Settings of the saved image processor; empty if none was saved."""
    from transformers.utils import cached_file

    for file in ("preprocessor_config.json", "processor_config.json"):
        found = cached_file(
            source,
            file,
            local_files_only=Path(source).is_dir(),
            _raise_exceptions_for_missing_entries=False,
        )
        if found is not None:
            saved = json.loads(Path(found).read_text())
            return saved.get("image_processor", saved)
    return {}


def _side(size: Any) -> int:  # noqa: ANN401 - as many spellings as years
    """Shorter side of a size as image processors write it; 0 if there is none."""
    if isinstance(size, dict):
        size = [size[k] for k in ("height", "width", "shortest_edge") if size.get(k)]
    if isinstance(size, list | tuple):
        return min(size, default=0)
    return size or 0


def _three(values: Sequence[float]) -> tuple[float, float, float]:
    red, green, blue = values
    return red, green, blue


def _parts(network: nn.Module) -> Any:  # noqa: ANN401 - submodules by name
    return network
