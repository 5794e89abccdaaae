"""A model whose tokens a task's controller thins out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foveate.adaptive.controller import Controller, Pruning
from foveate.adaptive.lora import use_lora
from foveate.adaptive.padded import PaddedStep
from foveate.adaptive.steps import GatheredStep, Ledger, MaskedStep
from foveate.backbones.registers import WithRegister, first_register
from foveate.forward import Step, run
from foveate.models import Model
from foveate.reduction.masked import MaskedRestore, read_masked
from foveate.reduction.plan import Plan, check_depths
from foveate.reduction.recover import Restore, recover
from foveate.tokens import Tokens

__all__ = ["Insight", "TaskViT", "open_task_vit", "run_mixed"]


@dataclass(frozen=True)
class Insight:
    """What a controller did on images.

    Attributes:
        counts: Removed at each depth, ``(B, depths)``.
        alphas: Share of the offset that comes back, ``(B, depths)``; None if nothing does.
        scores: What patches were ranked by at each depth, ``(B, depths, N)``; see
            :func:`~foveate.adaptive.steps.selection_score`.
        kept: What stayed at each depth, ``(B, depths, N)``, bool.
    """

    counts: Tensor
    alphas: Tensor | None
    scores: Tensor
    kept: Tensor


class TaskViT(nn.Module):
    """A model pruned by a controller for one task; called like the model.

    In training mode all patches stay and are masked, so that losses reach every choice; in
    eval mode they are gathered, by counts that are frozen, so that shapes are static. With
    the same counts both give the same output, up to rounding.

    Args:
        model: Backbone and tasks; shared, not edited.
        task: Name of its task.
        controller: What is removed.
        grid: Rows and columns of patches that the budget is meant for.
        lora: Low-rank update of the model to run with; None for none.

    Raises:
        ValueError: If the budget does not fit the grid or the task, or the backbone has no
            class token to select by.
    """

    def __init__(
        self,
        model: Model,
        task: str,
        controller: Controller,
        grid: tuple[int, int],
        lora: str | None = None,
    ) -> None:
        super().__init__()
        pruning, decoder = controller.pruning, model.task(task)
        last = decoder.taps(model.backbone.num_blocks)[-1]
        fuse = pruning.fuse_last if decoder.needs_grid else 0
        number = grid[0] * grid[1]
        if pruning.remove >= number:
            raise ValueError(
                f"remove must be below the {number} patches there are; got "
                f"{pruning.remove}."
            )
        schedule = tuple((depth, number) for depth in pruning.depths)
        check_depths(
            Plan("controller", task, grid, schedule, fuse_last=fuse), last, last - fuse
        )
        self.model, self.task, self.grid, self.lora = model, task, grid, lora
        self.controller = controller
        self.restore = last - fuse if fuse else None
        register, backbone = controller.register, model.backbone
        if register is None and not backbone.has_class_token:
            raise ValueError(
                f"selection must be 'register' for {model.name}, which has no class token; "
                "got 'class'."
            )
        if register is not None:
            backbone = WithRegister(backbone, register, pruning.one_way)
        tasks: dict[str, Any] = dict(model.tasks.items())
        self.controlled = Model(model.name, backbone, tasks, model.transform)

    @property
    def needs_grid(self) -> bool:
        """Whether removed patches are read back."""
        return self.model.task(self.task).needs_grid

    def forward(self, images: Tensor, counting: str | None = None) -> Tensor:
        """Raw output of the task.

        Args:
            images: ``(B, 3, H, W)`` of the grid.
            counting: None for learned counts in training mode, and frozen ones, gathered,
                in eval mode. ``learned``, ``frozen`` or ``images`` for the masked form with
                those (see :class:`~foveate.adaptive.steps.MaskedStep`); ``padded`` for
                those of ``images``, gathered (see
                :class:`~foveate.adaptive.padded.PaddedStep`), to run and not to learn.

        Returns:
            ``(B, ...)``.

        Raises:
            ValueError: If the images have another grid, or there is no such counting.
        """
        if counting == "padded":
            with torch.no_grad():
                return self._gathered(images, self._restored(self._padded()))
        if counting is None and not self.training:
            return self._gathered(images, self.steps())
        return self._decode(self._masked(images, counting or "learned")[0])

    def steps(self) -> dict[int, list[Step]]:
        """Steps of the gathered form, by depth, for the model ``controlled``."""
        counts = self.controller.whole
        steps: dict[int, list[Step]] = {
            depth: [GatheredStep(self.controller, index, count, self.needs_grid)]
            for index, (depth, count) in enumerate(
                zip(self.controller.pruning.depths, counts, strict=True)
            )
        }
        return self._restored(steps)

    def kept(self) -> dict[int, int]:
        """Patches left at each depth, by the frozen counts."""
        left, found = self.grid[0] * self.grid[1], {}
        counts = self.controller.whole
        for depth, count in zip(self.controller.pruning.depths, counts, strict=True):
            left -= count
            found[depth] = left
        return found

    @torch.no_grad()
    def calibrate(self, batches: Sequence[Tensor]) -> Tensor:
        """Freeze the counts at their mean over images.

        Args:
            batches: Images.

        Returns:
            The counts, one a depth.
        """
        counts = [self._masked(images, "learned")[1].counts for images in batches]
        self.controller.freeze(torch.cat([torch.stack(c, 1) for c in counts]))
        return self.controller.counts

    @torch.no_grad()
    def look(self, images: Tensor, counting: str = "frozen") -> Insight:
        """What the controller does on images, without what comes of it."""
        ledger = self._masked(images, counting)[1]
        counts = torch.stack(ledger.counts, 1)
        alphas = None
        if ledger.alphas:
            alphas = torch.stack(
                [
                    counts.new_full((len(images),), a)
                    if isinstance(a, float)
                    else a[:, 0, 0]
                    for a in ledger.alphas
                ],
                1,
            )
        scores, kept = torch.stack(ledger.scores, 1), torch.stack(ledger.masks, 1)
        return Insight(counts, alphas, scores, kept)

    def _padded(self) -> dict[int, list[Step]]:
        depths = self.controller.pruning.depths
        return {
            depth: [PaddedStep(self.controller, index, self.needs_grid)]
            for index, depth in enumerate(depths)
        }

    def _restored(self, steps: dict[int, list[Step]]) -> dict[int, list[Step]]:
        if self.restore is not None:
            steps[self.restore] = [Restore()]
        return steps

    def _gathered(self, images: Tensor, steps: dict[int, list[Step]]) -> Tensor:
        taps, tokens = self._start(images)
        backbone = self.controlled.backbone
        kept = run(backbone, tokens, 0, taps[-1], steps, taps)[1]
        return self._decode([
            recover(kept[d]) if self.needs_grid else kept[d] for d in taps
        ])

    def _masked(self, images: Tensor, counting: str) -> tuple[list[Tokens], Ledger]:
        """What the decoder reads, and what was decided."""
        taps, tokens = self._start(images)
        backbone = self.controlled.backbone
        pruning = self.controller.pruning
        budget = torch.full((len(images),), float(pruning.remove), device=images.device)
        ledger = Ledger(budget)
        steps: dict[int, list[Step]] = {
            depth: [MaskedStep(self.controller, index, ledger, self.needs_grid, counting)]
            for index, depth in enumerate(pruning.depths)
        }
        if self.restore is not None:
            steps[self.restore] = [MaskedRestore()]
        kept = run(backbone, tokens, 0, taps[-1], steps, taps)[1]
        read = [read_masked(kept[d]) if self.needs_grid else kept[d] for d in taps]
        return read, ledger

    def _decode(self, read: Sequence[Tokens]) -> Tensor:
        """Raw output. A decoder that pools must not take the register for a patch."""
        backbone = self.controlled.backbone
        if isinstance(backbone, WithRegister):
            read = [backbone.without_register(tokens) for tokens in read]
        features = tuple(tokens.x for tokens in read)
        return self.model.task(self.task).decode(backbone, features, read[0].layout)

    def _start(self, images: Tensor) -> tuple[tuple[int, ...], Tokens]:
        if self.lora is not None:
            use_lora(self.model, self.lora)
        backbone, decoder = self.controlled.backbone, self.model.task(self.task)
        tokens = backbone.embed(images)
        if tokens.layout.grid != self.grid:
            raise ValueError(
                f"images must have the patch grid {self.grid}; got {tokens.layout.grid} "
                f"from {tuple(images.shape[-2:])} pixels."
            )
        return decoder.taps(backbone.num_blocks), tokens


def open_task_vit(
    model: Model, task: str, pruning: Pruning, lora: str | None = None
) -> TaskViT:
    """Model with an untrained controller: even counts, a register like the class token.

    Args:
        model: The model.
        task: Name of its task.
        pruning: What to remove.
        lora: Low-rank update of the model to run with.

    Returns:
        The pruned model, on the model's device, in its mode.

    Raises:
        ValueError: If they do not fit together.
    """
    like = next(model.parameters())
    side = model.transform.size
    image = torch.zeros(1, 3, side, side, dtype=like.dtype, device=like.device)
    grid = model.backbone.embed(image).layout.grid
    register = None
    if pruning.selection == "register":
        register = first_register(model.backbone, image)
    controller = Controller(model.backbone.num_channels, pruning, register).to(like.device)
    return TaskViT(model, task, controller, grid, lora).train(model.training)


@torch.no_grad()
def run_mixed(
    models: Mapping[str, TaskViT], images: Tensor, tasks: Sequence[str]
) -> list[Tensor]:
    """Run a batch whose images are for different tasks.

    Args:
        models: Pruned models by task; they may share one backbone.
        images: ``(B, 3, H, W)``.
        tasks: Task of each image.

    Returns:
        Raw output of each image, in the order of the images; every task runs once.

    Raises:
        ValueError: If there is not one task an image, or a task has no model.
    """
    if len(tasks) != len(images) or set(tasks) - set(models):
        raise ValueError(
            f"tasks must be one of {', '.join(models)} for each of {len(images)} images; "
            f"got {list(tasks)}."
        )
    outputs: dict[int, Tensor] = {}
    for task in dict.fromkeys(tasks):
        rows = [row for row, name in enumerate(tasks) if name == task]
        outputs.update(zip(rows, models[task](images[rows]), strict=True))
    return [outputs[row] for row in range(len(images))]
