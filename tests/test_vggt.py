"""Oracle: the tiny network's own forward over sequences, finite differences, invariants."""

import sys

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from foveate.backbones import UnsupportedModelError
from foveate.backbones.vggt import VggtBackbone
from foveate.diagnosis.diagnose import diagnose
from foveate.diagnosis.jacobian import TokenJacobian, open_tap
from foveate.forward import run
from foveate.models import open_model
from foveate.tasks.pose import CameraPose, FrameDepth
from tests import tiny, tiny_vggt

TASKS = ("camera", "depth")
OPTIONS = ({}, {"rotates": False}, {"as_dictionary": True})
NUM_PREFIX = 1 + tiny_vggt.REGISTERS


@pytest.fixture(scope="module")
def network():
    return tiny_vggt.vggt().double()


@pytest.fixture(scope="module")
def model(network):
    return open_model(network)


@pytest.fixture
def images():
    return tiny_vggt.frames(torch.float64)


# --- equal to the network -----------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", [tiny.IMAGE, tiny.OTHER_IMAGE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_are_those_of_the_network_on_single_frames(options, size, dtype):
    network = tiny_vggt.vggt(**options).to(dtype)
    images = tiny.random_images(size, dtype).sigmoid()
    own, model = network(images[:, None]), open_model(network)
    error = 1e-5 if dtype == torch.float32 else 1e-12
    for task in TASKS:
        assert_close(model(images, task), own[task][:, 0], rtol=0, atol=error)
        assert torch.equal(model(images[:, None], task), model(images, task))


def test_taps_are_the_halves_of_the_stages(network, model, images):
    stages, num_prefix = network.aggregator(images[:, None])
    backbone = model.backbone
    _, kept = run(backbone, backbone.embed(images), 0, 6, taps=range(7))
    assert num_prefix == NUM_PREFIX
    for index, stage in enumerate(stages):
        halves = [kept[2 * index + i].x for i in (1, 2)]
        assert_close(torch.cat(halves, -1), stage[:, 0], rtol=0, atol=1e-12)


def test_layout_and_counts(model, images):
    backbone = model.backbone
    tokens = backbone.embed(images)
    assert tokens.layout.num_prefix == NUM_PREFIX
    assert (tokens.layout.grid, tokens.layout.image_size) == (tiny.GRID, tiny.IMAGE)
    assert (backbone.num_blocks, backbone.num_channels, backbone.num_heads) == (6, 36, 3)
    assert backbone.macs_per_token(1) == (4 * 36**2, 4 * 36**2)
    assert backbone.attention_channels(1) == 36
    assert model.task("camera").taps(6) == (5, 6)
    assert model.task("depth").taps(6) == (1, 2, 5, 6)
    assert (model.transform.size, model.transform.mean) == (516, (0, 0, 0))


def test_training_mode_drops_what_the_network_drops(images):
    network = tiny_vggt.vggt().double()
    for part in network.aggregator.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.3
    backbone = VggtBackbone(network.aggregator).train()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        truth = network.aggregator(images[:, None])[0][-1][:, 0]
        torch.manual_seed(3)
        found = run(backbone, backbone.embed(images), 0, 6)[0].x
    assert_close(found, truth[..., tiny_vggt.WIDTH :])
    whole = network.eval().aggregator(images[:, None])[0][-1][:, 0]
    assert not torch.allclose(truth, whole, atol=1e-3)


def test_a_frame_is_the_first_of_its_sequence(network, images):
    sequence = torch.stack([images[0], images[0]])[None]
    stages, _ = network.aggregator(sequence)
    assert not torch.allclose(stages[0][0, 0], stages[0][0, 1])
    alone, _ = network.aggregator(images[:1, None])
    found = VggtBackbone(network.aggregator).embed(images)
    assert torch.equal(found.prefix[0, 0], network.aggregator.camera_token[0, 0, 0])
    within, itself = (x[0][0, 0, :, : tiny_vggt.WIDTH] for x in (stages, alone))
    assert_close(within, itself)  # the first frame block does not see the second frame


