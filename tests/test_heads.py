"""Oracle: the network that was saved; a wrong value for each rule; the bytes on disk."""

import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.testing import assert_close

from foveate.scoring import heads
from foveate.scoring.heads import (
    build_network,
    find_head,
    head_name,
    load_head,
    save_head,
)
from tests import tiny

every_kind = pytest.mark.parametrize("kind", tiny.HEAD_CONFIG)


def numbers(head):
    """All that a head says about some tokens."""
    x = torch.randn(2, 7, tiny.WIDTH, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found = head.network(x, 2)
    return found.sketch() if head.kind == "metric" else found


@pytest.fixture
def file(tmp_path):
    """A head for importance, saved."""
    file = tmp_path / "head.safetensors"
    save_head(tiny.untrained_head("importance"), file)
    return file


def rewrite(file, change_metadata=None, change_state=None):
    """Save a head again with something else in it."""
    with safe_open(file, "pt") as opened:
        metadata = dict(opened.metadata())
        state = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    if change_metadata:
        change_metadata(metadata)
    if change_state:
        change_state(state)
    save_file(state, file, metadata)


@every_kind
def test_a_head_comes_back_as_it_was(kind, tmp_path):
    head = tiny.untrained_head(kind, depth=2, place="before", provenance={"a": [1, 0.5]})
    save_head(head, tmp_path / "new/deep/head.safetensors")
    found = load_head(tmp_path / "new/deep/head.safetensors")
    for name in ("kind", "model", "task", "depth", "place", "config", "provenance"):
        assert getattr(found, name) == getattr(head, name)
    state = head.network.state_dict()
    assert state.keys() == found.network.state_dict().keys()
    for name, weight in found.network.state_dict().items():
        assert torch.equal(weight, state[name])
    assert torch.equal(numbers(found), numbers(head))
    assert not found.network.training
    assert not any(p.requires_grad for p in found.network.parameters())
    assert [f.name for f in (tmp_path / "new/deep").iterdir()] == ["head.safetensors"]


@every_kind
def test_half_precision_rounds_matrices_alone(kind, tmp_path):
    head = tiny.untrained_head(kind)
    full, half = tmp_path / "full.safetensors", tmp_path / "half.safetensors"
    save_head(head, full)
    save_head(head, half, half=True)
    found = load_head(half)
    for name, weight in head.network.state_dict().items():
        kept = found.network.state_dict()[name]
        assert kept.dtype == torch.float32
        assert torch.equal(kept, weight.half().float() if weight.ndim > 1 else weight)
    assert_close(numbers(found), numbers(head), rtol=0.05, atol=0.05)
    saved = sum(2 * w.numel() for w in head.network.state_dict().values() if w.ndim > 1)
    assert abs(os.path.getsize(full) - os.path.getsize(half) - saved) < 64


def test_a_folder_is_searched_by_name(tmp_path):
    for kind, depth in (("importance", 1), ("importance", 2), ("metric", 1)):
        head = tiny.untrained_head(kind, depth=depth)
        save_head(head, tmp_path / head_name("cls", depth, kind))
    assert head_name("cls", 2, "metric") == "cls-2-metric.safetensors"
    found = find_head(str(tmp_path), "tiny", "cls", 2, "importance")
    assert (found.kind, found.depth) == ("importance", 2)
    wrong = (
        r"head must be given for 'cls' at depth 2 of tiny, of kind metric; the folder "
        rf"'{tmp_path}' has none \(train one with foveate distill metric\)"
    )
    with pytest.raises(ValueError, match=wrong):
        find_head(str(tmp_path), "tiny", "cls", 2, "metric")


def test_heads_of_the_package_have_a_folder_a_model(tmp_path, monkeypatch):
    monkeypatch.setattr(heads, "files", lambda package: tmp_path / package)
    name = head_name("cls", 1, "importance")
    head = tiny.untrained_head("importance", model="hf:some/net", depth=1)
    save_head(head, tmp_path / "foveate/heads/hf-some-net" / name)
    assert find_head("", "hf:some/net", "cls", 1, "importance").model == "hf:some/net"
    with pytest.raises(ValueError, match=r"the package has none \(train one with foveate"):
        find_head("", "hf:some/net", "cls", 2, "importance")


@pytest.mark.parametrize(
    ("asked", "wrong"),
    [
        (("big", "cls", 0, "importance"), "model 'big'; .* is for 'tiny'"),
        (("tiny", "saliency", 0, "importance"), "task 'saliency'; .* is for 'cls'"),
        (("tiny", "cls", 1, "importance"), "depth 1; .* is for 0"),
        (("tiny", "cls", 0, "metric"), "kind 'metric'; .* is for 'importance'"),
    ],
)
def test_a_head_for_something_else_is_refused(file, asked, wrong):
    assert find_head(str(file), "tiny", "cls", 0, "importance").kind == "importance"
    with pytest.raises(ValueError, match=f"head must be for {wrong}"):
        find_head(str(file), *asked)


@pytest.mark.parametrize(
    "content", [b"", b"garbage" * 20, b"\x08" + 7 * b"\0" + b"{}      "]
)
def test_a_file_of_something_else_is_refused(tmp_path, content):
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"head must .*x\.safetensors"):
        load_head(file)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"head must be a safetensors file; .*gone"):
        find_head(str(tmp_path / "gone.safetensors"), "tiny", "cls", 0, "importance")


