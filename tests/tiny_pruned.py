"""Tiny models under a controller whose readouts say something different of every image."""

from functools import cache

import torch
from torch import nn

from foveate.adaptive.controller import Controller, Pruning
from foveate.adaptive.task_vit import TaskViT
from foveate.models import Model, open_model
from foveate.tasks.saliency import Saliency, SaliencyDecoder
from foveate.tasks.segmentation import Segmentation
from tests import tiny


class SumOfMaps(nn.Module):
    """A decoder of several depths."""

    def forward(self, maps):
        return sum((i + 1) * m for i, m in enumerate(maps))


@cache
def model_of(network, dtype=torch.float32):
    """The network's own tasks, a dense one, and one that reads several depths."""
    opened = open_model(tiny.NETWORKS[network]())
    tasks = {
        **opened.tasks,
        "saliency": Saliency(tiny.randomise(SaliencyDecoder((tiny.WIDTH, 16, 8, 8)))),
        "taps": Segmentation(SumOfMaps(), (1, 2, 3)),
    }
    model = Model(network, opened.backbone, tasks, opened.transform).eval()
    return model.to(dtype).requires_grad_(False)


def vit_of(network, task, counts=(8, 9), dtype=torch.float32, grid=tiny.GRID, **changes):
    """A pruned model whose controller says something different of every image."""
    model = model_of(network, dtype)
    options = {"depths": (0, 1), "remove": sum(counts), **changes}
    pruning = Pruning(**options)
    draw = torch.Generator().manual_seed(2)
    register = None
    if pruning.selection == "register":
        register = torch.randn(tiny.WIDTH, generator=draw)
    controller = Controller(tiny.WIDTH, pruning, register)
    with torch.no_grad():
        for readout in (controller.allocate, controller.recover):
            if readout is not None:
                shape = readout.weight.shape
                readout.weight.copy_(0.15 * torch.randn(shape, generator=draw))
                readout.bias.add_(0.3)
    controller.freeze(torch.tensor([counts]))
    return TaskViT(model, task, controller.to(dtype), grid).eval()


def apart(a, b):
    return float((a - b).norm() / b.norm())
