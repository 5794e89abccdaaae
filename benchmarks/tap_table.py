"""Tables and a picture of what tap.py wrote.

    python benchmarks/tap_table.py out/tap/tap.json --picture docs/allocation.svg

A table for each form and task: what is removed where, what comes back, multiply-adds, the
clock where it was taken, scores, and paired differences from the unpruned row with 95 %
intervals. The picture has what the row of --row removes at each depth, and its alpha.
"""

import argparse
import json
from pathlib import Path

SCORES = {
    "classification": ("top1",),
    "segmentation": ("miou",),
    "detection": ("box_ap", "mask_ap"),
}
HEAD = ("row", "removed", "alpha", "MACs", "speed-up", "overhead", "peak memory")
HIGH, WIDE, LEFT = 120, 240, 40


def numbers(record: dict) -> list[str]:
    """Cells of a row that do not depend on the task."""
    counts, alphas = record.get("counts"), record.get("alpha")
    clock, ratio = record.get("clock"), record.get("mac_ratio")
    times = ["", "", ""]
    if clock:
        fast = "{median:.2f} ({low:.2f} to {high:.2f})".format_map(clock["speedup"])
        memory = clock["peak_memory_ratio"]
        times = [fast, f"{100 * clock['overhead_share']:.1f} %"]
        times.append("" if memory is None else f"{memory:.2f}")
    return [
        "/".join(map(str, counts)) if counts else "",
        "/".join(f"{a:.2f}" for a in alphas) if alphas else "",
        "" if ratio is None else f"{ratio:.2f}",
        *times,
    ]


def scores(record: dict, name: str) -> list[str]:
    """A score and its difference from the unpruned row, in points."""
    sides = record["scores"]
    if "difference" not in sides:
        return [f"{100 * sides['reduced'][name]['value']:.1f}", ""]
    apart = {k: 100 * v for k, v in sides["difference"][name].items() if v is not None}
    return [
        f"{100 * sides['reduced'][name]['value']:.1f}",
        f"{apart['value']:+.2f} ({apart['low']:+.2f} to {apart['high']:+.2f})",
    ]


def table(rows: dict[str, dict], task: str) -> list[str]:
    """Lines of Markdown."""
    names = SCORES[task]
    head = [*HEAD, *(part for name in names for part in (name, "difference"))]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row, record in rows.items():
        cells = [row, *numbers(record)]
        for name in names:
            cells += scores(record, name)
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def picture(found: dict[str, dict]) -> str:
    """Bars for what leaves at each depth, a dot for alpha, a panel a task."""
    parts = []
    for panel, (title, record) in enumerate(found.items()):
        x0, most = LEFT + panel * (WIDE + LEFT), max(record["counts"])
        parts.append(f'<text x="{x0}" y="18" font-weight="bold">{title}</text>')
        step = WIDE / len(record["counts"])
        alphas = record.get("alpha") or [None] * len(record["counts"])
        for i, (depth, count) in enumerate(
            zip(record["depths"], record["counts"], strict=True)
        ):
            x, high = x0 + i * step, HIGH * count / most
            parts.append(
                f'<rect x="{x:.1f}" y="{30 + HIGH - high:.1f}" width="{step * 0.6:.1f}" '
                f'height="{high:.1f}" fill="#e8710a"/>'
                f'<text x="{x:.1f}" y="{46 + HIGH}">block {depth}: {count}</text>'
            )
            if alphas[i] is not None:
                right, y = x + step * 0.75, 30 + HIGH * (1 - alphas[i])
                parts.append(
                    f'<circle cx="{right:.1f}" cy="{y:.1f}" r="4" fill="#1a73e8"/>'
                    f'<text x="{x:.1f}" y="{62 + HIGH}" fill="#1a73e8">alpha '
                    f"{alphas[i]:.2f}</text>"
                )
    wide = LEFT + len(found) * (WIDE + LEFT)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{HIGH + 74}" '
        'font-family="sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def main() -> None:
    """Print the tables, and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path, nargs="+")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--row", default="redundancy")
    options = parser.parse_args()
    groups: dict[tuple[str, str, int, str], dict[str, dict]] = {}
    drawn: dict[str, dict] = {}
    for file in options.record:
        for key, record in json.loads(file.read_text()).items():
            form, task, row, seed = key.split("/")
            groups.setdefault((form, task, record["size"], seed), {})[row] = record
            if row == options.row:
                drawn[f"{task}, {form}, {record['size']} pixels, seed {seed}"] = record
    for (form, task, size, seed), rows in groups.items():
        some = next(iter(rows.values()))
        print(
            f"\n{form}, {task}, {size} x {size}, seed {seed}, {some['num_val']} scenes, "
            f"{some['steps']} steps:\n"
        )
        print("\n".join(table(rows, task)))
    if options.picture and drawn:
        options.picture.write_text(picture(drawn))


if __name__ == "__main__":
    main()
