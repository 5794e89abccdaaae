"""A pruned model as the training loop sees it: labels, and a teacher if there is one."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from foveate.data.labelled import Target
from foveate.tokens import Layout
from foveate.training.loop import Batch
from foveate.training.views import Views

__all__ = ["Examples", "PrunedLoss"]


@dataclass(frozen=True)
class Examples:
    """Views as the loop takes them; the targets of what was drawn are kept beside."""

    views: Views
    targets: dict[int, Target] = field(default_factory=dict)

    def __len__(self) -> int:
        """Views."""
        return len(self.views)

    def batch(self, index: Tensor) -> Batch:
        """Images of some views."""
        seen = {i: self.views[i] for i in index.tolist()}
        self.targets.clear()
        self.targets.update({i: view.target for i, view in seen.items()})
        images = [seen[i].image for i in index.tolist()]
        return {"index": index, "images": torch.stack(images)}


class PrunedLoss(nn.Module):
    """A pruned model as the training loop sees it: from a batch to its loss.

    Args:
        network: Images to raw output.
        task: Whose head has the loss.
        examples: Know the targets.
        layout: Geometry of the images.
        teacher: Images to raw output, not trained; None to learn from labels alone.
        weight: Of what of the teacher is missed.
    """

    def __init__(
        self,
        network: nn.Module,
        task: str,
        examples: Examples,
        layout: Layout,
        teacher: nn.Module | None = None,
        weight: float = 1.0,
    ) -> None:
        super().__init__()
        self.network: Any = network
        self._rest = (
            task,
            examples,
            layout,
            teacher,
            weight,
        )  # a tuple registers no module

    def forward(self, batch: Batch, seed: int) -> Tensor:
        """Mean loss of a batch; what the head draws follows from the seed."""
        task, examples, layout, teacher, weight = self._rest
        head: Any = self.network.model.task(task)
        images = batch["images"]
        targets = [examples.targets[int(i)] for i in batch["index"]]
        with torch.random.fork_rng(devices=[images.device] if images.is_cuda else []):
            torch.manual_seed(seed)
            raw = self.network(images)
            loss = head.loss(raw, targets, layout)
        if teacher is None:
            return loss
        with torch.no_grad():
            wanted = teacher(images).float()
        missed = (raw.float() - wanted).square().mean()
        return loss + weight * missed / wanted.var(correction=0)
