"""Oracle: finite differences of what is smooth; invariants of a trained controller."""

import warnings

import pytest
import torch
from torch.autograd import gradcheck
from torch.testing import assert_close

from foveate.adaptive.controller import Controller, Pruning
from foveate.adaptive.fate import Fate, _masked, _merged
from foveate.adaptive.steps import MaskedStep, selection_score
from foveate.adaptive.task_vit import TaskViT, open_task_vit, run_mixed
from foveate.forward import Block
from tests import handmade, tiny
from tests.tiny_pruned import apart, model_of, vit_of

DOUBLE = torch.float64
every_action = pytest.mark.parametrize("action", ["prune", "merge"])


def state_of(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def bits(module):
    """What an edit of weights would change."""
    return [(k, v.data_ptr(), v._version) for k, v in module.state_dict().items()]


# --- gradients ----------------------------------------------------------------------------


@pytest.mark.parametrize("network", ["timm-dinov3", "hf-dinov2"])
@pytest.mark.parametrize("task", ["cls", "taps"])
@pytest.mark.parametrize("counting", ["learned", "images"])
@pytest.mark.parametrize("one_way", [False, True])
@every_action
def test_gradients_are_finite_and_reach_every_part(
    network, task, counting, one_way, action
):
    """One way, a class token hears of the register through masks alone."""
    vit = vit_of(network, task, dtype=DOUBLE, action=action, one_way=one_way,
                 fuse_last=1)  # fmt: skip
    output = vit(tiny.random_images(dtype=DOUBLE), counting)
    output.square().mean().backward()
    gradients = {name: p.grad for name, p in vit.controller.named_parameters()}
    reached = {"register"}
    if counting == "learned":
        reached |= {"allocate.weight", "allocate.bias"}
    if task == "taps":
        reached |= {"recover.weight", "recover.bias"}
    assert {k for k, g in gradients.items() if g is not None and g.any()} == reached
    assert all(g.isfinite().all() for g in gradients.values() if g is not None)
    assert all(p.grad is None for p in vit.model.parameters())


@pytest.mark.parametrize("task", ["cls", "taps"])
@every_action
def test_gradients_are_finite_in_single_precision(task, action):
    """Though what is gone has a size of 1e-30."""
    vit = vit_of("hf-dinov2", task, (9, 9, 9), depths=(0, 1, 2), action=action)
    vit.model.backbone.requires_grad_(True)
    try:
        parameters = [*vit.controller.parameters(), *vit.model.backbone.parameters()]
        loss = vit(tiny.random_images(), "learned").square().mean()
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
    finally:
        vit.model.backbone.requires_grad_(False)
    assert sum(g is not None and bool(g.any()) for g in found) > 40
    assert all(g.isfinite().all() for g in found if g is not None)


@pytest.mark.parametrize("task", ["saliency", "taps"])
@every_action
def test_the_gradient_of_a_count_has_the_sign_of_true_differences(task, action):
    """The total is fixed, so one removed early is one less removed late."""
    images = torch.cat([tiny.random_images(seed=s) for s in range(4)])
    target = model_of("hf-dinov2")(images, task)
    for count in (5, 8, 11):
        with torch.no_grad():
            fewer, more = (
                (vit_of("hf-dinov2", task, (c, 17 - c), action=action)(images, "frozen")
                 - target).square().mean() for c in (count - 3, count + 3)
            )  # fmt: skip
        vit = vit_of("hf-dinov2", task, action=action)
        readout = vit.controller.allocate
        with torch.no_grad():
            readout.weight.zero_()
            logit = torch.tensor(count / 17).logit() - vit.controller.first[0]
            readout.bias.fill_(logit)
        assert vit.look(images, "learned").counts[:, 0].tolist() == [count] * 8
        loss = (vit(images, "learned") - target).square().mean()
        (found,) = torch.autograd.grad(loss, readout.bias)
        assert more > fewer
        assert found > 0


def test_what_was_removed_early_leaves_its_place_by_its_chance_to_stay():
    """Presence of all patches sums, backwards too, to what the counts leave."""
    vit = vit_of("hf-dinov2", "cls", (9, 9, 9), depths=(0, 1, 2), dtype=DOUBLE)
    kept = []
    choose = MaskedStep._choose

    def watched(step, score, alive):
        mask, chance = choose(step, score, alive)
        kept.append((step.ledger, step.ledger.there.sum(1)))
        return mask, chance

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MaskedStep, "_choose", watched)
        vit(tiny.random_images(dtype=DOUBLE), "learned")
    ledger = kept[0][0]
    for depth, (_, number) in enumerate(kept):
        left = 35 - sum(ledger.counts[: depth + 1])
        assert torch.equal(number, left)
        for parameter in (vit.controller.register, vit.controller.allocate.bias):
            found, truth = (
                torch.autograd.grad(y.sum(), parameter, retain_graph=True)[0]
                for y in (number, left)
            )
            assert_close(found, truth, rtol=1e-6, atol=1e-6)


