"""Slow and obvious token reduction of ONE image, float64. Only tests import this.

Conventions. ``x`` (P + K, C) holds P prefix tokens, never reduced, then K patches; ``key``
and ``query`` have shape (heads, P + K, d), ``size`` (K,); ``keep`` patches are left. P is
``len(x) - len(size)`` where it is not an argument. Ties go to the lowest patch index.

Order of the result: the prefix, then the patches in ascending order of their LEAD, which is
the kept patch itself after pruning and the destination patch after a merge. Only EViT's
fused token has no lead: it comes last.
"""

import math
from typing import NamedTuple

import numpy as np

from tests.reference_agglomeration import (
    Agglomerated,
    cosine_agglomeration,
    greedy_agglomeration,
    pair_costs,
)
from tests.reference_budget import hamilton, macs, webster
from tests.reference_recovery import Step, recover
from tests.reference_scoring import (
    array,
    check_index_range,
    class_attention,
    cosine,
    cropr_scores,
    descending,
    farthest_point,
    feature_norm,
    key_redundancy,
    mean_keys,
    proportional_attention,
    received_attention,
)

__all__ = [
    "Agglomerated",
    "Reduced",
    "Step",
    "class_attention",
    "cosine_agglomeration",
    "cropr_scores",
    "diffrate",
    "diffrate_by_scores",
    "evit",
    "evit_by_scores",
    "farthest_point",
    "feature_norm",
    "greedy_agglomeration",
    "hamilton",
    "key_redundancy",
    "macs",
    "many_to_one",
    "pair_costs",
    "pitome",
    "pitome_energy",
    "proportional_attention",
    "prune",
    "received_attention",
    "recover",
    "tofu",
    "tome",
    "tome_edges",
    "webster",
]


class Reduced(NamedTuple):
    """Tokens after a step.

    Attributes:
        x: (P + keep, C).
        size: (keep,).
        group: (K,), index below ``keep`` of the token that speaks for each patch.
    """

    x: np.ndarray
    size: np.ndarray
    group: np.ndarray


def tome(x, key, size, keep, num_prefix):
    """ToMe: bipartite soft matching of patches, size-weighted mean into the patch of B."""
    x, size = _checked(x, size, keep, num_prefix)
    edges = tome_edges(mean_keys(key, num_prefix), len(size) - keep)
    destination = _destinations(len(size), edges)
    return _assemble(x, size, destination, destination, size)


def tofu(x, key, size, keep, num_prefix):
    """ToFu: ToMe, then each merged vector is scaled to its largest member's norm."""
    reduced = tome(x, key, size, keep, num_prefix)
    out, norms = reduced.x.copy(), feature_norm(x, num_prefix)
    for g in range(keep):
        members = [i for i in range(len(size)) if reduced.group[i] == g]
        norm = math.sqrt(float(out[num_prefix + g] @ out[num_prefix + g]))
        if len(members) > 1 and norm > 0:
            out[num_prefix + g] *= max(norms[i] for i in members) / norm
    return reduced._replace(x=out)


