"""ImageNet-1K: a folder for each synset."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from foveate.data.checked import picture_in, pictures_in

NUM_CLASSES = 1000
NUM_VALIDATION = 50_000


class Labelled(NamedTuple):
    """A picture with its class, from 0."""

    file: Path
    picture: Image.Image
    label: int


@dataclass(frozen=True)
class ImageNet:
    """Pictures by synset; classes are numbered as pretrained heads number them.

    Attributes:
        files: Pictures, sorted by synset and name.
        labels: Class of each, 0 to 999: the rank of its synset among all 1000, so a folder
            with a few of them still has the right numbers.
    """

    files: tuple[Path, ...]
    labels: tuple[int, ...]

    @property
    def is_official(self) -> bool:
        """Whether there are as many pictures as in the validation set, 50 000."""
        return len(self) == NUM_VALIDATION

    def __len__(self) -> int:
        """Pictures."""
        return len(self.files)

    def __getitem__(self, index: int) -> Labelled:
        """Read picture ``index``.

        Args:
            index: From 0 to below the number of pictures.

        Returns:
            The picture in RGB, and its class.

        Raises:
            ValueError: If it cannot be read.
        """
        file = self.files[index]
        return Labelled(file, picture_in(file), self.labels[index])


def open_imagenet(folder: str | Path) -> ImageNet:
    """List pictures in folders named by synset, as ``val/n01440764/*.JPEG``.

    Args:
        folder: Holds the synsets' folders, any number of the 1000.

    Returns:
        The data set; pictures are read one by one.

    Raises:
        ValueError: If there is no such folder, it holds none, a name in it is not one of
            the 1000 synsets, or a synset has no picture.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(
            f"data must be a folder with a folder for each synset; got no such '{folder}'."
        )
    number = {name: index for index, name in enumerate(sorted(_synsets()))}
    found = sorted(f for f in folder.iterdir() if f.is_dir())
    if not found:
        raise ValueError(
            f"data must hold a folder for each synset; '{folder}' holds no folder."
        )
    unknown = [f.name for f in found if f.name not in number]
    if unknown:
        raise ValueError(
            "data must hold folders named by ImageNet-1K's synsets, as n01440764; got "
            f"'{unknown[0]}' in '{folder}'."
        )
    pairs = [(f, number[each.name]) for each in found for f in pictures_in(each)]
    return ImageNet(*(tuple(part) for part in zip(*pairs, strict=True)))


def _synsets() -> list[str]:
    from timm.data import ImageNetInfo

    return ImageNetInfo().label_names()
