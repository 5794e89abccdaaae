"""Slow and obvious token scores of ONE image, float64. Only tests import this.

K patches follow P prefix tokens. ``key`` and ``query`` have shape (heads, P + K, d), ``x``
(P + K, C). Every score has shape (K,), and higher means keep. Zero vectors have cosine 0.
"""

import math

import numpy as np


def array(values):
    """Float64 copy of a tensor, an array or a list."""
    return np.array(np.asarray(values, dtype=np.float64))


def check_index_range(name, value, low, high):
    """Refuse a count outside low..high."""
    if not low <= value <= high:
        raise ValueError(f"{name} must be between {low} and {high}; got {value}.")


def cosine(a, b):
    """Cosine of two vectors, 0 if one of them is zero."""
    norms = math.sqrt(sum(v * v for v in a)) * math.sqrt(sum(v * v for v in b))
    return sum(u * v for u, v in zip(a, b, strict=True)) / norms if norms > 0 else 0.0


def mean_keys(key, num_prefix):
    """Keys of the patches, averaged over heads: (K, d)."""
    key = array(key)
    heads = [key[h] for h in range(len(key))]
    return (sum(heads) / len(heads))[num_prefix:]


def descending(scores):
    """Indices from the highest score to the lowest; equal scores: lowest index first."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


def attention_row(query, key, head, token, log_size):
    """Attention of one query over all tokens: softmax(q . k / sqrt(d) + log size)."""
    d = key.shape[-1]
    logits = []
    for j in range(key.shape[1]):
        product = sum(query[head, token, c] * key[head, j, c] for c in range(d))
        logits.append(product / math.sqrt(d) + log_size[j])
    highest = max(logits)
    exponentials = [math.exp(logit - highest) for logit in logits]
    return [e / sum(exponentials) for e in exponentials]


def log_sizes(num_tokens, size, num_prefix):
    """Log size of every token's key; prefix tokens, and all tokens without size, have 0."""
    if size is None:
        return [0.0] * num_tokens
    if num_prefix + len(size) != num_tokens:
        raise ValueError(
            f"size must have {num_tokens - num_prefix} entries; got {len(size)}."
        )
    return [0.0] * num_prefix + [math.log(float(s)) for s in size]


def class_attention(query, key, num_prefix=1, size=None):
    """Attention of the class token (token 0) on each patch, mean over heads.

    The softmax runs over all P + K tokens, so the scores do not sum to 1. ``size`` (K,)
    adds log sizes to the logits, as proportional attention does; None adds nothing.
    """
    query, key = array(query), array(key)
    bias = log_sizes(key.shape[1], size, num_prefix)
    rows = [attention_row(query, key, h, 0, bias) for h in range(len(key))]
    patches = range(num_prefix, key.shape[1])
    return array([sum(row[j] for row in rows) / len(rows) for j in patches])


def received_attention(query, key, num_prefix, size=None):
    """Attention that each patch receives, mean over the queries of all patches and heads.

    Prefix queries are left out; prefix keys take part in the softmax.
    """
    query, key = array(query), array(key)
    bias = log_sizes(key.shape[1], size, num_prefix)
    patches = range(num_prefix, key.shape[1])
    rows = [attention_row(query, key, h, i, bias) for h in range(len(key)) for i in patches]
    return array([sum(row[j] for row in rows) / len(rows) for j in patches])


def feature_norm(x, num_prefix):
    """Euclidean norm of each patch."""
    return array([math.sqrt(sum(v * v for v in token)) for token in array(x)[num_prefix:]])


def key_redundancy(key, num_prefix):
    """1 - the highest cosine of a patch's head-averaged key to another patch's."""
    keys = mean_keys(key, num_prefix)
    check_index_range("number of patches", len(keys), 2, math.inf)
    others = [[j for j in range(len(keys)) if j != i] for i in range(len(keys))]
    return array([
        1 - max(cosine(keys[i], keys[j]) for j in others[i]) for i in range(len(keys))
    ])


def cropr_scores(query_vectors, key, num_prefix=0):
    """Sum over queries and heads of q . k, before scaling and softmax.

    ``query_vectors`` has shape (Q, heads, d). Scores of the tokens after the prefix.
    """
    query_vectors, key = array(query_vectors), array(key)
    scores = []
    for j in range(num_prefix, key.shape[1]):
        total = 0.0
        for q in range(len(query_vectors)):
            for h in range(len(key)):
                total += float(query_vectors[q, h] @ key[h, j])
        scores.append(total)
    return array(scores)


def farthest_point(grid):
    """Minus the rank of each patch (row-major) in greedy farthest-point order.

    The first patch is the nearest to the centre of the grid, each next one the patch whose
    nearest chosen patch is farthest away (Euclidean). Ties: lowest index. The first patch
    scores 0, the last -(K - 1).
    """
    rows, columns = grid
    # Doubled coordinates make the centre, and so every squared distance, an integer.
    points = [(2 * r, 2 * c) for r in range(rows) for c in range(columns)]
    centre = (rows - 1, columns - 1)

    def squared(p, q):
        return (p[0] - q[0]) ** 2 + (p[1] - q[1]) ** 2

    order = [min(range(len(points)), key=lambda i: (squared(points[i], centre), i))]
    while len(order) < len(points):
        left = [i for i in range(len(points)) if i not in order]
        gap = {i: min(squared(points[i], points[j]) for j in order) for i in left}
        order.append(max(left, key=lambda i: (gap[i], -i)))
    return array([-order.index(i) for i in range(len(points))])


def proportional_attention(query, key, value, size, num_prefix):
    """softmax(q k^T / sqrt(d) + log size of the key) v per head: (heads, P + K, d)."""
    query, key, value = array(query), array(key), array(value)
    bias = log_sizes(key.shape[1], size, num_prefix)
    out = np.zeros_like(value)
    for h in range(len(key)):
        for i in range(key.shape[1]):
            row = attention_row(query, key, h, i, bias)
            for j in range(key.shape[1]):
                out[h, i] += row[j] * value[h, j]
    return out
