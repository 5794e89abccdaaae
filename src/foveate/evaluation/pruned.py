"""Pruned models that were trained: their score, clock and memory beside the full model."""

import torch
from torch import Tensor

from foveate.adaptive.checkpoint import Network
from foveate.adaptive.full_vit import FullViT
from foveate.adaptive.task_vit import TaskViT
from foveate.data.labelled import LabelledImages
from foveate.evaluation.benchmark import Benchmark, time_pair
from foveate.evaluation.cost import plan_macs
from foveate.evaluation.evaluate import Evaluation, Progress, collect, open_trial
from foveate.evaluation.metrics import intervals, paired_intervals
from foveate.evaluation.timed import TimedCall
from foveate.models import Model
from foveate.reduction.macs import block_macs, token_counts
from foveate.reduction.plan import Plan
from foveate.reduction.presets import build_steps

__all__ = ["REGISTER", "evaluate_pruned", "plan_of", "pruned_macs", "time_pruned"]

REGISTER = "task-register"


def plan_of(network: Network) -> Plan | None:
    """What a network does, as a plan; None for nothing.

    Args:
        network: The network.

    Returns:
        Its plan; that of a controller has the method ``task-register``, and says how many
        patches are left where, but not which.
    """
    if isinstance(network, FullViT):
        return None
    if not isinstance(network, TaskViT):
        return network.plan
    pruning = network.controller.pruning
    schedule = tuple(network.kept().items())
    fuse = pruning.fuse_last if network.needs_grid else 0
    return Plan(REGISTER, network.task, network.grid, schedule, fuse_last=fuse)


def time_pruned(
    network: Network, batch: Tensor, rounds: int = 20, warmup: int = 3
) -> Benchmark | None:
    """Clock and memory of a network beside the same weights with nothing removed.

    Args:
        network: The network.
        batch: Images.
        rounds: Pairs of calls that count.
        warmup: Pairs before them.

    Returns:
        What was saved; None for a network that removes nothing.
    """
    plan = plan_of(network)
    if plan is None:
        return None
    model, task = network.model, plan.task
    full = TimedCall(model, task)
    if isinstance(network, TaskViT):
        with torch.no_grad():
            network(batch[:1])  # makes its low-rank update the active one
        reduced = TimedCall(network.controlled, task, network.steps())
    else:
        reduced = TimedCall(model, task, build_steps(model, plan))
    macs = pruned_macs(network, batch[:1])
    with torch.no_grad():
        return time_pair((full, reduced), plan, macs, batch, rounds, warmup)


@torch.no_grad()
def pruned_macs(network: Network, image: Tensor) -> tuple[int, int]:
    """Multiply-adds an image of the blocks that the task reads.

    Args:
        network: The network.
        image: ``(1, 3, H, W)``; only its size counts.

    Returns:
        With nothing removed and no register, and as the network runs.
    """
    model = network.model
    layout = model.backbone.embed(image).layout
    if isinstance(network, FullViT):
        return plan_macs(model, Plan(REGISTER, network.task, layout.grid, ()), layout)
    if not isinstance(network, TaskViT):
        return plan_macs(model, network.plan, layout)
    backbone, task = model.backbone, network.task
    longer = network.controlled.backbone.embed(image).layout
    last = model.task(task).taps(backbone.num_blocks)[-1]
    counts = token_counts(
        backbone.num_blocks, longer, network.kept(), "between", network.restore
    )
    fewer = sum(block_macs(backbone, d, *pair) for d, pair in enumerate(counts[:last]))
    return plan_macs(model, Plan(REGISTER, task, layout.grid, ()), layout)[0], fewer


@torch.no_grad()
def evaluate_pruned(
    network: Network,
    data: LabelledImages,
    full: Model | None = None,
    batch_size: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
) -> Evaluation:
    """Score a trained network beside the full model.

    Args:
        network: The network.
        data: The data set.
        full: The model to hold it against, with a task of the same name; the network's own
            weights with nothing removed if None.
        batch_size: Images at a time.
        seed: Of the resamples.
        progress: Told how many images are done, and of how many.

    Returns:
        Scores as :func:`~foveate.evaluation.evaluate.evaluate`; of a network that removes
        nothing, and has nothing to be held against, its own alone.

    Raises:
        ValueError: If network, model and labels do not fit together.
    """
    model = network.model
    plan = plan_of(network)
    task = network.task if isinstance(network, TaskViT | FullViT) else network.plan.task
    trial = open_trial(model, task, data)
    like = next(model.parameters())
    if full is None and plan is None:
        alone = collect([network], trial, data, batch_size, like, progress)[0]
        scores = {"full": intervals(alone, seed)}
        return Evaluation(model.name, task, data.name, len(data), scores)
    lora = getattr(network, "lora", None)
    beside = FullViT(model, task, lora) if full is None else FullViT(full, task)
    found = collect([beside, network], trial, data, batch_size, like, progress)
    pair = paired_intervals(found[0], found[1], seed)
    image = trial.scorer.inputs(data[0].picture)[:1].to(like)
    clock = time_pruned(network, image.expand(batch_size, -1, -1, -1))
    return Evaluation(model.name, task, data.name, len(data), pair, clock)
