"""The control that reduces no token: the full model on smaller images."""

from collections.abc import Callable
from dataclasses import replace
from math import floor
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from foveate.backbones import grid_of
from foveate.models import Model
from foveate.reduction.macs import encoder_macs, token_counts
from foveate.reduction.plan import Plan

__all__ = [
    "RESOLUTION",
    "LowerResolution",
    "coarser_grid",
    "refuse_steps",
    "resolution_plan",
]

RESOLUTION = "resolution"  # the method's name in a plan

Grid = tuple[int, int]


class LowerResolution(nn.Module):
    """A frozen model that sees smaller images and gives outputs of the usual size.

    Images are resized (bicubic, antialias) to the largest grid of the same aspect with at
    most as many patches as the plan keeps, and a map is resized back (bilinear). Outputs of
    two dimensions, such as embeddings and logits of classes, are left as they are.

    Args:
        model: The full model, kept as it is and shared.
        plan: Its schedule is one pair, of depth 0 and the patches to keep.

    Raises:
        ValueError: If the plan is another method's or has another schedule.
    """

    def __init__(self, model: Model, plan: Plan) -> None:
        super().__init__()
        model.task(plan.task)
        if plan.method != RESOLUTION or [depth for depth, _ in plan.schedule] != [0]:
            raise ValueError(
                f"plan must have method '{RESOLUTION}' and one count, at depth 0; got "
                f"'{plan.method}' with {[list(pair) for pair in plan.schedule]}."
            )
        keep = plan.counts[0]
        self.model = model
        self.plan = plan
        self.grid = coarser_grid(plan.grid, lambda grid: grid[0] * grid[1] <= keep)
        self.training = model.training

    def forward(self, images: Tensor) -> Tensor:
        """Raw output of the plan's task, ``(B, 3, H, W) -> (B, ...)``.

        Args:
            images: Images of the plan's patch grid.

        Returns:
            Output in the shape of the full model's.

        Raises:
            ValueError: If the images have another grid, or an output has no whole number of
                pixels for a patch.
        """
        (high, wide), full = _patch_size(self.model), self.plan.grid
        if (grid := grid_of(images, (high, wide))) != full:
            raise ValueError(
                f"images must have the plan's patch grid {full}; got {grid} from "
                f"{tuple(images.shape[-2:])} pixels."
            )
        rows, columns = self.grid
        size = (rows * high, columns * wide)
        small = interpolate(images, size, mode="bicubic", antialias=True)
        output = self.model(small, self.plan.task)
        if output.ndim < 3:
            return output
        sides = [divmod(s, g) for s, g in zip(output.shape[-2:], self.grid, strict=True)]
        if any(rest for _, rest in sides):
            raise ValueError(
                f"output must have whole pixels for each of {rows} x {columns} patches; "
                f"got {tuple(output.shape)}."
            )
        target = [f * side for f, (side, _) in zip(full, sides, strict=True)]
        maps = output[:, None] if output.ndim == 3 else output
        resized = interpolate(maps, target, mode="bilinear")
        return resized[:, 0] if output.ndim == 3 else resized


def resolution_plan(model: Model, asked: Plan) -> Plan:
    """Plan of a resolution that costs at most what other methods do by a schedule.

    Args:
        model: The model.
        asked: A plan whose schedule, place and blocks on the full grid set the budget.

    Returns:
        A plan whose one count, at depth 0, says how many patches the largest affordable
        grid has, and whose multiply-adds count like any other's.

    Raises:
        ValueError: If not even one patch is affordable.
    """
    backbone, task = model.backbone, model.task(asked.task)
    weight = next(model.parameters())
    pixels = [g * p for g, p in zip(asked.grid, _patch_size(model), strict=True)]
    with torch.no_grad():
        layout = backbone.embed(weight.new_zeros(1, 3, *pixels)).layout
    restore = backbone.num_blocks - asked.fuse_last if task.needs_grid else None
    pairs = token_counts(backbone.num_blocks, layout, asked.counts, asked.place, restore)
    budget = encoder_macs(backbone, pairs)

    def fits(grid: Grid) -> bool:
        tokens = layout.num_prefix + grid[0] * grid[1]
        return encoder_macs(backbone, [(tokens, tokens)] * backbone.num_blocks) <= budget

    rows, columns = coarser_grid(asked.grid, fits)
    return replace(
        asked, schedule=((0, rows * columns),), place="before", fuse_last=0, alpha=0.0
    )


def refuse_steps(setting: object) -> NoReturn:
    """Stand where other methods build an action; smaller images are no step.

    Args:
        setting: What a step would be built from.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        f"method '{RESOLUTION}' must be run by foveate.reduce, since it changes the images "
        "and takes no step; got a request for steps."
    )


def coarser_grid(grid: Grid, fits: Callable[[Grid], bool]) -> Grid:
    """Largest grid of the same aspect, as near as whole numbers get, that fits.

    Candidates are all numbers of rows with the nearest number of columns, and the other way
    round; the grid itself is one.

    Args:
        grid: Rows and columns of the full grid.
        fits: Whether a grid is affordable; true of every grid with fewer patches than one
            that is.

    Returns:
        Rows and columns.

    Raises:
        ValueError: If none fits.
    """
    rows, columns = grid
    candidates = [(r, max(1, floor(r * columns / rows + 0.5))) for r in range(1, rows + 1)]
    candidates += [
        (max(1, floor(c * rows / columns + 0.5)), c) for c in range(1, columns + 1)
    ]
    for candidate in sorted(candidates, key=lambda g: g[0] * g[1], reverse=True):
        if fits(candidate):
            return candidate
    raise ValueError(f"budget must allow a grid as coarse as {min(candidates)}; got less.")


def _patch_size(model: Model) -> Any:  # noqa: ANN401 - an attribute of all adapters
    return model.backbone.patch_size
