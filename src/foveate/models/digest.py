"""Which weights: a digest that changes when one of them does."""

import hashlib

import torch
from torch import nn


def model_hash(module: nn.Module) -> str:
    """Digest of all weights and buffers and their names."""
    digest = hashlib.sha256()
    for name, weight in sorted(module.state_dict().items()):
        digest.update(name.encode())
        flat = weight.detach().cpu().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())  # numpy has no bfloat16
    return digest.hexdigest()
