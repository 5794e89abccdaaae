"""Oracle: W + B A written out; shapes; the model that was handed in."""

import copy

import pytest
import torch
from torch.testing import assert_close

from foveate.adaptive.lora import (
    add_lora,
    load_lora,
    lora_parameters,
    lora_state,
    share,
    shared_copy,
    use_lora,
)
from foveate.backbones import open_backbone
from foveate.data.folder import ImageTransform
from foveate.models import Model
from foveate.tasks.embedding import ClassToken
from tests import tiny

NETWORKS = ("timm-vit", "timm-dinov3", "timm-eva02", "hf-dinov2", "hf-dinov3", "hf-clip")
every_network = pytest.mark.parametrize("network", NETWORKS)


def model_of(network):
    backbone = open_backbone(tiny.BACKBONES[network]())
    return Model(network, backbone, {"cls": ClassToken()}, ImageTransform(20)).eval()


def randomise(model, name, seed=0):
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in lora_parameters(model, name):
            p.copy_(0.3 * torch.randn(p.shape, generator=draw))


def numbers(parameters):
    return sum(p.numel() for p in parameters)


def of_meta(network):
    """A model without memory: its weights have shapes alone."""
    with torch.device("meta"):
        return share_of(open_backbone(network()))


def share_of(backbone):
    model = Model.__new__(Model)  # a check of weights would need their values
    torch.nn.Module.__init__(model)
    model.name, model.backbone = "meta", backbone
    return model


def dinov2_base():
    from transformers import Dinov2Config, Dinov2Model

    return Dinov2Model(Dinov2Config(image_size=518, patch_size=14))


def vit_base():
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer()


def test_the_publication_s_count():
    """Rank 16 on separate q, k, v, o of ViT-B: 12 x 4 x 2 x 768 x 16."""
    model = of_meta(dinov2_base)
    assert add_lora(model, "task", 16) == 12 * 4 * 2 * 768 * 16 == 1_179_648


def test_a_fused_layer_has_one_update():
    """12 x ((768 + 2304) + (768 + 768)) x 16, a quarter fewer."""
    model = of_meta(vit_base)
    found = add_lora(model, "task", 16)
    assert found == 12 * (768 + 2304 + 768 + 768) * 16 == 884_736
    assert found == 0.75 * 1_179_648


@every_network
def test_numbers_follow_from_shapes(network):
    model = share(model_of(network))
    backbone = model.backbone
    sides = [
        sum(backbone.network.get_submodule(path).weight.shape)
        for depth in range(tiny.DEPTH)
        for path in backbone.attention_layers(depth)
    ]
    assert add_lora(model, "a", 5) == 5 * sum(sides)
    assert numbers(lora_parameters(model, "a")) == 5 * sum(sides)
    assert sum(v.numel() for v in lora_state(model, "a").values()) == 5 * sum(sides)


@every_network
def test_nothing_changes_at_first(network, images):
    model = model_of(network)
    shared = share(model)
    before = model(images)
    assert torch.equal(shared(images), before)
    add_lora(shared, "a", 4)
    assert_close(shared(images).detach(), before, rtol=0, atol=1e-6)


@every_network
def test_weights_are_shared_and_the_model_stays_as_it_was(network, images):
    model = model_of(network)
    before = model(images)
    state = [(k, v.data_ptr(), v._version) for k, v in model.state_dict().items()]
    shared = share(model)
    add_lora(shared, "a", 4)
    randomise(shared, "a")
    assert (shared(images) - before).abs().max() > 1e-2
    assert [(k, v.data_ptr(), v._version) for k, v in model.state_dict().items()] == state
    assert torch.equal(model(images), before)
    old = {v.data_ptr() for v in model.state_dict().values()}
    new = {k for k, v in shared.state_dict().items() if v.data_ptr() not in old}
    assert new
    assert all("lora" in name for name in new)
    assert not any(hasattr(m, "lora_A") for m in model.modules())


@every_network
def test_the_update_is_b_times_a(network, double_images):
    """Against a network whose weights hold W + s B A."""
    model = model_of(network).double()
    shared = share(model)
    add_lora(shared, "a", 3, scale=0.7)
    shared.double()
    randomise(shared, "a")
    truth = copy.deepcopy(model)
    state = lora_state(shared, "a")
    with torch.no_grad():
        for key, a in state.items():
            if key.endswith("lora_A"):
                path = key.removesuffix(".lora_A")
                update = 0.7 * state[f"{path}.lora_B"] @ a
                truth.backbone.network.get_submodule(path).weight.add_(update)
    found = shared(double_images).detach()
    assert_close(found, truth(double_images), rtol=1e-10, atol=1e-10)
    assert (found - model(double_images)).abs().max() > 1e-2


