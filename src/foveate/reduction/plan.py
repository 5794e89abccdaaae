"""A plan: which method reduces to how many patches where, as data."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from foveate.forward import Place

FORMAT = "foveate-plan"
VERSION = 1

Schedule = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Plan:
    """What a reduced model does, in full; the same plan gives the same bits.

    Attributes:
        method: Name of a preset: how patches are scored and what becomes of them.
        task: Name of the task whose output is wanted.
        grid: Rows and columns of the patch grid the counts are meant for.
        schedule: Pairs of a depth and the patches left after the step there.
        place: Where the steps stand.
        fuse_last: Blocks at the end that run on the full grid again, for a task that reads it.
        alpha: Share of its offset from its stand-in that a removed patch gets back.
        options: Further settings of the method, by name.
    """

    method: str
    task: str
    grid: tuple[int, int]
    schedule: Schedule
    place: Place = "between"
    fuse_last: int = 1
    alpha: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check what can be checked without a model.

        Raises:
            ValueError: If depths do not ascend, counts grow, or a field is out of range.
        """
        rows, columns = self.grid
        before = (-1, rows * columns)
        for depth, keep in self.schedule:
            if depth <= before[0] or not 1 <= keep <= before[1]:
                raise ValueError(
                    "schedule must have ascending depths and counts that never grow, from 1 "
                    f"to {rows * columns}; got {[list(s) for s in self.schedule]}."
                )
            before = (depth, keep)
        if self.place not in get_args(Place):
            raise ValueError(f"place must be one of {get_args(Place)}; got '{self.place}'.")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must be from 0 to 1; got {self.alpha}.")

    @property
    def num_patches(self) -> int:
        """Patches of the full grid."""
        return self.grid[0] * self.grid[1]

    @property
    def counts(self) -> dict[int, int]:
        """Patches left after the step at each depth."""
        return dict(self.schedule)

    def save(self, file: str | Path) -> None:
        """Write the plan as JSON."""
        record = {"format": FORMAT, "version": VERSION, **asdict(self)}
        Path(file).write_text(json.dumps(record, indent=2) + "\n")

    @staticmethod
    def load(file: str | Path) -> "Plan":
        """Read a plan from JSON.

        Args:
            file: Written by :meth:`save`.

        Returns:
            The plan.

        Raises:
            ValueError: If it is not a plan of this version, or has unknown or missing fields.
        """
        try:
            record = json.loads(Path(file).read_text())
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"plan must be a JSON file; {file}: {error}.") from error
        return Plan.from_record(record, str(file))

    @staticmethod
    def from_record(record: Any, name: str = "plan") -> "Plan":  # noqa: ANN401 - any JSON
        """Check a JSON value and turn it into a plan.

        Args:
            record: What JSON gave.
            name: For messages.

        Returns:
            The plan.

        Raises:
            ValueError: As :meth:`load`.
        """
        head = (
            (record.get("format"), record.get("version"))
            if isinstance(record, dict)
            else None
        )
        if head != (FORMAT, VERSION):
            raise ValueError(
                f"plan must have format '{FORMAT}' and version {VERSION}; {name} has {head}."
            )
        known = {f.name for f in fields(Plan)}
        given = record.keys() - {"format", "version"}
        if given != known:
            wrong = sorted(given - known) or sorted(known - given)
            what = "unknown" if given - known else "missing"
            raise ValueError(f"plan must have the fields {sorted(known)}; {what}: {wrong}.")
        record = {k: record[k] for k in known}
        record["grid"] = _integers(record["grid"], "grid", 2)
        record["schedule"] = tuple(_integers(s, "schedule", 2) for s in record["schedule"])
        return Plan(**record)


def _integers(values: Any, name: str, length: int) -> tuple[int, ...]:  # noqa: ANN401
    if (
        not isinstance(values, Sequence)
        or len(values) != length
        or not all(type(v) is int for v in values)
    ):
        raise ValueError(f"{name} must hold {length} integers; got {values!r}.")
    return tuple(values)
