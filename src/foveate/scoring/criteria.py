r"""Scores that need no training: Tokens and a block in, ``(B, K)`` out, higher = keep.

B images, P prefix tokens, K patches now, N originally, T = P + K, C channels, h heads of d
channels. Half precision is raised to float32 before anything is summed. All have static
shapes and compile into one graph. Costs are multiply-adds an image, beside the block's own
projections: those are free between attention and MLP, and paid for before the block.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import log
from random import Random as Twister

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from foveate.forward import Block
from foveate.tokens import Tokens, widen

__all__ = [
    "Random",
    "class_attention",
    "coverage",
    "feature_norm",
    "key_redundancy",
    "log_prefix_attention",
    "pairwise_cosine",
    "prefix_attention",
    "received_attention",
]

_ROWS = 1024  # rows of a K x K matrix held at once


@dataclass(frozen=True)
class Random:
    """Uniform draws: the control that every other score has to beat.

    One draw serves all images, so that no image depends on its batch-mates. Every depth has
    a draw of its own. Cost: nothing.

    Attributes:
        seed: The same seed gives the same scores, on every device.
    """

    seed: int = 0

    def __call__(self, tokens: Tokens, block: Block) -> Tensor:
        """Scores in [0, 1), the same for every image, ``(B, K)``."""
        draws = _draws(self.seed, block.depth, tokens.layout.num_patches)
        return _for_all_images(draws, tokens)[:, : tokens.num_patches]


def feature_norm(tokens: Tokens, block: Block) -> Tensor:
    """Euclidean norm of each patch's features, ``(B, K)``. Cost: K C."""
    return widen(tokens.patches).norm(dim=-1)


def class_attention(tokens: Tokens, block: Block) -> Tensor:
    r"""Attention that the class token pays to each patch.

    :math:`\frac1h \sum_{a} \mathrm{softmax}(q^a_0 K^{a\top} / \sqrt d + \log s)_j`, the row
    of the class token over all keys, with the log size of each key once patches have been
    merged. Only this row is computed. Cost: T h d.

    Args:
        tokens: Tokens with K patches.
        block: The block whose attention is read.

    Returns:
        Scores, ``(B, K)``, in [0, 1]; with the prefix tokens' share they sum to 1.

    Raises:
        ValueError: If the backbone has no class token.

    References:
        Liang et al., "Not all patches are what you need: expediting vision transformers via
        token reorganizations" (EViT), ICLR 2022.
    """
    if not block.backbone.has_class_token:
        raise ValueError(
            "class_attention must be given a backbone with a class token; got "
            f"{type(block.backbone).__name__} without one (received_attention needs none)."
        )
    return prefix_attention(tokens, block, 0)


def prefix_attention(tokens: Tokens, block: Block, index: int) -> Tensor:
    """Attention that one prefix token pays to each patch, as :func:`class_attention`.

    Args:
        tokens: Tokens with K patches.
        block: The block whose attention is read.
        index: Which prefix token.

    Returns:
        Scores, ``(B, K)``, in [0, 1].
    """
    row = _prefix_logits(tokens, block, index).softmax(-1)  # (B, h, 1, T)
    return row.mean(1)[:, 0, tokens.layout.num_prefix :]


def log_prefix_attention(tokens: Tokens, block: Block, index: int) -> Tensor:
    """Logarithm of :func:`prefix_attention`, finite where that underflows.

    Args:
        tokens: Tokens with K patches.
        block: The block whose attention is read.
        index: Which prefix token.

    Returns:
        Scores, ``(B, K)``, at most 0.
    """
    row = _prefix_logits(tokens, block, index).log_softmax(-1)  # (B, h, 1, T)
    mean = row.logsumexp(1) - log(row.shape[1])
    return mean[:, 0, tokens.layout.num_prefix :]


