"""Oracle: naive DiffRate in ``reference_reduction``; true steps; finite differences."""

import copy
from fractions import Fraction

import pytest
import torch
from torch.testing import assert_close

from foveate.backbones import open_backbone
from foveate.data.folder import ImageTransform
from foveate.forward import Block, run
from foveate.models import Model
from foveate.reduction import learned_rates
from foveate.reduction.learned_rates import (
    Budget,
    fit_counts,
    learn_rates,
    macs_share,
)
from foveate.reduction.masked import (
    ABSENT,
    MaskedStep,
    Rate,
    Rates,
    masked_output,
    read_masked,
)
from foveate.reduction.plan import Plan
from foveate.reduction.presets import plan_for
from foveate.reduction.rates import DiffRate, prune_count
from foveate.reduction.reduced_vit import reduce
from foveate.reduction.regroup import regroup
from tests import reference_reduction as reference
from tests import tiny

GRID = tiny.GRID
OPTIONS = {"prune_share": 0.5, "keep_prune": None}


@pytest.fixture(scope="module")
def deep_model():
    """The tiny dense model with five blocks, float64."""
    network = tiny.hf_dinov2(num_hidden_layers=5)
    tasks = dict(tiny.dense_model().tasks)
    model = Model("tiny", open_backbone(network), tasks, ImageTransform(20))
    return model.double().eval()


def between(model, images, depth=1):
    """Tokens between attention and MLP of a block, with sizes that differ."""
    backbone = model.backbone
    tokens, _ = run(backbone, backbone.embed(images), 0, depth)
    heads = backbone.project(depth, tokens)
    tokens = backbone.attend(depth, tokens, heads)
    size = torch.arange(35.0).remainder(3).add(1).expand(2, -1).contiguous()
    return tokens.with_(size=size), Block(backbone, depth, heads)


def naive(tokens, block, keep_prune, keep, image):
    query, key, _ = block.heads
    return reference.diffrate(
        tokens.x[image], query[image], key[image], tokens.size[image], keep_prune, keep
    )


@pytest.mark.parametrize(("keep_prune", "keep"), [(25, 14), (14, 14), (35, 14), (34, 1)])
@pytest.mark.parametrize("stand_in", [False, True])
def test_action_is_the_naive_one(double_model, double_images, keep_prune, keep, stand_in):
    tokens, block = between(double_model, double_images)
    after = regroup(tokens, DiffRate(keep_prune, stand_in)(tokens, block, keep))
    for image in range(2):
        expected = naive(tokens, block, keep_prune, keep, image)
        assert_close(after.x[image], torch.from_numpy(expected.x))
        assert_close(after.size[image].double(), torch.from_numpy(expected.size))
        group, found = torch.from_numpy(expected.group), after.stand_in[image, :, 0]
        spoken = found >= 0
        assert torch.equal(found[spoken], group[spoken])
        assert int((~spoken).sum()) == (0 if stand_in else 35 - keep_prune)


def test_what_is_pruned_takes_its_mass_along(double_model, double_images):
    tokens, block = between(double_model, double_images)
    after = regroup(tokens, DiffRate(20, stand_in=True)(tokens, block, 10))
    merged_only = regroup(tokens, DiffRate(35)(tokens, block, 10))
    assert (after.size.sum(1) < tokens.size.sum(1)).all()
    assert_close(merged_only.size.sum(1), tokens.size.sum(1))


@pytest.mark.parametrize("keep_prune", [9, 36])
def test_refuses_a_pruning_that_leaves_too_few_or_too_many(
    double_model, double_images, keep_prune
):
    tokens, block = between(double_model, double_images)
    with pytest.raises(ValueError, match=rf"10 to 35 patches at depth 1; got {keep_prune}"):
        DiffRate(keep_prune)(tokens, block, 10)


