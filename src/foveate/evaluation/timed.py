"""Models with a clock inside: they compute what they always do, and say what it takes."""

from torch import Tensor, nn

from foveate.evaluation.clock import Clock
from foveate.forward import NO_STEPS, Block, Step, Steps, run
from foveate.models import Model
from foveate.reduction.plan import Plan
from foveate.reduction.presets import build_steps
from foveate.reduction.recover import recover
from foveate.reduction.resolution import RESOLUTION, LowerResolution
from foveate.tokens import Tokens

__all__ = ["TimedCall", "TimedModel", "TimedStep"]


class TimedStep:
    """A step that does what another does, timed as ``steps``.

    Args:
        step: The step.
        clock: Where its time goes.
    """

    def __init__(self, step: Step, clock: Clock) -> None:
        self.step = step
        self.place = step.place
        self.clock = clock

    def __call__(self, tokens: Tokens, block: Block) -> Tokens:
        """Take the step."""
        with self.clock.span("steps"):
            return self.step(tokens, block)


class TimedModel(Model):
    """A model with steps at its blocks, timed as ``encoder``: blocks, steps and recovery.

    Args:
        model: The model.
        clock: Where the times go.
        steps: What to do at the blocks.
    """

    def __init__(self, model: Model, clock: Clock, steps: Steps = NO_STEPS) -> None:
        nn.Module.__init__(self)  # the weights have been checked
        self.backbone, self.tasks = model.backbone, model.tasks
        self.clock = clock
        self.steps = {
            depth: [TimedStep(step, clock) for step in here]
            for depth, here in steps.items()
        }
        self.training = model.training

    def forward(self, images: Tensor, task: str = "cls") -> Tensor:
        """Raw output of one task, ``(B, 3, H, W) -> (B, ...)``."""
        decoder, backbone = self.task(task), self.backbone
        taps = decoder.taps(backbone.num_blocks)
        tokens = backbone.embed(images)
        with self.clock.span("encoder"):
            kept = run(backbone, tokens, 0, taps[-1], self.steps, taps)[1]
            read = [kept[depth] for depth in taps]
            if self.steps and decoder.needs_grid:
                with self.clock.span("steps"):
                    read = [recover(tokens) for tokens in read]
        return decoder.decode(backbone, tuple(t.x for t in read), tokens.layout)


class TimedCall:
    """A call of a model, timed as ``model``.

    Args:
        model: The model.
        task: Name of the task.
        steps: What to do at the blocks.
        smaller: Plan for smaller images, in place of steps.
    """

    def __init__(
        self, model: Model, task: str, steps: Steps = NO_STEPS, smaller: Plan | None = None
    ) -> None:
        self.model, self.task = model, task
        self.steps, self.smaller = steps, smaller

    @classmethod
    def by_plan(cls, model: Model, plan: Plan) -> "TimedCall":
        """A call by a plan.

        Args:
            model: The model.
            plan: What to do.

        Returns:
            The call.

        Raises:
            ValueError: If the plan does not fit the model.
        """
        if plan.method == RESOLUTION:
            return cls(model, plan.task, smaller=plan)
        return cls(model, plan.task, build_steps(model, plan))

    def __call__(self, images: Tensor, clock: Clock) -> Tensor:
        """Raw output of the task; the times go to the clock."""
        model = TimedModel(self.model, clock, self.steps)
        if self.smaller:
            lower = LowerResolution(model, self.smaller)
            with clock.span("model"):
                return lower(images)
        with clock.span("model"):
            return model(images, self.task)
