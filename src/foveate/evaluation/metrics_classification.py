"""Top-1 and top-5 accuracy."""

from torch import Tensor, cat

from foveate.evaluation.metrics import Means


def accuracy(logits: Tensor, labels: Tensor, ks: tuple[int, ...] = (1, 5)) -> Means:
    """Whether the true class is among the k highest logits, per image.

    Args:
        logits: ``(N, C)``; all that matters is their order within an image.
        labels: True classes, ``(N,)``.
        ks: Which k.

    Returns:
        ``top1``, ``top5``: 1 or 0 for each image.

    Raises:
        ValueError: If shapes do not fit, a logit is not finite, a label is not a class,
            or k is not within 1 to C.
    """
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"logits must be (N, C) and labels (N,); got {tuple(logits.shape)} and "
            f"{tuple(labels.shape)}."
        )
    num_classes = logits.shape[1]
    if not logits.isfinite().all():
        raise ValueError("logits must be finite; one is not.")
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise ValueError(
            f"labels must be 0 to {num_classes - 1}; got {int(labels.min())} to "
            f"{int(labels.max())}."
        )
    if not 1 <= min(ks) <= max(ks) <= num_classes:
        raise ValueError(f"ks must be within 1 to {num_classes} classes; got {ks}.")
    ranked = logits.topk(max(ks), dim=1).indices == labels[:, None]
    return Means({f"top{k}": ranked[:, :k].any(dim=1).double() for k in ks})


def gather(parts: list[Means]) -> Means:
    """Put batches together in their order."""
    names = parts[0].values
    return Means({name: cat([part.values[name] for part in parts]) for name in names})
