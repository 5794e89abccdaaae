"""The section of the report about ``diagnose.json``."""

from collections.abc import Mapping, Sequence
from html import escape
from math import log10
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from plotly import graph_objects as go

from foveate.report.blocks import (
    Block,
    Chart,
    Facts,
    Gallery,
    Layer,
    Photograph,
    Section,
    Table,
    Text,
)
from foveate.report.pictures import find_photograph, heat_map_uri, photograph_uri
from foveate.report.statistics import STATISTICS, in_figures

Record = Mapping[str, Any]

MAX_PHOTOGRAPHS = 24
MAX_CURVES = 40
TOKENS = {"all": ("all tokens", "#3b82f6"), "patches": ("patches", "#f97316")}
MAPS = {"importance": "Importance", "block_norm": "Block norm"}


def section(record: Record, directory: Path) -> Section:
    """Show what a diagnosis found.

    Args:
        record: What ``diagnose`` wrote.
        directory: Folder of the record.

    Returns:
        Regime and advice, statistics, spectrum, and heat-maps over the photographs.
    """
    blocks: list[Block] = [
        Text([record["advice"]], heading=f"Regime: {record['regime']}", is_callout=True),
        _facts(record),
        _statistics(record),
        Chart("Spectrum", spectrum(record), SPECTRUM),
        Chart("Energy caught", cumulative_energy(record), ENERGY),
        gallery(record, directory),
    ]
    if record.get("skipped"):
        blocks.append(_skipped(record["skipped"]))
    where = (
        f"{record['model']} · {record['task']} · tokens entering block {record['depth']}"
    )
    return Section("Which tokens the task depends on", blocks, where)


SPECTRUM = (
    "Singular values of the Jacobian of the task output with respect to the tokens: how "
    "far the output moves when the tokens move by one unit along each direction. Thin: one "
    "image each. Bold: geometric mean."
)
ENERGY = (
    "Share of the squared sensitivity that the leading directions hold; κ_cap is its value "
    "at the chosen rank. No metric of that rank can catch more."
)
HEAT = (
    "What the model sees of each photograph, and the share of each patch. Importance: its "
    "part in the leading directions. Block norm: its part in all directions. Colours run "
    "from zero to the maximum of each map."
)


def _facts(record: Record) -> Facts:
    products = record["products"]
    cost = f"{products['jvp']} JVP + {products['vjp']} VJP an image"
    return Facts([
        ("Images", f"{record['num_images']}"),
        ("Patches", f"{record['num_patches']}"),
        ("Outputs", f"{record['num_outputs']}"),
        ("Rank", f"{record['rank']}"),
        ("Route", record["route"]),
        ("Cost", cost),
    ])


def _statistics(record: Record) -> Table:
    rows = [
        (s.name, in_figures(record["all"][key]), in_figures(record["patches"][key]))
        for key, s in STATISTICS.items()
    ]
    caption = (
        f"Mean over {record['num_images']} images ± standard error. All tokens: with class "
        "and register tokens."
    )
    notes = [s.meaning for s in STATISTICS.values()]
    return Table(("Statistic", "All tokens", "Patches"), rows, caption, notes=notes)


def _skipped(skipped: Sequence[Mapping[str, str]]) -> Table:
    rows = [(s["file"], s["reason"]) for s in skipped]
    return Table(("Skipped file", "Reason"), rows, num_text=2)


def spectrum(record: Record) -> go.Figure:
    """Singular values of each image on a logarithmic axis, and their geometric mean."""
    figure = go.Figure()
    for tokens, (label, colour) in TOKENS.items():
        curves = [i[tokens]["singular_values"] for i in record["images"]]
        _add_curves(figure, record, curves, label, colour)
        _add_mean(figure, _geometric_mean(curves), label, colour)
    figure.update_xaxes(title="direction", rangemode="tozero")
    figure.update_yaxes(title="singular value", tickformat="~g", **_log_axis(record))
    return figure


