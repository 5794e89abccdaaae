"""Error against multiply-adds of records that errors.py wrote, as one SVG picture.

python benchmarks/frontier.py out/cls.json out/saliency.json --out docs/frontier.svg
"""

import argparse
import json
import math
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP = 380, 300, 60, 36
OURS = ("foveate-oracle", "foveate")
COLOURS = {
    "foveate-oracle": "#b3261e",
    "foveate": "#e8710a",
    "agglomerate": "#1a73e8",
    "tome": "#188038",
    "tome-plain": "#6ba583",
    "pitome": "#9334e6",
    "evit": "#5f6368",
    "diffrate": "#a0752b",
    "random": "#bdc1c6",
}


def curves(file: Path) -> tuple[str, dict[str, list[tuple[float, float]]]]:
    """Title of a record, and the points of each method by ratio."""
    record = json.loads(file.read_text())
    found: dict[str, list[tuple[float, float]]] = {}
    for row in record["rows"]:
        point = (row["mac_ratio"], row["output_error"]["mean"])
        found.setdefault(row["method"], []).append(point)
    depths = record["rows"][0]["depths"]
    place = f"depths {', '.join(map(str, depths))}"
    if len(depths) > 3:
        place = f"every block from {depths[0]} to {depths[-1]}"
    title = f"{record['task']}, {place}, {record['num_images']} photographs"
    return title, {name: sorted(points) for name, points in found.items()}


def panel(file: Path, x0: int) -> list[str]:
    """One picture: logarithmic errors, linear ratios."""
    title, found = curves(file)
    points = [point for line in found.values() for point in line]
    low, high = (f(math.log10(e) for _, e in points) for f in (min, max))
    low, high = math.floor(low), math.ceil(high)
    first, last = (f(r for r, _ in points) for f in (min, max))

    def at(ratio: float, error: float) -> tuple[float, float]:
        across = (ratio - first) / (last - first)
        up = (math.log10(error) - low) / (high - low)
        return x0 + LEFT + across * WIDTH, TOP + (1 - up) * HEIGHT

    parts = [f'<text x="{x0 + LEFT}" y="20" font-weight="bold">{title}</text>']
    for power in range(low, high + 1):
        _, y = at(first, 10.0**power)
        parts.append(
            f'<path d="M{x0 + LEFT} {y:.1f}h{WIDTH}" stroke="#dadce0"/>'
            f'<text x="{x0 + LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}'
            "</text>"
        )
    for ratio in sorted({round(r, 1 if r > 1.2 else 2) for r, _ in points}):
        x, _ = at(ratio, 10.0**low)
        parts.append(
            f'<text x="{x:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{ratio:g}'
            "</text>"
        )
    for name, line in found.items():
        colour, bold = COLOURS.get(name, "#000"), 3 if name in OURS else 1.5
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*p) for p in line))
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" '
            f'stroke-width="{bold}"/>'
        )
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
            for x, y in (at(*p) for p in line)
        ]
    return parts


def legend(names: list[str], x: int) -> list[str]:
    """Names in their colours."""
    return [
        f'<text x="{x}" y="{TOP + 16 + 20 * i}" fill="{COLOURS.get(name, "#000")}" '
        f'font-weight="bold">{name}</text>'
        for i, name in enumerate(names)
    ]


def main() -> None:
    """Draw all records side by side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    step = WIDTH + LEFT + 30
    parts, names = [], []
    for index, file in enumerate(options.records):
        parts += panel(file, index * step)
        names += [name for name in curves(file)[1] if name not in names]
    across = step * len(options.records)
    names.sort(key=list(COLOURS).index)
    parts += legend(names, across + 10)
    foot = "multiply-adds of the full model over those of the reduced one"
    parts.append(f'<text x="{LEFT}" y="{TOP + HEIGHT + 40}">{foot}; relative error</text>')
    body = "\n".join(parts)
    options.out.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{across + 140}" '
        f'height="{TOP + HEIGHT + 54}" font-family="sans-serif" font-size="13">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    main()
