"""Slow and obvious integer budgets and multiply-add counts. Only tests import this."""

from fractions import Fraction
from math import floor


def macs(attention_tokens, mlp_tokens, channels, hidden):
    """Multiply-adds of the blocks of one image.

    Per block 4 N C^2 (query, key, value, output) + 2 N^2 C (scores, weighted values) with
    N the tokens in the attention, and 2 N' C H with N' the tokens in the MLP. Counts
    include prefix tokens; biases, norms and softmax are not counted.
    """
    total = 0
    for n, n_mlp in zip(attention_tokens, mlp_tokens, strict=True):
        total += 4 * n * channels**2 + 2 * n**2 * channels + 2 * n_mlp * channels * hidden
    return total


def bounded_quotas(weights, total, lower, upper):
    """Exact shares clamp(t x w_i, lower_i, upper_i) that sum to ``total``.

    Shares in proportion to the weights; while some leave their bounds, only the side that
    must give way is fixed (the lower ones if clamping all would overspend, else the upper
    ones), since fixing both at once can leave a negative rest. Where all open weights are
    zero they count as equal.
    """
    weights = _checked(weights, total, lower, upper)
    fixed = {}
    while len(fixed) < len(weights):
        left = [i for i in range(len(weights)) if i not in fixed]
        rest = total - sum(fixed.values())
        weight = {i: weights[i] for i in left}
        if sum(weight.values()) == 0:
            weight = dict.fromkeys(left, Fraction(1))
        quota = {i: rest * weight[i] / sum(weight.values()) for i in left}
        low = {i: Fraction(lower[i]) for i in left if quota[i] < lower[i]}
        high = {i: Fraction(upper[i]) for i in left if quota[i] > upper[i]}
        clamped = sum({**quota, **low, **high}.values())
        if clamped == rest:
            fixed |= {**quota, **low, **high}
        else:
            fixed |= low if clamped > rest else high
    return [fixed[i] for i in range(len(weights))]


def hamilton(weights, total, lower, upper):
    """Largest remainder: integers within bounds that sum to ``total``.

    Every bounded quota is rounded down and the rest goes one each to the largest
    fractions; ties: larger weight, then lower index.
    """
    quotas = bounded_quotas(weights, total, lower, upper)
    counts = [floor(q) for q in quotas]
    order = sorted(
        range(len(quotas)),
        key=lambda i: (-(quotas[i] - counts[i]), -Fraction(weights[i]), i),
    )
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


def webster(weights, total, lower, upper):
    """Sainte-Lague with bounds: from ``lower``, one at a time to the largest w/(2k+1).

    Only items below their upper bound take part; ties: larger weight, then lower index.
    Where all of those have weight zero they count as equal.
    """
    weights = _checked(weights, total, lower, upper)
    counts = list(lower)
    while sum(counts) < total:
        left = [i for i in range(len(weights)) if counts[i] < upper[i]]
        zero = all(weights[i] == 0 for i in left)
        priority = {
            i: (1 if zero else weights[i]) / Fraction(2 * counts[i] + 1) for i in left
        }
        counts[min(left, key=lambda i: (-priority[i], -weights[i], i))] += 1
    return counts


def _checked(weights, total, lower, upper):
    """Exact weights, after checking that a solution exists."""
    if any(w < 0 for w in weights):
        raise ValueError(f"weights must not be negative; got {list(weights)}.")
    if any(low > high for low, high in zip(lower, upper, strict=True)):
        raise ValueError(f"lower must not exceed upper; got {lower} and {upper}.")
    if not sum(lower) <= total <= sum(upper):
        raise ValueError(
            f"total must be between {sum(lower)} and {sum(upper)}; got {total}."
        )
    return [Fraction(w) for w in weights]