def _log_axis(record: Record) -> dict[str, Any]:
    """Axis that ends four decades below the top, since what follows is rounding error."""
    values = [v for i in record["images"] for t in TOKENS for v in i[t]["singular_values"]]
    top = log10(max(values))
    bottom = max(log10(min(v for v in values if v > 0)), top - 4)
    margin = 0.05 * (top - bottom) + 0.05
    dtick = "D2" if top - bottom < 2 else 1
    return {"type": "log", "range": [bottom - margin, top + margin], "dtick": dtick}


def cumulative_energy(record: Record) -> go.Figure:
    """Share of the energy in the leading directions, with kappa_cap at the rank."""
    figure, rank = go.Figure(), record["rank"]
    for tokens, (label, colour) in TOKENS.items():
        curves = [i[tokens]["cumulative"] for i in record["images"]]
        kappa = record[tokens]["kappa_cap"]["mean"]
        name = f"{label}: κ_cap({rank}) = {kappa:.1%}"
        _add_curves(figure, record, curves, name, colour)
        _add_mean(figure, [fmean(c) for c in zip(*curves, strict=False)], name, colour)
        mark = {"color": colour, "size": 11, "line": {"color": "white", "width": 2}}
        figure.add_scatter(
            x=[rank],
            y=[kappa],
            mode="markers",
            marker=mark,
            legendgroup=name,
            showlegend=False,
            name=name,
        )
    figure.add_vline(x=rank, line={"dash": "dot", "width": 1, "color": "gray"})
    figure.update_xaxes(title="leading directions", rangemode="tozero")
    figure.update_yaxes(title="share of energy", tickformat=".0%", range=[0, 1.02])
    return figure


def _add_curves(
    figure: go.Figure,
    record: Record,
    curves: Sequence[Sequence[float]],
    label: str,
    colour: str,
) -> None:
    for image, curve in zip(record["images"][:MAX_CURVES], curves, strict=False):
        figure.add_scatter(
            x=list(range(1, len(curve) + 1)),
            y=list(curve),
            mode="lines",
            line={"color": colour, "width": 1},
            opacity=0.35,
            legendgroup=label,
            showlegend=False,
            name=escape(Path(image["file"]).name),
        )


def _add_mean(figure: go.Figure, mean: Sequence[float], label: str, colour: str) -> None:
    figure.add_scatter(
        x=list(range(1, len(mean) + 1)),
        y=list(mean),
        mode="lines",
        line={"color": colour, "width": 3},
        legendgroup=label,
        name=label,
    )


def _geometric_mean(curves: Sequence[Sequence[float]]) -> list[float]:
    """Geometric mean over images of each singular value, zero if one of them is."""
    ranks = zip(*curves, strict=False)
    return [geometric_mean(values) if min(values) > 0 else 0.0 for values in ranks]


def gallery(record: Record, directory: Path) -> Gallery:
    """Heat-maps of importance and block norm over the photographs."""
    images = record["images"]
    shown = [_photograph(image, directory) for image in images[:MAX_PHOTOGRAPHS]]
    caption = HEAT
    if len(images) > len(shown):
        caption += f" Shown: the first {len(shown)} of {len(images)} images."
    return Gallery("Where it looks", shown, caption)


def _photograph(image: Record, directory: Path) -> Photograph:
    rows, columns = image["grid"]
    file = find_photograph(image["file"], directory)
    photograph = photograph_uri(file, (rows, columns)) if file else ""
    layers = [Layer("Photograph")] if photograph else []
    for key, label in MAPS.items():
        values = image["patches"][key]
        limits = (f"{0:.0f}", f"{max(values):.3g}")
        layers.append(Layer(label, heat_map_uri(values, (rows, columns)), limits))
    note = "" if photograph else "The photograph is no longer at its place."
    return Photograph(Path(image["file"]).name, photograph, (rows, columns), layers, note)