def test_kept_patches_take_their_positions_along(network, model, images):
    kept = torch.tensor([2, 3, 11, 17, 30])
    backbone = model.backbone
    full = backbone.embed(images)
    x = torch.cat([full.prefix, full.patches[:, kept]], dim=1)
    pos = torch.cat([torch.zeros(2, NUM_PREFIX, 2), full.position[:, kept]], dim=1)
    truth = network.aggregator.frame_blocks[0](x, pos)
    few = full.with_(x=x, position=full.position[:, kept])
    assert_close(run(backbone, few, 0, 1)[0].x, truth, rtol=0, atol=1e-12)
    wrong = full.with_(x=x, position=full.position[:, kept.flip(0)])
    assert not torch.allclose(run(backbone, wrong, 0, 1)[0].x, truth, atol=1e-3)


def test_a_size_stands_for_repeated_patches(model, images):
    backbone = model.backbone
    full = backbone.embed(images)
    size = torch.ones(2, 35, dtype=torch.float64)
    size[:, 4], size[:, 9] = 3, 2
    copies = torch.tensor([4, 4, 9])
    again = full.with_(
        x=torch.cat([full.x, full.patches[:, copies]], dim=1),
        position=torch.cat([full.position, full.position[:, copies]], dim=1),
    )
    truth = run(backbone, again, 0, 6)[0].x[:, : full.x.shape[1]]
    sized = run(backbone, full.with_(size=size, proportional=True), 0, 6)[0].x
    assert_close(sized, truth, rtol=0, atol=1e-12)


# --- Jacobians ----------------------------------------------------------------------------


def test_a_camera_takes_the_exact_route_and_nine_directions_hold_it(model, images):
    found = diagnose(model, images, task="camera", depth=2, rank=9)
    assert (found.route, found.num_outputs) == ("exact", 9)
    assert found.products.vjp == 1 + 9
    for tokens in ("all", "patches"):
        assert found.summary(tokens)["kappa_cap"]["mean"] == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("task", TASKS)
def test_products_are_finite_differences_although_the_head_detaches(model, images, task):
    tap = open_tap(model.backbone, model.task(task), images, 3)
    jacobian, h = TokenJacobian(tap.tail, tap.tokens.x), 1e-6
    v = torch.randn(jacobian.tokens.shape, generator=torch.Generator().manual_seed(0))
    v = v.double()
    differences = (
        tap.tail(jacobian.tokens + h * v) - tap.tail(jacobian.tokens - h * v)
    ) / (2 * h)
    assert_close(jacobian.jvp(v[None])[0], differences, rtol=1e-5, atol=1e-7)
    assert jacobian.route == "recorded"


def test_the_head_by_itself_has_another_derivative(network):
    """So the test above would fail if detaching were left alone."""
    stage = tiny.random_images((1, 24), torch.float64).view(2, 1, 1, 72)
    task, v, h = CameraPose(network.camera_head), stage.flip(-1).sin(), 1e-6

    def whole(x):
        return task.decode(None, x[:, 0].chunk(2, dim=-1), None)

    assert torch.equal(whole(stage), network.camera_head([stage])[-1][:, 0])
    truth = (whole(stage + h * v) - whole(stage - h * v)) / (2 * h)
    with sdpa_kernel(SDPBackend.MATH):
        (_, ours), (_, alone) = (
            torch.func.jvp(f, (stage,), (v,))
            for f in (whole, lambda x: network.camera_head([x])[-1][:, 0])
        )
    assert_close(ours, truth, rtol=1e-5, atol=1e-7)
    assert not torch.allclose(alone, truth, rtol=0.01)


def test_patches_move_the_camera_up_to_the_last_block(model, images):
    tap = open_tap(model.backbone, model.task("camera"), images, 5)
    pulled = TokenJacobian(tap.tail, tap.tokens.x).vjp(torch.ones(1, 2, 9).double())
    assert pulled[:, :, NUM_PREFIX:].abs().max() > 0  # the last global block still mixes
    with pytest.raises(ValueError, match="depth must be from 0 to 5 for this task"):
        open_tap(model.backbone, model.task("camera"), images, 6)


