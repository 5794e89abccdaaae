"""A model for one task with nothing removed."""

from torch import Tensor, nn

from foveate.adaptive.lora import use_lora
from foveate.models import Model

__all__ = ["FullViT"]


class FullViT(nn.Module):
    """A model for one task with nothing removed.

    Args:
        model: The model.
        task: Name of its task.
        lora: Low-rank update of the model to run with.
    """

    def __init__(self, model: Model, task: str, lora: str | None = None) -> None:
        super().__init__()
        self.model, self.task, self.lora = model, task, lora

    def forward(self, images: Tensor) -> Tensor:
        """Raw output of the task."""
        if self.lora is not None:
            use_lora(self.model, self.lora)
        return self.model(images, self.task)
