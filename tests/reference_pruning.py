"""Pruning by a controller, written a second time: one image, loops, lists of indices."""

from dataclasses import dataclass, field
from math import exp, log, sqrt

import torch
from torch import Tensor

from foveate.tokens import Tokens


@dataclass
class Reference:
    """One image on its way through the blocks.

    Attributes:
        vit: What is written a second time.
        tokens: What entered block 0, the register among the prefix tokens.
        there: Original index of every patch that is left, ascending.
        sizes: Of these patches.
        events: For every step, who speaks for every patch, how loud, and what it lacks.
    """

    vit: object
    tokens: Tokens
    there: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    events: list[dict[int, tuple[dict[int, float], Tensor]]] = field(default_factory=list)

    def output(self) -> Tensor:
        """What the task reads, decoded."""
        vit, tokens = self.vit, self.tokens
        backbone, pruning = vit.controlled.backbone, vit.controller.pruning
        task, P = vit.model.task(vit.task), tokens.layout.num_prefix
        self.there = list(range(tokens.num_patches))
        self.sizes = [1] * len(self.there)
        taps, read = task.taps(backbone.num_blocks), []
        for depth in range(taps[-1] + 1):
            if depth in taps:
                read.append(self.filled(tokens).x if task.needs_grid else tokens.x)
            if depth == taps[-1]:
                break
            if depth == vit.restore:
                tokens = self.filled(tokens)
                self.there, self.events = list(range(tokens.num_patches)), []
                self.sizes = [1] * len(self.there)
            tokens = self.placed(tokens)
            heads = backbone.project(depth, tokens)
            tokens = backbone.attend(depth, tokens, heads)
            if depth in pruning.depths:
                at = pruning.depths.index(depth)
                tokens = self.step(tokens, heads, at, int(vit.controller.counts[at]))
            tokens = backbone.transform(depth, self.placed(tokens))
        has = vit.controller.register is not None
        if has:  # decoders know nothing of it
            read = [torch.cat([x[:, : P - 1], x[:, P:]], dim=1) for x in read]
        layout = vit.model.backbone.embed(self.images).layout
        return task.decode(vit.model.backbone, tuple(read), layout)

    def placed(self, tokens: Tokens) -> Tokens:
        """The patches that are left, with their rotary positions and sizes."""
        position = self.tokens.position
        merges = self.vit.controller.pruning.action == "merge"
        size = torch.tensor([self.sizes], dtype=torch.float32)
        return Tokens(
            tokens.x,
            tokens.layout,
            size=size if merges else None,
            position=None if position is None else position[:, self.there],
            proportional=merges,
        )

    def step(self, tokens: Tokens, heads, at: int, count: int) -> Tokens:
        """Remove the patches of least attention."""
        controller, P = self.vit.controller, tokens.layout.num_prefix
        place = 0 if controller.register is None else P - 1
        score = self.ranking(self.attention(heads, place, P), heads, P)
        number = len(self.there)
        order = sorted(range(number), key=lambda i: (-score[i], i))
        stays = sorted(order[: number - count])
        keys = heads.key[0, :, P:].mean(0)  # (K, d)
        target, voices = {i: i for i in stays}, {i: {i: 1.0} for i in stays}
        for i in order[number - count :]:
            voices[i] = self.voices(keys, i, stays)
            target[i] = next(iter(voices[i]))
        before = tokens.patches[0]
        after, sizes = self.survivors(before, target)
        alpha = self.alpha(tokens.x[0, place])
        self.events.append({
            self.there[i]: (
                {self.there[j]: w for j, w in said.items()},
                alpha * (before[i] - sum(w * after[j] for j, w in said.items())),
            )
            for i, said in voices.items()
        })
        self.sizes = [sizes[j] for j in stays]
        self.there = [self.there[j] for j in stays]
        x = torch.cat([tokens.prefix[0], torch.stack([after[j] for j in stays])])
        return Tokens(x[None], tokens.layout)

    def voices(self, keys: Tensor, i: int, stays: list[int]) -> dict[int, float]:
        """Patches of most similar key that speak for one that goes, the nearest first."""
        pruning = self.vit.controller.pruning
        cosines = {
            j: float(keys[i] @ keys[j] / keys[i].norm() / keys[j].norm()) for j in stays
        }
        best = sorted(stays, key=lambda j: -cosines[j])[: pruning.stand_ins]
        loud = {j: exp(cosines[j] / pruning.blend) for j in best}
        return {j: loud[j] / sum(loud.values()) for j in best}

    def ranking(self, attention: list[float], heads, P: int) -> list[float]:
        """Attention itself, or its log less the weighed cosine to the nearest key."""
        weight = self.vit.controller.redundancy
        if weight is None:
            return attention
        keys = heads.key[0, :, P:].mean(0)
        unit = [k / k.norm() for k in keys]
        nearest = [
            max(float(a @ b) for j, b in enumerate(unit) if j != i)
            for i, a in enumerate(unit)
        ]
        return [log(a) - float(weight) * c for a, c in zip(attention, nearest, strict=True)]

    def attention(self, heads, place: int, P: int) -> list[float]:
        """Attention of one token to the patches, head by head."""
        total = [0.0] * len(self.there)
        number = heads.query.shape[1]
        merges = self.vit.controller.pruning.action == "merge"
        for q, k in zip(heads.query[0], heads.key[0], strict=True):
            weight = [exp(float(q[place] @ key) / sqrt(len(key))) for key in k]
            if merges:
                weight[P:] = [w * s for w, s in zip(weight[P:], self.sizes, strict=True)]
            for i, w in enumerate(weight[P:]):
                total[i] += w / sum(weight) / number
        return total

    def survivors(self, before: Tensor, target: dict) -> tuple[dict, dict]:
        """Features and sizes of the patches that stay."""
        after, sizes = {}, {}
        for j in (j for i, j in target.items() if i == j):
            members = [i for i in target if target[i] == j]
            after[j], sizes[j] = before[j], self.sizes[j]
            if self.vit.controller.pruning.action == "merge":
                sizes[j] = sum(self.sizes[i] for i in members)
                after[j] = sum(self.sizes[i] * before[i] for i in members) / sizes[j]
        return after, sizes

    def alpha(self, state: Tensor) -> float:
        """Share of the offset that comes back."""
        controller = self.vit.controller
        if controller.recover is None:
            return float(controller.pruning.recovery)
        z = (state - state.mean()) / (state.var(correction=0) + 1e-5).sqrt()
        logit = z @ controller.recover.weight[0] + controller.recover.bias[0]
        return 1 / (1 + exp(-float(logit)))

    def filled(self, tokens: Tokens) -> Tokens:
        """The full grid: from the last step back to the first."""
        value = dict(zip(self.there, tokens.patches[0], strict=True))
        for event in reversed(self.events):
            value = {
                i: sum(w * value[j] for j, w in said.items()) + lost
                for i, (said, lost) in event.items()
            }
        x = torch.stack([value[i] for i in range(len(value))])
        return Tokens(torch.cat([tokens.prefix[0], x])[None], tokens.layout)

    @property
    def images(self) -> Tensor:
        """Any image of the grid, for its layout."""
        height, width = self.tokens.layout.image_size
        return torch.zeros(1, 3, height, width, dtype=self.tokens.x.dtype)


@torch.no_grad()
def reference_output(vit, images: Tensor) -> Tensor:
    """Output of a pruned model for every image, by loops."""
    embedded = [vit.controlled.backbone.embed(image[None]) for image in images]
    return torch.cat([Reference(vit, tokens).output() for tokens in embedded])
