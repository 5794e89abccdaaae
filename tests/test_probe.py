"""Oracle: one plan at a time through the reduced model; scipy; closed forms."""

from dataclasses import replace

import pytest
import scipy.stats
import torch

from foveate.data.labelled import LabelledImages
from foveate.evaluation.agreement import Drops, Pair, excludes_zero, holm, spearman
from foveate.evaluation.conditions import CRITERIA, Conditions
from foveate.evaluation.evaluate import collect, open_trial
from foveate.evaluation.metrics import Estimate, paired_intervals
from foveate.evaluation.probe import MEASURES, probe
from foveate.evaluation.verdict import judge
from foveate.forward import run
from foveate.reduction.matching import Prune
from foveate.reduction.presets import plan_for
from foveate.reduction.recover import recover
from foveate.reduction.reduced_vit import reduce
from foveate.reduction.regroup import Memory
from foveate.reduction.sketch import PulledProbes, Sensitivity
from foveate.reduction.step import Reduce
from foveate.scoring.criteria import feature_norm
from tests import labelled, tiny

GRID, KEEP = (8, 8), 16
NUM = 5
PRESETS = tuple(name for name in CRITERIA if name != "sensitivity")


@pytest.fixture(scope="module")
def model():
    return labelled.taught_model()


@pytest.fixture(scope="module")
def data():
    return labelled.scenes(NUM, seed=1)


@pytest.fixture(scope="module")
def found(model, data):
    """All tasks and criteria at two depths."""
    settings = {"keep": 0.25, "num_resamples": 40, "seed": 4, "num_probes": 2}
    tasks = [*labelled.HEADS]
    return probe(model, data, tasks, [0, 2], 2, criteria=CRITERIA, **settings)


@pytest.fixture(scope="module")
def record(found):
    return found.record()


def cell_of(record, **wanted):
    (found,) = [c for c in record["cells"] if wanted.items() <= c.items()]
    return found["drop"]


def by_hand(model, task, depth, alpha):
    """Pruned by sensitivity: the loop over the blocks, written out."""
    decoder = model.task(task)
    score = Sensitivity(PulledProbes(decoder, num_probes=2, seed=4))
    step = Reduce(Prune(score, stand_in=True), KEEP, memory=Memory(alpha))
    taps = decoder.taps(tiny.DEPTH)

    def call(images):
        tokens = model.backbone.embed(images)
        _, kept = run(model.backbone, tokens, 0, taps[-1], {depth: [step]}, taps)
        read = [recover(kept[d]) if decoder.needs_grid else kept[d] for d in taps]
        return decoder.decode(model.backbone, tuple(t.x for t in read), tokens.layout)

    return call


@torch.no_grad()
def naive(model, data, task, criterion, depth, alpha):
    """Interval of the difference, from two models run one after the other."""
    if criterion == "sensitivity":
        call = by_hand(model, task, depth, alpha)
    else:
        options = {"seed": 4} if criterion == "random" else {}
        settings = {"fuse_last": 0, "alpha": alpha, "options": options}
        call = reduce(
            model, plan_for(model, criterion, task, GRID, {depth: KEEP}, **settings)
        )
    trial = open_trial(model, task, data)
    calls = [lambda images: model(images, task), call]
    pair = collect(calls, trial, data, 3, torch.zeros(()))
    return paired_intervals(*pair, seed=4, num_resamples=40)["difference"]


@pytest.mark.parametrize("task", labelled.HEADS)
@pytest.mark.parametrize("criterion", CRITERIA)
def test_a_cell_is_one_plan_alone(model, data, record, task, criterion):
    score = MEASURES[labelled.HEADS[task][0]]
    for depth, alpha in ((0, 0.0), (0, 1.0), (2, 0.0), (2, 1.0)):
        drop = cell_of(record, task=task, criterion=criterion, depth=depth, alpha=alpha)
        change = naive(model, data, task, criterion, depth, alpha)[score]
        assert drop["value"] == pytest.approx(-change.value, abs=1e-6)
        ends = sorted([-change.low, -change.high])
        assert [drop["low"], drop["high"]] == pytest.approx(ends, abs=1e-6)


def test_something_was_lost(record):
    """Else all of these tests would pass on zeros."""
    for task in labelled.HEADS:
        drops = [c["drop"]["value"] for c in record["cells"] if c["task"] == task]
        assert max(drops) > 0.02


def test_boxes_alone_are_the_boxes_found_with_masks(model, data):
    task = model.task("objects")
    images = torch.stack([model.transform(data[i].picture) for i in range(3)])
    layout = model.backbone.embed(images).layout
    output = model(images, "objects")
    for alone, both in zip(
        task.boxes(output, layout), task.predict(output, layout), strict=True
    ):
        assert len(alone.labels)
        assert alone.masks is None
        for name in ("boxes", "labels", "scores"):
            assert torch.equal(getattr(alone, name), getattr(both, name))