def tome_edges(metric, num_merges):
    """Pairs (a, b) that ToMe merges; a has an even position, b an odd one.

    Each a takes its most cosine-similar b; the ``num_merges`` most similar pairs are
    merged. Several a may share one b.
    """
    check_index_range("number of merges", num_merges, 0, len(metric) // 2)
    odd = range(1, len(metric), 2)
    best = {}
    for a in range(0, len(metric), 2):
        if len(odd) > 0:
            best[a] = max((cosine(metric[a], metric[b]), -b) for b in odd)
    order = sorted(best, key=lambda a: (-best[a][0], a))
    return [(a, -best[a][1]) for a in order[:num_merges]]


def pitome_energy(key, num_prefix, margin):
    """Energy of each patch: mean over all j, itself included, of ELU(cos_ij - margin)."""
    keys = mean_keys(key, num_prefix)

    def elu(v):
        return v if v > 0 else math.exp(v) - 1

    return array([sum(elu(cosine(a, b) - margin) for b in keys) / len(keys) for a in keys])


def pitome(x, key, size, keep, margin):
    """PiToMe: of the 2r patches of highest energy, every second merges into its best other.

    In descending order of energy they go in turn to A, B, A, ... Each a of A merges into
    the most cosine-similar b of B, size-weighted; several may share one b. The other
    patches are protected.
    """
    num_prefix = len(x) - len(size)
    x, size = _checked(x, size, keep, num_prefix)
    num_merges = len(size) - keep
    check_index_range("number of merges", num_merges, 0, len(size) // 2)
    keys = mean_keys(key, num_prefix)
    mergeable = descending(pitome_energy(key, num_prefix, margin))[: 2 * num_merges]
    edges = [(a, _nearest(a, mergeable[1::2], keys)) for a in mergeable[::2]]
    destination = _destinations(len(size), edges)
    return _assemble(x, size, destination, destination, size)


def prune(x, key, scores, size, keep):
    """Keep the ``keep`` patches of highest score, unchanged; the others' mass is lost.

    A pruned patch's stand-in is the kept patch whose head-averaged key is most similar.
    """
    num_prefix = len(x) - len(size)
    x, size = _checked(x, size, keep, num_prefix)
    kept, keys = descending(scores)[:keep], mean_keys(key, num_prefix)
    members = [i if i in kept else None for i in range(len(size))]
    speaker = [_nearest_unless_kept(i, kept, keys) for i in range(len(size))]
    return _assemble(x, size, members, speaker, size)


def many_to_one(x, key, scores, size, keep, num_prefix):
    """Merge the least important patches into kept ones, size-weighted.

    Each goes to the kept patch whose head-averaged key is most similar.
    """
    x, size = _checked(x, size, keep, num_prefix)
    kept, keys = descending(scores)[:keep], mean_keys(key, num_prefix)
    destination = [_nearest_unless_kept(i, kept, keys) for i in range(len(size))]
    return _assemble(x, size, destination, destination, size)


def evit(x, query, key, size, keep, fuse):
    """EViT: keep the patches that the class token attends to most; see evit_by_scores."""
    scores = class_attention(query, key, len(x) - len(size))
    return evit_by_scores(x, key, scores, size, keep, fuse)


def evit_by_scores(x, key, scores, size, keep, fuse):
    """Pruning, or ``keep - 1`` patches and one fused token in the last place.

    The fused token is the sum of (score x token) over the dropped, not renormalised. EViT
    has no sizes: here the fused token takes the dropped ones' mass, and it speaks for them.
    With ``keep`` = K nothing is dropped, so nothing is fused.
    """
    if not fuse or keep == len(size):
        return prune(x, key, scores, size, keep)
    x, size = _checked(x, size, keep, len(x) - len(size))
    num_prefix = len(x) - len(size)
    kept = sorted(descending(scores)[: keep - 1])
    dropped = [i for i in range(len(size)) if i not in kept]
    fused = sum(scores[i] * x[num_prefix + i] for i in dropped)
    return Reduced(
        x=np.stack([*x[:num_prefix], *(x[num_prefix + i] for i in kept), fused]),
        size=array([*(size[i] for i in kept), sum(size[i] for i in dropped)]),
        group=np.array([
            kept.index(i) if i in kept else keep - 1 for i in range(len(size))
        ]),
    )


def diffrate(x, query, key, size, keep_prune, keep):
    """DiffRate by class attention; see diffrate_by_scores."""
    scores = class_attention(query, key, len(x) - len(size))
    return diffrate_by_scores(x, key, scores, size, keep_prune, keep)


def diffrate_by_scores(x, key, scores, size, keep_prune, keep):
    """Prune to ``keep_prune`` patches, then merge the next least important, to ``keep``.

    A merged patch goes to the kept one whose FEATURE is most cosine-similar; the mean is
    plain, over the kept patch and all that join it. Sizes add up exactly, whereas the
    published rule adds size x similarity, which loses mass; what is pruned is lost in both.
    A pruned patch's stand-in is the kept patch whose head-averaged key is most similar.
    """
    num_prefix = len(x) - len(size)
    x, size = _checked(x, size, keep_prune, num_prefix)
    check_index_range("keep", keep, 1, keep_prune)
    order, keys, features = descending(scores), mean_keys(key, num_prefix), x[num_prefix:]
    kept, members, speaker = order[:keep], [None] * len(size), [None] * len(size)
    for rank, i in enumerate(order):
        merged = _nearest_unless_kept(i, kept, features)
        members[i] = merged if rank < keep_prune else None
        speaker[i] = merged if rank < keep_prune else _nearest(i, kept, keys)
    return _assemble(x, size, members, speaker, np.ones(len(size)))


def _checked(x, size, keep, num_prefix):
    """Float64 x and size, after checking that the counts fit."""
    x, size = array(x), array(size)
    if len(x) != num_prefix + len(size):
        raise ValueError(f"x must have {num_prefix + len(size)} tokens; got {len(x)}.")
    check_index_range("keep", keep, 1, len(size))
    return x, size


def _nearest(i, candidates, vectors):
    """The candidate whose vector is most cosine-similar to that of i."""
    return max(candidates, key=lambda j: (cosine(vectors[i], vectors[j]), -j))


def _nearest_unless_kept(i, kept, vectors):
    """The patch itself if it is kept, else the nearest kept one."""
    return i if i in kept else _nearest(i, kept, vectors)


def _destinations(num_patches, edges):
    """Where each patch goes: itself, unless an edge (a, b) sends it to b."""
    sent = dict(edges)
    return [sent.get(i, i) for i in range(num_patches)]


def _assemble(x, size, members, speaker, weight):
    """Average the members of each lead, and point every patch to its speaker.

    ``members[i]`` is the lead that patch i is averaged into, None if it is dropped;
    ``speaker[i]`` the lead that speaks for it; ``weight`` (K,) weighs the mean.
    """
    num_prefix, tokens, sizes = len(x) - len(size), list(x[: len(x) - len(size)]), []
    leads = sorted({lead for lead in members if lead is not None})
    for lead in leads:
        group = [i for i in range(len(size)) if members[i] == lead]
        total = sum(weight[i] for i in group)
        tokens.append(sum(weight[i] / total * x[num_prefix + i] for i in group))
        sizes.append(sum(size[i] for i in group))
    return Reduced(
        x=np.stack(tokens),
        size=array(sizes),
        group=np.array([leads.index(lead) for lead in speaker]),
    )
