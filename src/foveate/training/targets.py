"""What the heads learn from, computed once and kept on disk."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import PartialState
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from foveate.data.crops import Crops, Photographs
from foveate.models import Model
from foveate.models.digest import model_hash
from foveate.training.modes import leading_modes
from foveate.training.probes import Cut, pull_back

__all__ = ["Cut", "Pictures", "TargetSpec", "Targets", "compute_targets", "model_hash"]

SHARD = 8  # images
MANIFEST = "manifest.json"

Progress = Callable[[int, int], None]
Pictures = Crops | Photographs

NAMES = {
    "probes": ("tokens", "rows"),
    "norms": ("tokens", "norm"),
    "modes": ("tokens", "vectors", "energies", "importance"),
}


@dataclass(frozen=True)
class TargetSpec:
    """What is computed of every image.

    Attributes:
        kind: ``probes`` for random signs pulled back to the patches of all cuts at once,
            ``norms`` for nothing but their norms, ``modes`` for the leading right singular
            vectors and their energies at the tokens that enter a block.
        task: Name of a task of the model.
        cuts: Depths and places where the tokens are taken.
        rows: Probes, or modes.
        seed: The same seed gives the same probes.

    Raises:
        ValueError: If there is no row or no cut, or modes are asked for elsewhere.
    """

    kind: Literal["probes", "norms", "modes"]
    task: str
    cuts: tuple[Cut, ...]
    rows: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.rows < 1 or not self.cuts:
            raise ValueError(
                f"rows and cuts must be at least 1; got {self.rows} and {len(self.cuts)}."
            )
        if self.kind == "modes" and any(cut.place != "before" for cut in self.cuts):
            raise ValueError("place must be 'before' for modes; got 'between'.")

    @property
    def names(self) -> tuple[str, ...]:
        """What is kept of every cut."""
        return NAMES[self.kind]


class Targets:
    """Targets on disk, read as they are asked for.

    Args:
        folder: Where the shards are.
        num: Images.
        cut: Which of the cuts is read.
        names: Which of its tensors.
    """

    def __init__(self, folder: Path, num: int, cut: Cut, names: Sequence[str]) -> None:
        self.folder, self.num, self.cut, self.names = folder, num, cut, tuple(names)
        self._open = cache(lambda shard: safe_open(_file(folder, shard), "pt"))

    def __len__(self) -> int:
        """Images."""
        return self.num

    def batch(self, index: Tensor) -> dict[str, Tensor]:
        """Targets of images ``(B,)``, by name, in float32; random access on disk.

        Args:
            index: From 0 to below the number of images.

        Returns:
            Tensors with B as their first dimension.
        """
        rows = [divmod(int(i), SHARD) for i in index]
        found = {}
        for name in self.names:
            full = f"{name}.{self.cut}"
            parts = [self._open(s).get_slice(full)[r : r + 1] for s, r in rows]
            found[name] = torch.cat(parts).float()
        return found


def compute_targets(
    model: Model,
    pictures: Pictures,
    spec: TargetSpec,
    folder: Path,
    progress: Progress | None = None,
) -> Path:
    """Compute the targets of all pictures that are not on disk yet.

    Shards of eight images are written one by one, each in one move, so that a run that is
    killed goes on where it was. Under ``accelerate launch`` the processes share the shards.
    A longer list of crops, later, adds shards. Cost an image: one forward pass, and a
    backward pass from the output to the first cut for each probe; for modes see
    :func:`~foveate.training.modes.leading_modes`.

    Args:
        model: The model.
        pictures: Its images.
        spec: What to compute.
        folder: Where to.
        progress: Told how many images are done, and how many there are.

    Returns:
        The folder.

    Raises:
        ValueError: If the folder holds targets of something else; the message names what
            differs. Or if a shard is broken.
    """
    manifest = describe(model, pictures, spec)
    _check_manifest(folder / MANIFEST, manifest)
    # A process has one device for good: without this, that of a GPU the model is not on.
    state = PartialState(cpu=next(model.parameters()).device.type == "cpu")
    shards = range(-(-len(pictures) // SHARD))
    for shard in shards[state.process_index :: state.num_processes]:
        _one_shard(model, pictures, spec, _file(folder, shard), manifest)
        if progress is not None:
            progress(min(len(pictures), (shard + 1) * SHARD), len(pictures))
    state.wait_for_everyone()
    return folder


def describe(model: Model, pictures: Pictures, spec: TargetSpec) -> dict[str, Any]:
    """What targets depend on, as JSON; the number of pictures is not among it."""
    files = [[file.name, file.stat().st_size] for file in pictures.files]
    digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    return {
        "format": "foveate-targets",
        "version": 1,
        "model": model.name,
        "model_hash": model_hash(model),
        "files": digest,
        "size": pictures.transform.size,
        "scale": None if pictures.scale is None else list(pictures.scale),
        "crop_seed": pictures.seed,
        **json.loads(json.dumps(asdict(spec))),
    }


def _file(folder: Path, shard: int) -> Path:
    return folder / f"targets-{shard:06d}.safetensors"


def _check_manifest(file: Path, manifest: dict[str, Any]) -> None:
    if not file.exists():
        return
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"targets must have a manifest; {file}: {error}.") from error
    _compare(found, manifest, str(file))


def _write_manifest(file: Path, manifest: dict[str, Any]) -> None:
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".partial{PartialState().process_index}")
        partial.write_text(json.dumps(manifest, indent=2) + "\n")
        partial.replace(file)


def _compare(found: dict[str, Any], expected: dict[str, Any], name: str) -> None:
    for key, value in expected.items():
        if found.get(key) != value:
            raise ValueError(
                f"targets must have {key} {value!r}; {name} has {found.get(key)!r}."
            )


def _one_shard(
    model: Model, pictures: Pictures, spec: TargetSpec, file: Path, manifest: dict[str, Any]
) -> None:
    first = int(file.stem.removeprefix("targets-")) * SHARD
    last = min(len(pictures), first + SHARD)
    if file.exists() and _holds(file, manifest, last - first):
        return
    images = pictures.batch(first, last).to(next(model.parameters()))
    seed = spec.seed * 1_000_003 + first
    compute = leading_modes if spec.kind == "modes" else pull_back
    found = compute(model, spec.task, images, spec.cuts, spec.rows, seed)
    _write_manifest(file.with_name(MANIFEST), manifest)
    wanted = {f"{name}.{cut}" for name in spec.names for cut in spec.cuts}
    metadata = {"manifest": json.dumps(manifest), "count": str(last - first)}
    partial = file.with_suffix(f".partial{PartialState().process_index}")
    save_file(
        {k: v.contiguous().cpu() for k, v in found.items() if k in wanted},
        partial,
        metadata,
    )
    partial.replace(file)


def _holds(file: Path, manifest: dict[str, Any], count: int) -> bool:
    """Whether a shard is complete; one of something else is refused by name."""
    try:
        with safe_open(file, "pt") as shard:
            metadata = shard.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"targets must be safetensors; {file}: {error}.") from error
    _compare(json.loads(metadata.get("manifest", "{}")), manifest, str(file))
    return int(metadata["count"]) >= count
