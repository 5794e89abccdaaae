"""Methods of token reduction on the same images: how far each moves the task output."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from foveate.evaluation.cost import back_propagates, plan_macs
from foveate.evaluation.schedule import Case, Refusal, make_cases
from foveate.evaluation.terms import Terms
from foveate.models import Model
from foveate.reduction.plan import Plan
from foveate.reduction.reduced_vit import reduce
from foveate.tokens import Layout

__all__ = [
    "Comparison",
    "Refusal",
    "Row",
    "compare",
    "cosine",
    "mean_and_error",
    "output_error",
]

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Row:
    """One method at one budget.

    Attributes:
        case: What was done.
        macs: Multiply-adds of its blocks for one image.
        full_macs: Those of the full model.
        errors: Output error of every image.
        cosines: Cosine of the outputs of every image.
    """

    case: Case
    macs: int
    full_macs: int
    errors: tuple[float, ...]
    cosines: tuple[float, ...]

    @property
    def mac_ratio(self) -> float:
        """Multiply-adds of the full model over those of this row."""
        return self.full_macs / self.macs

    def record(self) -> dict[str, Any]:
        """Everything as JSON."""
        plan, cosine = self.case.plan, mean_and_error(self.cosines)
        return {
            "method": plan.method,
            "depths": [depth for depth, _ in plan.schedule],
            "keep": self.case.keep,
            "counts": [count for _, count in plan.schedule],
            "place": plan.place,
            "back_propagates": back_propagates(plan),
            "output_error": mean_and_error(self.errors),
            "cosine": cosine["mean"],
            "cosine_standard_error": cosine["standard_error"],
            "macs": self.macs,
            "mac_ratio": self.mac_ratio,
            "target_mac_ratio": self.case.target,
            "error_per_image": list(self.errors),
            "cosine_per_image": list(self.cosines),
            "plan": plan.record(),
        }


@dataclass(frozen=True)
class Comparison:
    """Methods on the same images.

    Attributes:
        model: Name of the model.
        task: Name of the task.
        layout: Geometry of the unreduced sequence.
        seed: Seed of the methods' random choices.
        num_images: Images.
        rows: What was measured, in the order that was asked for.
        skipped: What could not be done.
    """

    model: str
    task: str
    layout: Layout
    seed: int
    num_images: int
    rows: tuple[Row, ...]
    skipped: tuple[Refusal, ...]

    def record(self, files: Sequence[str] | None = None) -> dict[str, Any]:
        """Everything as JSON.

        Args:
            files: Name of each image.

        Returns:
            Lists, texts and finite numbers. ``place`` is null if the rows differ in it.

        Raises:
            ValueError: If there is not one name for each image.
        """
        if files is not None and len(files) != self.num_images:
            raise ValueError(
                f"files must name the {self.num_images} images; got {len(files)} names."
            )
        places = {row.case.plan.place for row in self.rows}
        return {
            "model": self.model,
            "task": self.task,
            "place": places.pop() if len(places) == 1 else None,
            "seed": self.seed,
            "num_images": self.num_images,
            "num_patches": self.layout.num_patches,
            "grid": list(self.layout.grid),
            "full_macs": self.rows[0].full_macs,
            "rows": [row.record() for row in self.rows],
            "skipped": [asdict(refusal) for refusal in self.skipped],
            "files": None if files is None else list(files),
        }


@torch.no_grad()
def compare(
    model: Model,
    methods: Sequence[str | Plan],
    images: Tensor,
    task: str = "cls",
    batch_size: int = 8,
    progress: Progress | None = None,
    **terms: Any,  # noqa: ANN401 - fields of Terms
) -> Comparison:
    r"""Run methods of token reduction on the same images and measure what each changes.

    The output error of an image is :math:`\lVert \tilde y - y \rVert_2 / \lVert y \rVert_2`
    over its whole raw output, with y that of the full model. Multiply-adds are those of the
    blocks, from the true number of tokens at each; scoring, matching and recovery are not
    in them (:func:`~foveate.evaluation.benchmark.benchmark` times them), nor are the
    backward passes of methods that have ``back_propagates`` in the record.

    Cost: one forward pass of the full model and one of each method and budget, plus the
    products of those that back-propagate. Nothing is kept of a batch but a number an image.

    Args:
        model: The model.
        methods: Names of presets, and plans, which are taken as they are.
        images: ``(B, 3, H, W)``.
        task: Name of one of its tasks.
        batch_size: Images at a time. Results do not depend on it beyond rounding.
        progress: Told how much is done, and how much there is.
        **terms: Fields of :class:`~foveate.evaluation.terms.Terms`: ``depths``,
            ``keeps`` or ``mac_ratios``, ``place``, ``fuse_last``, ``alpha``,
            ``num_probes``, ``seed``, ``head``.

    Returns:
        Errors, cosines and multiply-adds. What a method cannot do, such as pairwise merging
        of more than half of the patches at once, is in ``skipped`` with the reason.

    Raises:
        ValueError: If an argument is out of range, an output of the full model is zero or
            not finite, or no method can do what is asked.
    """
    if not len(images) or batch_size < 1:
        raise ValueError(
            "images and batch_size must be at least 1; got "
            f"{len(images)} images and batch_size {batch_size}."
        )
    model.task(task)
    settings = Terms(**terms)
    layout = model.backbone.embed(images[:1]).layout
    found = make_cases(model, layout, task, methods, settings)
    cases = [case for case in found if isinstance(case, Case)]
    skipped = [refusal for refusal in found if isinstance(refusal, Refusal)]
    trials = [_Trial(case, reduce(model, case.plan)) for case in cases]
    for done, first in enumerate(range(0, len(images), batch_size)):
        batch = images[first : first + batch_size]
        full = _full_output(model, batch, task, first)
        for index, trial in enumerate(trials, 1):
            trial.see(batch, full)
            if progress:
                of = -(-len(images) // batch_size) * len(trials)
                progress(done * len(trials) + index, of)
    rows = [trial.row(model, layout) for trial in trials if not trial.reason]
    skipped += [trial.refusal() for trial in trials if trial.reason]
    if not rows:
        raise ValueError(
            f"methods must include one that can do what is asked; got {skipped[0].method} "
            f"at keep {skipped[0].keep:g}: {skipped[0].reason}"
        )
    settled = (model.name, task, layout, settings.seed, len(images))
    return Comparison(*settled, tuple(rows), tuple(skipped))


def output_error(reduced: Tensor, full: Tensor) -> Tensor:
    r"""Relative error of each output.

    :math:`\lVert \tilde y - y \rVert_2 / \lVert y \rVert_2`, at least in float32.

    Args:
        reduced: Output of a reduced model, ``(B, ...)``.
        full: Output of the full model, ``(B, ...)``, not zero.

    Returns:
        One error an image, ``(B,)``.
    """
    y = _flat(full)
    return (_flat(reduced) - y).norm(dim=1) / y.norm(dim=1)


def cosine(reduced: Tensor, full: Tensor) -> Tensor:
    """Cosine of each image's outputs, ``(B, ...)`` twice ``-> (B,)``; 0 if one is 0."""
    return torch.nn.functional.cosine_similarity(_flat(reduced), _flat(full), dim=1)


