"""Training a pruned model on labelled pictures: by task registers, or by any method."""

import copy
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn

from foveate.adaptive.controller import Controller, Pruning
from foveate.adaptive.full_vit import FullViT
from foveate.adaptive.lora import add_lora, lora_parameters, share
from foveate.adaptive.task_vit import TaskViT, open_task_vit
from foveate.backbones.recomputed import Recomputed
from foveate.models import Model
from foveate.models.checkpoint import add_heads
from foveate.models.digest import model_hash
from foveate.reduction.plan import Plan
from foveate.reduction.reduced_vit import ReducedViT, reduce
from foveate.training.loop import Batch, Recipe, Training, Watch, fit
from foveate.training.pruned_loss import Examples, PrunedLoss
from foveate.training.views import Views

__all__ = ["Form", "Pruned", "TapCourse", "build_pruned", "train_pruned"]

Form = Literal["tap-j", "tap-f"]


@dataclass(frozen=True)
class TapCourse:
    """What to train, and how.

    Attributes:
        form: ``tap-j`` fine-tunes a backbone of its own; ``tap-f`` leaves the backbone as
            it is and trains a low-rank update of it.
        task: Name of a task with a head that can be trained; it is trained as well.
        recipe: Steps, batch size, rates.
        pruning: What a controller removes; None for another method, or none.
        controller: One that was trained before, of another task perhaps, to remove it: it
            learns nothing more, but its counts are calibrated anew. None for a new one.
        plan: What another method removes.
        rank: Of the low-rank update.
        backbone_rate: Factor of the learning rate for the backbone's own weights.
        calibrate: Views whose mean counts are frozen at the end.
        distill: Weight of distillation from a teacher; 0 for none.
        recompute: Whether activations are computed again backwards, to save memory.

    Raises:
        ValueError: If both a pruning and a plan are given, a controller of another pruning,
            or a negative weight.
    """

    form: Form
    task: str
    recipe: Recipe
    pruning: Pruning | None = None
    plan: Plan | None = None
    rank: int = 16
    backbone_rate: float = 0.1
    calibrate: int = 64
    distill: float = 0.0
    recompute: bool = False
    controller: Controller | None = None

    def record(self) -> dict[str, Any]:
        """All of it, as JSON or text; the controller by its digest."""
        held = None if self.controller is None else model_hash(self.controller)
        return {**asdict(replace(self, controller=None)), "controller": held}

    def __post_init__(self) -> None:
        """Check what goes together."""
        if not self.distill >= 0:
            raise ValueError(f"distill must be at least 0; got {self.distill}.")
        if self.pruning is not None and self.plan is not None:
            raise ValueError("pruning and plan cannot both be given; got both.")
        if self.controller is not None and self.controller.pruning != self.pruning:
            raise ValueError(
                f"controller must have the pruning {self.pruning}; got one with "
                f"{self.controller.pruning}."
            )


@dataclass(frozen=True)
class Pruned:
    """A trained, pruned model.

    Attributes:
        network: Called with images; in eval mode.
        model: Its backbone and head, which it shares.
        training: Losses.
        parameters: Numbers that were trained, by part.
        seconds: Of training.
        difference: Relative difference between the masked and the gathered output of some
            views; None without a controller.
        alphas: Mean share of the offset that comes back at each depth, over those views;
            None if nothing does.
    """

    network: TaskViT | ReducedViT | FullViT
    model: Model
    training: Training
    parameters: Mapping[str, int]
    seconds: float
    difference: float | None = None
    alphas: list[float] | None = None


def build_pruned(
    model: Model, course: TapCourse
) -> tuple[TaskViT | ReducedViT | FullViT, dict[str, int]]:
    """Pruned model that is ready to be trained; the one handed in is not edited.

    Args:
        model: The model; its task's head is copied.
        course: What to train.

    Returns:
        The pruned model, whose parameters that are trained require gradients, and how many
        they are by part.

    Raises:
        ValueError: If course and model do not fit together, or the backbone that ``tap-f``
            leaves as it is has not been frozen.
    """
    own, parts, lora = _trainable(model, course)
    if course.pruning is not None:
        vit = open_task_vit(own, course.task, course.pruning, lora)
        if course.controller is None:
            return vit, {**vit.controller.parameter_counts(), **parts}
        held = copy.deepcopy(course.controller).requires_grad_(False)
        like = next(own.parameters())
        return TaskViT(own, course.task, held.to(like.device), vit.grid, lora), parts
    if course.plan is not None:
        reduced = reduce(own, course.plan)
        if not isinstance(reduced, ReducedViT):
            raise ValueError(
                f"plan must reduce tokens to be trained; got '{course.plan.method}'."
            )
        return reduced, parts
    return FullViT(own, course.task, lora), parts