def test_keeping_all_costs_nothing(model, data):
    found = probe(model, data, ["mask", "objects"], [1], keep=1.0, num_resamples=3)
    for cell in found.record()["cells"]:
        assert cell["drop"] == {"value": 0.0, "low": 0.0, "high": 0.0}


def test_the_same_seed_gives_the_same_record_and_batches_do_not_matter(model, data, record):
    settings = {"keep": 0.25, "num_resamples": 40, "num_probes": 2, "criteria": CRITERIA}
    tasks = [*labelled.HEADS]
    again = probe(model, data, tasks, [0, 2], 5, seed=4, **settings).record()
    for first, second in zip(record["cells"], again["cells"], strict=True):
        assert first["drop"] == pytest.approx(second["drop"], abs=1e-6)
    other = probe(model, data, ["mask"], [0], seed=5, criteria=["random"], keep=0.25)
    drop = other.record()["cells"][0]["drop"]
    assert (
        drop["value"]
        != cell_of(record, task="mask", criterion="random", depth=0, alpha=0.0)["value"]
    )


def test_tasks_whose_inputs_differ_are_probed_as_well(model):
    """Windows, centre and letterbox of a picture that is not square are three inputs."""
    whole = labelled.scenes(3, side=48, seed=2)

    def cut(scene):
        example = whole.read(scene)
        wide = example.picture.crop((0, 0, 48, 36))
        target, objects = example.target, example.target.objects
        masks = objects.masks[:, :36]
        seen = masks.flatten(1).any(1)
        parts = (objects.boxes, objects.labels, objects.crowd, masks)
        objects = type(objects)(*(part[seen] for part in parts))
        target = replace(target, mask=target.mask[:36], objects=objects)
        return example._replace(picture=wide, target=target)

    data = LabelledImages("wide", whole.source, cut, whole.classes, whole.files)
    tasks = ["label", "mask", "objects"]
    settings = {"criteria": ("norm",), "keep": 0.25, "num_resamples": 40, "seed": 4}
    record = probe(model, data, tasks, [0], 2, **settings).record()
    for task in tasks:
        change = naive(model, data, task, "norm", 0, 1.0)
        score = MEASURES[labelled.HEADS[task][0]]
        drop = cell_of(record, task=task, alpha=1.0)
        assert drop["value"] == pytest.approx(-change[score].value, abs=1e-6)


@pytest.fixture
def rooms():
    """A depth model that reads three depths, and pictures that are as deep as bright."""
    from foveate.data.labelled import Example, Target
    from foveate.models import open_model

    model = open_model(tiny.hf_depth_anything(), 24)
    whole = labelled.scenes(4, side=24)

    def read(scene):
        example = whole.read(scene)
        depth = 1 + model.transform.whole(example.picture, (24, 24)).abs().sum(0)
        valid = torch.ones(24, 24, dtype=torch.bool)
        return Example(example.picture, Target(depth=depth, valid=valid))

    data = LabelledImages("rooms", whole.source, read, {"depth": ()}, whole.files)
    return model, data


@pytest.mark.parametrize("criterion", ["norm", "sensitivity"])
def test_what_a_task_reads_before_the_block_stays_as_it_was(rooms, criterion):
    model, data = rooms
    settings = {"keep": 0.25, "num_resamples": 10, "seed": 4, "num_probes": 2}
    found = probe(model, data, ["depth"], [1, 3], criteria=[criterion], **settings)
    (task,) = found.tasks
    assert task.score == "delta1"
    trial = open_trial(model, "depth", data)
    decoder, taps = trial.task, trial.task.taps(4)
    assert taps == (2, 3, 4)
    score = (
        feature_norm
        if criterion == "norm"
        else Sensitivity(PulledProbes(decoder, num_probes=2, seed=4))
    )
    for d, depth in enumerate((1, 3)):
        for a, alpha in enumerate((0.0, 1.0)):
            step = Reduce(Prune(score, stand_in=True), 9, memory=Memory(alpha))

            def call(images, step=step, depth=depth):
                tokens = model.backbone.embed(images)
                _, kept = run(model.backbone, tokens, 0, 4, {depth: [step]}, taps)
                read = tuple(recover(kept[d]).x for d in taps)
                return decoder.decode(model.backbone, read, tokens.layout)

            calls = [lambda images: model(images, "depth"), call]
            with torch.no_grad():
                full, reduced = collect(calls, trial, data, 4, torch.zeros(()))
            change = full.values["delta1"].mean() - reduced.values["delta1"].mean()
            assert float(found.drops.drawn[0, 0, a, d, 0]) == pytest.approx(
                float(change), abs=1e-6
            )
    assert found.drops.drawn[0].abs().max() > 1e-3