def received_attention(tokens: Tokens, block: Block) -> Tensor:
    r"""Attention that each patch receives from the patches.

    :math:`\sum_i \frac{s_i}{\sum_l s_l} \frac1h \sum_a A^a_{ij}` over the patches i, where
    :math:`A^a` is the attention of head a over all keys and :math:`s_i` the size of patch
    i, so that a merged patch asks as often as its members would. Needs no class token. At
    most 1024 rows of attention exist at a time. Cost: K T h d.

    Args:
        tokens: Tokens with K patches.
        block: The block whose attention is read.

    Returns:
        Scores, ``(B, K)``, in [0, 1]; with the prefix tokens' share they sum to 1.
    """
    heads, num_prefix = block.project(tokens), tokens.layout.num_prefix
    bias, size = tokens.key_bias(), tokens.sizes()
    share = (size / size.sum(1, keepdim=True))[:, None, None]  # (B, 1, 1, K)
    received: Tensor | float = 0.0
    patches = heads.query[:, :, num_prefix:]
    for rows, weight in zip(patches.split(_ROWS, 2), share.split(_ROWS, 3), strict=True):
        attention = _attention(rows, heads.key, bias)  # (B, h, rows, T)
        received = received + (weight.to(attention.dtype) @ attention).mean(1)[:, 0]
    return received[:, num_prefix:]  # type: ignore[index]  # a tensor after the first rows


def coverage(tokens: Tokens, block: Block) -> Tensor:
    r"""Minus the rank in which farthest-point sampling visits the patches' places.

    The first is the patch closest to the mean place, then always the patch farthest from
    all those visited, distances in patches; the lower index wins a tie. The best K' patches
    therefore spread over the image for every K'. After a reduction, a patch's place is the
    mean place of the original patches it speaks for; the middle of the grid if it speaks
    for none; rounding may then break ties. Looks at no feature. Cost: nothing on the full
    grid; 2 K^2 after a reduction, in K steps that wait for each other.

    Args:
        tokens: Tokens with K patches.
        block: Not looked at.

    Returns:
        Scores 0, -1, ..., 1 - K in some order, ``(B, K)``.

    References:
        Gonzalez, "Clustering to minimize the maximum intercluster distance", Theor. Comput.
        Sci. 38, 1985.
    """
    if tokens.stand_in is None:
        return _for_all_images(_grid_coverage(tokens.layout.grid), tokens)
    return -_farthest_first(_mean_place(tokens, tokens.stand_in))


def key_redundancy(tokens: Tokens, block: Block) -> Tensor:
    r"""One minus the largest cosine between a patch's key and another patch's.

    Keys are averaged over heads, as attention sees them: normalised and rotated where the
    network does so. A patch without a close relative scores high; a key of zeros has cosine
    0 with all. At most 1024 rows of cosines exist at a time. Cost: K^2 d.

    Args:
        tokens: Tokens with K patches.
        block: The block whose keys are read.

    Returns:
        Scores, ``(B, K)``, in [0, 2]; 2 for a lone patch.

    References:
        Bolya et al., "Token merging: your ViT but faster" (ToMe), ICLR 2023, for comparing
        tokens by keys.
    """
    keys = widen(block.project(tokens).key[:, :, tokens.layout.num_prefix :]).mean(1)
    index = torch.arange(tokens.num_patches, device=keys.device)
    nearest = []
    for rows, own in zip(keys.split(_ROWS, 1), index.split(_ROWS), strict=True):
        cosine = pairwise_cosine(rows, keys)  # (B, rows, K)
        nearest.append(cosine.masked_fill(own[:, None] == index, -1.0).amax(-1))
    return 1 - torch.cat(nearest, dim=1)


