"""What a task register costs at ViT-B width: share of the encoder's time, and memory.

    python benchmarks/controller.py --batch-size 8 --rounds 12 --threads 2

Weights are random: speed does not depend on them. ``selection`` is a classification task,
for which nothing is recovered; ``with recovery`` a dense one, whose removed patches are
given stand-ins, offsets and their places back.
"""

import argparse
import json
from pathlib import Path

import timm
import torch

import foveate as fv
from foveate.adaptive.controller import Pruning
from foveate.adaptive.task_vit import open_task_vit
from foveate.evaluation.benchmark import noise
from foveate.evaluation.pruned import time_pruned
from foveate.models.checkpoint import add_heads
from foveate.tasks.heads import build_head


def main() -> None:
    """Time both, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", default="vit_base_patch14_dinov2")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--depths", default="3,6,9")
    parser.add_argument("--out", type=Path, default=Path("out/controller.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    network = timm.create_model(options.network, img_size=224, dynamic_img_size=True)
    model = fv.open_model(network.eval().requires_grad_(False), 224)
    width = model.backbone.num_channels
    heads = {
        "selection": build_head("classification", width, 1000),
        "with recovery": build_head("segmentation", width, 150),
    }
    model = add_heads(model, heads).eval().requires_grad_(False)
    depths = tuple(int(d) for d in options.depths.split(","))
    images, found = noise(model, options.batch_size), {}
    for task in heads:
        for action in ("prune", "merge"):
            vit = open_task_vit(model, task, Pruning(depths, 128, action=action)).eval()
            record = time_pruned(vit, images, options.rounds).record()
            names = ("speedup", "mac_ratio", "overhead_share", "peak_memory_ratio")
            found[f"{task}, {action}"] = {name: record[name] for name in names}
            print(task, action, json.dumps(found[f"{task}, {action}"]), flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