def test_a_record_has_its_parts(record):
    assert record["depths"] == [0, 2]
    assert record["criteria"] == list(CRITERIA)
    recovers = {task["name"]: task["recovers"] for task in record["tasks"]}
    assert recovers == {"label": False, "mean": True, "mask": True, "objects": True}
    assert len(record["cells"]) == 4 * 2 * 2 * 7
    assert len(record["pairs"]) == (1 + 3 * 2) * 2 * 21
    assert len(record["between_tasks"]) == 2 * 6 * 2
    assert len(record["between_depths"]) == 1 + 3 * 2
    assert [v["claim"] for v in record["verdict"]] == ["ranking", "depth", "recovery"]
    label = [c for c in record["cells"] if c["task"] == "label"]
    half = len(label) // 2
    assert [c["drop"] for c in label[:half]] == [c["drop"] for c in label[half:]]


def test_recovery_is_a_difference_of_means(record):
    for row in record["recovery"]:
        drops = {0.0: [], 1.0: []}
        for cell in record["cells"]:
            if cell["task"] == row["task"] and row["depth"] in (None, cell["depth"]):
                drops[cell["alpha"]].append(cell["drop"]["value"])
        mean = sum(drops[1.0]) / len(drops[1.0]) - sum(drops[0.0]) / len(drops[0.0])
        assert row["value"] == pytest.approx(mean)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": []}, r"tasks must be at least one, and each once; got \[\]"),
        ({"tasks": ["mask", "mask"]}, r"tasks must .* each once"),
        ({"tasks": ["cls"]}, r"task must be one that labels exist for .*; got 'cls'"),
        ({"tasks": ["fly"]}, r"task must be one of .*; got 'fly'"),
        ({"depths": [2, 1]}, r"depths must ascend, from 0 to 2 .*; got \[2, 1\]"),
        ({"depths": [3]}, r"depths must ascend, from 0 to 2 .*; got \[3\]"),
        ({"depths": []}, r"depths must be at least one"),
        ({"batch_size": 0}, r"batch_size must be at least 1; got 0"),
        ({"criteria": ("fly",)}, r"criteria must be from random, .*; got 'fly'"),
        ({"criteria": ("norm", "norm")}, r"criteria must .* each once"),
        ({"keep": 0.0}, r"keep must be in \(0, 1\]; got 0.0"),
        ({"keep": 0.001}, r"keep_ratio must keep at least 1 of 64 patches; got 0.001"),
        ({"num_resamples": 1}, r"num_resamples must be at least 2; got 1"),
        ({"num_probes": 0}, r"num_probes must be at least 1; got 0"),
    ],
)
def test_wrong_settings_are_refused(model, data, changes, message):
    settings = {"tasks": ["mask"], "depths": [1], **changes}
    with pytest.raises(ValueError, match=message):
        probe(model, data, **settings)


# --- statistics ---------------------------------------------------------------------------


def test_spearman_is_that_of_scipy(generator):
    a, b = (torch.randint(0, 5, (30, 6), generator=generator).double() for _ in range(2))
    for row, x, y in zip(spearman(a, b), a, b, strict=True):
        assert float(row) == pytest.approx(scipy.stats.spearmanr(x, y).statistic)
    flat = torch.ones(1, 6)
    assert spearman(flat, a[:1].double()).isnan()
    hole = a[:1].clone()
    hole[0, 2] = torch.nan
    assert spearman(hole, b[:1]).isnan()


def test_holm_in_closed_form():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def drops_of(means, spread=0.001, recovers=None, num=60):
    """Drops with given means ``(T, 2, D, C)`` and normal resamples of this spread."""
    means = torch.tensor(means, dtype=torch.float64)
    noise = torch.randn(num, *means.shape, generator=torch.Generator().manual_seed(0))
    drawn = torch.cat([means[None], means + spread * noise.double()])
    num_tasks, _, num_depths, num_criteria = means.shape
    return Drops(
        drawn,
        tuple("xyz"[:num_tasks]),
        tuple(recovers or [True] * num_tasks),
        tuple(range(num_depths)),
        tuple(f"c{i}" for i in range(num_criteria)),
    )


def findings(drops):
    return [v.finding for v in judge(drops, drops.pairs())]


UP, DOWN = [0.1, 0.2, 0.3], [0.3, 0.2, 0.1]


