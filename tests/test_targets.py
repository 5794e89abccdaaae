"""Oracle: materialised float64 Jacobians, their SVD in numpy; calls that are counted."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.testing import assert_close

from foveate.data.crops import Crops, Photographs
from foveate.data.folder import ImageTransform
from foveate.forward import run
from foveate.models import Model
from foveate.training import targets
from foveate.training.modes import leading_modes
from foveate.training.probes import Cut, pull_back
from foveate.training.targets import Targets, TargetSpec, compute_targets, model_hash
from tests import tiny
from tests.reference_jacobian import materialise
from tests.test_crops import draw

CUTS = (Cut(0, "between"), Cut(1, "before"), Cut(1, "between"))
PREFIX, N = 1, 35


class Levels(torch.nn.Module):
    """Reads the mean of all tokens that enter blocks 1 and 2, and of the last ones."""

    needs_grid = True

    def taps(self, num_blocks):
        return (1, 2, num_blocks)

    def decode(self, backbone, features, layout):
        return torch.cat([x.square().mean(1) for x in features], dim=1)


@pytest.fixture(scope="module")
def double():
    model = tiny.dense_model(torch.float64)
    tasks = {**model.tasks, "levels": Levels()}
    return Model("tiny", model.backbone, tasks, model.transform).eval()


def jacobian_at(model, name, images, cut):
    """Tokens at a cut, and the Jacobian of each image there, ``(B, M, P + N, C)``."""
    backbone, task = model.backbone, model.task(name)
    taps, stop = task.taps(backbone.num_blocks), backbone.num_blocks
    tokens, early = run(backbone, backbone.embed(images), 0, cut.depth, taps=taps)
    if cut.place == "between":
        heads = backbone.project(cut.depth, tokens)
        tokens = backbone.attend(cut.depth, tokens, heads)

    def tail(x):
        image = next(i for i in range(len(images)) if torch.equal(tokens.x[i], x[0]))
        here, kept, start = tokens.with_(x=x), {}, cut.depth
        if cut.place == "between":
            here, start = backbone.transform(cut.depth, here), cut.depth + 1
        kept = run(backbone, here, start, stop, taps=taps)[1]
        old = {d: t.x[image : image + 1] for d, t in early.items()}
        read = tuple(kept[d].x if d in kept else old[d] for d in taps)
        return task.decode(backbone, read, tokens.layout).flatten(1)

    return tokens, materialise(tail, tokens.x)


def signs(seed, batch, outputs, num):
    generator = torch.Generator().manual_seed(seed)
    bits = [torch.randint(0, 2, (batch, outputs), generator=generator) for _ in range(num)]
    return 2.0 * torch.stack(bits).double() - 1


# --- probes -------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["cls", "levels"])
def test_rows_and_norms_are_those_of_the_materialised_jacobian(double, double_images, task):
    found = pull_back(double, task, double_images, CUTS, 3, seed=7)
    for cut in CUTS:
        tokens, jacobian = jacobian_at(double, task, double_images, cut)
        patches = jacobian[:, :, PREFIX:]
        drawn = signs(7, 2, jacobian.shape[1], 3)
        rows = torch.einsum("rbm,bmnc->bnrc", drawn, patches)
        unit = rows.square().mean((1, 2, 3)).sqrt()
        assert_close(found[f"unit.{cut}"], unit)
        assert_close(found[f"norm.{cut}"], rows.square().sum(3).mean(2).sqrt())
        scaled = rows / unit[:, None, None, None]
        assert_close(found[f"rows.{cut}"].double(), scaled, rtol=1e-3, atol=1e-4)
        assert_close(found[f"tokens.{cut}"], tokens.x.half())
    assert set(found) == {
        f"{name}.{cut}" for name in ("tokens", "rows", "unit", "norm") for cut in CUTS
    }
    assert found[f"rows.{CUTS[0]}"].shape == (2, N, 3, tiny.WIDTH)
    assert found[f"rows.{CUTS[0]}"].dtype == torch.float16


@pytest.mark.parametrize("task", ["cls", "saliency", "levels"])
def test_all_cuts_in_one_pass_are_as_each_on_its_own(double, double_images, task):
    cuts = (*CUTS, Cut(2, "before"))
    together = pull_back(double, task, double_images, cuts[::-1], 2, seed=1)
    for cut in cuts:
        alone = pull_back(double, task, double_images, (cut,), 2, seed=1)
        for name, value in alone.items():
            assert_close(together[name], value, rtol=1e-6, atol=1e-9)


def test_many_probes_have_the_frobenius_norm_in_the_mean(double, double_images):
    cut = Cut(1, "before")
    _, jacobian = jacobian_at(double, "cls", double_images, cut)
    truth = jacobian[:, :, PREFIX:].square().sum((1, 3))
    found = pull_back(double, "cls", double_images, [cut], 400, seed=0)["norm.1.before"]
    assert_close(found.square(), truth, rtol=0.35, atol=0)
    assert_close(found.square().mean(1), truth.mean(1), rtol=0.1, atol=0)


def test_pulling_back_leaves_the_model_as_it_was(dense_model, images):
    before = model_hash(dense_model)
    with torch.no_grad():
        found = pull_back(dense_model, "cls", images, CUTS, 1, seed=0)
    assert not any(value.requires_grad for value in found.values())
    assert all(p.grad is None for p in dense_model.parameters())
    assert model_hash(dense_model) == before


@pytest.mark.parametrize("depth", [-1, 3, 7])
def test_cuts_behind_what_the_task_reads_are_refused(double, double_images, depth):
    wrong = rf"cuts must lie before depth 3, the last that 'cls' .* got {depth}\.between\."
    with pytest.raises(ValueError, match=wrong):
        pull_back(double, "cls", double_images, [Cut(1), Cut(depth)], 1, seed=0)


def test_patches_that_do_not_matter_are_refused(double, double_images):
    wrong = r"output of 'cls' must depend on the patches at 2\.between\."
    with pytest.raises(ValueError, match=wrong):
        pull_back(double, "cls", double_images, [Cut(2)], 1, seed=0)


# --- modes --------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "tolerance"), [(12, 1e-6), (4, 0.2)])
def test_modes_are_those_of_the_svd_of_the_patch_columns(
    double, double_images, rank, tolerance
):
    cuts = (Cut(1, "before"), Cut(0, "before"))  # 36 outputs: 12 modes search them all
    found = leading_modes(double, "cls", double_images, cuts, rank, seed=0)
    for cut in cuts:
        tokens, jacobian = jacobian_at(double, "cls", double_images, cut)
        for image in range(2):
            patches = jacobian[image, :, PREFIX:].flatten(1).numpy()
            _, values, right = np.linalg.svd(patches, full_matrices=False)
            energies = found[f"energies.{cut}"][image].double().numpy()
            np.testing.assert_allclose(energies, values[:rank] ** 2, rtol=tolerance)
            assert (energies <= (1 + 1e-6) * values[:rank] ** 2).all()  # Ritz values
            vectors = found[f"vectors.{cut}"][image].double().flatten(1).numpy()
            vectors /= (N * tiny.WIDTH) ** 0.5
            np.testing.assert_allclose(vectors @ vectors.T, np.eye(rank), atol=2e-3)
            share = np.square(vectors @ right[:rank].T).sum() / rank
            assert share > 1 - max(tolerance, 2e-3)
            weighted = (values[:rank, None] * right[:rank]).reshape(rank, N, -1)
            truth = np.sqrt(np.square(weighted).sum((0, 2)))
            importance = found[f"importance.{cut}"][image].double().numpy()
            np.testing.assert_allclose(importance, truth, rtol=max(tolerance, 1e-5))
        assert_close(found[f"tokens.{cut}"], tokens.x.half())


def test_modes_of_an_image_do_not_depend_on_its_position_in_a_longer_shard(
    double, double_images
):
    cut = Cut(1, "before")
    alone = leading_modes(double, "cls", double_images[:1], [cut], 3, seed=5)
    both = leading_modes(double, "cls", double_images, [cut], 3, seed=5)
    assert_close(alone["importance.1.before"][0], both["importance.1.before"][0])


def test_more_modes_than_outputs_are_refused(double, double_images):
    wrong = r"rank must be at most the 36 outputs of 'cls'; got 37\."
    with pytest.raises(ValueError, match=wrong):
        leading_modes(double, "cls", double_images, [Cut(1, "before")], 37, seed=0)


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
