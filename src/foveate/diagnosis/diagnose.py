"""Which tokens and directions a task depends on, measured on the user's own images."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Generator, Tensor

from foveate.diagnosis.findings import Diagnosis, Finding, examine
from foveate.diagnosis.jacobian import TokenJacobian, check_adjoint, open_tap
from foveate.diagnosis.output_metric import Jacobian
from foveate.diagnosis.sketch import (
    Budget,
    Sketch,
    exact_sketch,
    randomised_sketch,
    split_budget,
)
from foveate.models import Model
from foveate.tokens import Tokens

__all__ = ["Diagnosis", "Finding", "diagnose"]

Exact = Literal["auto", "always", "never"]
Progress = Callable[[int, int], None]

DEFAULT_RANK = 20
_ROUTES = ("auto", "always", "never")
_ROWS_AT_ONCE = 768 << 20  # bytes of the rows of a batch
_LARGEST = 8 << 30  # bytes of the rows of one image


def diagnose(  # noqa: PLR0913 - the options of the command, by name
    model: Model,
    images: Tensor,
    task: str = "cls",
    depth: int = 10,
    rank: int = DEFAULT_RANK,
    probes: int = 100,
    iterations: int = 2,
    exact: Exact = "auto",
    seed: int = 0,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> Diagnosis:
    r"""Diagnose how the output of a task depends on the tokens that enter a block.

    For each image, of the Jacobian of the raw output with respect to all tokens, and of
    that with respect to the patches alone: spectrum, share of the energy in the leading
    directions (``kappa_cap``), effective ranks, spread over tokens (``cv``), importance and
    block norm of each patch. It starts with the adjoint check, since a decoder that
    detaches would make every pull-back zero.

    The exact route takes M VJPs and serves both Jacobians; "auto" takes it where these (or
    T * C JVPs) are no more than what the randomised route may spend, 2 (``rank * iterations
    + probes``). The randomised route (:func:`foveate.diagnosis.sketch.randomised_sketch`)
    spends at most ``rank * iterations + probes`` JVPs and as many VJPs an image, 140 and
    140 by default, and serves both Jacobians too. Measured against the exact route on
    8 photographs with 8 seeds (class token of a ViT-S/14 at depth 10, the defaults):
    ``kappa_cap`` is off by 0.2-0.3 % in the mean and 0.9 % at most; importance ranks the
    patches at Spearman 0.9998 or better; entropy rank and ``rank_90`` are off by 1 % and
    2 % in the mean, 4 % and 8 % at most.

    What is random is drawn for each image from the seed and the image's index, so that an
    image's results do not depend on the other images or on ``batch_size``, up to rounding.

    Args:
        model: Model in float32 or float64.
        images: ``(N, 3, H, W)``, prepared by ``model.transform``.
        task: Name of one of the model's tasks.
        depth: Block that the tokens enter, from 0.
        rank: Leading directions r, from 1 to the smaller of M and the T * C entries of the
            tokens. The default also stands for all of them where there are fewer.
        probes: Products of each kind beyond those of the iterations. More probes: a smaller
            error of the total, and of the subspace.
        iterations: Products of each kind for each leading direction. More iterations: a
            smaller error of the subspace.
        exact: ``auto``, ``always`` or ``never``.
        seed: At least 0; the same seed gives the same results.
        batch_size: Most images at once; fewer are taken where their rows need over 768 MiB.
        progress: Called with the products done so far and to be done, over all images.

    Returns:
        The diagnosis.

    Raises:
        ValueError: If an argument is out of range, a weight or an image is not finite, the
            output does not depend on the tokens, or the decoder detaches.
    """
    if exact not in _ROUTES:
        raise ValueError(f"exact must be one of {', '.join(_ROUTES)}; got '{exact}'.")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1; got {batch_size}.")
    if images.ndim != 4 or len(images) == 0:
        raise ValueError(
            f"images must be (N, 3, H, W) with N >= 1; got {tuple(images.shape)}."
        )
    _, jacobian = _open(model, images[:1], task, depth)
    route = _choose_route(jacobian, rank, probes, iterations, exact)
    report = _Progress(progress, route.num_products * len(images))
    found: list[dict[str, Finding]] = []
    errors = []
    for batch in torch.arange(len(images)).split(min(batch_size, route.batch_size)):
        tokens, jacobian = _open(model, images[batch], task, depth)
        device = jacobian.tokens.device
        errors.append(check_adjoint(jacobian, Generator(device).manual_seed(seed)))
        generators = [_generator(seed, int(index)) for index in batch]
        sketch = route.sketch(
            _Watched(jacobian, report), tokens.layout.num_prefix, generators
        )
        found += examine(sketch, rank)
    report.finish()
    return Diagnosis(
        model.name,
        task,
        depth,
        rank,
        "exact" if route.budget is None else "randomised",
        jacobian.num_outputs,
        tokens.layout.grid,
        jacobian.products,
        max(errors),
        tuple(found),
    )


@dataclass(frozen=True)
class _Route:
    """How the Jacobian of each image is taken.

    Attributes:
        rank: Leading directions.
        budget: Of the randomised route; None on the exact one.
        num_products: Products with the Jacobian of one image, at most.
        batch_size: Images whose rows may be held at once.
    """

    rank: int
    budget: Budget | None
    num_products: int
    batch_size: int

    def sketch(
        self, jacobian: Jacobian, num_prefix: int, generators: list[Generator]
    ) -> Sketch:
        if self.budget is None:
            return exact_sketch(jacobian, num_prefix)
        return randomised_sketch(jacobian, num_prefix, self.rank, self.budget, generators)


def _choose_route(
    jacobian: Jacobian, rank: int, probes: int, iterations: int, exact: Exact
) -> _Route:
    """Choose the exact or the randomised route; errors as of :func:`diagnose`."""
    num_outputs, num_columns = jacobian.num_outputs, jacobian.tokens[0].numel()
    num_rows = min(num_outputs, num_columns)
    largest = max(num_rows, DEFAULT_RANK)
    if not 1 <= rank <= largest:
        raise ValueError(
            f"rank must be from 1 to {largest}, as the Jacobian is {num_outputs} x "
            f"{num_columns}; got {rank}."
        )
    budget = split_budget(rank, probes, iterations, num_outputs)
    is_exact = exact == "always" or (exact == "auto" and num_rows <= 2 * budget.total)
    held = num_rows if is_exact else budget.search + budget.probes
    row_bytes = (num_columns + num_outputs) * jacobian.tokens.element_size()
    if held * row_bytes > _LARGEST:
        raise ValueError(
            f"exact must be 'auto' or 'never' here: {held} rows of the Jacobian of one "
            f"image take {held * row_bytes / 2**30:.0f} GiB; got '{exact}'."
        )
    return _Route(
        rank,
        None if is_exact else budget,
        num_rows + 2 if is_exact else 2 * budget.total,
        max(1, _ROWS_AT_ONCE // (held * row_bytes)),
    )


def _open(
    model: Model, images: Tensor, task: str, depth: int
) -> tuple[Tokens, TokenJacobian]:
    tap = open_tap(model.backbone, model.task(task), images, depth)
    tokens = tap.tokens.x
    if tokens.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            "dtype must be float32 or float64, as half precision loses most of a Jacobian; "
            f"got {str(tokens.dtype).removeprefix('torch.')}."
        )
    jacobian = TokenJacobian(tap.tail, tokens)
    if not (tokens.isfinite().all() and jacobian.output.isfinite().all()):
        raise ValueError(_not_finite(model, images))
    return tap.tokens, jacobian


def _not_finite(model: Model, images: Tensor) -> str:
    if not images.isfinite().all():
        return "images must be finite; got NaN or infinity."
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if not weight.isfinite().all():
            return f"weights must be finite; got NaN or infinity in {name}."
    return "tokens and output must be finite; the network overflows on these images."


def _generator(seed: int, index: int) -> Generator:
    """Source of randomness of one image: same seed and index, same draws."""
    state = np.random.SeedSequence((seed, index)).generate_state(1, np.uint64)[0]
    return Generator().manual_seed(int(state >> np.uint64(1)))


class _Progress:
    """Products done so far, over all images."""

    def __init__(self, call: Progress | None, total: int) -> None:
        self.call = call
        self.total = total
        self.done = 0

    def add(self, count: int) -> None:
        self.done += count
        if self.call:
            self.call(min(self.done, self.total), self.total)

    def finish(self) -> None:
        self.add(self.total - self.done)


class _Watched:
    """A Jacobian that reports its products."""

    def __init__(self, jacobian: TokenJacobian, progress: _Progress) -> None:
        self.jacobian = jacobian
        self.progress = progress
        self.tokens = jacobian.tokens
        self.output = jacobian.output
        self.products = jacobian.products

    @property
    def num_outputs(self) -> int:
        return self.jacobian.num_outputs

    def jvp(self, directions: Tensor) -> Tensor:
        self.progress.add(directions.shape[0] * directions.shape[1])
        return self.jacobian.jvp(directions)

    def vjp(self, cotangents: Tensor) -> Tensor:
        self.progress.add(cotangents.shape[0] * cotangents.shape[1])
        return self.jacobian.vjp(cotangents)
