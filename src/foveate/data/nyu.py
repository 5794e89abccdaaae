"""NYU-Depth-V2: photographs of rooms with the depth of every pixel."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from foveate.data.checked import labels_in, must_exist, picture_in
from foveate.data.folder import SUFFIXES

NUM_TEST = 654
SIZE = (480, 640)  # rows, columns
EIGEN_ROWS, EIGEN_COLUMNS = slice(45, 471), slice(41, 601)
MIN_DEPTH, MAX_DEPTH = 1e-3, 10.0  # metres; the first is not counted, the second is
MILLIMETRES = 1000
LABELLED, TEST_SPLIT = "nyu_depth_v2_labeled.mat", "splits.mat"
FORMS = (("rgb_", "", "sync_depth_", ""), ("", "_colors", "", "_depth"))


class Measured(NamedTuple):
    """A picture with its depth in metres and where it counts, ``(H, W)`` both."""

    file: Path
    picture: Image.Image
    depth: Tensor
    valid: Tensor


@dataclass(frozen=True)
class NYU:
    """Pictures with depth; a pixel counts inside Eigen's crop and from 1 mm to 10 m.

    Attributes:
        files: Pictures, sorted by path.
        depths: Depth of each, sixteen bits a pixel, in millimetres; 0 is unknown.
    """

    files: tuple[Path, ...]
    depths: tuple[Path, ...]

    @property
    def is_official(self) -> bool:
        """Whether there are as many pictures as in the test set, 654."""
        return len(self) == NUM_TEST

    def __len__(self) -> int:
        """Pictures."""
        return len(self.files)

    def __getitem__(self, index: int) -> Measured:
        """Read picture ``index`` and its depth.

        Args:
            index: From 0 to below the number of pictures.

        Returns:
            The picture in RGB, the depth in metres, float32, and the pixels that count:
            0.001 < depth <= 10 in rows 45 to 470 and columns 41 to 600.

        Raises:
            ValueError: If one cannot be read, is not 640 x 480, or the depth has not
                sixteen bits.
        """
        file, annotation = self.files[index], self.depths[index]
        picture = picture_in(file)
        if picture.size != SIZE[::-1]:
            raise ValueError(
                f"'{file}' must be 640 x 480, since Eigen's crop is for that size; got "
                f"{picture.width} x {picture.height}."
            )
        millimetres = labels_in(annotation, ("I;16", "I;16B", "I"), picture.size)
        depth = millimetres.float() / MILLIMETRES
        return Measured(file, picture, depth, eigen_crop() & is_measured(depth))


@dataclass(frozen=True)
class LabelledNYU:
    """Pictures with depth out of the one file that the authors publish.

    Attributes:
        source: ``nyu_depth_v2_labeled.mat``.
        indices: Which of its pictures, from 0.
        name: ``rawDepths``, as measured, 0 where nothing was, which the PNG files of the
            test set are made of too; or ``depths``, whose holes have been filled.
    """

    source: Path
    indices: tuple[int, ...]
    name: str

    @property
    def files(self) -> tuple[Path, ...]:
        """A name for each picture, which is no file: its number in the file, from 1."""
        return tuple(self.source / f"{index + 1:05d}" for index in self.indices)

    @property
    def is_official(self) -> bool:
        """Whether there are as many pictures as in the test set, 654."""
        return len(self) == NUM_TEST

    def __len__(self) -> int:
        """Pictures."""
        return len(self.indices)

    def __getitem__(self, index: int) -> Measured:
        """Read picture ``index`` and its depth.

        Args:
            index: From 0 to below the number of pictures.

        Returns:
            As of :class:`NYU`.

        Raises:
            ValueError: If it cannot be read.
        """
        at = self.indices[index]
        try:
            with _open_mat(self.source) as mat:
                colours, depths = mat["images"][at], mat[self.name][at]
        except (OSError, KeyError) as error:
            raise ValueError(f"'{self.source}' must be readable; {error}.") from error
        # Stored column by column: (3, W, H) and (W, H).
        picture = Image.fromarray(np.ascontiguousarray(colours.transpose(2, 1, 0)))
        depth = torch.from_numpy(np.ascontiguousarray(depths.T)).float()
        return Measured(
            self.files[index], picture, depth, eigen_crop() & is_measured(depth)
        )


def open_nyu(folder: str | Path) -> NYU | LabelledNYU:
    """Open the authors' file, or list pairs of files in the folder and all below it.

    A folder with ``nyu_depth_v2_labeled.mat`` gives the pictures that ``splits.mat`` beside
    it names for the test, and all of them if there is no such file, with the depths as
    measured if it has them; both are read by the extra ``nyu``. Otherwise the names are
    those of the two distributions of the test set as PNG files: ``SCENE/rgb_00045.jpg``
    with ``SCENE/sync_depth_00045.png``, or ``00000_colors.png`` with ``00000_depth.png``.

    Args:
        folder: Holds the files.

    Returns:
        The data set; pictures are read one by one.

    Raises:
        ValueError: If there is no such folder, it holds no picture of such a name, a
            picture has no depth, or the authors' file is damaged or of another layout.
        ModuleNotFoundError: If h5py or scipy is needed and not installed.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"data must be a folder with NYU-Depth-V2; got '{folder}'.")
    if (folder / LABELLED).is_file():
        return _open_labelled(folder / LABELLED, folder / TEST_SPLIT)
    pairs = [(f, depth) for f in sorted(folder.rglob("*")) if (depth := _depth_of(f))]
    if not pairs:
        raise ValueError(
            f"data must hold {LABELLED}, rgb_*.jpg with sync_depth_*.png, or *_colors.png "
            f"with *_depth.png; '{folder}' holds none."
        )
    files, depths = zip(*pairs, strict=True)
    must_exist(depths, f"belongs to a picture in '{folder}'")
    return NYU(files, depths)