def pairwise_cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of every row of ``a`` with every row of ``b``; 0 where either is zero.

    Args:
        a: ``(..., K, C)``.
        b: ``(..., L, C)``.

    Returns:
        ``(..., K, L)``, float32 if the rows are of half precision.
    """
    return normalize(widen(a), dim=-1) @ normalize(widen(b), dim=-1).mT


def _for_all_images(scores: tuple[float, ...], tokens: Tokens) -> Tensor:
    row = torch.tensor(scores, dtype=torch.float32, device=tokens.x.device)
    return row.expand(tokens.x.shape[0], -1)


def _prefix_logits(tokens: Tokens, block: Block, index: int) -> Tensor:
    heads = block.project(tokens)
    query = heads.query[:, :, index : index + 1]
    return _logits(query, heads.key, tokens.key_bias())


def _attention(query: Tensor, key: Tensor, key_bias: Tensor | None) -> Tensor:
    """Rows of attention, ``(B, h, rows, d)`` x ``(B, h, T, d)`` to ``(B, h, rows, T)``."""
    return _logits(query, key, key_bias).softmax(-1)


def _logits(query: Tensor, key: Tensor, key_bias: Tensor | None) -> Tensor:
    logits = widen(query) @ widen(key).mT / query.shape[-1] ** 0.5
    return logits if key_bias is None else logits + key_bias


@torch.compiler.assume_constant_result
def _draws(seed: int, depth: int, count: int) -> tuple[float, ...]:
    source = Twister(f"{seed}/{depth}/{count}")
    return tuple(source.random() for _ in range(count))


@torch.compiler.assume_constant_result
def _grid_coverage(grid: tuple[int, int]) -> tuple[float, ...]:
    return _grid_ranks(*grid)


@lru_cache(maxsize=8)
def _grid_ranks(rows: int, columns: int) -> tuple[float, ...]:
    """Minus ``_farthest_first`` on the full grid; in NumPy, as a tracer must not see it."""
    place = np.indices((rows, columns)).reshape(2, -1).T.astype(np.float64)  # (N, 2)
    visit = int(((place - place.mean(0)) ** 2).sum(1).argmin())
    distance, score = np.full(len(place), np.inf), np.zeros(len(place))
    for rank in range(len(place)):
        visit = int(distance.argmax()) if rank else visit
        distance = np.minimum(distance, ((place - place[visit]) ** 2).sum(1))
        distance[visit] = -1  # below every distance, even to a patch at the same place
        score[visit] = -rank
    return tuple(score.tolist())


def _farthest_first(place: Tensor) -> Tensor:
    """Rank in which each point is visited, ``(B, K, 2) -> (B, K)``."""
    distance = place.new_full(place.shape[:2], torch.inf)
    rank = torch.zeros_like(distance)
    visit = (place - place.mean(1, keepdim=True)).square().sum(-1).argmin(1, keepdim=True)
    for step in range(place.shape[1]):
        visit = distance.argmax(1, keepdim=True) if step else visit  # (B, 1)
        here = place.gather(1, visit[..., None].expand(-1, -1, 2))
        distance = torch.minimum(distance, (place - here).square().sum(-1))
        distance = distance.scatter(1, visit, -1.0)  # below every distance, 0 included
        rank = rank.scatter(1, visit, float(step))
    return rank


def _mean_place(tokens: Tokens, stand_in: Tensor) -> Tensor:
    """Mean row and column of the patches that each patch speaks for, ``(B, K, 2)``."""
    (rows, columns), batch, device = tokens.layout.grid, len(stand_in), stand_in.device
    row, column = torch.meshgrid(
        torch.arange(rows, device=device),
        torch.arange(columns, device=device),
        indexing="ij",
    )
    entry = torch.stack([row, column, torch.ones_like(row)], -1).flatten(0, 1)  # (N, 3)
    values = entry.float()[:, None].expand(batch, -1, stand_in.shape[-1], -1).flatten(1, 2)
    slot = (
        (stand_in + 1).flatten(1)[..., None].expand(-1, -1, 3)
    )  # slot 0: spoken for by none
    total = values.new_zeros(batch, tokens.num_patches + 1, 3).scatter_add(1, slot, values)
    total = total[:, 1:]  # sums of integers: exact in any order
    middle = total.new_tensor([(rows - 1) / 2, (columns - 1) / 2])
    count = total[..., 2:]
    return torch.where(count > 0, total[..., :2] / count.clamp(min=1), middle)
