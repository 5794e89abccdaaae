"""Jacobians as estimators see them, and a metric on the task output."""

from typing import Protocol

from torch import Tensor

from foveate.diagnosis.jacobian import Products

__all__ = ["Jacobian", "OutputMetric"]


class Jacobian(Protocol):
    """A Jacobian through its products; :class:`TokenJacobian` is one.

    Attributes:
        tokens: Tokens at the tap, ``(B, T, C)``.
        output: Task output, ``(B, M)``.
        products: How many products with the Jacobian of each image have been taken.
    """

    tokens: Tensor
    output: Tensor
    products: Products

    @property
    def num_outputs(self) -> int:
        """Outputs of the task, M."""

    def jvp(self, directions: Tensor) -> Tensor:
        """Push token directions forward, ``(R, B, T, C) -> (R, B, M)``."""

    def vjp(self, cotangents: Tensor) -> Tensor:
        """Pull output directions back, ``(R, B, M) -> (R, B, T, C)``."""


class OutputMetric:
    r"""A Jacobian J seen through a metric :math:`H = L^\top L` on the output: :math:`L J`.

    The length of an output change :math:`\delta` is then :math:`\lVert L \delta \rVert`,
    and the pullback metric is :math:`J^\top H J`. It is a :class:`Jacobian` itself, with M'
    outputs L y; its products are those of J.

    Args:
        jacobian: Jacobian at the tap, for B images with M outputs.
        factor: L, as a matrix ``(M', M)``, one for each image ``(B, M', M)``, or a diagonal
            ``(M,)``. A factor of H by ``torch.linalg.cholesky`` is its transpose.

    Raises:
        ValueError: If the factor does not fit the outputs or the images.

    Example:
        >>> import torch
        >>> from foveate.diagnosis.jacobian import TokenJacobian
        >>> jacobian = TokenJacobian(lambda x: x.flatten(1), torch.ones(1, 2, 1))
        >>> in_metres = OutputMetric(jacobian, torch.tensor([1.0, 3.0]))
        >>> in_metres.jvp(torch.ones(1, 1, 2, 1))
        tensor([[[1., 3.]]])
    """

    def __init__(self, jacobian: Jacobian, factor: Tensor) -> None:
        num_images, num_outputs = jacobian.output.shape
        fits = 1 <= factor.ndim <= 3 and factor.shape[-1] == num_outputs
        if not fits or (factor.ndim == 3 and len(factor) != num_images):
            raise ValueError(
                f"factor must have shape ({num_outputs},), (M', {num_outputs}) or "
                f"({num_images}, M', {num_outputs}); got {tuple(factor.shape)}."
            )
        self.jacobian = jacobian
        self.factor = factor.to(jacobian.output)
        self.tokens = jacobian.tokens
        self.products = jacobian.products
        self.output = self._apply(jacobian.output[None])[0]

    @property
    def num_outputs(self) -> int:
        """Outputs after the factor, M'."""
        return self.output.shape[1]

    def jvp(self, directions: Tensor) -> Tensor:
        """Push token directions forward: ``L J v``, ``(R, B, T, C) -> (R, B, M')``."""
        return self._apply(self.jacobian.jvp(directions))

    def vjp(self, cotangents: Tensor) -> Tensor:
        """Pull output directions back: ``J^T L^T u``, ``(R, B, M') -> (R, B, T, C)``."""
        if self.factor.ndim == 1:
            return self.jacobian.vjp(cotangents * self.factor)
        return self.jacobian.vjp((cotangents[..., None, :] @ self.factor)[..., 0, :])

    def _apply(self, outputs: Tensor) -> Tensor:
        if self.factor.ndim == 1:
            return outputs * self.factor
        return (self.factor @ outputs[..., None])[..., 0]  # (R, B, M')
