r"""What it costs to merge two clusters of patches.

Under proportional attention a merged token acts as its s copies, so its block of the
Jacobian is the sum of its members' blocks. With :math:`g_i` the block of one copy (a sketch
of R rows) and :math:`f_i` the feature, merging a and b into their size-weighted mean
changes the sketched output, to first order and with all cancellation, by

.. math::
    e_{ab} = \frac{s_a s_b}{s_a + s_b} \, (g_a - g_b)(f_a - f_b) \in \mathbb{R}^R .

Features and sketches merge by the same weighted mean, so the cost of every later merge is
known without going back to the network.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from foveate.reduction.regroup import Grouping, pick, sum_groups


@dataclass(frozen=True)
class Clusters:
    """Patches on their way to fewer, K clusters of B images.

    Attributes:
        feature: Size-weighted mean of the members, ``(B, K, C)``, float32.
        size: Original patches in each cluster, ``(B, K)``.
        sketch: R rows of the Jacobian for one copy of each cluster, ``(B, K, R, D)``; None
            for a cost that does not ask for it.
        basis: Orthonormal columns in which the rows are coordinates, ``(C, D)``; None if
            they are in the features' own, D = C.
    """

    feature: Tensor
    size: Tensor
    sketch: Tensor | None = None
    basis: Tensor | None = None

    def seen(self) -> Tensor:
        """Features in the coordinates of the sketch, ``(B, K, D)``."""
        return self.feature if self.basis is None else self.feature @ self.basis

    def select(self, index: Tensor) -> "Clusters":
        """Some clusters of every image, by index ``(A,)``."""
        sketch = None if self.sketch is None else self.sketch[:, index]
        return Clusters(self.feature[:, index], self.size[:, index], sketch, self.basis)

    def join(self, group: Tensor, keep: int) -> "Clusters":
        """Merge clusters into ``keep`` groups, ``(B, K)``."""
        weight = self.size[..., None]
        total = sum_groups(weight, group, keep)  # (B, keep, 1)
        feature = sum_groups(self.feature * weight, group, keep) / total
        if self.sketch is None:
            return Clusters(feature, total[..., 0])
        flat = sum_groups(self.sketch.flatten(2) * weight, group, keep) / total
        sketch = flat.unflatten(2, self.sketch.shape[2:])
        return Clusters(feature, total[..., 0], sketch, self.basis)


PairCost = Callable[[Clusters, Clusters], Tensor]


@dataclass(frozen=True)
class PullbackCost:
    r"""Cost of merging two clusters: first-order effect plus damping.

    .. math::
        \frac1R \lVert e_{ab} \rVert^2 + \mathrm{damping} \; v \;
        \frac{s_a s_b}{s_a + s_b} \, \frac{\lVert f_a - f_b \rVert^4}{\phi^2}

    With R rows of pulled probes the first term is an unbiased estimate of the squared
    change of the output, of relative standard error at most :math:`\sqrt{2 / R}`. The
    second stands for the curvature that the first order leaves out. It grows with the
    fourth power of the move, so cheap merges are ranked by the first term alone; v is the
    mean squared norm of all rows over the channels, :math:`\phi^2` the mean squared
    distance of the patches from their mean. Cost: 2 A T R D.

    Attributes:
        stiffness: :math:`v / \phi^2` of every image, ``(B, 1, 1)``.
        damping: Weight of the second term.
    """

    stiffness: Tensor
    damping: float

    @staticmethod
    def of(clusters: Clusters, damping: float) -> "PullbackCost":
        """Cost with the scales of patches that are still on their own."""
        assert clusters.sketch is not None
        centred = clusters.feature - clusters.feature.mean(1, keepdim=True)
        spread = centred.square().sum(-1).mean(1)
        variance = clusters.sketch.square().sum(-1).mean((1, 2)) / centred.shape[-1]
        # Patches that are all alike cost nothing to merge, whatever the stiffness.
        return PullbackCost((variance / spread.clamp(min=1e-30))[:, None, None], damping)

    def __call__(self, a: Clusters, b: Clusters) -> Tensor:
        """Costs of all pairs of A and T clusters, ``(B, A, T)``, squared output units."""
        assert a.sketch is not None
        assert b.sketch is not None
        s_a, s_b = a.size[:, :, None], b.size[:, None]
        share = s_a * s_b / (s_a + s_b)
        first = share.square() * squared_effects(a.seen(), a.sketch, b.seen(), b.sketch)
        dot = a.feature @ b.feature.transpose(1, 2)
        norm_a, norm_b = a.feature.square().sum(-1), b.feature.square().sum(-1)
        apart = (norm_a[:, :, None] + norm_b[:, None] - 2 * dot).clamp(min=0)
        return first + self.damping * self.stiffness * share * apart.square()


def squared_effects(f_a: Tensor, g_a: Tensor, f_b: Tensor, g_b: Tensor) -> Tensor:
    r"""Mean over rows of :math:`((g_a - g_b)(f_a - f_b))^2` for all pairs.

    Args:
        f_a: Features, ``(B, A, C)``.
        g_a: Rows of the Jacobian, ``(B, A, R, C)``.
        f_b: Features, ``(B, T, C)``.
        g_b: Rows of the Jacobian, ``(B, T, R, C)``.

    Returns:
        ``(B, A, T)``; a few rows are held at once.
    """
    total = f_a.new_zeros(len(f_a), f_a.shape[1], f_b.shape[1])
    own_a = (g_a * f_a[:, :, None]).sum(-1).transpose(1, 2)  # (B, R, A)
    own_b = (g_b * f_b[:, :, None]).sum(-1).transpose(1, 2)
    for row in range(g_a.shape[2]):
        crossed = g_a[:, :, row] @ f_b.transpose(1, 2)
        crossed = torch.baddbmm(crossed, f_a, g_b[:, :, row].transpose(1, 2))
        total += (own_a[:, row, :, None] + own_b[:, row, None] - crossed).square()
    return total / g_a.shape[2]


def cosine_cost(a: Clusters, b: Clusters) -> Tensor:
    """One minus the cosine of features: the control that knows no task, ``(B, A, T)``."""
    unit_a, unit_b = normalize(a.feature, dim=-1), normalize(b.feature, dim=-1)
    return 1 - unit_a @ unit_b.transpose(1, 2)


def cancel(clusters: Clusters, grouping: Grouping, ridge: float) -> Tensor:
    r"""Move every group's feature to where the first-order effect of its merges vanishes.

    With :math:`G = \sum_i s_i g_i` and :math:`e = \sum_i s_i g_i (m - f_i)` over the
    members of a group, the shift of least norm is
    :math:`-G^\top (G G^\top + \rho I)^{-1} e`; :math:`\rho` is ``ridge`` times the mean
    diagonal of :math:`G G^\top`, because rows are few and the Jacobian is local. A patch
    alone stays where it is. Cost: K R D + K' R^2 D.

    Args:
        clusters: One cluster a patch, with sketches.
        grouping: Which patches are merged into their mean.
        ridge: Weight of the regulariser, positive.

    Returns:
        What to add to the mean of each group, ``(B, K', C)``.
    """
    assert clusters.sketch is not None
    keep = grouping.lead.shape[1]
    joined = clusters.join(grouping.group, keep)
    assert joined.sketch is not None
    moved = pick(joined.seen(), grouping.group) - clusters.seen()  # (B, K, D)
    effect = (clusters.sketch * moved[:, :, None]).sum(-1) * clusters.size[..., None]
    effect = sum_groups(effect, grouping.group, keep)  # (B, K', R)
    summed = joined.sketch * joined.size[..., None, None]
    gram = summed @ summed.transpose(-1, -2)  # (B, K', R, R)
    level = gram.diagonal(dim1=-2, dim2=-1).mean(-1)  # (B, K')
    # A group that the output ignores has no rows; the floor only keeps its system solvable.
    level = torch.maximum(level, 1e-6 * level.amax(1, keepdim=True)).clamp(min=1e-30)
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    gram = gram / level[..., None, None] + ridge * identity
    solved = torch.linalg.solve(gram, effect / level[..., None])
    shift = -(summed * solved[..., None]).sum(2)  # (B, K', D)
    return shift if joined.basis is None else shift @ joined.basis.T
