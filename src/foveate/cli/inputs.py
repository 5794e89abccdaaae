"""What options stand for: a model on its device, and pictures that it takes."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from foveate.cli.options import Common

if TYPE_CHECKING:
    from torch import device

    from foveate.data.folder import LoadedImages
    from foveate.models import Model

# Here and in the commands, heavy libraries are imported inside the functions, so that
# --help answers at once.


def open_model(common: Common, size: int | None = None) -> "Model":
    """Open the model on its device and in its precision.

    Args:
        common: Options.
        size: Side of the images in pixels; the model's own if None.

    Returns:
        The model, which has the task.
    """
    import torch

    from foveate import models

    device = find_device(common.device)
    model = models.open_model(common.model, *(() if size is None else (size,)))
    model.task(common.task)
    return model.to(device, getattr(torch, common.dtype))


def find_device(name: str) -> "device":
    """Look a device up.

    Args:
        name: Its name; ``auto`` is a GPU if there is one.

    Returns:
        The device.

    Raises:
        ValueError: If this machine has none of that name.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # an unknown name; a backend not built in
        raise ValueError(
            f"device must be auto, cpu, or an accelerator of this machine; got '{name}'."
        ) from error


def load_pictures(files: Sequence[Path], model: "Model") -> "LoadedImages":
    """Read pictures, in the model's precision and on its device."""
    from foveate.data.folder import load_images

    loaded = load_images(files, model.transform)
    return loaded._replace(images=loaded.images.to(next(model.parameters())))
