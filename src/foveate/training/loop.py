"""The one training loop: plain PyTorch on accelerate, resumable at any validation."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import Generator, Tensor, nn

from foveate.models import check_weights
from foveate.training.recipe import Recipe

Batch = Mapping[str, Tensor]
Objective = Callable[[nn.Module, Batch, Generator], Tensor]


class Examples(Protocol):
    """Something to learn from."""

    def __len__(self) -> int:
        """Number of examples."""

    def batch(self, index: Tensor) -> Batch:
        """Examples by index ``(B,)``, each tensor with B as its first dimension."""


@dataclass
class Training:
    """Where a training stands.

    Attributes:
        step: Updates done.
        losses: Mean loss since the validation before, at every validation.
        scores: Score at every validation; empty without one.
        best_step: Updates at the best score; those done without validation.
        stopped: Whether patience ended it.
    """

    step: int = 0
    losses: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    best_step: int = 0
    stopped: bool = False

    @property
    def best_score(self) -> float | None:
        """The best score, None without validation."""
        return max(self.scores) if self.scores else None

    def is_late(self, patience: int | None) -> bool:
        """Whether the best score is more than ``patience`` validations ago."""
        best = max(range(len(self.scores)), key=self.scores.__getitem__, default=0)
        return patience is not None and len(self.scores) - 1 - best >= patience


Watch = Callable[[Training], None]


def fit(
    network: nn.Module,
    examples: Examples,
    objective: Objective,
    recipe: Recipe,
    validate: Callable[[nn.Module], float] | None = None,
    state: Path | None = None,
    watch: Watch | None = None,
) -> Training:
    """Train a network in place and leave it in eval mode at its best validation.

    Which examples an update sees, and what its objective draws, follow from the seed and
    the number of the update alone: a run that is killed and started again with the same
    ``state`` goes on from its last validation and ends with the same weights.

    Args:
        network: What to train; parameters without gradient stay as they are.
        examples: What to learn from.
        objective: Loss of a network on a batch; the generator is for what it draws.
        recipe: How long and how fast.
        validate: Score of the network, higher is better.
        state: File to resume from, if it is there, and to save to.
        watch: Told where training stands after every validation.

    Returns:
        Losses and scores.

    Raises:
        ValueError: If there is no example, or a loss or score is not finite, or ``state``
            belongs to another recipe or network.
    """
    if not len(examples):
        raise ValueError("examples must hold at least one; got none.")
    run = _Run(network, recipe, state)
    now = run.resume()
    losses: list[Tensor] = []
    network.train()
    while now.step < recipe.steps and not now.stopped:
        losses.append(run.update(examples, objective, now.step))
        now.step += 1
        if now.step % recipe.validate_every and now.step < recipe.steps:
            continue
        run.check(now, torch.stack(losses), validate)
        losses.clear()
        if watch is not None:
            watch(now)
    run.finish()
    network.eval()
    return now


class _Run:
    """Network, optimiser and the best weights so far."""

    def __init__(self, network: nn.Module, recipe: Recipe, state: Path | None) -> None:
        self.recipe, self.state, self.network = recipe, state, network
        self.accelerator = Accelerator(
            mixed_precision=recipe.precision,
            cpu=next(network.parameters()).device.type == "cpu",
            # A readout that a task has no use for gets no gradient.
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        )
        learned = [p for p in network.parameters() if p.requires_grad]
        groups = _groups(network, recipe)
        optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95))
        self.learned = learned
        self.model, self.optimizer = self.accelerator.prepare(network, optimizer)
        self.best: dict[str, Tensor] = {}

    def update(self, examples: Examples, objective: Objective, step: int) -> Tensor:
        """One update; the mean loss of its passes."""
        accelerator, recipe = self.accelerator, self.recipe
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.rate(step) * group["factor"]
        total = torch.zeros((), device=accelerator.device)
        for part in range(recipe.accumulate):
            index = self._mine(len(examples), step * recipe.accumulate + part)
            seed = (recipe.seed * 1_000_003 + step) * recipe.accumulate + part
            generator = _generator(seed * 64 + accelerator.process_index)
            batch = {k: v.to(accelerator.device) for k, v in examples.batch(index).items()}
            with accelerator.autocast():
                loss = objective(self.model, batch, generator)
            if not loss.isfinite():
                raise ValueError(f"loss must be finite; got {loss.item()} at step {step}.")
            accelerator.backward(loss / recipe.accumulate)
            total += loss.detach() / recipe.accumulate
        accelerator.clip_grad_norm_(self.learned, recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def _mine(self, count: int, turn: int) -> Tensor:
        """This process's share of a batch; every example once before any comes again."""
        size = self.recipe.batch_size
        order: list[int] = []
        first = turn * size
        while len(order) < size:
            epoch, at = divmod(first + len(order), count)
            generator = _generator(self.recipe.seed + 7919 * epoch)
            shuffled = torch.randperm(count, generator=generator)
            order += shuffled[at : at + size - len(order)].tolist()
        here = self.accelerator
        return torch.tensor(order[here.process_index :: here.num_processes])

    def check(
        self, now: Training, losses: Tensor, validate: Callable[[nn.Module], float] | None
    ) -> None:
        """Validate, keep the best, save."""
        now.losses.append(float(losses.mean()))
        now.best_step = now.step
        if validate is not None:
            self.network.eval()
            with torch.no_grad():
                now.scores.append(float(validate(self.network)))
            self.network.train()
            if not math.isfinite(now.scores[-1]):
                raise ValueError(f"score must be finite; got {now.scores[-1]}.")
            best = max(range(len(now.scores)), key=now.scores.__getitem__)
            if best == len(now.scores) - 1:
                self.best = _copy(self.network)
            now.best_step = min(self.recipe.steps, (best + 1) * self.recipe.validate_every)
            now.stopped = now.is_late(self.recipe.patience)
        self._save(now)

    def finish(self) -> None:
        """Load the weights of the best validation, and leave nothing of autocast behind."""
        check_weights(self.network)
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        if self.best:
            self.network.load_state_dict(self.best)

    def resume(self) -> Training:
        """Go on from the file, if it is there."""
        if self.state is None or not self.state.exists():
            return Training()
        saved = _load(self.state, self.recipe)
        try:
            self.network.load_state_dict(saved["network"])
        except RuntimeError as error:
            raise ValueError(f"state must belong to this network; {error}") from error
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(saved["scaler"])
        self.best = saved["best"]
        return Training(**saved["training"])

    def _save(self, now: Training) -> None:
        if self.state is None or not self.accelerator.is_main_process:
            return
        self.state.parent.mkdir(parents=True, exist_ok=True)
        saved: dict[str, Any] = {
            "recipe": asdict(self.recipe),
            "training": asdict(now),
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "best": self.best,
            "scaler": (scaler := self.accelerator.scaler) and scaler.state_dict(),
        }
        partial = self.state.with_suffix(".partial")
        torch.save(saved, partial)
        partial.replace(self.state)


def _groups(network: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """Parameters by the factor of their rate and whether they decay: matrices do."""
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            key = (recipe.factor(name), parameter.ndim > 1)
            groups.setdefault(key, []).append(parameter)
    return [
        {
            "params": params,
            "weight_decay": recipe.weight_decay if decays else 0.0,
            "factor": scale,
        }
        for (scale, decays), params in groups.items()
    ]


def _copy(network: nn.Module) -> dict[str, Tensor]:
    return {k: v.detach().clone() for k, v in network.state_dict().items()}


def _generator(seed: int) -> Generator:
    """Source of randomness for a seed that may have outgrown 64 bits."""
    return Generator().manual_seed(seed % 2**64)


def _load(state: Path, recipe: Recipe) -> dict[str, Any]:
    try:
        saved = torch.load(state, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, UnpicklingError) as error:
        raise ValueError(f"state must be of a training; {state} is not.") from error
    if saved["recipe"] != asdict(recipe):
        raise ValueError(f"state must belong to this recipe; {state} is of another one.")
    return saved
