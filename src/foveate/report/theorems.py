"""The section of the report about ``theorems.json``: bounds beside what was measured."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from foveate.report.blocks import Block, Chart, Facts, Section, Table, Text

if TYPE_CHECKING:  # plotly is slow to import
    from plotly import graph_objects as go

Record = Mapping[str, Any]

COLOURS = ("#3b82f6", "#f97316", "#10b981", "#a855f7")
ROUNDING = 1e-6  # of a share or of a bound, in float32


def section(record: Record, directory: Path) -> Section:
    """Show whether the theorems behind a diagnosis hold on the user's images.

    Args:
        record: What ``benchmarks/theorems.py`` writes: for each image the share of the
            energy that metrics of one rank catch, bounds and measured changes of replaced
            tokens, rank correlations of merging costs, and the length of a path.
        directory: Folder of the record.

    Returns:
        A verdict, the share that each metric catches, measured changes over their bounds,
        what scores and directions say about merging, and the lengths of the paths.
    """
    rank = record["rank"]
    blocks: list[Block] = [
        Text(verdict(record), heading="Bounds and measurements", is_callout=True),
        Facts([
            ("Images", f"{record['num_images']}"),
            ("Rank", f"{rank}"),
            ("Tokens replaced", f"{record['num_tokens']} an image"),
            ("Norm of a block", record["norm"]),
        ]),
        Table(
            (f"Metric of rank {rank}", "Caught", "Of the bound, at most"),
            captured_rows(record),
            CAUGHT,
        ),
        Chart("Replacing one token", replacements(record), REPLACED),
        Table(("Costs of merging by", "Rank correlation"), merging_rows(record), MERGING),
        Table(LENGTHS, length_rows(record), PATHS),
        Chart("Speed along the paths", speeds(record), SPEEDS),
    ]
    where = (
        f"{record['model']} · {record['task']} · tokens entering block {record['depth']}"
    )
    return Section("Whether the theory holds here", blocks, where)


CAUGHT = (
    "Theorem 1. Share of the sensitivity in the range of each metric, mean over images; "
    "none can exceed κ_cap."
)
REPLACED = (
    "Theorem 4. Change of the output when one token is moved towards another by the given "
    "share, over the norm of its Jacobian block times the move. On or below the line: "
    "within the bound, which holds to first order."
)
MERGING = (
    "Theorem 2. Spearman correlation with the true first-order cost of merging random "
    "pairs of patches into their mean, mean over images. Scores of tokens see no "
    "cancellation between the two."
)
LENGTHS = ("Path", "Length", "Chord", "First order")
PATHS = (
    "Length: integral of ‖J dF‖ along the straight path between two feature maps ± its "
    "discretisation error. Chord: distance of the two outputs, which no path undercuts. "
    "First order: ‖J ΔF‖ at the start."
)
SPEEDS = "How fast the output moves at each point of the path; flat under a linear decoder."


def verdict(record: Record) -> list[str]:
    """A line on metrics, and one on replacements.

    Args:
        record: The record.

    Returns:
        Lines; a violated bound is named as such.
    """
    shares = [value for _, value in _shares_of_bound(record)]
    within = sum(share <= 1 + ROUNDING for share in shares)
    metrics = (
        f"{within} of {len(shares)} metrics of rank {record['rank']} caught no more than "
        "κ_cap."
    )
    lines = [metrics]
    for scale, pairs in by_scale(record).items():
        kept = sum(y <= x * (1 + ROUNDING) for x, y in pairs)
        lines.append(
            f"Moved by {scale:.0%}: {kept} of {len(pairs)} replaced tokens changed the "
            "output by no more than their bound."
        )
    return lines


def by_scale(record: Record) -> dict[float, list[tuple[float, float]]]:
    """Bound and measured change of every replaced token, by how far it was moved."""
    found: dict[float, list[tuple[float, float]]] = {}
    for image in record["images"]:
        for one in image["replacement"]:
            pairs = zip(one["bound"], one["measured"], strict=True)
            found.setdefault(one["scale"], []).extend(pairs)
    return found


def _shares_of_bound(record: Record) -> Iterator[tuple[str, float]]:
    for image in record["images"]:
        for name, share in image["captured"].items():
            yield name, share / image["kappa_cap"]


def captured_rows(record: Record) -> list[tuple[str, str, str]]:
    """The bound, and each metric: mean share and its largest part of the bound."""
    images = record["images"]
    bound = fmean(image["kappa_cap"] for image in images)
    rows = [("κ_cap, the bound", f"{bound:.2%}", "100.00%")]
    for name in images[0]["captured"]:
        mean = fmean(image["captured"][name] for image in images)
        most = max(share for of, share in _shares_of_bound(record) if of == name)
        rows.append((name, f"{mean:.2%}", f"{most:.2%}"))
    return rows


def merging_rows(record: Record) -> list[tuple[str, str]]:
    """Mean rank correlation of each way to predict the cost of merging."""
    images = record["images"]
    return [
        (name, f"{fmean(image['merging'][name] for image in images):.3f}")
        for name in images[0]["merging"]
    ]


def length_rows(record: Record) -> list[tuple[str, ...]]:
    """Length, chord and first-order change of the path of each image."""
    return [
        (
            f"{Path(image['file']).name} to {Path(image['path']['to']).name}",
            f"{image['path']['length']:.4g} ± {image['path']['error']:.1g}",
            f"{image['path']['chord']:.4g}",
            f"{image['path']['first_order']:.4g}",
        )
        for image in record["images"]
    ]


def replacements(record: Record) -> "go.Figure":
    """Measured change over its bound, both logarithmic, with the line where they agree."""
    from plotly import graph_objects as go

    figure, ends = go.Figure(), []
    for index, (scale, pairs) in enumerate(sorted(by_scale(record).items())):
        drawn = [(x, y) for x, y in pairs if x > 0 and y > 0]
        ends += [value for pair in drawn for value in pair]
        figure.add_scatter(
            x=[x for x, _ in drawn],
            y=[y for _, y in drawn],
            mode="markers",
            marker={"color": COLOURS[index % len(COLOURS)], "size": 5, "opacity": 0.6},
            name=f"moved by {scale:.0%}",
        )
    if ends:
        _add_line(figure, [min(ends), max(ends)])
    figure.update_xaxes(title="bound", type="log", tickformat="~g")
    figure.update_yaxes(title="measured change", type="log", tickformat="~g")
    return figure


def _add_line(figure: "go.Figure", ends: Sequence[float]) -> None:
    figure.add_scatter(
        x=list(ends),
        y=list(ends),
        mode="lines",
        line={"dash": "dash", "width": 1, "color": "gray"},
        name="bound reached",
    )


def speeds(record: Record) -> "go.Figure":
    """Speed of the output along the path of each image."""
    from plotly import graph_objects as go

    figure = go.Figure()
    for index, image in enumerate(record["images"]):
        values = image["path"]["speeds"]
        figure.add_scatter(
            x=[i / (len(values) - 1) for i in range(len(values))],
            y=list(values),
            mode="lines+markers",
            line={"color": COLOURS[index % len(COLOURS)]},
            name=escape(Path(image["file"]).name),
        )
    figure.update_xaxes(title="part of the path")
    figure.update_yaxes(title="speed of the output", rangemode="tozero")
    return figure
