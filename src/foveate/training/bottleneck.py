"""Train the latent that a decoder is read through, on images without labels."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Generator, Tensor, nn

from foveate.backbones import Backbone
from foveate.bottleneck.shape import Shape, choose_depths
from foveate.bottleneck.tap import Errors, Reading, ThroughLatent, errors_of, read_depths
from foveate.bottleneck.vae import Bottleneck
from foveate.models import Model
from foveate.tokens import Layout
from foveate.training.loop import Batch, Recipe, Training, Watch, fit

__all__ = [
    "Images",
    "LatentObjective",
    "TokenExamples",
    "Weights",
    "evaluate_bottleneck",
    "make_bottleneck",
    "train_bottleneck",
]

_MEASURED = 256  # images whose channels are standardised; each has many patches


class Images(Protocol):
    """Images of one size by index; a tensor ``(B, 3, H, W)`` is one."""

    def __len__(self) -> int:
        """Number of images."""

    def __getitem__(self, index: int, /) -> Tensor:
        """One image, ``(3, H, W)``; the same for the same index."""


@dataclass(frozen=True)
class Weights:
    """What the parts of the loss weigh beside the reconstruction.

    Attributes:
        task: Of the relative error of the task output.
        kl: Of the divergence from the prior, in nats for each number of the latent.

    Raises:
        ValueError: If one is negative.
    """

    task: float = 1.0
    kl: float = 1e-3

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("task", "kl"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0; got {getattr(self, name)}.")

    def loss(self, errors: Errors) -> Tensor:
        """Weighted sum, mean over the images."""
        total = errors.reconstruction + self.task * errors.task + self.kl * errors.kl
        return total.mean()


class TokenExamples:
    """What a frozen network makes of images, computed once and kept.

    Memory: tokens of all depths and the output of every image seen, in their own precision;
    1.8 MB an image for 257 tokens of 384 channels at four depths and 224 x 224 logits.

    Args:
        backbone: The network.
        task: A task through a bottleneck, which says what is read.
        images: Images of one size.
        keep: Whether to keep what was computed.

    Raises:
        ValueError: If there is no image.
    """

    def __init__(
        self, backbone: Backbone, task: ThroughLatent, images: Images, keep: bool = True
    ) -> None:
        if not len(images):
            raise ValueError("images must hold at least one; got none.")
        self.backbone = backbone
        self.task = task
        self.images = images
        self.keep = keep
        self.layout = self._read([0]).layout
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        """Number of images."""
        return len(self.images)

    def batch(self, index: Tensor) -> Batch:
        """Tokens ``(B, P + N, K * C)`` and output ``(B, M)``, on the CPU."""
        wanted = index.tolist()
        rows = {i: self._kept[i] for i in wanted if i in self._kept}
        new = [i for i in dict.fromkeys(wanted) if i not in rows]
        if new:
            reading = self._read(new)
            pairs = zip(reading.tokens.cpu(), reading.output.cpu(), strict=True)
            rows |= dict(zip(new, pairs, strict=True))
        if self.keep:
            self._kept |= rows
        tokens, output = zip(*(rows[i] for i in wanted), strict=True)
        return {"tokens": torch.stack(tokens), "output": torch.stack(output)}

    def _read(self, index: list[int]) -> Reading:
        images = torch.stack([self.images[i] for i in index])
        return read_depths(self.backbone, self.task, images.to(_device(self.backbone)))


@dataclass(frozen=True)
class LatentObjective:
    r"""Loss of a bottleneck on the tokens of images.

    Mean squared error of the standardised tokens + ``weights.task``
    :math:`\lVert \hat y - y \rVert / \lVert y \rVert` + ``weights.kl`` KL, at a draw of the
    latent.

    Attributes:
        backbone: The network.
        task: The task through the bottleneck.
        layout: Geometry of the tokens.
        weights: What the parts weigh.
    """

    backbone: Backbone
    task: ThroughLatent
    layout: Layout
    weights: Weights

    def __call__(self, network: nn.Module, batch: Batch, generator: Generator) -> Tensor:
        """Loss of ``network``, which holds the bottleneck of the task, on a batch."""
        return self.weights.loss(self.errors(network, batch, generator))

    def errors(
        self, network: nn.Module, batch: Batch, generator: Generator | None = None
    ) -> Errors:
        """Errors of each image, at a draw or at the mode of the latent."""
        tokens, output = batch["tokens"], batch["output"]
        rebuilt = network(tokens, self.layout.grid, generator)
        reading = Reading(tokens, output, self.layout)
        return errors_of(self.backbone, self.task, rebuilt, reading)


def make_bottleneck(
    model: Model,
    image: Tensor,
    task: str,
    seed: int = 0,
    sizes: Mapping[str, Any] | None = None,
) -> ThroughLatent:
    """A task of a model behind a new bottleneck with random weights.

    Args:
        model: The model.
        image: One of its images, ``(3, H, W)``.
        task: Name of one of its tasks.
        seed: Of the weights.
        sizes: Fields of :class:`~foveate.bottleneck.shape.Shape` other than the default;
            ``depths`` is what the task reads if that is four depths or more, and else four
            evenly spaced ones that end where the task reads.

    Returns:
        The task, on the device of the model.

    Raises:
        ValueError: If there is no such task, or a size is out of range.
    """
    backbone, decoder = model.backbone, model.task(task)
    device = _device(backbone)
    with torch.no_grad():
        layout = backbone.embed(image[None].to(device)).layout
    fields = {"depths": choose_depths(decoder.taps(backbone.num_blocks)), **(sizes or {})}
    shape = Shape(
        num_channels=backbone.num_channels, num_prefix=layout.num_prefix, **fields
    )
    network = Bottleneck(shape, Generator().manual_seed(seed)).to(device)
    through = ThroughLatent(decoder, network)
    through.taps(backbone.num_blocks)  # refuses depths that do not fit
    return through.eval()


def train_bottleneck(  # noqa: PLR0913 - what fit takes, and what is trained
    model: Model,
    images: Images,
    task: ThroughLatent,
    recipe: Recipe,
    weights: Weights | None = None,
    validation: Images | None = None,
    state: Path | None = None,
    watch: Watch | None = None,
) -> Training:
    """Train the bottleneck of a task in place, on images without labels.

    First the channels are standardised, and the linear latent is set, on the first 256
    images at most. The backbone, the
    task and their weights stay as they are.

    Args:
        model: The frozen model.
        images: What to learn from, all of one size.
        task: From :func:`make_bottleneck`.
        recipe: How long and how fast.
        weights: What the parts of the loss weigh.
        validation: Images that score the bottleneck, by the negative loss at the mode of
            the latent without the divergence; the best weights are kept.
        state: File to resume from, if it is there, and to save to.
        watch: Told where training stands after every validation.

    Returns:
        Losses and scores.

    Raises:
        ValueError: If there is no image, they do not fit the bottleneck, or a loss is not
            finite.
    """
    backbone, weights = model.backbone, weights or Weights()
    examples = TokenExamples(backbone, task, images)
    index = torch.arange(min(_MEASURED, len(examples)))
    tokens = (examples.batch(i)["tokens"] for i in index.split(8))
    task.network.measure(tokens, examples.layout.grid)
    objective = LatentObjective(backbone, task, examples.layout, weights)
    held_out = None if validation is None else TokenExamples(backbone, task, validation)

    def validate(network: nn.Module) -> float:
        assert held_out is not None
        errors = _evaluate(objective, network, held_out)
        return -float((errors.reconstruction + weights.task * errors.task).mean())

    score = None if held_out is None else validate
    return fit(task.network, examples, objective, recipe, score, state, watch)


def evaluate_bottleneck(model: Model, task: ThroughLatent, images: Images) -> Errors:
    """Errors of each image at the mode of the latent, ``(B,)`` each, on the CPU."""
    examples = TokenExamples(model.backbone, task, images, keep=False)
    objective = LatentObjective(model.backbone, task, examples.layout, Weights())
    return _evaluate(objective, task.network, examples)


@torch.no_grad()
def _evaluate(
    objective: LatentObjective, network: nn.Module, examples: TokenExamples
) -> Errors:
    parts = []
    for index in torch.arange(len(examples)).split(8):
        batch = examples.batch(index)
        on_device = {k: v.to(_device(objective.backbone)) for k, v in batch.items()}
        parts.append(objective.errors(network, on_device))
    return Errors(*(torch.cat(values).cpu() for values in zip(*parts, strict=True)))


def _device(backbone: Backbone) -> torch.device:
    assert isinstance(backbone, nn.Module)
    return next(backbone.parameters()).device