def test_autocast_does_not_round_scores():
    """Attention in eight bits would tie where float32 does not."""
    vit = vit_of("hf-dinov2", "taps")
    backbone, controller = vit.controlled.backbone, vit.controller
    tokens = backbone.embed(tiny.random_images())
    block = Block(backbone, 0, backbone.project(0, tokens))
    plain = selection_score(tokens, block, controller)
    state = tokens.x[:, tokens.layout.num_prefix - 1]
    said = controller.share(0, state), controller.alpha(state)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(selection_score(tokens, block, controller), plain)
        assert torch.equal(controller.share(0, state), said[0])
        assert torch.equal(controller.alpha(state), said[1])


@pytest.mark.parametrize("fuse_last", [0, 1])
@every_action
def test_derivatives_of_what_comes_back(action, fuse_last):
    """The choice of patches does not depend on alpha: the output is smooth in it."""
    vit = vit_of("hf-dinov2", "taps", dtype=DOUBLE, action=action, fuse_last=fuse_last)
    images = tiny.random_images(dtype=DOUBLE)[:1]
    draw = torch.Generator().manual_seed(4)
    layout = vit(images).shape
    weight = torch.randn(layout, generator=draw, dtype=DOUBLE)
    recover = vit.controller.recover

    def loss(slope, bias):
        parts = {"controller.recover.weight": slope, "controller.recover.bias": bias}
        y = torch.func.functional_call(vit, parts, (images, "frozen"))
        return (weight * y).mean()

    inputs = [p.detach().clone().requires_grad_() for p in recover.parameters()]
    assert gradcheck(loss, inputs, fast_mode=True)
    assert torch.autograd.grad(loss(*inputs), inputs[1])[0].abs() > 1e-6


