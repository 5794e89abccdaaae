"""Draw what registers keep on the bundled photographs, a row for each, a column a task.

    python benchmarks/selector.py --networks a=out/tap/A,b=out/tap/B --out docs/selector.jpg

A patch is the darker the earlier it leaves; what stays to the end keeps its colours.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

from foveate.adaptive.checkpoint import open_pruned
from foveate.data.bundled import bundled_photographs

SIDE, GAP, HEAD = 224, 6, 22


def shaded(picture: Image.Image, network) -> Image.Image:
    """The photograph, each patch as dark as it left early."""
    transform = network.model.transform
    seen = network.look(transform(picture)[None])
    left = seen.kept[0].float().cumprod(0).mean(0)  # share of the depths it survives
    rows, columns = network.grid
    light = Image.fromarray((255 * (0.25 + 0.75 * left)).byte().view(rows, columns).numpy())
    short = min(picture.size)
    x, y = ((n - short) // 2 for n in picture.size)
    square = picture.crop((x, y, x + short, y + short)).resize((SIDE, SIDE))
    mask = np.asarray(light.resize((SIDE, SIDE), Image.Resampling.NEAREST))[..., None]
    return Image.fromarray((np.asarray(square) * (mask / 255.0)).astype(np.uint8))


@torch.no_grad()
def main() -> None:
    """Draw and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    pairs = [part.split("=") for part in options.networks.split(",")]
    networks = {name: open_pruned(Path(folder)) for name, folder in pairs}
    photographs = bundled_photographs()
    size = (
        len(networks) * (SIDE + GAP) - GAP,
        HEAD + len(photographs) * (SIDE + GAP) - GAP,
    )
    page = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(page)
    for column, (name, network) in enumerate(networks.items()):
        x = column * (SIDE + GAP)
        draw.text((x + 4, 5), f"{name}: {network.controller.counts.tolist()}", fill="black")
        for row, picture in enumerate(photographs.values()):
            shown = shaded(picture.convert("RGB"), network)
            page.paste(shown, (x, HEAD + row * (SIDE + GAP)))
    page.save(options.out, quality=85)


if __name__ == "__main__":
    main()