def mean_and_error(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and its standard error (n - 1); the error of one value's mean is None."""
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {"mean": fmean(values), "standard_error": error}


@dataclass
class _Trial:
    """A case while the batches pass by; over as soon as there is a reason."""

    case: Case
    model: nn.Module
    errors: list[float] = field(default_factory=list)
    cosines: list[float] = field(default_factory=list)
    reason: str = ""

    def see(self, images: Tensor, full: Tensor) -> None:
        if self.reason:
            return
        try:
            reduced = self.model(images)
        except ValueError as error:  # what a method cannot do, it finds out when it runs
            self.reason = str(error)
            return
        if not reduced.isfinite().all():
            self.reason = f"output must be finite; got NaN or infinity in {full.dtype}."
            return
        self.errors += output_error(reduced, full).tolist()
        self.cosines += cosine(reduced, full).tolist()

    def row(self, model: Model, layout: Layout) -> Row:
        full, macs = plan_macs(model, self.case.plan, layout)
        return Row(self.case, macs, full, tuple(self.errors), tuple(self.cosines))

    def refusal(self) -> Refusal:
        return Refusal(self.case.plan.method, self.case.keep, self.reason)


def _full_output(model: Model, images: Tensor, task: str, first: int) -> Tensor:
    full = model(images, task)
    norms = _flat(full).norm(dim=1)
    bad = (~norms.isfinite() | (norms == 0)).nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"output of '{task}' must be finite and not zero, or no relative error exists; "
            f"got a norm of {float(norms[bad[0]])} for image {first + bad[0]}."
        )
    return full


def _flat(output: Tensor) -> Tensor:
    return output.flatten(1).to(torch.promote_types(output.dtype, torch.float32))