@every_action
def test_derivatives_of_a_mask_between_zero_and_one(action):
    """Features and sizes where patches are neither there nor gone."""
    tokens = handmade.tokens(sizes=True)
    here = torch.arange(tokens.num_patches)
    alive = (here != 4).expand(2, -1)
    leads = (here % 3 == 0).expand(2, -1)
    speaker = torch.where(leads, here, here // 3 * 3)
    mask = torch.where(leads, 0.9, 0.3).double().requires_grad_()
    x = tokens.x.clone().requires_grad_()

    def change(mask, x):
        fate = Fate(mask, alive, torch.zeros(2, tokens.num_patches))
        before = tokens.with_(x=x)
        merges = action == "merge"
        changed = _merged(before, fate, speaker) if merges else _masked(before, fate)
        return changed.x, changed.size.log()[alive]

    assert gradcheck(change, (mask, x), atol=1e-4)


def test_what_is_gone_passes_on_what_it_would_have_been_worth():
    """By its chance to have stayed; its size remains."""
    tokens = handmade.tokens()
    size = torch.full((2, 15), 1e-12, dtype=DOUBLE, requires_grad=True)
    chance = torch.rand(2, 15, dtype=DOUBLE)
    fate = Fate(torch.zeros(2, 15), torch.zeros(2, 15).bool(), chance)
    after = _masked(tokens.with_(size=size), fate).size
    assert torch.equal(after, size)
    assert torch.equal(torch.autograd.grad(after.sum(), size)[0], chance)


def test_a_kept_patch_is_worth_its_attention():
    """Derivative of the output in a mask at 1, by finite differences of log sizes."""
    vit = vit_of("hf-dinov2", "cls", dtype=DOUBLE)
    backbone = vit.model.backbone
    tokens = backbone.embed(tiny.random_images(dtype=DOUBLE))
    alive, chance = torch.ones(2, 35).bool(), torch.zeros(2, 35)

    def read(mask):
        masked = _masked(tokens, Fate(mask, alive, chance))
        heads = backbone.project(0, masked)
        return backbone.attend(0, masked, heads).x[:, 0].square().sum()

    mask = torch.ones(2, 35, dtype=DOUBLE, requires_grad=True)
    (found,) = torch.autograd.grad(read(mask), mask)
    with torch.no_grad():
        for at in (0, 17, 34):
            step = torch.zeros(2, 35, dtype=DOUBLE)
            step[1, at] = 1e-5
            truth = (read(1 + step) - read(1 - step)) / 2e-5
            # Sizes are float32 in the bias of attention.
            assert_close(found[1, at], truth, rtol=1e-3, atol=1e-6)


# --- learning -----------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["saliency", "taps"])
@every_action
def test_a_few_steps_lower_the_loss(task, action):
    model = model_of("hf-dinov2")
    before = bits(model)
    images = tiny.random_images()
    target = model(images, task)
    vit = vit_of("hf-dinov2", task, action=action, fuse_last=1)
    first = state_of(vit.controller)
    optimizer = torch.optim.Adam(vit.controller.parameters(), lr=3e-2)
    losses = []
    for _ in range(12):
        loss = (vit(images, "learned") - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert min(losses[6:]) < 0.9 * losses[0]
    last = vit.controller.state_dict()
    assert {k for k in first if not torch.equal(first[k], last[k])} == set(first) - {
        "counts"
    }
    assert bits(model) == before
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("task", ["saliency", "taps"])
@every_action
def test_the_allocation_alone_lowers_the_loss(task, action):
    """On these networks late removal is better, as trying all counts shows."""
    images = torch.cat([tiny.random_images(seed=s) for s in range(4)])
    target = model_of("hf-dinov2")(images, task)

    def loss_of(vit, counting):
        return (vit(images, counting) - target).square().mean()

    with torch.no_grad():
        early, late = (
            loss_of(vit_of("hf-dinov2", task, counts, action=action), "frozen")
            for counts in ((17, 0), (0, 17))
        )
    assert late < 0.7 * early
    vit = vit_of("hf-dinov2", task, action=action)
    optimizer = torch.optim.Adam(vit.controller.allocate.parameters(), lr=3e-2)
    losses = []
    for _ in range(16):
        loss = loss_of(vit, "learned")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.85 * losses[0]
    assert vit.look(images, "learned").counts[0, 0] < 5


def test_training_mode_learns_and_eval_mode_is_frozen(images):
    vit = vit_of("hf-dinov2", "cls").train()
    assert vit(images).requires_grad
    assert torch.equal(vit(images), vit(images, "learned"))
    counts = vit.look(images, "learned").counts
    vit.eval()
    assert not torch.equal(vit(images), vit(images, "learned"))  # 8 and 9 are frozen
    assert counts[0].tolist() != [8.0, 9.0]


# --- calibrating and looking --------------------------------------------------------------


def test_calibrate_freezes_the_mean_over_images():
    vit = vit_of("hf-dinov2", "taps")
    batches = [tiny.random_images(seed=s)[: 1 + s % 2] for s in range(5)]
    looks = [vit.look(batch, "learned").counts for batch in batches]
    mean = torch.cat(looks).double().mean(0)
    found = vit.calibrate(batches)
    assert found.sum() == 17
    assert bool(((found - mean).abs() < 1).all())
    assert vit.kept() == {0: 35 - int(found[0]), 1: 18}


@every_action
def test_look(action, images):
    vit = vit_of("hf-dinov2", "taps", action=action)
    seen = vit.look(images)
    assert seen.counts.tolist() == [[8.0, 9.0]] * 2
    assert seen.kept.shape == seen.scores.shape == (2, 2, 35)
    assert seen.kept.sum(2).tolist() == [[27, 18]] * 2
    assert not (seen.kept[:, 1] & ~seen.kept[:, 0]).any()  # what is gone stays gone
    for image in range(2):
        first = seen.scores[image, 0]
        kept = seen.kept[image, 0]
        assert first[kept].min() >= first[~kept].max()
        second, there = seen.scores[image, 1][kept], seen.kept[image, 1][kept]
        assert second[there].min() >= second[~there].max()
    assert seen.scores.exp().sum(2).max() < 1
    assert seen.alphas.shape == (2, 2)
    assert 0 < seen.alphas.min() < seen.alphas.max() < 1
    assert not seen.counts.requires_grad


def test_look_says_what_is_set_and_what_is_not_read(images):
    assert vit_of("hf-dinov2", "cls").look(images).alphas is None
    fixed = vit_of("hf-dinov2", "taps", recovery=0.25).look(images).alphas
    assert torch.equal(fixed, torch.full((2, 2), 0.25))


# --- counts of images ---------------------------------------------------------------------


@pytest.mark.parametrize("task", ["cls", "taps"])
@every_action
@torch.no_grad()
def test_images_share_the_budget_of_every_layer(action, task):
    vit = vit_of("hf-dinov2", task, dtype=DOUBLE, action=action)
    with torch.no_grad():
        vit.controller.allocate.weight.mul_(5)
    images = torch.cat([tiny.random_images(dtype=DOUBLE, seed=s) for s in range(3)])
    seen, together = vit.look(images, "images"), vit(images, "images")
    assert seen.counts.sum(0).tolist() == [6 * 8.0, 6 * 9.0]
    assert len(set(seen.counts[:, 0].tolist())) > 2  # images do differ
    for image in range(6):
        counts = [int(c) for c in seen.counts[image]]
        alone = vit_of("hf-dinov2", task, counts, DOUBLE, action=action)
        weights = vit.controller.state_dict()
        del weights["counts"]
        alone.controller.load_state_dict(weights, strict=False)
        for counting in ("frozen", None):
            y = alone(images[image][None], counting)
            assert apart(y[0], together[image]) < 1e-8


def test_a_static_allocation_is_the_same_for_all_images(images):
    vit = vit_of("hf-dinov2", "cls", allocation="static")
    for counting in ("learned", "images", "frozen"):
        assert vit.look(images, counting).counts.tolist() == [[8.0, 9.0]] * 2


# --- export, opening, mixing, refusals ----------------------------------------------------


@pytest.mark.parametrize(("network", "task"), [("hf-dinov2", "saliency"),
                                               ("timm-vit", "cls"),
                                               ("timm-dinov3", "taps")])  # fmt: skip
@every_action
def test_the_gathered_form_exports(network, task, action, images):
    vit = vit_of(network, task, action=action).requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its own parts
        exported = torch.export.export(vit, (images,)).module()
    other = tiny.random_images(seed=9)
    assert_close(exported(other), vit(other), rtol=1e-4, atol=1e-5)


def test_opening_starts_even_and_at_the_class_token():
    model = model_of("hf-dinov2")
    vit = open_task_vit(model, "cls", Pruning((0, 2), 11))
    side = model.transform.size // tiny.PATCH
    assert vit.grid == (side, side)
    assert not vit.training
    assert vit.controller.counts.tolist() == [6, 5]
    image = torch.zeros(1, 3, model.transform.size, model.transform.size)
    truth = model.backbone.embed(image).x[0, 0]
    assert torch.equal(vit.controller.register.detach(), truth)
    classic = open_task_vit(model, "cls", Pruning((0, 2), 11, selection="class"))
    assert classic.controller.register is None


def test_a_mixed_batch_runs_every_task_once():
    models = {t: vit_of("hf-dinov2", t) for t in ("cls", "taps")}
    images = torch.cat([tiny.random_images(seed=s) for s in range(2)])
    tasks = ["taps", "cls", "cls", "taps"]
    found = run_mixed(models, images, tasks)
    for y, image, task in zip(found, images, tasks, strict=True):
        assert_close(y, models[task](image[None])[0].detach(), rtol=1e-4, atol=1e-5)
    for wrong in (["cls"], ["cls", "cls", "cls", "depth"]):
        with pytest.raises(ValueError, match=r"tasks must be one of cls, taps for each"):
            run_mixed(models, images, wrong)


def test_images_of_another_grid_are_refused():
    vit = vit_of("hf-dinov2", "cls")
    for counting in (None, "frozen"):
        with pytest.raises(ValueError, match=r"patch grid \(5, 7\); got \(7, 3\) from"):
            vit(tiny.random_images(tiny.OTHER_IMAGE), counting)


@pytest.mark.parametrize(
    ("task", "pruning", "message"),
    [
        ("cls", {"remove": 35}, "remove must be below the 35 patches .*; got 35"),
        ("cls", {"depths": (0, 3)}, "depths must be at least 0 and below 3 .*; got 3"),
        ("taps", {"fuse_last": 2}, "depths must be at least 0 and below 1 .*; got 1"),
        ("taps", {"fuse_last": 4}, "fuse_last must be from 0 to 3; got 4"),
        ("pose", {}, "task must be one of cls, saliency, taps"),
    ],
)
def test_what_does_not_fit_is_refused(task, pruning, message):
    controller = Controller(
        tiny.WIDTH, Pruning(**{"depths": (0, 1), "remove": 9, **pruning}), torch.zeros(36)
    )
    with pytest.raises(ValueError, match=message):
        TaskViT(model_of("hf-dinov2"), task, controller, tiny.GRID)


def test_a_class_token_that_is_not_there_is_refused():
    controller = Controller(tiny.WIDTH, Pruning((0,), 9, selection="class"), None)
    with pytest.raises(ValueError, match=r"selection must be 'register' for .* no class"):
        TaskViT(model_of("timm-vit-average"), "saliency", controller, tiny.GRID)


def test_an_unknown_way_of_counting_is_refused(images):
    with pytest.raises(ValueError, match="counting must be"):
        vit_of("hf-dinov2", "cls")(images, "freezing")
