"""Class logits, by the classifier that a network was trained with."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from foveate.backbones import Backbone
from foveate.data.labelled import Target
from foveate.tokens import Layout

Pool = Callable[[Tensor, int], Tensor]


def class_token(x: Tensor, num_prefix: int) -> Tensor:
    """Take the first token, ``(B, P + N, C) -> (B, C)``."""
    return x[:, 0]


def mean_patch(x: Tensor, num_prefix: int) -> Tensor:
    """Average the patches, ``(B, P + N, C) -> (B, C)``."""
    return x[:, num_prefix:].mean(dim=1)


def class_token_and_mean_patch(x: Tensor, num_prefix: int) -> Tensor:
    """Class token beside the mean patch, ``(B, P + N, C) -> (B, 2 C)``, as DINOv2 reads."""
    return torch.cat([class_token(x, num_prefix), mean_patch(x, num_prefix)], dim=1)


class Logits(nn.Module):
    """Class logits before any softmax.

    Under reduction, a mean over patches is one over the full grid: a removed patch counts
    as what it is read back as, so that without offsets a patch counts by its size.

    Args:
        classifier: Takes what ``pool`` returns, gives ``(B, classes)``.
        pool: Takes the tokens ``(B, P + N, C)`` and P, gives ``(B, M)``.
        needs_grid: Whether ``pool`` reads patches.
        normalised: Whether ``pool`` reads tokens after the final norm, or before it.
    """

    kind = "classification"

    def __init__(
        self,
        classifier: nn.Module,
        pool: Pool,
        *,
        needs_grid: bool,
        normalised: bool = True,
    ) -> None:
        super().__init__()
        self.classifier = classifier
        self.pool = pool
        self.needs_grid = needs_grid
        self.normalised = normalised

    def taps(self, num_blocks: int) -> tuple[int, ...]:
        """Tokens after the last block."""
        return (num_blocks,)

    def decode(
        self, backbone: Backbone, features: tuple[Tensor, ...], layout: Layout
    ) -> Tensor:
        """Logits of each image, ``(B, classes)``."""
        x = backbone.finish(features[0]) if self.normalised else features[0]
        return self.classifier(self.pool(x, layout.num_prefix))

    def loss(self, output: Tensor, targets: Sequence[Target], layout: Layout) -> Tensor:
        """Cross-entropy.

        Args:
            output: Logits, ``(B, classes)``.
            targets: Labels.
            layout: Not looked at.

        Returns:
            Mean over the images, scalar.

        Raises:
            ValueError: If a target has no label.
        """
        labels = [target.label for target in targets]
        if None in labels:
            raise ValueError("targets must have a label for classification; one has none.")
        return cross_entropy(output, torch.tensor(labels, device=output.device))

    def predict(self, output: Tensor, layout: Layout) -> Sequence[Tensor]:
        """Logits of each image, ``(classes,)``."""
        return list(output)
