"""A plan: which method reduces to how many patches where, as data."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from foveate.forward import Place

FORMAT = "foveate-plan"
VERSION = 1

Schedule = tuple[tuple[int, int], ...]

# What JSON must hold; the grid and the schedule have rules of their own.
_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "method": ("a string", (str,)),
    "task": ("a string", (str,)),
    "place": ("a string", (str,)),
    "fuse_last": ("an integer", (int,)),
    "alpha": ("a number", (int, float)),
    "options": ("an object", (dict,)),
}


@dataclass(frozen=True)
class Plan:
    """What a reduced model does, in full; the same plan gives the same bits.

    Attributes:
        method: Name of a preset: how patches are scored and what becomes of them.
        task: Name of the task whose output is wanted.
        grid: Rows and columns of the patch grid the counts are meant for.
        schedule: Pairs of a depth and the patches left after the step there.
        place: Where the steps stand.
        fuse_last: For a task that reads the grid, how many blocks at the end run on all of
            it again.
        alpha: For such a task, the share of its offset from its stand-in that a removed
            patch gets back.
        options: Further settings of the method, by name.

    Raises:
        ValueError: If depths do not ascend, counts grow, or a field is out of range.
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
        """Check what can be checked without a model."""
        if min(self.grid) < 1:
            raise ValueError(f"grid must be at least 1 x 1 patches; got {self.grid}.")
        before = (-1, self.num_patches)
        for depth, keep in self.schedule:
            if depth <= before[0] or not 1 <= keep <= before[1]:
                raise ValueError(
                    "schedule must have ascending depths and counts that never grow, from "
                    f"1 to {self.num_patches}; got {[list(s) for s in self.schedule]}."
                )
            before = (depth, keep)
        if self.place not in get_args(Place):
            raise ValueError(f"place must be one of {get_args(Place)}; got '{self.place}'.")
        if self.fuse_last < 0:
            raise ValueError(f"fuse_last must be at least 0; got {self.fuse_last}.")
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

    def record(self) -> dict[str, Any]:
        """Everything as JSON; :meth:`from_record` reads it."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    def save(self, file: str | Path) -> None:
        """Write the plan as JSON."""
        Path(file).write_text(json.dumps(self.record(), indent=2) + "\n")

    @staticmethod
    def load(file: str | Path) -> "Plan":
        """Read a plan from JSON.

        Args:
            file: Written by :meth:`save`.

        Returns:
            The plan.

        Raises:
            ValueError: If it is not a plan of this version, has unknown or missing fields,
                or a field is of the wrong type or out of range.
        """
        try:
            record = json.loads(Path(file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:  # no file, no text, no JSON
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
        read = record if isinstance(record, dict) else {}
        head = (read.get("format"), read.get("version"))
        if head != (FORMAT, VERSION):
            raise ValueError(
                f"plan must have format '{FORMAT}' and version {VERSION}; {name} has "
                f"{head}."
            )
        known, given = {f.name for f in fields(Plan)}, read.keys() - {"format", "version"}
        if given != known:
            what = "unknown" if given - known else "missing"
            wrong = sorted(given - known) or sorted(known - given)
            raise ValueError(
                f"plan must have the fields {', '.join(sorted(known))}; {name} has "
                f"{what} {', '.join(wrong)}."
            )
        values = {k: read[k] for k in known}
        _check_kinds(values)
        steps = values["schedule"]
        if not isinstance(steps, list):
            raise ValueError(f"schedule must be a list of pairs; got {steps!r}.")
        values["schedule"] = tuple(_pair(step, "schedule") for step in steps)
        values["grid"] = _pair(values["grid"], "grid")
        return Plan(**values)


def check_options(plan: Plan, defaults: Mapping[str, Any]) -> None:
    """Refuse options that a method does not have, or values of another type.

    Args:
        plan: The plan.
        defaults: Options of its method; one that is None takes values of any type.

    Raises:
        ValueError: Naming the option.
    """
    unknown = sorted(plan.options.keys() - defaults.keys())
    if unknown:
        known = ", ".join(sorted(defaults)) or "none"
        raise ValueError(
            f"options of '{plan.method}' are {known}; got {', '.join(unknown)}."
        )
    for name, value in plan.options.items():
        default = defaults[name]
        kinds = (int, float) if type(default) is float else (type(default),)
        if type(default) in (int, float, str) and type(value) not in kinds:
            raise ValueError(
                f"option '{name}' of '{plan.method}' must be of the type of its default, "
                f"{default!r}; got {value!r}."
            )


def check_depths(plan: Plan, last: int, full_from: int) -> None:
    """Refuse steps at blocks that do not run, or that already run on the full grid.

    Args:
        plan: The plan.
        last: Blocks that run: the deepest tap of the task.
        full_from: First block that runs on the full grid again; ``last`` if none does.

    Raises:
        ValueError: If a depth is out of range.
    """
    if plan.fuse_last > last:
        raise ValueError(f"fuse_last must be from 0 to {last}; got {plan.fuse_last}.")
    for depth, _ in plan.schedule:
        if not 0 <= depth < full_from:
            raise ValueError(
                f"depths must be at least 0 and below {full_from} for task '{plan.task}', "
                f"which reads {last} blocks, the last {last - full_from} of them on the "
                f"full grid; got {depth}."
            )


def _check_kinds(values: dict[str, Any]) -> None:
    for name, (label, kinds) in _KINDS.items():
        if type(values[name]) not in kinds:  # a boolean is no integer here
            raise ValueError(f"{name} must be {label}; got {values[name]!r}.")


def _pair(values: Any, name: str) -> tuple[int, int]:  # noqa: ANN401 - any JSON
    right = isinstance(values, list) and [type(v) for v in values] == [int, int]
    if not right:
        raise ValueError(f"{name} must hold pairs of integers; got {values!r}.")
    return (values[0], values[1])
