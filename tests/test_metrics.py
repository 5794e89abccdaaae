"""Oracle: torchmetrics, scipy's bootstrap, and the formulas in numpy, to 1e-6."""

import numpy as np
import pytest
import scipy.stats
import torch
from torchmetrics.functional.classification import multiclass_accuracy
from torchmetrics.functional.classification import multiclass_jaccard_index as jaccard

from foveate.evaluation import metrics_classification as classification
from foveate.evaluation import metrics_segmentation as segmentation
from foveate.evaluation.metrics import (
    Estimate,
    Means,
    intervals,
    paired_intervals,
    resamples,
)

NAN = float("nan")


def value_of(statistics):
    """Scores on all images, as numbers."""
    once = torch.ones(1, statistics.num_images, dtype=torch.float64)
    return {name: float(value) for name, value in statistics.scores(once).items()}


# Classification


@pytest.mark.parametrize("k", [1, 5])
def test_accuracy_is_that_of_torchmetrics(generator, k):
    logits = torch.randn(200, 12, generator=generator)
    labels = torch.randint(12, (200,), generator=generator)
    expected = multiclass_accuracy(logits, labels, 12, average="micro", top_k=k)
    found = value_of(classification.accuracy(logits, labels))[f"top{k}"]
    assert found == pytest.approx(float(expected), abs=1e-6)


def test_accuracy_per_image_in_closed_form():
    logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    labels = torch.tensor([0, 1, 2])
    found = classification.accuracy(logits, labels, ks=(1, 2)).values
    assert found["top1"].tolist() == [1, 0, 0]
    assert found["top2"].tolist() == [1, 1, 0]
    parts = [
        classification.accuracy(logits[i : i + 1], labels[i : i + 1], (2,)) for i in (1, 2)
    ]
    assert classification.gather(parts).values["top2"].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("logits", "labels", "ks", "message"),
    [
        (
            torch.zeros(2, 3),
            torch.zeros(3),
            (1,),
            r"labels \(N,\); got \(2, 3\) and \(3,\)",
        ),
        (torch.full((1, 3), NAN), torch.zeros(1), (1,), r"logits must be finite"),
        (torch.zeros(1, 3), torch.tensor([3]), (1,), r"0 to 2; got 3 to 3"),
        (
            torch.zeros(1, 3),
            torch.tensor([0]),
            (1, 5),
            r"within 1 to 3 classes; got \(1, 5\)",
        ),
    ],
)
def test_accuracy_refuses(logits, labels, ks, message):
    with pytest.raises(ValueError, match=message):
        classification.accuracy(logits, labels, ks)


# Segmentation


def naive_miou(predicted, target, num_classes):
    """Pixels added up over all images, class by class; absent classes are skipped."""
    predicted, target = (
        np.concatenate([m.numpy().ravel() for m in p]) for p in (predicted, target)
    )
    predicted, target = predicted[target != 255], target[target != 255]
    ratios = []
    for c in range(num_classes):
        either = ((predicted == c) | (target == c)).sum()
        if either:
            ratios.append(((predicted == c) & (target == c)).sum() / either)
    return np.mean(ratios) if ratios else NAN


def masks(kind, generator):
    """Predicted and true masks of three images of unlike sizes."""
    shapes = ((6, 8), (5, 4), (9, 3))
    predicted = [torch.randint(7, shape, generator=generator) for shape in shapes]
    target = [torch.randint(7, shape, generator=generator) for shape in shapes]
    for p, t in zip(predicted, target, strict=True):
        if kind != "plain":
            t[torch.rand(t.shape, generator=generator) < 0.3] = 255
        if kind == "absent":  # in neither
            p[p == 2], t[t == 2] = 3, 3
        if kind == "only predicted":
            t[t == 2] = 255
        if kind == "never predicted":
            p[p == 4] = 0
        if kind == "perfect":
            p[t != 255] = t[t != 255]
    if kind == "an ignored image":
        target[1][:] = 255
    return predicted, target


KINDS = (
    "plain",
    "absent",
    "only predicted",
    "never predicted",
    "perfect",
    "an ignored image",
)


@pytest.mark.parametrize("kind", KINDS)
def test_miou_is_that_of_torchmetrics_and_numpy(generator, kind):
    predicted, target = masks(kind, generator)
    pairs = zip(predicted, target, strict=True)
    found = segmentation.gather([segmentation.overlap(p, t, 7) for p, t in pairs])
    flat = [torch.cat([m.flatten() for m in each]) for each in (predicted, target)]
    theirs = jaccard(*flat, num_classes=7, ignore_index=255, average="macro")
    assert value_of(found)["miou"] == pytest.approx(float(theirs), abs=1e-6)
    naive = naive_miou(predicted, target, 7)
    assert value_of(found)["miou"] == pytest.approx(naive, abs=1e-12)


