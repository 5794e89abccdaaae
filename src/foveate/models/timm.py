"""Open a network of timm by name, and find the tasks that it was trained for."""

from difflib import get_close_matches
from functools import partial
from typing import Any

import timm
import torch
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from foveate.data.folder import ImageTransform
from foveate.models.loading import one_line_errors
from foveate.tasks import Task
from foveate.tasks.classification import Logits
from foveate.tasks.embedding import ClassToken, PooledPatches


def load_timm(name: str) -> nn.Module:
    """Create a pretrained network that takes images of any size patches can tile.

    Args:
        name: Name known to ``timm.create_model``, with or without a tag; also
            ``hf-hub:REPO`` and ``local-dir:DIR``.

    Returns:
        The network, with timm's own classifier where the weights have one.

    Raises:
        ValueError: If timm knows no such name, or the network is not supported.
    """
    from foveate.backbones.timm import check_network

    if ":" not in name:
        if not timm.is_model(name):
            close = get_close_matches(name, timm.list_models(), 3) or ["vit_*, eva*"]
            raise ValueError(
                f"model must be a name known to timm, such as {', '.join(close)}; "
                f"got 'timm:{name}'."
            )
        with torch.device("meta"):  # refuse before anything is downloaded
            check_network(timm.create_model(name, pretrained=False))
    with one_line_errors(f"timm:{name}"):
        return timm.create_model(name, pretrained=True, dynamic_img_size=True)


def timm_transform(network: nn.Module) -> ImageTransform:
    """Input size and normalisation of a network; ImageNet's where it carries none."""
    known: Any = network
    config = resolve_model_data_config(network)
    size = min(known.patch_embed.img_size or config["input_size"][1:])
    return ImageTransform(size, tuple(config["mean"]), tuple(config["std"]))


def timm_tasks(network: nn.Module) -> dict[str, Task]:
    """Tasks of a ``VisionTransformer`` or an ``Eva``.

    ``cls`` is the class token if the final norm comes before pooling, else the network's
    own pooling with the norm behind it; ``logits`` is its classifier, if it has one.

    Args:
        network: A network that the timm adapter takes.

    Returns:
        Tasks by name; none where the network neither has a class token nor pools.
    """
    known: Any = network
    pools = bool(known.global_pool) or known.attn_pool is not None
    needs_grid = known.attn_pool is not None or known.global_pool != "token"
    tasks: dict[str, Task] = {}
    if known.cls_token is not None and not isinstance(known.norm, nn.Identity):
        tasks["cls"] = ClassToken()
    elif pools:
        tasks["cls"] = PooledPatches(
            partial(known.forward_head, pre_logits=True), needs_grid
        )
    if pools and not isinstance(known.head, nn.Identity):
        pool = partial(_pool, network)
        tasks["logits"] = Logits(known.head, pool, needs_grid=needs_grid)
    return tasks


def _pool(network: Any, x: Tensor, num_prefix: int) -> Tensor:  # noqa: ANN401 - timm's
    return network.forward_head(x, pre_logits=True)
