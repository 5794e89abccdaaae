"""Oracle: the formulas in numpy, least squares by scipy, closed forms; to 1e-6."""

import numpy as np
import pytest
import scipy.stats
import torch
from torch.testing import assert_close

from foveate.evaluation import metrics_depth as depth
from foveate.evaluation.metrics import intervals

NAN = float("nan")


def value_of(statistics):
    """Scores on all images, as numbers."""
    once = torch.ones(1, statistics.num_images, dtype=torch.float64)
    return {name: float(value) for name, value in statistics.scores(once).items()}


def naive_depth(d, truth, valid, variance_focus=1.0):
    d, truth = (m.double().numpy()[valid.numpy()] for m in (d, truth))
    d = np.clip(d, 1e-3, 10)
    e = np.log(d) - np.log(truth)
    return [
        np.mean(np.abs(d - truth) / truth),
        np.sqrt(np.mean((d - truth) ** 2)),
        np.mean(np.maximum(d / truth, truth / d) < 1.25),
        np.mean(np.abs(np.log10(d) - np.log10(truth))),
        100 * np.sqrt(np.mean(e**2) - variance_focus * np.mean(e) ** 2),
    ]


def rooms(generator, shape=(12, 17)):
    truth = 0.5 + 8 * torch.rand(shape, generator=generator)
    predicted = truth * (1 + 0.3 * torch.randn(shape, generator=generator))
    return predicted, truth, torch.rand(shape, generator=generator) < 0.7


@pytest.mark.parametrize("variance_focus", [1.0, 0.85, 0.5])
def test_depth_errors_are_those_of_numpy(generator, variance_focus):
    case = rooms(generator)
    found = depth.depth_errors(*case, variance_focus=variance_focus)
    assert found.tolist() == pytest.approx(naive_depth(*case, variance_focus), abs=1e-6)


def test_depth_outside_the_limits_and_not_finite_is_set_to_them(generator):
    predicted, truth, valid = rooms(generator)
    special = {0: float("inf"), 1: NAN, 2: -3.0, 3: 0.0, 4: 99.0, 5: -float("inf")}
    expected = predicted.double()
    for column, value in special.items():
        predicted[:, column] = value
        expected[:, column] = 10.0 if value > 5 else 1e-3
    found = depth.depth_errors(predicted, truth, valid)
    assert found.tolist() == pytest.approx(naive_depth(expected, truth, valid), abs=1e-6)


def test_depth_is_resized_with_corners_aligned(generator):
    _, truth, valid = rooms(generator, (11, 21))
    rows, columns = torch.linspace(1, 3, 11)[:, None], torch.linspace(0, 4, 21)
    plane = rows + columns  # bilinear resizing of a plane is the plane
    found = depth.depth_errors(plane[::5, ::5], truth, valid)
    assert found.tolist() == pytest.approx(naive_depth(plane, truth, valid), abs=1e-5)


def test_a_perfect_depth_has_no_error(generator):
    _, truth, valid = rooms(generator)
    errors = dict(zip(depth.NAMES, depth.depth_errors(truth, truth, valid), strict=True))
    assert errors.pop("delta1") == 1
    assert all(error == 0 for error in errors.values())


def test_silog_does_not_see_a_common_factor(generator):
    predicted, truth, valid = rooms(generator)
    pair = [depth.depth_errors(s * predicted.clamp(1, 4), truth, valid)[4] for s in (1, 2)]
    assert_close(*pair)


def test_images_without_a_valid_pixel_are_left_out_of_means(generator):
    predicted, truth, valid = rooms(generator)
    nothing = torch.zeros_like(valid)
    errors = [depth.depth_errors(predicted, truth, v) for v in (nothing, valid, nothing)]
    assert errors[0].isnan().all()
    found = value_of(depth.gather(errors))
    assert [*found] == [*depth.NAMES]
    assert [*found.values()] == pytest.approx(
        naive_depth(predicted, truth, valid), abs=1e-6
    )
    assert np.isnan(value_of(depth.gather(errors[:1]))["abs_rel"])


def test_alignment_undoes_a_scale_and_shift_of_disparity(generator):
    _, truth, valid = rooms(generator)
    predicted = 3 / truth + 0.7
    aligned = depth.align_disparity(predicted, truth, valid)
    assert_close(aligned, truth.double(), atol=1e-4, rtol=0)


def test_alignment_is_least_squares_where_the_prediction_is_positive(generator):
    _, truth, valid = rooms(generator)
    predicted = 1 / truth + 0.3 * torch.randn(truth.shape, generator=generator)
    used = (valid & (predicted > 0)).numpy()
    assert used.sum() < valid.sum()
    fit = scipy.stats.linregress(predicted.numpy()[used], 1 / truth.numpy()[used])
    disparity = np.maximum(fit.slope * predicted.double().numpy() + fit.intercept, 1e-3)
    expected = torch.from_numpy(np.clip(1 / disparity, 1e-3, 10))
    found = depth.align_disparity(predicted, truth, valid)
    assert_close(found, expected, atol=1e-4, rtol=1e-5)


def test_alignment_of_a_constant_is_the_mean_disparity(generator):
    _, truth, valid = rooms(generator)
    found = depth.align_disparity(torch.ones_like(truth), truth, valid)
    assert_close(found, torch.full_like(found, float(1 / (1 / truth[valid]).mean())))


def test_alignment_without_a_valid_pixel_leaves_no_error(generator):
    predicted, truth, valid = rooms(generator)
    nothing = torch.zeros_like(valid)
    aligned = depth.align_disparity(predicted, truth, nothing)
    assert depth.depth_errors(aligned, truth, nothing).isnan().all()


def test_depth_that_does_not_fit_is_refused():
    ones, valid = torch.ones(3, 4), torch.ones(3, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"got \(3, 4\), \(3, 4\) and \(4, 3\)"):
        depth.depth_errors(ones, ones, valid.T)
    with pytest.raises(ValueError, match=r"target must be positive where it is valid"):
        depth.depth_errors(ones, 0 * ones, valid)
    with pytest.raises(ValueError, match=r"limits must be .* ascending; got \(2, 1\)"):
        depth.depth_errors(ones, ones, valid, (2, 1))
    with pytest.raises(ValueError, match=r"variance_focus must be within \[0, 1\]; got 2"):
        depth.depth_errors(ones, ones, valid, variance_focus=2)
    with pytest.raises(ValueError, match=r"at least 2 valid pixels to be aligned; got 0"):
        depth.align_disparity(0 * ones, ones, valid)
    with pytest.raises(ValueError, match=r"predicted must be finite"):
        depth.align_disparity(NAN * ones, ones, valid)


def test_intervals_contain_the_score(generator):
    errors = [depth.depth_errors(*rooms(generator)) for _ in range(6)]
    for estimate in intervals(depth.gather(errors), num_resamples=100).values():
        assert estimate.low < estimate.high
        assert estimate.low <= estimate.value <= estimate.high
