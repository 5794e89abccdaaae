"""The leading modes of a Jacobian, as targets."""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from foveate.diagnosis.jacobian import TokenJacobian, open_tap
from foveate.diagnosis.sensitivity import importance, leading_rows
from foveate.diagnosis.subspace import Basis, search
from foveate.models import Model
from foveate.training.probes import Cut

__all__ = ["leading_modes"]

SEARCH = 3  # directions of output space searched, for each mode that is wanted


def leading_modes(
    model: Model,
    task: str,
    images: Tensor,
    cuts: Sequence[Cut],
    rank: int,
    seed: int,
) -> dict[str, Tensor]:
    r"""Leading right singular vectors of the Jacobian with respect to the patches.

    A block Krylov search in output space, with three directions for every mode or all there
    are. Cost an image and cut: ``3 rank`` VJPs and nearly as many JVPs, at most M of each.

    Args:
        model: The model.
        task: Name of a task.
        images: ``(B, 3, H, W)``.
        cuts: Taps, before blocks.
        rank: Modes r, at most the outputs M.
        seed: Source of the start.

    Returns:
        For each cut, under ``NAME.DEPTH.PLACE``: ``tokens`` ``(B, P + N, C)`` float16;
        ``vectors``, orthonormal rows over the patches, ``(B, r, N, C)``, float16 times the
        root of N C, in which they are of unit size; ``energies`` :math:`\sigma_j^2`,
        descending, ``(B, r)``; and ``importance``
        :math:`\mathrm{imp}^*`, ``(B, N)``.

    Raises:
        ValueError: If there are fewer outputs than modes, or the model is in half
            precision.
    """
    if images.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            "dtype must be float32 or float64 for modes, as half precision loses most of a "
            f"Jacobian; got {str(images.dtype).removeprefix('torch.')}."
        )
    result: dict[str, Tensor] = {}
    for cut in cuts:
        tap = open_tap(model.backbone, model.task(task), images, cut.depth)
        jacobian = TokenJacobian(tap.tail, tap.tokens.x)
        if jacobian.num_outputs < rank:
            raise ValueError(
                f"rank must be at most the {jacobian.num_outputs} outputs of '{task}'; "
                f"got {rank}."
            )
        first = tap.tokens.layout.num_prefix
        size = min(SEARCH * rank, jacobian.num_outputs)
        draws = [Generator().manual_seed(seed * 64 + i) for i in range(len(images))]
        basis = Basis(jacobian, [first], size, draws)
        search(basis, rank, size)
        energy, coordinates = basis.ritz(0)
        leading = torch.stack([
            leading_rows(rows[:, first:], vectors, rank)
            for rows, vectors in zip(basis.rows, coordinates, strict=True)
        ])  # (B, r, N, C), each row sigma_j v_j
        norm = leading.flatten(2).norm(dim=2)[..., None, None]
        unit = leading[0, 0].numel() ** 0.5
        result |= {
            f"tokens.{cut}": tap.tokens.x.half(),
            f"vectors.{cut}": (unit * leading / norm).half(),
            f"energies.{cut}": energy[:, :rank].float(),
            f"importance.{cut}": torch.stack([importance(x) for x in leading]).float(),
        }
    return result