def eigen_crop() -> Tensor:
    """Pixels inside Eigen's crop, ``(480, 640)``, bool."""
    crop = torch.zeros(SIZE, dtype=torch.bool)
    crop[EIGEN_ROWS, EIGEN_COLUMNS] = True
    return crop


def is_measured(depth: Tensor) -> Tensor:
    """Whether depths in metres lie above 1 mm and are at most 10 m."""
    return (depth > MIN_DEPTH) & (depth <= MAX_DEPTH)


def _depth_of(file: Path) -> Path | None:
    """Where the depth of a picture should be; None if it is no picture of such a name."""
    if file.suffix.lower() not in SUFFIXES:
        return None
    for begin, end, depth_begin, depth_end in FORMS:
        if file.stem.startswith(begin) and file.stem.endswith(end):
            middle = file.stem.removeprefix(begin).removesuffix(end)
            return file.with_name(f"{depth_begin}{middle}{depth_end}.png")
    return None


def _open_labelled(source: Path, split: Path) -> LabelledNYU:
    """Check the layout of the authors' file, and choose its pictures for the test."""
    try:
        with _open_mat(source) as mat:
            depths = "rawDepths" if "rawDepths" in mat else "depths"
            wanted = {"images": (3, *SIZE[::-1]), depths: SIZE[::-1]}
            shapes = {name: tuple(mat[name].shape) for name in wanted if name in mat}
    except OSError as error:
        raise ValueError(f"'{source}' must be an HDF5 file; {error}.") from error
    lengths = {shape[0] for shape in shapes.values()}
    fits = all(shapes.get(name, ())[1:] == shape for name, shape in wanted.items())
    if not fits or len(lengths) != 1:
        raise ValueError(
            f"'{source}' must hold images (N, 3, 640, 480) and {depths} (N, 640, 480), "
            f"since Eigen's crop is for that size; got {shapes}."
        )
    num = lengths.pop()
    numbers = _test_numbers(split) if split.is_file() else [*range(1, num + 1)]
    if not numbers or not 1 <= min(numbers) <= max(numbers) <= num:
        raise ValueError(
            f"'{split}' must name pictures from 1 to {num} under testNdxs; got "
            f"{len(numbers)} of them, up to {max(numbers, default=0)}."
        )
    return LabelledNYU(source, tuple(number - 1 for number in numbers), depths)


def _test_numbers(split: Path) -> list[int]:
    """Pictures of the test, from 1, in the order of the file."""
    try:
        from scipy.io import loadmat  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "NYU-Depth-V2's splits.mat needs scipy: pip install 'foveate[nyu]'."
        ) from error
    try:
        return [int(number) for number in loadmat(split)["testNdxs"].ravel()]
    except Exception as error:  # scipy's parser raises whatever broken data makes it
        raise ValueError(
            f"'{split}' must be a MATLAB file with testNdxs; {error!r}."
        ) from error


def _open_mat(source: Path) -> Any:  # noqa: ANN401 - a file of h5py
    try:
        import h5py  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{LABELLED} needs h5py: pip install 'foveate[nyu]'."
        ) from error
    return h5py.File(source, "r")