def test_half_a_file_is_refused(file):
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"head must be a safetensors file; .*head"):
        load_head(file)


@pytest.mark.parametrize(
    ("key", "value", "wrong"),
    [
        ("version", "2", "version 1; .* 'foveate-head' and 2"),
        ("format", "pt", "format 'foveate-head' .* 'pt' and 1"),
        ("head", "{", "head must say what it is for .*; .*head.safetensors"),
        ("head", "{}", "head must say what it is for .*; .*head.safetensors"),
        ("head", "[1]", "head must say what it is for .*; .*head.safetensors"),
    ],
)
def test_another_version_is_refused(file, key, value, wrong):
    rewrite(file, lambda metadata: metadata.update({key: value}))
    with pytest.raises(ValueError, match=wrong):
        load_head(file)


def test_another_field_is_refused(file):
    def change(metadata):
        said = json.loads(metadata["head"])
        metadata["head"] = json.dumps({**said, "colour": "red"})

    rewrite(file, change)
    with pytest.raises(ValueError, match=r"head must say what it is for .*; .*colour"):
        load_head(file)


def test_weights_that_do_not_fit_are_refused(file):
    rewrite(file, change_state=lambda state: state.pop("log_unit"))
    with pytest.raises(ValueError, match=r"(?s)weights of its kind; .*log_unit"):
        load_head(file)


def test_not_a_number_among_the_weights_is_refused(file):
    rewrite(file, change_state=lambda state: state["log_unit"].fill_(float("nan")))
    with pytest.raises(ValueError, match=r"weights must be finite; .* 'log_unit'"):
        load_head(file)


@pytest.mark.parametrize(
    ("kind", "config", "wrong"),
    [
        ("importanc", {}, r"kind must be one of \('importance', .*; got 'importanc'"),
        (
            "importance",
            {"channels": 4, "colour": 1},
            "config must fit .* importance.*colour",
        ),
        ("metric", {"channels": 4, "rank": 0}, "rank must be at least 1; got 0"),
        ("factors", {"channels": 4, "dims": 5}, "dims from 1 to 4; got"),
    ],
)
def test_networks_that_cannot_be_built_are_refused(kind, config, wrong):
    with pytest.raises(ValueError, match=wrong):
        build_network(kind, config)


def test_a_write_that_fails_leaves_the_file_before(file, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    before = file.read_bytes()
    monkeypatch.setattr(heads, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save_head(tiny.untrained_head("metric"), file)
    assert file.read_bytes() == before