def train_pruned(
    model: Model,
    course: TapCourse,
    views: Views,
    state: Path | None = None,
    watch: Watch | None = None,
    teacher: nn.Module | None = None,
) -> Pruned:
    r"""Train a pruned model, its head, and what its form allows of the backbone.

    The loss is the head's, and
    :math:`w \lVert y - t \rVert^2 / \lVert t - \bar t \rVert^2` of the raw outputs y, given
    those of a teacher, t, and the course's weight w: the share of the teacher's variance
    that is missed.

    Args:
        model: Where to start from, with a trained head; it is not edited.
        course: What to train.
        views: Labelled views.
        state: File to go on from after a kill, and to save to.
        watch: Told where training stands after every validation interval.
        teacher: Images to raw output, not trained; the model with nothing removed if None.

    Returns:
        The trained model, its counts frozen.

    Raises:
        ValueError: If course, model and views do not fit together, or masked and gathered
            outputs differ by more than rounding.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(course.recipe.seed)
        network, parts = build_pruned(model, course)
    own = network.model
    images = views[0].image[None].to(next(own.parameters()))
    layout = own.backbone.embed(images).layout
    examples = Examples(views)
    recipe = course.recipe
    if course.form == "tap-j":
        slow = {"network.model.backbone.": course.backbone_rate}
        recipe = replace(recipe, factors={**slow, **recipe.factors})
    started = time.perf_counter()
    guide = None
    if course.distill:
        guide = teacher or FullViT(model, course.task)
    loss = PrunedLoss(network, course.task, examples, layout, guide, course.distill)
    training = fit(loss, examples, _loss, recipe, state=state, watch=watch)
    network.requires_grad_(False).eval()
    frozen: tuple[float | None, list[float] | None] = (None, None)
    if isinstance(network, TaskViT):
        frozen = _freeze(network, views, course)
    seconds = time.perf_counter() - started
    return Pruned(network, own, training, parts, seconds, *frozen)


def _loss(network: nn.Module, batch: Batch, generator: Generator) -> Tensor:
    return network(batch, generator.initial_seed() % 2**63)


def _trainable(model: Model, course: TapCourse) -> tuple[Model, dict[str, int], str | None]:
    """Model with a head of its own, what is trained of it, and its low-rank update."""
    head: Any = copy.deepcopy(model.task(course.task))
    head.requires_grad_(True)
    parts = {"head": sum(p.numel() for p in head.parameters())}
    if course.form == "tap-j":
        own = copy.deepcopy(model)
        own.requires_grad_(False)
        backbone: Any = own.backbone
        backbone.requires_grad_(True)
        parts["backbone"] = sum(p.numel() for p in backbone.parameters())
        return _with_head(own, course, head), parts, None
    loose = [
        n for n, p in model.named_parameters() if p.requires_grad and ".lora_" not in n
    ]
    if loose:
        raise ValueError(
            "model must be frozen for tap-f, by requires_grad_(False); gradients are "
            f"required by {len(loose)} weights, {loose[0]} among them."
        )
    own = share(model)
    parts["lora"] = add_lora(own, course.task, course.rank)
    for parameter in lora_parameters(own, course.task):
        parameter.requires_grad_(True)
    return _with_head(own, course, head), parts, course.task


def _with_head(model: Model, course: TapCourse, head: Any) -> Model:  # noqa: ANN401
    """Model with the head that is trained, under gradient checkpoints if wanted."""
    if course.recompute:
        tasks: dict[str, Any] = dict(model.tasks.items())
        model = Model(model.name, Recomputed(model.backbone), tasks, model.transform)
    return add_heads(model, {course.task: head})


def _freeze(
    vit: TaskViT, views: Views, course: TapCourse
) -> tuple[float, list[float] | None]:
    """Freeze the counts; how far masked and gathered outputs are apart, and alphas."""
    like, recipe = next(vit.parameters()), course.recipe
    # Data sets come sorted by class, so that the first views would be of a single one.
    order = torch.randperm(len(views), generator=Generator().manual_seed(recipe.seed))
    batches = [
        torch.stack([views[int(i)].image for i in part]).to(like)
        for part in order[: max(1, course.calibrate)].split(recipe.batch_size)
    ]
    vit.calibrate(batches)
    alphas = [vit.look(batch).alphas for batch in batches]
    known = [each for each in alphas if each is not None]
    images = batches[0][:1]
    with torch.no_grad():
        masked, gathered = vit(images, "frozen"), vit(images)
    difference = float((masked - gathered).norm() / gathered.norm())
    if not difference < 1e-4:
        raise ValueError(
            "masked and gathered outputs must agree up to rounding; they differ by "
            f"{difference:.1e} of their norm."
        )
    return difference, torch.cat(known).mean(0).tolist() if known else None
