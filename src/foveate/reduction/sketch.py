"""Rows of the Jacobian at the tokens of one block: what the oracle presets know."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from foveate.backbones import Backbone
from foveate.diagnosis.jacobian import Tail, TokenJacobian
from foveate.forward import Block, Place, run
from foveate.reduction.recover import recover
from foveate.tasks import Task
from foveate.tokens import Tokens


@dataclass(frozen=True)
class PulledProbes:
    r"""Random cotangents pulled back to the tokens of a block.

    Row k of patch n is :math:`(J^\top u_k)_n / s_n` with :math:`u_k \sim \mathcal N(0, I_M)`:
    for one copy of a patch that stands for :math:`s_n`. What follows the block is the model
    as it would go on from here, without further reduction, on the recovered grid if the task
    reads one. All images share the probes. Cost: ``num_probes`` VJPs an image.

    Attributes:
        backbone: The network.
        task: Its decoder.
        place: Where at the block the tokens are taken.
        num_probes: Rows, R.
        seed: The same seed gives the same probes; each depth draws its own.
    """

    backbone: Backbone
    task: Task
    place: Place
    num_probes: int
    seed: int = 0

    def __call__(self, tokens: Tokens, block: Block) -> Tensor:
        """Sketch of every patch, ``(B, K, R, C)``, float32."""
        jacobian = TokenJacobian(self._tail(tokens, block), tokens.x)
        generator = Generator().manual_seed(self.seed + 7919 * block.depth)
        shape = (self.num_probes, 1, jacobian.num_outputs)
        probes = torch.randn(shape, generator=generator).to(tokens.x)
        pulled = jacobian.vjp(probes.expand(-1, len(tokens.x), -1))  # (R, B, P + K, C)
        rows = pulled[:, :, tokens.layout.num_prefix :].permute(1, 2, 0, 3)
        return rows.float() / tokens.sizes()[..., None, None]

    def _tail(self, tokens: Tokens, block: Block) -> Tail:
        backbone, task, depth = self.backbone, self.task, block.depth
        taps = task.taps(backbone.num_blocks)

        def tail(x: Tensor) -> Tensor:
            now, start = tokens.with_(x=x), depth
            if self.place == "between":
                now, start = backbone.transform(depth, now), depth + 1
            _, late = run(backbone, now, start, taps[-1], taps=taps)
            read = [{**block.kept, **late}[d] for d in taps]
            features = tuple((recover(t) if task.needs_grid else t).x for t in read)
            return task.decode(backbone, features, tokens.layout).flatten(1)

        return tail


@dataclass(frozen=True)
class Sensitivity:
    r"""The oracle of all scores: how much the task output moves when one patch moves.

    :math:`\sqrt{\frac1R \sum_k \lVert (J^\top u_k)_n \rVert^2}` estimates the Frobenius norm
    of a patch's block of the Jacobian; the relative standard error of its square is at most
    :math:`\sqrt{2 / R}`. Cost: that of the sketch.

    Attributes:
        sketch: Pulled probes.
    """

    sketch: PulledProbes

    def __call__(self, tokens: Tokens, block: Block) -> Tensor:
        """Scores, ``(B, K)``, nonnegative; comparable between the patches of one call."""
        rows = self.sketch(tokens, block) * tokens.sizes()[..., None, None]
        return rows.square().sum(-1).mean(-1).sqrt()