def test_counts_of_pruning_come_from_a_share_or_a_list():
    plan = Plan("diffrate", "cls", GRID, ((1, 20), (2, 13)))
    shares = [prune_count(plan, 1, 35, {**OPTIONS, "prune_share": s}) for s in (0, 0.5, 1)]
    assert shares == [35, 27, 20]
    listed = {**OPTIONS, "keep_prune": [30, 14]}
    assert [prune_count(plan, d, b, listed) for d, b in ((1, 35), (2, 20))] == [30, 14]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_prune": [30]}, r"one integer for each of 2 steps; got \[30\]"),
        ({"keep_prune": [30, 1.5]}, r"one integer for each of 2 steps; got \[30, 1\.5\]"),
        ({"keep_prune": 30}, "one integer for each of 2 steps; got 30"),
        ({"prune_share": 1.5}, r"prune_share must be in \[0, 1\]; got 1\.5"),
    ],
)
def test_refuses_counts_of_pruning(options, message):
    plan = Plan("diffrate", "cls", GRID, ((1, 20), (2, 13)))
    with pytest.raises(ValueError, match=message):
        prune_count(plan, 1, 35, {**OPTIONS, **options})


def test_listed_counts_reach_the_model(dense_model, images):
    counts = {1: 20, 2: 12}
    outputs = [
        reduce(dense_model, plan_for(dense_model, "diffrate", "cls", GRID, counts, **given))
        for given in (
            {},
            {"options": {"keep_prune": [27, 16]}},
            {"options": {"keep_prune": [35, 20]}},
        )
    ]
    shared, same, merged = (model(images) for model in outputs)
    assert torch.equal(shared, same)  # half of 15 and of 8, rounded half up
    assert not torch.allclose(shared, merged)


def test_needs_a_class_token():
    network = tiny.timm_vit_average()
    from foveate.models import open_model

    model = open_model(network)
    with pytest.raises(ValueError, match="'diffrate' must be given a model with a class"):
        plan_for(model, "diffrate", next(iter(model.tasks)), GRID, {1: 20})


def hard_rate(count, num_patches=35):
    """A rate that is certain."""
    mask = (torch.arange(num_patches) < count).double()
    return Rate(torch.tensor(float(count), dtype=torch.float64), mask)