def test_what_is_reversed_beyond_doubt_is_confirmed():
    drops = drops_of([[[UP], [UP]], [[DOWN], [DOWN]]])
    ranking, depth, _ = judge(drops, drops.pairs())
    assert ranking.finding == "confirmed"
    assert "of 6 comparisons of two criteria in two tasks, 6 are reversed" in (
        ranking.sentence
    )
    assert "c0 is better than c2 for x at depth 0, alpha 0, by 20.0 points" in (
        ranking.sentence
    )
    assert "worse for y" in ranking.sentence
    assert "from -1.00 to -1.00" in ranking.sentence
    assert depth.finding == "undecided"
    assert "nothing to compare" in depth.sentence


def test_what_is_the_same_beyond_doubt_is_refuted():
    assert findings(drops_of([[[UP, UP], [UP, UP]]] * 2))[:2] == ["refuted", "refuted"]


def test_depth_is_judged_within_a_task():
    turned = [[[UP, DOWN], [UP, DOWN]]] * 2
    assert findings(drops_of(turned))[:2] == ["refuted", "confirmed"]


def test_what_is_lost_in_noise_is_undecided():
    noisy = drops_of([[[UP], [UP]], [[DOWN], [DOWN]]], spread=1.0)
    assert findings(noisy)[0] == "undecided"
    one_side = torch.stack(
        [
            drops_of([[[UP], [UP]]] * 2).drawn[:, 0],
            drops_of([[[UP], [UP]]] * 2, spread=1.0).drawn[:, 0],
        ],
        dim=1,
    )
    drops = drops_of([[[UP], [UP]]] * 2)
    assert findings(replace(drops, drawn=one_side))[0] == "undecided"


def test_recovery_needs_both_signs():
    helped, hurt = [[[0.2, 0.3]], [[0.1, 0.2]]], [[[0.1, 0.2]], [[0.2, 0.3]]]
    assert findings(drops_of([helped, hurt]))[2] == "confirmed"
    assert findings(drops_of([helped, helped]))[2] == "refuted"
    assert findings(drops_of([helped, hurt], spread=1.0))[2] == "undecided"
    assert findings(drops_of([helped, hurt], recovers=[True, False]))[2] == "undecided"


def test_a_task_without_a_grid_counts_once():
    drops = drops_of([[[UP], [UP]], [[DOWN], [DOWN]]], recovers=[False, True])
    pairs = drops.pairs()
    assert [p.task for p in pairs] == [0] * 3 + [1] * 6
    assert findings(drops)[0] == "confirmed"
    assert [row["alpha"] for row in drops.between_tasks()] == [0.0, 1.0]


def test_pairs_without_spread_say_nothing():
    drops = drops_of([[[UP], [UP]]], spread=0.0)
    assert {p.p for p in drops.pairs()} == {1.0}
    assert {p.sign() for p in drops.pairs()} == {0}


def test_the_probability_of_a_pair_is_that_of_its_z():
    drops = drops_of([[[[0.1, 0.16]], [[0.1, 0.16]]]], spread=0.015, num=400)
    pair = drops.pairs()[0]
    change = drops.drawn[1:, 0, 0, 0, 0] - drops.drawn[1:, 0, 0, 0, 1]
    z = -0.06 / float(change.std())
    assert pair.p == pytest.approx(2 * scipy.stats.norm.cdf(z))
    assert pair.p_holm == pytest.approx(2 * pair.p)
    assert pair.sign() == -1
    assert pair._replace(p_holm=0.051).sign() == 0


def test_an_interval_excludes_zero_on_either_side():
    assert excludes_zero(Estimate(1.0, 0.5, 2.0))
    assert excludes_zero(Estimate(-1.0, -2.0, -0.5))
    assert not excludes_zero(Estimate(1.0, 0.0, 2.0))
    assert not excludes_zero(Estimate(1.0, float("nan"), float("nan")))
    assert isinstance(Pair(0, 0, 0, (0, 1), Estimate(0, 0, 0), 1.0).sign(), int)


def test_drops_must_have_their_shape():
    drops = drops_of([[[UP], [UP]]])
    with pytest.raises(ValueError, match=r"drawn must be \(1 \+ R, 1, 2, 1, 2\); got"):
        replace(drops, criteria=("a", "b"))


def test_conditions_take_lists():
    assert Conditions(criteria=["norm"]).criteria == ("norm",)


def test_attention_needs_a_class_token(data):
    from foveate.backbones import open_backbone
    from foveate.data.folder import ImageTransform
    from foveate.models import Model

    backbone = open_backbone(tiny.timm_vit_average())
    head = labelled.model_with_heads().task("mask")
    model = Model("average", backbone, {"mask": head}, ImageTransform(32)).eval()
    with pytest.raises(ValueError, match="criteria must not hold attention for a model"):
        probe(model, data, ["mask"], [0])
    found = probe(model, data, ["mask"], [0], criteria=["received"], num_resamples=2)
    assert found.drops.criteria == ("received",)
