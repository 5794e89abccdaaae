"""What a page is made of. A section of the report is a title and a few of these."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Text:
    """Paragraphs; as a callout, they stand out."""

    kind: ClassVar[str] = "text"
    paragraphs: Sequence[str]
    heading: str = ""
    is_callout: bool = False


@dataclass(frozen=True)
class Facts:
    """Labels with a value each."""

    kind: ClassVar[str] = "facts"
    items: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """Rows of text.

    Attributes:
        columns: Heads.
        rows: Cells.
        caption: A line below.
        num_text: Leading columns that hold words; all others hold numbers.
        notes: A line for each row, below its first cell; none if empty.
    """

    kind: ClassVar[str] = "table"
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    num_text: int = 1
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Chart:
    """A plotly figure; its colours of text and grid follow the page."""

    kind: ClassVar[str] = "chart"
    heading: str
    figure: Any
    caption: str = ""

    @property
    def json(self) -> str:
        """The figure as plotly.js reads it."""
        return self.figure.to_json()


@dataclass(frozen=True)
class Layer:
    """One value per patch, drawn over a photograph.

    Attributes:
        label: What the values are.
        image: Data URI of a picture, one pixel per patch; empty for the photograph alone.
        limits: Smallest and largest value in words.
    """

    label: str
    image: str = ""
    limits: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Photograph:
    """A photograph with the layers over it.

    Attributes:
        name: File name.
        image: Data URI; empty if the file is gone.
        grid: Rows and columns of patches.
        layers: What is shown, side by side.
        note: A line below.
    """

    name: str
    image: str
    grid: tuple[int, int]
    layers: Sequence[Layer]
    note: str = ""


@dataclass(frozen=True)
class Gallery:
    """Photographs, one below the other."""

    kind: ClassVar[str] = "gallery"
    heading: str
    photographs: Sequence[Photograph]
    caption: str = ""


Block = Text | Facts | Table | Chart | Gallery


@dataclass(frozen=True)
class Section:
    """One record on the page."""

    title: str
    blocks: Sequence[Block]
    subtitle: str = ""
