"""Oracle: Jacobians materialised in float64, and their SVD in numpy."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from foveate.forward import run
from foveate.models import Model
from foveate.training.modes import leading_modes
from foveate.training.probes import Cut, pull_back
from foveate.training.targets import model_hash
from tests import tiny
from tests.reference_jacobian import materialise

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
