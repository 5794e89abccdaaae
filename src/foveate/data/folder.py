"""A folder of pictures, and how a picture becomes a model's input."""

from dataclasses import dataclass

from PIL import Image, ImageOps
from torch import Tensor, tensor


@dataclass(frozen=True)
class ImageTransform:
    """Resize the shorter side, crop the centre, normalise.

    Attributes:
        size: Side of the square input in pixels.
        mean: Mean of each channel, of values in [0, 1].
        std: Standard deviation of each channel.
    """

    size: int
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    def __call__(self, picture: Image.Image) -> Tensor:
        """Prepare one picture, ``(3, size, size)``; one of that size passes unresampled."""
        from torchvision.transforms.v2 import functional

        upright = ImageOps.exif_transpose(picture).convert("RGB")
        image = functional.to_dtype(functional.pil_to_tensor(upright), scale=True)
        bicubic = functional.InterpolationMode.BICUBIC
        image = functional.resize(image, [self.size], interpolation=bicubic, antialias=True)
        image = functional.center_crop(image.clamp(0, 1), [self.size, self.size])
        mean, std = (tensor(v).view(3, 1, 1) for v in (self.mean, self.std))
        return (image - mean) / std
