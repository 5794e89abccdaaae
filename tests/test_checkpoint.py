"""Oracle: the bytes that were saved; a wrong value for each rule; the network changed."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from foveate.models import open_model
from foveate.models.checkpoint import (
    HeadSpec,
    add_heads,
    open_heads,
    read_checkpoint,
    read_weights,
    save_heads,
    write_checkpoint,
)
from tests import labelled, tiny

SPECS = {
    name: HeadSpec(
        kind,
        labelled.CLASSES if num == 3 else ("background", *labelled.CLASSES),
        settings,
        {"data": "scenes", "loss": 0.5},
    )
    for name, (kind, num, settings) in labelled.HEADS.items()
}


@pytest.fixture
def network(tmp_path):
    """A network on disk."""
    tiny.hf_dinov2().save_pretrained(tmp_path / "network")
    return tmp_path / "network"


@pytest.fixture
def model(network):
    """The same as a model with random heads."""
    heads = {name: labelled.model_with_heads().task(name) for name in SPECS}
    return add_heads(open_model(network, 32), heads).eval()


@pytest.fixture
def saved(model, tmp_path):
    """A checkpoint of its heads."""
    save_heads(tmp_path / "heads", model, SPECS)
    return tmp_path / "heads"


def edit(folder, **changes):
    file = folder / "checkpoint.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_heads_come_back_bit_for_bit(model, saved):
    opened = open_model(saved)
    assert opened.transform.size == 32
    for name in SPECS:
        before, after = (m.tasks[name].state_dict() for m in (model, opened))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert not opened.tasks[name].training
        assert not any(p.requires_grad for p in opened.tasks[name].parameters())
    images = tiny.random_images((32, 32))
    for name in ("label", "mask", "objects"):
        assert torch.equal(opened(images, name), model(images, name))


def test_only_the_heads_are_saved(model, saved):
    weights = load_file(saved / "weights.safetensors")
    assert {key.partition(".")[0] for key in weights} == set(SPECS)
    record = read_checkpoint(saved, "heads")
    assert record["tasks"]["mask"]["classes"] == ["background", *labelled.CLASSES]
    assert record["tasks"]["mask"]["provenance"] == {"data": "scenes", "loss": 0.5}
    assert record["size"] == 32
    assert sorted(f.name for f in saved.iterdir()) == [
        "checkpoint.json",
        "weights.safetensors",
    ]


def test_heads_are_added_to_a_copy(model):
    bare = labelled.bare_model()
    more = add_heads(bare, {"label": model.task("label")})
    assert list(bare.tasks) == ["cls"]
    assert list(more.tasks) == ["cls", "label"]
    assert more.backbone is bare.backbone
    assert not more.training


def test_a_backbone_with_other_weights_is_refused(saved, network):
    file = network / "model.safetensors"
    weights = load_file(file)
    name = next(key for key in weights if key.endswith("query.weight"))
    weights[name][0, 0] += 1e-3
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"must be of the weights of .*\(hash \w{12}\)"):
        open_heads(saved)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda f: (f / "checkpoint.json").write_text("{"),
            r"must hold checkpoint.json; '.*checkpoint.json'",
        ),
        (lambda f: (f / "checkpoint.json").write_text("[]"), r"must have format .*has 0"),
        (lambda f: edit(f, version=2), r"version 1; '.*' has \('foveate-checkpoint', 2\)"),
        (lambda f: edit(f, kind="tap-j"), r"must be of heads; '.*heads' is of tap-j"),
        (
            lambda f: (f / "weights.safetensors").unlink(),
            r"must hold weights.safetensors; '.*heads'",
        ),
        (
            lambda f: (f / "weights.safetensors").write_bytes(b"torn"),
            r"must hold weights.safetensors; '.*heads'",
        ),
    ],
)
def test_damaged_files_are_named(saved, spoil, message):
    spoil(saved)
    with pytest.raises(ValueError, match=message):
        open_heads(saved)


def change_weights(folder, change):
    file = folder / "weights.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file)


def test_weights_must_fit_and_be_finite(saved):
    name = "mask.decoder.classifier.bias"
    change_weights(saved, lambda w: w[name].fill_(torch.nan))
    with pytest.raises(ValueError, match=r"4 NaN or infinite values in 'decoder.class"):
        open_heads(saved)
    change_weights(saved, lambda w: w.pop(name))
    with pytest.raises(ValueError, match=r"must hold the weights of its heads; .*heads'"):
        open_heads(saved)
    change_weights(saved, lambda w: w.update({name: torch.zeros(7)}))
    with pytest.raises(ValueError, match=r"must hold the weights of its heads; .*heads'"):
        open_heads(saved)


def test_the_record_is_written_last(tmp_path, monkeypatch):
    """A run that dies while it saves leaves nothing that could be opened."""
    import foveate.models.checkpoint as module

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(module, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        write_checkpoint(tmp_path / "new", {"kind": "heads"}, {"a": torch.ones(1)})
    with pytest.raises(ValueError, match=r"must hold checkpoint.json"):
        read_checkpoint(tmp_path / "new")


def test_any_weights_can_be_kept(tmp_path):
    weights = {
        "a": torch.arange(6.0).reshape(2, 3).T,
        "b": torch.ones((), dtype=torch.int64),
    }
    write_checkpoint(tmp_path, {"kind": "other", "more": [1]}, weights)
    read = read_weights(tmp_path)
    assert all(torch.equal(read[key], weights[key]) for key in weights)
    assert read_checkpoint(tmp_path)["more"] == [1]
