"""A model that runs a plan. It is called like the model, and the model is not edited."""

from collections.abc import Sequence

from torch import Tensor, nn

from foveate.forward import Step, run
from foveate.models import Model
from foveate.reduction.plan import Plan
from foveate.reduction.presets import build_steps
from foveate.reduction.recover import recover
from foveate.reduction.resolution import RESOLUTION, LowerResolution
from foveate.tokens import Tokens


class ReducedViT(nn.Module):
    """A frozen model with fewer tokens.

    Nothing is remembered between calls, so that it can be copied and pickled and, unless
    its method back-propagates, compiled into one graph and put under gradient checkpoints.
    Each image's result is independent of its batch-mates.

    Args:
        model: The full model, kept as it is and shared.
        plan: What to do.

    Raises:
        ValueError: If the plan does not fit the model.
    """

    def __init__(self, model: Model, plan: Plan) -> None:
        super().__init__()
        self.model = model
        self.plan = plan
        self.steps = nn.ModuleDict()
        for depth, here in build_steps(model, plan).items():
            self.steps[str(depth)] = nn.ModuleList(here)  # type: ignore[arg-type]  # modules
        self.training = model.training  # train() would also set every part of the model

    def forward(self, images: Tensor) -> Tensor:
        """Raw output of the plan's task, ``(B, 3, H, W) -> (B, ...)``."""
        task = self.model.task(self.plan.task)
        taps = task.taps(self.model.backbone.num_blocks)
        kept = self.tokens_at(images, taps)
        read = [recover(kept[d]) if task.needs_grid else kept[d] for d in taps]
        features = tuple(tokens.x for tokens in read)
        return task.decode(self.model.backbone, features, read[0].layout)

    def tokens_at(self, images: Tensor, depths: Sequence[int]) -> dict[int, Tokens]:
        """Reduced tokens that enter the blocks at some depths, before any step there.

        Args:
            images: ``(B, 3, H, W)``.
            depths: Ascending; the number of blocks for what leaves the last.

        Returns:
            Tokens by depth.

        Raises:
            ValueError: If the images have another patch grid than the plan.
        """
        backbone = self.model.backbone
        tokens = backbone.embed(images)
        if tokens.layout.grid != self.plan.grid:
            raise ValueError(
                f"images must have the plan's patch grid {self.plan.grid}; got "
                f"{tokens.layout.grid} from {tuple(images.shape[-2:])} pixels."
            )
        steps: dict[int, list[Step]] = {
            int(depth): list(here)  # type: ignore[call-overload]  # a ModuleList
            for depth, here in self.steps.items()
        }
        return run(backbone, tokens, 0, depths[-1], steps, depths)[1]


def reduce(model: Model, plan: Plan) -> ReducedViT | LowerResolution:
    """Run a model by a plan, on fewer tokens or, for one method, on smaller images."""
    kind = LowerResolution if plan.method == RESOLUTION else ReducedViT
    return kind(model, plan)