def test_a_fused_layer_with_its_bias_apart_is_updated_as_well(double_images):
    """EvaAttention adds the bias of queries and values itself."""
    network = tiny.timm_eva().double()
    assert network.blocks[0].attn.q_bias is not None
    model = Model("eva", open_backbone(network), {"cls": ClassToken()}, ImageTransform(20))
    shared = share(model.eval())
    add_lora(shared, "a", rank=3)
    randomise(shared, "a")
    merged = copy.deepcopy(model)
    state = lora_state(shared, "a")
    with torch.no_grad():
        for path, layer in merged.backbone.network.named_modules():
            if f"{path}.lora_A" in state:
                update = state[f"{path}.lora_B"] @ state[f"{path}.lora_A"]
                assert update.any()
                layer.weight.add_(update)
        assert len(state) == 2 * 2 * tiny.DEPTH  # qkv and proj
        assert_close(shared(double_images), merged(double_images))
    assert (shared(double_images) - model(double_images)).abs().max() > 1e-2


def test_only_the_update_is_trained(images):
    model = model_of("hf-dinov2")
    shared = share(model)
    add_lora(shared, "a", 4)
    mine = lora_parameters(shared, "a")
    trained = [p for p in shared.parameters() if p.requires_grad]
    assert {id(p) for p in trained} == {id(p) for p in mine}
    randomise(shared, "a")
    shared(images).square().sum().backward()
    assert all(bool(p.grad.abs().max() > 0) for p in mine)
    assert all(p.grad is None for p in model.parameters())


def test_two_updates_switch(images):
    model = model_of("timm-vit")
    shared, outputs = share(model), {}
    for seed, name in enumerate(("a", "b")):
        add_lora(shared, name, 4 + seed)
        randomise(shared, name, seed)
        outputs[name] = shared(images).detach()
        active = {id(p) for p in shared.parameters() if p.requires_grad}
        assert active == {id(p) for p in lora_parameters(shared, name)}
    assert (outputs["a"] - outputs["b"]).abs().max() > 1e-2
    for name in ("a", "b", "b", "a"):
        use_lora(shared, name)
        assert torch.equal(shared(images), outputs[name])
        active = {id(p) for p in shared.parameters() if p.requires_grad}
        assert active == {id(p) for p in lora_parameters(shared, name)}
    assert numbers(lora_parameters(shared, "b")) * 4 == 5 * numbers(
        lora_parameters(shared, "a")
    )
    assert torch.equal(model(images), share(model)(images))


@every_network
def test_an_update_survives_saving(network, images):
    model = model_of(network)
    first = share(model)
    add_lora(first, "a", 4)
    randomise(first, "a", 3)
    saved = {k: v.clone() for k, v in lora_state(first, "a").items()}
    second = share(model)
    add_lora(second, "other", 4)
    assert not torch.equal(second(images), first(images))
    load_lora(second, "other", saved)
    assert torch.equal(second(images), first(images))


def test_what_does_not_fit_is_refused():
    shared = share(model_of("hf-dinov2"))
    with pytest.raises(ValueError, match="rank must be at least 1; got 0"):
        add_lora(shared, "a", 0)
    with pytest.raises(ValueError, match=r"name must be of a low-rank update .*; got 'a'"):
        use_lora(shared, "a")
    add_lora(shared, "a", 4)
    with pytest.raises(ValueError, match=r"name must be new; there is .* 'a' already"):
        add_lora(shared, "a", 4)
    with pytest.raises(ValueError, match=r"name must be of a low-rank update .*; got 'b'"):
        use_lora(shared, "b")
    state = lora_state(shared, "a")
    with pytest.raises(ValueError, match=r"state must have the 24 matrices of .* 'a' in"):
        load_lora(shared, "a", dict(list(state.items())[1:]))
    add_lora(shared, "thin", 2)
    with pytest.raises(ValueError, match="in their shapes; got 24 that differ"):
        load_lora(shared, "thin", state)


@pytest.mark.parametrize("name", ["", "a.b"])
def test_names_that_no_path_can_hold_are_refused(name):
    with pytest.raises(ValueError, match="name must have a letter"):
        add_lora(share(model_of("hf-dinov2")), name, 4)


def test_a_backbone_that_names_no_layers_is_refused():
    class Other(torch.nn.Module):
        num_blocks = 1

    with pytest.raises(ValueError, match=r"linear layers are known, .*; got Other"):
        add_lora(share_of(Other()), "a", 4)


def test_a_shared_copy_can_be_edited_apart():
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    other = shared_copy(module)
    assert other[0] is not module[0]
    assert other[0].weight is module[0].weight
    assert other[1].running_mean is module[1].running_mean
    other[0] = torch.nn.Identity()
    assert isinstance(module[0], torch.nn.Linear)
