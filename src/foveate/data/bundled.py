"""Photographs for a first try, out of the installed scikit-image; nothing is fetched."""

import os
from importlib.util import find_spec
from pathlib import Path

from PIL import Image

from foveate.data.folder import read_picture

# The colour photographs that lie inside the wheel. All others there are drawings, grey
# pictures or medical slides, or would be downloaded.
PHOTOGRAPHS = {
    "astronaut": "astronaut.png",
    "cat": "chelsea.png",
    "coffee": "coffee.png",
    "motorcycle": "motorcycle_left.png",
    "rocket": "rocket.jpg",
}


def bundled_photographs() -> dict[str, Image.Image]:
    """Photographs by name, in RGB and of 300 to 741 pixels a side.

    Returns:
        The pictures, sorted by name.

    Raises:
        ModuleNotFoundError: If scikit-image is not installed.
    """
    spec = find_spec("skimage")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            "bundled photographs need scikit-image: pip install 'foveate[demo]'."
        )
    folder = Path(spec.submodule_search_locations[0]) / "data"
    return {name: read_picture(folder / file) for name, file in sorted(PHOTOGRAPHS.items())}


def write_photographs(folder: Path) -> list[Path]:
    """Write the bundled photographs as PNG files.

    Args:
        folder: Where to; made if need be, files of the same name are replaced.

    Returns:
        The files, sorted by name.

    Raises:
        ModuleNotFoundError: If scikit-image is not installed.
    """
    pictures = bundled_photographs()  # before anything is made
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, picture in pictures.items():
        file = folder / f"{name}.png"
        partial = folder / f".{file.name}.{os.getpid()}.partial"
        try:
            picture.save(partial, format="png")
            files.append(partial.replace(file))
        finally:
            partial.unlink(missing_ok=True)
    return files
