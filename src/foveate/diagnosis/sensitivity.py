"""How the sensitivity of a task is spread over the tokens."""

from torch import Tensor


def leading_rows(rows: Tensor, vectors: Tensor, rank: int) -> Tensor:
    r"""Turn rows into the leading right singular vectors, times their singular values.

    Args:
        rows: Rows :math:`B = Q^\top J` of one image, ``(D, T, C)``.
        vectors: Eigenvectors of :math:`B B^\top`, as columns, leading first, ``(D, D)``.
        rank: How many, r.

    Returns:
        :math:`\sigma_j v_j^{(t)}`, ``(min(r, D), T, C)``.
    """
    leading = vectors[:, :rank].T.to(rows)
    return (leading @ rows.flatten(1)).unflatten(1, rows.shape[1:])


def importance(leading: Tensor) -> Tensor:
    r"""Importance of each token in the leading directions.

    :math:`\mathrm{imp}^*_t = \sqrt{\sum_{j \le r} \sigma_j^2 \lVert v_j^{(t)} \rVert^2}`,
    in output units per token unit. At full rank it is the norm of the token's Jacobian
    block.

    Args:
        leading: Output of :func:`leading_rows`, ``(r, T, C)``.

    Returns:
        ``(T,)``, nonnegative, float64.
    """
    return leading.double().square().sum((0, 2)).sqrt()


def concentration(leading: Tensor) -> float:
    r"""Coefficient of variation over tokens of the energy of the leading directions, CV.

    With :math:`e_t = \sum_{j \le r} \lVert v_j^{(t)} \rVert^2` this is
    :math:`\mathrm{std}(e) / \mathrm{mean}(e)`, the standard deviation over all T tokens
    (divided by T). It is 0 if all tokens share the directions equally, and
    :math:`\sqrt{T - 1}` if one token has them all.

    Args:
        leading: Output of :func:`leading_rows`, ``(r, T, C)``; directions without any
            energy are left out.

    Returns:
        CV, at least 0.
    """
    energy = leading.double().square().sum(2)  # (r, T)
    of_direction = energy.sum(1)
    has_energy = of_direction > 1e-12 * of_direction.max()
    of_token = (energy[has_energy] / of_direction[has_energy, None]).sum(0)
    return float(of_token.std(correction=0) / of_token.mean())


def block_norm(rows: Tensor, weight: Tensor) -> Tensor:
    r"""Norm of each token's Jacobian block, :math:`\lVert J_t \rVert_F`.

    The square is unbiased: :math:`\sum_d w_d \lVert b_d^{(t)} \rVert^2` counts the rows of
    the searched subspace once, and n/k times the k random rows, which stand for the n
    directions outside it.

    Args:
        rows: Rows of one image, ``(D, T, C)``.
        weight: What each row stands for, ``(D,)``.

    Returns:
        ``(T,)``, nonnegative, float64.
    """
    of_row = rows.double().square().sum(2)  # (D, T)
    return (weight.double()[:, None] * of_row).sum(0).sqrt()
