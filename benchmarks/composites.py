"""Are labelled scenes what they say, the same in every process, and fast enough?

python benchmarks/composites.py --cutouts CUTOUTS --photos PHOTOS --num 1000
"""

import argparse
import hashlib
import multiprocessing
import time
from pathlib import Path

import torch

from foveate.data.composites import open_composites


def digests(cutouts: Path, photos: Path, num: int) -> tuple[list[str], float, int]:
    """Hash of every scene's pixels and labels, scenes a second, scenes that contradict."""
    scenes = open_composites(cutouts, photos, num)
    started = time.perf_counter()
    drawn = [scenes[index] for index in range(num)]
    rate = num / (time.perf_counter() - started)
    found = []
    for scene in drawn:
        digest = hashlib.sha256(scene.picture.tobytes())
        for labels in (scene.instances, scene.classes, scene.visible, scene.boxes):
            digest.update(labels.numpy().tobytes())
        found.append(digest.hexdigest())
    return found, rate, sum(not is_sound(scene) for scene in drawn)


def is_sound(scene) -> bool:
    """Boxes are tight, masks disjoint, classes and label those of the pixels."""
    owner = torch.zeros_like(scene.semantic)
    for mask, box, label in zip(scene.masks, scene.boxes, scene.classes, strict=True):
        rows, columns = mask.nonzero(as_tuple=True)
        tight = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        if owner[mask].any() or box.tolist() != [float(v) for v in tight]:
            return False
        owner[mask] = label + 1
    largest = scene.classes[scene.areas.argmax()]
    return torch.equal(owner, scene.semantic) and scene.label == int(largest)


def main() -> None:
    """Draw the scenes in two processes, and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cutouts", type=Path, required=True)
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--num", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    what = (options.cutouts, options.photos, options.num)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        other, _, _ = pool.apply(digests, what)
    mine, rate, wrong = digests(*what)
    differ = sum(a != b for a, b in zip(mine, other, strict=True))
    print(f"{options.num} scenes: {differ} differ between processes, {wrong} contradict "
          f"themselves, {rate:.0f} a second on one core")  # fmt: skip


if __name__ == "__main__":
    main()
