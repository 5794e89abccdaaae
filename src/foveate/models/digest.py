"""Which weights: a digest that changes when one of them does."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn


def model_hash(module: nn.Module) -> str:
    """Digest of all weights and buffers and their names."""
    return weights_hash(module.state_dict())


def weights_hash(weights: Mapping[str, Tensor]) -> str:
    """Digest of weights and their names."""
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        digest.update(name.encode())
        flat = weight.detach().cpu().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())  # numpy has no bfloat16
    return digest.hexdigest()
