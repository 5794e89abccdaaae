"""Image embeddings: the class token, or what the network pools in its place."""

from collections.abc import Callable

from torch import Tensor, nn

from foveate.backbones import Backbone
from foveate.tokens import Layout


class ClassToken(nn.Module):
    """The class token after the final norm, through the network's own projection if any.

    Args:
        projection: Linear map of the class token, as CLIP's ``visual_projection``.
    """

    needs_grid = False

    def __init__(self, projection: nn.Module | None = None) -> None:
        super().__init__()
        self.projection = projection

    def taps(self, num_blocks: int) -> tuple[int, ...]:
        """Tokens after the last block."""
        return (num_blocks,)

    def decode(
        self, backbone: Backbone, features: tuple[Tensor, ...], layout: Layout
    ) -> Tensor:
        """Embedding of each image, ``(B, C)`` or ``(B, projection channels)``."""
        x = backbone.finish(features[0][:, :1])[:, 0]
        return x if self.projection is None else self.projection(x)


class PooledPatches(nn.Module):
    """All tokens after the final norm, pooled as the network itself pools them.

    Args:
        pool: Takes ``(B, P + N, C)`` and returns ``(B, M)``, as SigLIP's attention pooling.
        needs_grid: Whether it reads patches.
    """

    def __init__(self, pool: Callable[[Tensor], Tensor], needs_grid: bool = True) -> None:
        super().__init__()
        self.pool = pool
        self.needs_grid = needs_grid

    def taps(self, num_blocks: int) -> tuple[int, ...]:
        """Tokens after the last block."""
        return (num_blocks,)

    def decode(
        self, backbone: Backbone, features: tuple[Tensor, ...], layout: Layout
    ) -> Tensor:
        """Embedding of each image, ``(B, M)``."""
        return self.pool(backbone.finish(features[0]))
