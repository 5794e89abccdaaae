"""Oracle: the computation itself, called by hand; how often it is called."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.testing import assert_close

from foveate.data.crops import Crops, Photographs
from foveate.data.folder import ImageTransform
from foveate.training import targets
from foveate.training.modes import leading_modes
from foveate.training.probes import Cut, pull_back
from foveate.training.targets import Targets, TargetSpec, compute_targets, model_hash
from tests import tiny
from tests.test_crops import draw

CUTS = (Cut(0, "between"), Cut(1, "before"), Cut(1, "between"))

# --- on disk ------------------------------------------------------------------------------

PROBES = TargetSpec("probes", "cls", CUTS, 2)
MODES = TargetSpec("modes", "cls", (Cut(1, "before"),), 2)
NORMS = TargetSpec("norms", "cls", (Cut(1, "before"),), 2)


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    return [draw(folder / f"{i}.png", (30 + 5 * i, 40), seed=i) for i in range(3)]


@pytest.fixture
def crops(dense_model, files):
    return Crops(files, dense_model.transform, 19)


@pytest.fixture
def counted(monkeypatch):
    """How many images each computation was given."""
    calls = []

    def count(function):
        def call(model, task, images, *rest):
            calls.append(len(images))
            return function(model, task, images, *rest)

        return call

    monkeypatch.setattr(targets, "pull_back", count(targets.pull_back))
    monkeypatch.setattr(targets, "leading_modes", count(targets.leading_modes))
    return calls


def read(folder, num, spec, cut, index):
    return Targets(folder, num, cut, spec.names).batch(torch.tensor(index))


@pytest.mark.parametrize("spec", [PROBES, MODES, NORMS], ids=lambda s: s.kind)
def test_what_is_read_is_what_was_computed(dense_model, crops, tmp_path, counted, spec):
    told = []
    folder = compute_targets(
        dense_model, crops, spec, tmp_path / "t", lambda *now: told.append(now)
    )
    assert counted == [8, 8, 3]
    assert told == [(8, 19), (16, 19), (19, 19)]
    compute = leading_modes if spec.kind == "modes" else pull_back
    for cut in spec.cuts:
        found = read(folder, 19, spec, cut, [18, 2, 9, 2])
        assert set(found) == set(spec.names)
        for row, index in enumerate([18, 2, 9, 2]):
            first = index // 8 * 8
            images = crops.batch(first, min(19, first + 8))
            truth = compute(dense_model, "cls", images, spec.cuts, 2, first)
            for name in spec.names:
                expected = truth[f"{name}.{cut}"][index - first].float()
                assert_close(found[name][row], expected, rtol=1e-3, atol=1e-4)
                assert found[name].dtype == torch.float32
    with safe_open(folder / "targets-000000.safetensors", "pt") as shard:
        kept = set(shard.keys())
    assert kept == {f"{name}.{cut}" for name in spec.names for cut in spec.cuts}


def test_a_second_call_computes_nothing(dense_model, crops, tmp_path, counted):
    folder = compute_targets(dense_model, crops, NORMS, tmp_path / "t")
    before = {f.name: (f.read_bytes(), f.stat().st_mtime_ns) for f in folder.iterdir()}
    counted.clear()
    compute_targets(dense_model, crops, NORMS, tmp_path / "t")
    assert not counted
    after = {f.name: (f.read_bytes(), f.stat().st_mtime_ns) for f in folder.iterdir()}
    assert after == before
    assert sorted(before) == [
        "manifest.json",
        *(f"targets-{i:06d}.safetensors" for i in range(3)),
    ]


@pytest.mark.parametrize("when", ["while it is computed", "while it is written"])
def test_a_killed_run_leaves_whole_shards_and_goes_on(
    dense_model, crops, tmp_path, counted, monkeypatch, when
):
    truth = compute_targets(dense_model, crops, NORMS, tmp_path / "truth")
    counted.clear()
    compute, save = targets.pull_back, targets.save_file

    def die(*given):
        if len(counted) == 1:
            raise KeyboardInterrupt
        return compute(*given)

    def half(state, file, metadata):
        save(state, file, metadata)
        if len(counted) == 2:
            file.write_bytes(file.read_bytes()[:100])
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if when == "while it is computed":
            patch.setattr(targets, "pull_back", die)
        else:
            patch.setattr(targets, "save_file", half)
        with pytest.raises(KeyboardInterrupt):
            compute_targets(dense_model, crops, NORMS, tmp_path / "t")
    names = {f.name for f in (tmp_path / "t").glob("*.safetensors")}
    assert names == {"targets-000000.safetensors"}
    counted.clear()
    folder = compute_targets(dense_model, crops, NORMS, tmp_path / "t")
    assert counted == [8, 3]
    cut, everything = NORMS.cuts[0], range(19)
    found, expected = (read(f, 19, NORMS, cut, everything) for f in (folder, truth))
    assert all(torch.equal(found[name], expected[name]) for name in NORMS.names)


def test_a_longer_list_adds_to_a_shorter_one(dense_model, crops, tmp_path, counted):
    folder = tmp_path / "t"
    compute_targets(dense_model, replace(crops, num=8), NORMS, folder)
    first = (folder / "targets-000000.safetensors").read_bytes()
    compute_targets(dense_model, replace(crops, num=11), NORMS, folder)
    assert counted == [8, 3]
    compute_targets(dense_model, crops, NORMS, folder)
    assert counted == [8, 3, 8, 3]  # the shard that was not full is computed again
    compute_targets(dense_model, replace(crops, num=10), NORMS, folder)
    assert counted == [8, 3, 8, 3]
    assert (folder / "targets-000000.safetensors").read_bytes() == first
    truth = compute_targets(dense_model, crops, NORMS, tmp_path / "truth")
    cut = NORMS.cuts[0]
    for name, value in read(truth, 19, NORMS, cut, range(19)).items():
        assert torch.equal(read(folder, 19, NORMS, cut, range(19))[name], value)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"spec": {"rows": 3}}, "rows 3; .* has 2"),
        ({"spec": {"seed": 1}}, "seed 1; .* has 0"),
        ({"spec": {"task": "saliency"}}, "task 'saliency'; .* has 'cls'"),
        ({"spec": {"kind": "modes"}}, "kind 'modes'; .* has 'norms'"),
        ({"spec": {"cuts": (Cut(0, "before"),)}}, "cuts .*'depth': 0.* has .*'depth': 1"),
        ({"crops": {"seed": 4}}, "crop_seed 4; .* has 0"),
        ({"crops": {"scale": (0.5, 1.0)}}, r"scale \[0\.5, 1\.0\]; .* has \[0\.25, 1\.0\]"),
        ({"crops": {"transform": ImageTransform(16)}}, "size 16; .* has 20"),
    ],
)
def test_targets_of_something_else_are_refused_by_name(
    dense_model, crops, tmp_path, counted, change, field
):
    compute_targets(dense_model, replace(crops, num=1), NORMS, tmp_path / "t")
    counted.clear()
    spec = replace(NORMS, **change.get("spec", {}))
    other = replace(crops, **change.get("crops", {}))
    with pytest.raises(ValueError, match=rf"targets must have {field}"):
        compute_targets(dense_model, other, spec, tmp_path / "t")
    assert not counted


def test_targets_of_other_files_or_weights_are_refused(
    dense_model, crops, files, tmp_path, counted
):
    folder = compute_targets(dense_model, replace(crops, num=1), NORMS, tmp_path / "t")
    with pytest.raises(ValueError, match="targets must have files '"):
        compute_targets(dense_model, replace(crops, files=files[:2]), NORMS, folder)
    whole = Photographs(files, dense_model.transform)
    with pytest.raises(ValueError, match="targets must have scale None"):
        compute_targets(dense_model, whole, NORMS, folder)
    with torch.no_grad():
        next(dense_model.parameters()).flatten()[0] += 1e-3
    with pytest.raises(ValueError, match="targets must have model_hash '"):
        compute_targets(dense_model, crops, NORMS, folder)


@pytest.mark.parametrize("content", [b"", b"garbage" * 30, None])
def test_a_broken_shard_is_refused_by_name(dense_model, crops, tmp_path, content):
    folder = compute_targets(dense_model, crops, NORMS, tmp_path / "t")
    shard = folder / "targets-000001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-9] if content is None else content)
    with pytest.raises(ValueError, match=r"targets must be safetensors; .*-000001\.safe"):
        compute_targets(dense_model, crops, NORMS, folder)


def test_a_shard_from_elsewhere_is_refused_by_name(dense_model, crops, tmp_path):
    folder = compute_targets(dense_model, replace(crops, num=1), NORMS, tmp_path / "t")
    file = folder / "targets-000000.safetensors"
    save_file({"x": torch.zeros(1)}, file)
    with pytest.raises(ValueError, match=r"targets must have format .*-000000\.safetens"):
        compute_targets(dense_model, crops, NORMS, folder)


def test_a_broken_manifest_is_refused_by_name(dense_model, crops, tmp_path):
    folder = compute_targets(dense_model, replace(crops, num=1), NORMS, tmp_path / "t")
    manifest = folder / "manifest.json"
    assert json.loads(manifest.read_text())["kind"] == "norms"
    manifest.write_text("{")
    with pytest.raises(ValueError, match=r"targets must have a manifest; .*manifest\.json"):
        compute_targets(dense_model, crops, NORMS, folder)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"rows": 0}, "rows and cuts must be at least 1; got 0 and 1"),
        ({"cuts": ()}, "rows and cuts must be at least 1; got 2 and 0"),
        ({"cuts": (Cut(1),)}, "place must be 'before' for modes; got 'between'"),
    ],
)
def test_targets_that_cannot_be_are_refused(change, wrong):
    with pytest.raises(ValueError, match=wrong):
        replace(MODES, **change)


# --- the hash of a model ------------------------------------------------------------------


def test_the_hash_says_whether_weights_are_the_same():
    first, second = tiny.dense_model(), tiny.dense_model()
    assert model_hash(first) == model_hash(second)
    name, buffer = next((n, b) for n, b in second.named_buffers() if "running_var" in n)
    assert name
    buffer[0] += 1e-6
    assert model_hash(first) != model_hash(second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_precision_has_a_hash(dtype):
    assert model_hash(tiny.dense_model(dtype)) == model_hash(tiny.dense_model(dtype))
    assert model_hash(tiny.dense_model(dtype)) != model_hash(tiny.dense_model())


def test_targets_of_a_bfloat16_model(files, tmp_path):
    model = tiny.dense_model(torch.bfloat16)
    crops = Crops(files, model.transform, 2)
    compute_targets(model, crops, PROBES, tmp_path / "t")
    found = read(tmp_path / "t", 2, PROBES, CUTS[1], [0, 1])
    assert all(value.isfinite().all() for value in found.values())
