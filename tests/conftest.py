"""Images and networks that every test can afford."""

import pytest
import torch

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