# --- what is refused ----------------------------------------------------------------------


def test_sequences_of_several_frames_are_refused(model, images):
    with pytest.raises(ValueError, match=r"sequences of one frame.*got 2 frames"):
        model(images[None], "camera")


def without(name):
    network = tiny_vggt.vggt()
    delattr(network.aggregator, name)
    return network


def with_order(order, group):
    network = tiny_vggt.vggt()
    network.aggregator.aa_order, network.aggregator.aa_block_size = order, group
    return network


def with_child(path, child):
    network = tiny_vggt.vggt()
    parent, _, name = path.rpartition(".")
    setattr(network.aggregator.get_submodule(parent), name, child)
    return network


def without_heads():
    network = tiny_vggt.vggt()
    network.camera_head = network.depth_head = None
    return network


REFUSED = {
    "token": (lambda: without("register_token"), "must have 'register_token'; got a Agg"),
    "blocks": (lambda: without("global_blocks"), "must have 'global_blocks'"),
    "order": (lambda: with_order(["global", "frame"], 1), r"got \['global', 'frame'\]"),
    "group": (lambda: with_order(["frame", "global"], 2), "got .* and 2"),
    "trunk": (lambda: with_child("merger", nn.Identity()), "unknown module 'merger'"),
    "block": (
        lambda: with_child("global_blocks.1.attn.merge", nn.Identity()),
        r"unknown module 'global_blocks\.1\.attn\.merge' \(Identity\)",
    ),
    "path": (
        lambda: with_child("frame_blocks.2.drop_path1", nn.Dropout(0.1)),
        r"frame_blocks\.2\.drop_path1 must be an Identity.*got Dropout",
    ),
    "heads": (without_heads, "'camera_head' or a 'depth_head'.*got a TinyVggt"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_laid_out_otherwise_is_refused_by_name(name):
    build, message = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=message):
        open_model(build())


def test_one_head_is_enough():
    network = tiny_vggt.vggt()
    network.depth_head = None
    assert list(open_model(network).tasks) == ["camera"]


@pytest.mark.parametrize("stages", [[], [2, 0], [1, 1], [-1]])
def test_stages_must_ascend(stages):
    with pytest.raises(ValueError, match=r"stages must ascend from 0 or more; got \["):
        FrameDepth(nn.Identity(), stages)


def test_stages_must_exist():
    with pytest.raises(ValueError, match=r"stages must be below 3, .*; got 3"):
        FrameDepth(nn.Identity(), [0, 3]).taps(6)


def test_a_pose_takes_a_round():
    with pytest.raises(ValueError, match="num_iterations must be at least 1; got 0"):
        CameraPose(nn.Identity(), 0)


# --- by name ------------------------------------------------------------------------------


def test_a_missing_package_is_named():
    with pytest.raises(ValueError, match="'vggt:x/y' needs the package vggt"):
        open_model("vggt:x/y")


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A package ``vggt`` that loads the tiny network, and is forgotten afterwards."""
    folder = tmp_path / "vggt" / "models"
    folder.mkdir(parents=True)
    for place in (folder.parent, folder):
        (place / "__init__.py").touch()
    (folder / "vggt.py").write_text(
        "from tests import tiny_vggt\n"
        "class VGGT:\n"
        "    @staticmethod\n"
        "    def from_pretrained(source):\n"
        "        assert source == 'x/y', source\n"
        "        return tiny_vggt.vggt()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [n for n in sys.modules if n.partition(".")[0] == "vggt"]:
        del sys.modules[name]


@pytest.mark.usefixtures("package")
def test_a_name_goes_to_the_package():
    model = open_model("vggt:x/y", size=28)
    assert (model.name, model.transform.size) == ("vggt:x/y", 28)
    assert list(model.tasks) == ["camera", "depth"]
    with pytest.raises(ValueError, match="'vggt:z' could not be loaded: z"):
        open_model("vggt:z")