@pytest.mark.parametrize(
    ("task", "fuse_last", "pairs"),
    [
        ("cls", 1, {1: (28, 20), 2: (20, 20), 4: (12, 6)}),
        ("saliency", 1, {1: (28, 20), 2: (20, 9), 3: (33, 7)}),
        ("saliency", 0, {2: (28, 20), 4: (12, 6)}),
    ],
)
def test_masks_do_what_removal_does(deep_model, double_images, task, fuse_last, pairs):
    schedule = tuple((d, keep) for d, (_, keep) in pairs.items())
    left = [35, *(keep for _, keep in pairs.values())]
    listed = [min(p, b) for (p, _), b in zip(pairs.values(), left, strict=False)]
    plan = Plan(
        "diffrate",
        task,
        GRID,
        schedule,
        fuse_last=fuse_last,
        options={"keep_prune": listed},
    )
    masks = {d: (hard_rate(p), hard_rate(m)) for d, (p, m) in pairs.items()}
    decoder = deep_model.task(task)
    restore = 5 - fuse_last if decoder.needs_grid else None
    masked = masked_output(deep_model.backbone, decoder, double_images, masks, restore)
    assert_close(masked, reduce(deep_model, plan)(double_images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("task", ["cls", "saliency"])
@pytest.mark.parametrize("which", [0, 1])
def test_gradient_of_a_mask_is_a_difference(deep_model, double_images, task, which):
    decoder = deep_model.task(task)
    restore = 4 if decoder.needs_grid else None

    def output(masks):
        rates = {1: tuple(Rate(m.sum().detach(), m) for m in masks)}
        out = masked_output(deep_model.backbone, decoder, double_images, rates, restore)
        return (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum()

    def masks_with(value):
        masks = [hard_rate(25).mask, hard_rate(18).mask]
        masks[which][27 if which == 0 else 20] = value  # of a patch that is gone
        return masks

    masks = [m.requires_grad_() for m in masks_with(0.0)]
    output(masks).backward()
    gradient = masks[which].grad[27 if which == 0 else 20]
    if task == "cls":  # a decoder that reads patches is told more, see read_masked
        step = 1e-4
        near, far = output(masks_with(step)), output(masks_with(2 * step))
        difference = (4 * near - far - 3 * output(masks_with(0.0))) / (2 * step)
        assert_close(gradient, difference.detach(), rtol=1e-4, atol=1e-8)
    assert gradient.isfinite()
    assert gradient != 0 if which == 0 else True


def test_what_is_masked_twice_stays_as_small_as_once(deep_model, double_images):
    backbone = deep_model.backbone
    steps = {
        d: [MaskedStep(hard_rate(m), hard_rate(m))] for d, m in ((1, 30), (2, 20), (3, 9))
    }
    tokens, _ = run(backbone, backbone.embed(double_images), 0, 4, steps)
    size = tokens.sizes()
    assert ((size > 0.5).sum(1) == 9).all()
    assert_close(size[size < 0.5], torch.full((52,), ABSENT, dtype=torch.float64),
                 rtol=1e-6, atol=0)  # fmt: skip


def test_a_masked_patch_is_also_worth_its_own_feature(double_model, double_images):
    tokens = double_model.backbone.embed(double_images)
    size = torch.ones(2, 35, dtype=torch.float64)
    size[:, 4] = 3 * ABSENT  # it had been three patches
    size.requires_grad_()
    stand_in = torch.arange(35).expand(2, -1)[..., None].clone()
    stand_in[:, 4] = 9
    masked = tokens.with_(size=size, stand_in=stand_in)
    full = read_masked(masked)
    own, copy = tokens.patches[:, 4], tokens.patches[:, 9]
    assert_close(full.patches[:, 4], copy)
    weight = torch.randn_like(full.patches)
    (gradient,) = torch.autograd.grad((full.patches * weight).sum(), size)
    assert_close(gradient[:, 4], ((own - copy) * weight[:, 4]).sum(-1) / 3)
    assert gradient.count_nonzero() == 2


def test_rates_are_whole_forwards_and_probable_backwards():
    rates = Rates(35, {1: 20, 2: 13})
    prune, merge = rates()[1]
    share = rates.logits[0, 1].softmax(0)
    assert rates.candidates.tolist() == [35, 31, 27, 23, 19, 15, 11, 7, 3]
    assert_close(prune.count, torch.tensor(27.5))  # half-way from 35
    assert_close(merge.count, torch.tensor(20.0))
    assert float(prune.mask.detach().sum()) == 28
    (by_mask,) = torch.autograd.grad(merge.mask[21], rates.logits)
    above = (rates.candidates > 21).float()  # a patch of rank 21 stays with 22 or more
    assert_close(by_mask[0, 1], share * (above - (share * above).sum()))


def test_rates_start_as_open_as_can_be():
    share = Rates(35, {1: 19}).logits[0, 1].detach().softmax(0)
    assert_close(share, torch.full((9,), 1 / 9))  # 19 is the middle of the candidates


def budget_of(model, ratio, restore=None):
    layout = model.backbone.embed(tiny.random_images(dtype=torch.float64)).layout
    return Budget(model.backbone, layout, ratio, restore)


def test_share_of_macs_is_that_of_the_schedule(deep_model):
    budget = budget_of(deep_model, 1, restore=4)
    masks = {1: (hard_rate(28), hard_rate(20)), 3: (hard_rate(30), hard_rate(25))}
    expected = budget.macs({1: 20, 3: 20}) / budget.macs({})
    assert float(macs_share(budget, masks)) == pytest.approx(expected, rel=1e-12)


def test_the_count_that_takes_effect_gets_the_gradient(deep_model):
    budget = budget_of(deep_model, 1)
    masks = {d: (hard_rate(p), hard_rate(m)) for d, p, m in ((1, 28, 20), (3, 30, 25))}
    counts = [rate.count.requires_grad_() for pair in masks.values() for rate in pair]
    gradients = torch.autograd.grad(macs_share(budget, masks), counts)
    step = (budget.macs({1: 21, 3: 21}) - budget.macs({1: 19, 3: 19})) / budget.macs({}) / 2
    assert [float(g) for g in gradients] == pytest.approx([0, step, 0, 0], rel=1e-9)


@pytest.mark.parametrize("ratio", [1.05, 1.3, 1.9])
@pytest.mark.parametrize("counts", [{1: 30, 2: 20.5, 4: 3}, {1: 2, 3: 2}, {2: 35, 3: 35}])
def test_fitted_counts_take_the_budget_and_no_patch_more(deep_model, counts, ratio):
    budget = budget_of(deep_model, ratio)
    fitted = fit_counts(counts, budget)
    assert budget.fits(fitted)
    values = [35, *fitted.values()]
    assert values == sorted(values, reverse=True)
    assert values[-1] >= 1
    more = [
        {**fitted, d: k + 1}
        for (d, k), b in zip(fitted.items(), values, strict=False)
        if k < b
    ]
    assert not any(budget.fits(m) for m in more)


def test_counts_on_the_budget_stay(deep_model):
    counts = {1: 30, 2: 20, 4: 3}
    free = budget_of(deep_model, 1)
    ratio = Fraction(free.macs({}), free.macs(counts))
    assert fit_counts(counts, budget_of(deep_model, ratio)) == counts


def test_refuses_a_budget_out_of_reach(deep_model):
    with pytest.raises(ValueError, match=r"reach of 1 patch at depths \[4\]; got 2\.0"):
        fit_counts({4: 10}, budget_of(deep_model, 2.0))


@pytest.mark.parametrize(
    ("task", "depths"), [("cls", [1, 2, 3, 4]), ("saliency", [1, 2, 3])]
)
def test_learned_plan_fits_runs_and_repeats(deep_model, double_images, task, depths):
    before = copy.deepcopy(deep_model.state_dict())
    plans = [learn_rates(deep_model, double_images, task, 1.25, steps=3) for _ in range(2)]
    plan = plans[0]
    assert plan == plans[1]
    assert [depth for depth, _ in plan.schedule] == depths
    assert budget_of(deep_model, 1.25, 4 if task == "saliency" else None).fits(plan.counts)
    assert reduce(deep_model, plan)(double_images).isfinite().all()
    assert all(torch.equal(before[k], v) for k, v in deep_model.state_dict().items())


def test_learning_spends_nothing_where_nothing_is_read(deep_model, double_images):
    start = budget_of(deep_model, 1.3).equal_steps([1, 2, 3, 4])
    plan = learn_rates(deep_model, double_images, "cls", 1.3, steps=60)
    assert plan.counts[4] < start[4]  # after the last attention no patch is read


def test_learning_stays_near_the_budget(deep_model, double_images, monkeypatch):
    wanted = []

    def spy(counts, budget):
        wanted.append(counts)
        return fit_counts(counts, budget)

    monkeypatch.setattr(learned_rates, "fit_counts", spy)
    learn_rates(deep_model, double_images, "cls", 1.3, steps=60)
    budget = budget_of(deep_model, 1.3)
    macs = budget.macs({d: round(k) for d, k in wanted[0].items()})
    assert macs == pytest.approx(budget.macs({}) / 1.3, rel=0.02)


def test_learning_leaves_gradients_of_the_model_alone(deep_model, double_images):
    model = copy.deepcopy(deep_model).requires_grad_()
    with torch.no_grad():
        learn_rates(model, double_images, "cls", 1.3, steps=1)
    assert all(p.grad is None for p in model.parameters())


def test_refuses_to_learn_nothing(deep_model, double_images):
    with pytest.raises(ValueError, match="steps must be at least 1; got 0"):
        learn_rates(deep_model, double_images, "cls", 1.3, steps=0)
