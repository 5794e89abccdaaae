"""Images and networks that every test can afford."""

import pytest
import torch
from PIL import Image

from tests import tiny


@pytest.fixture
def images():
    """Two images of 5 x 7 patches, ``(2, 3, 20, 28)``."""
    return tiny.random_images()


@pytest.fixture
def double_images():
    """The same two images in float64."""
    return tiny.random_images(dtype=torch.float64)


@pytest.fixture
def dense_model():
    """A tiny DINOv2 with the tasks ``cls`` and ``saliency``, float32."""
    return tiny.dense_model()


@pytest.fixture
def double_model():
    """The same model in float64, for Jacobians."""
    return tiny.dense_model(torch.float64)


@pytest.fixture
def generator():
    """A seeded source of randomness."""
    return torch.Generator().manual_seed(0)


@pytest.fixture
def photographs(tmp_path):
    """A folder with two photographs and a broken file."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for seed, name in enumerate(("a.png", "b.png")):
        noise = tiny.random_images((40, 52), seed=seed)[0].sigmoid()
        pixels = (255 * noise).byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(folder / name)
    (folder / "torn.jpg").write_bytes(b"\xff\xd8\xff")
    return folder