def test_miou_of_a_resample_is_that_of_the_repeated_images(generator):
    predicted, target = masks("absent", generator)
    pairs = zip(predicted, target, strict=True)
    found = segmentation.gather([segmentation.overlap(p, t, 7) for p, t in pairs])
    weights = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]], dtype=torch.float64)
    for scored, drawn in zip(
        found.scores(weights)["miou"], ([0, 0, 2], [1, 1, 1]), strict=True
    ):
        again = ([each[i] for i in drawn] for each in (predicted, target))
        assert float(scored) == pytest.approx(naive_miou(*again, 7), abs=1e-12)


def test_miou_without_a_counted_pixel_is_undefined():
    nothing = torch.full((3, 4), 255)
    found = segmentation.gather([
        segmentation.overlap(torch.zeros(3, 4).long(), nothing, 5)
    ])
    assert np.isnan(value_of(found)["miou"])
    assert intervals(found)["miou"].record() == {"value": None, "low": None, "high": None}


def test_masks_that_do_not_fit_are_refused():
    mask = torch.zeros(3, 4).long()
    with pytest.raises(ValueError, match=r"target's size \(3, 4\); got \(4, 3\)"):
        segmentation.overlap(mask.T, mask, 5)
    with pytest.raises(ValueError, match=r"predicted must hold classes 0 to 4; got 0 to 5"):
        segmentation.overlap(mask + torch.eye(3, 4).long() * 5, mask, 5)
    with pytest.raises(ValueError, match=r"target must hold classes 0 to 4; got 7 to 7"):
        segmentation.overlap(mask, mask + 7, 5)


# Intervals


def test_intervals_are_those_of_scipy(generator):
    values = torch.randn(80, generator=generator).exp()
    found = intervals(Means({"error": values}), num_resamples=20_000)["error"]
    theirs = scipy.stats.bootstrap(
        (values.numpy(),), np.mean, n_resamples=20_000, method="percentile", rng=1
    ).confidence_interval
    assert found.value == pytest.approx(float(values.mean()), abs=1e-6)
    spread = float(theirs.high - theirs.low)
    assert found.low == pytest.approx(theirs.low, abs=0.03 * spread)  # 4 standard errors
    assert found.high == pytest.approx(theirs.high, abs=0.03 * spread)


def test_a_seed_gives_the_same_interval_and_another_one_does_not(generator):
    means = Means({"error": torch.rand(30, generator=generator)})
    first, again, other = (intervals(means, seed=s)["error"] for s in (4, 4, 5))
    assert first == again
    assert (first.low, first.high) != (other.low, other.high)
    assert first.value == other.value


def test_a_resample_draws_as_many_images_as_there_are():
    drawn = torch.cat([*resamples(7, 100, seed=0)])
    assert drawn.shape == (100, 7)
    assert (drawn.sum(dim=1) == 7).all()
    assert drawn.std() == pytest.approx((6 / 7) ** 0.5, abs=0.1)  # binomial


def test_a_pair_is_scored_on_the_same_resamples(generator):
    values = torch.rand(40, generator=generator, dtype=torch.float64)
    full, reduced = Means({"error": values}), Means({"error": values + 0.05})
    found = paired_intervals(full, reduced, seed=3)
    assert found["full"] == intervals(full, seed=3)
    assert found["reduced"] == intervals(reduced, seed=3)
    assert found["difference"]["error"] == pytest.approx((0.05, 0.05, 0.05))
    low = found["reduced"]["error"].low - found["full"]["error"].high
    assert low < 0  # what the difference of unpaired intervals would leave open


def test_intervals_contain_the_score(generator):
    pairs = zip(*masks("absent", generator), strict=True)
    overlaps = segmentation.gather([segmentation.overlap(p, t, 7) for p, t in pairs])
    estimate = intervals(overlaps, num_resamples=100)["miou"]
    assert estimate.low < estimate.high
    assert estimate.low <= estimate.value <= estimate.high


def test_a_single_image_leaves_no_interval():
    assert intervals(Means({"top1": torch.tensor([0.5])}))["top1"] == Estimate(
        0.5, 0.5, 0.5
    )


def test_statistics_that_do_not_fit_are_refused():
    one, two = Means({"a": torch.ones(1)}), Means({"a": torch.ones(2)})
    with pytest.raises(ValueError, match=r"same images; got 1 and 2"):
        paired_intervals(one, two)
    with pytest.raises(ValueError, match=r"same scores; got \['a'\] and \['b'\]"):
        paired_intervals(one, Means({"b": torch.ones(1)}))
    with pytest.raises(ValueError, match=r"num_resamples must be at least 2; got 1"):
        intervals(one, num_resamples=1)
    with pytest.raises(ValueError, match=r"level must be within \(0, 1\); got 95"):
        intervals(one, level=95)
    with pytest.raises(ValueError, match=r"one number per image"):
        Means({"a": torch.ones(2), "b": torch.ones(3)})
    with pytest.raises(ValueError, match=r"values of a must not be infinite"):
        Means({"a": torch.tensor([float("inf")])})
