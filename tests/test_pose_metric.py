"""Oracle: scipy's rotations at finite distance, scipy's Spearman, closed forms."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation
from scipy.stats import spearmanr
from torch.testing import assert_close

from foveate.diagnosis.jacobian import TokenJacobian, open_tap
from foveate.diagnosis.output_metric import OutputMetric
from foveate.diagnosis.pose_metric import PoseWeights, compare_metrics, pose_factor
from foveate.models import open_model
from tests import tiny_vggt
from tests.reference_jacobian import Bend, importance_of, materialise

WEIGHTS = PoseWeights(translation=0.7, rotation=2.5, field_of_view=1.3)


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def squared_distance(a, b, weights=WEIGHTS):
    """Of two poses each, with the angle of scipy's relative rotation, ``(B,)``."""
    one, other = (Rotation.from_quat(p[:, 3:7].numpy()) for p in (a, b))
    angle = torch.from_numpy((one.inv() * other).magnitude())
    return (
        weights.translation * (a - b)[:, :3].square().sum(1)
        + weights.rotation * angle.square()
        + weights.field_of_view * (a - b)[:, 7:].square().sum(1)
    )


def squared_length(poses, change, weights=WEIGHTS):
    moved = pose_factor(poses, weights) @ change[..., None]
    return moved.square().sum((1, 2))


def test_the_length_of_a_step_is_the_distance_to_second_order():
    poses, change = normal(6, 9), normal(6, 9, seed=1)
    steps = (1e-2, 1e-3)
    gaps = [
        squared_distance(poses, poses + h * change).sqrt() / h
        - squared_length(poses, change).sqrt()
        for h in steps
    ]
    assert gaps[0].abs().max() > 1e-5  # poses are curved
    assert (gaps[1].abs() <= 0.11 * gaps[0].abs() + 1e-9).all()  # distance errs as h^2


@pytest.mark.parametrize("axis", range(3))
def test_turning_by_an_angle_has_that_length(axis):
    start, rate = Rotation.from_rotvec([0.3, -1.1, 0.8]), np.eye(3)[axis]
    ahead, behind = (
        (start * Rotation.from_rotvec(s * 1e-6 * rate)).as_quat() for s in (1, -1)
    )
    poses = torch.zeros(1, 9, dtype=torch.float64)
    poses[0, 3:7] = torch.from_numpy(5 * start.as_quat())
    change = torch.zeros(1, 9, dtype=torch.float64)
    change[0, 3:7] = torch.from_numpy(5 * (ahead - behind) / 2e-6)
    length = squared_length(poses, change, PoseWeights()).sqrt()
    assert_close(length, torch.ones(1, dtype=torch.float64), rtol=1e-8, atol=0)


@given(st.integers(0, 2**31), st.floats(0.01, 100), st.booleans())
def test_neither_scale_nor_sign_of_a_quaternion_changes_a_length(seed, scale, flips):
    poses, change = normal(3, 9, seed=seed), normal(3, 9, seed=seed + 1)
    scale = -scale if flips else scale
    other, moved = poses.clone(), change.clone()
    other[:, 3:7] *= scale
    moved[:, 3:7] *= scale
    assert_close(squared_length(other, moved), squared_length(poses, change))


def test_the_metric_is_the_same_for_both_signs():
    poses = normal(4, 9)
    other = poses.clone()
    other[:, 3:7] *= -1
    one, two = (pose_factor(p, WEIGHTS) for p in (poses, other))
    assert_close(one.mT @ one, two.mT @ two)


def test_scaling_a_quaternion_is_the_only_change_without_length():
    poses = normal(5, 9)
    factor = pose_factor(poses, WEIGHTS)
    energies, vectors = torch.linalg.eigh(factor.mT @ factor)
    assert energies[:, 0].abs().max() < 1e-12
    least = torch.full((5,), min(0.7, 1.3)).double()
    turning = 4 * 2.5 / poses[:, 3:7].square().sum(1)
    assert_close(energies[:, 1], torch.minimum(least, turning))
    null = torch.zeros_like(poses)
    null[:, 3:7] = poses[:, 3:7] / poses[:, 3:7].norm(dim=1, keepdim=True)
    assert_close((vectors[:, :, 0] * null).sum(1).abs(), torch.ones(5).double())


def test_each_pose_of_a_batch_has_its_own_metric():
    poses = normal(3, 9)
    together = pose_factor(poses)
    assert_close(together[1], pose_factor(poses[1:2])[0])
    assert not torch.allclose(together[0], together[1])


def test_it_plugs_in_as_an_output_metric():
    tail, tokens = Bend(3, 4, 9), normal(2, 3, 4)
    jacobian = TokenJacobian(tail, tokens)
    seen = OutputMetric(jacobian, pose_factor(jacobian.output, WEIGHTS))
    v = normal(2, 3, 4, seed=2)
    h = 1e-4
    moved = squared_distance(tail(tokens - h * v), tail(tokens + h * v)).sqrt() / (2 * h)
    assert_close(seen.jvp(v[None])[0].norm(dim=1), moved, rtol=1e-5, atol=0)


@pytest.fixture(scope="module")
def camera():
    """A tiny VGGT, its Jacobian at block 2, and the dense matrix."""
    model = open_model(tiny_vggt.vggt().double())
    images = tiny_vggt.frames(torch.float64)

    def cut(part):
        return open_tap(model.backbone, model.task("camera"), part, 2)

    dense = [materialise(tap.tail, tap.tokens.x) for tap in map(cut, images.split(1))]
    tap = cut(images)
    jacobian = TokenJacobian(tap.tail, tap.tokens.x)
    return jacobian, tap.tokens.layout.num_prefix, torch.cat(dense)


def test_both_metrics_rank_the_patches_of_a_camera(camera):
    jacobian, num_prefix, dense = camera
    found = compare_metrics(jacobian, num_prefix, rank=4, weights=WEIGHTS)
    factor = pose_factor(jacobian.output, WEIGHTS)
    record = found.record()
    for image in range(2):
        plain = importance_of(dense[image, :, num_prefix:], 4)
        through = torch.einsum("nm,mtc->ntc", factor[image], dense[image, :, num_prefix:])
        turned = importance_of(through, 4)
        assert_close(found.euclidean[image]["patches"].importance, plain)
        assert_close(found.rotation[image]["patches"].importance, turned)
        truth = spearmanr(plain, turned).statistic
        assert record[image]["spearman"] == pytest.approx(truth)
        order = turned.argsort(descending=True).tolist()
        assert record[image]["rotation"]["order"] == order


@pytest.mark.parametrize("rank", [9, 20])
def test_nine_directions_hold_a_pose_under_both_metrics(camera, rank):
    jacobian, num_prefix, _ = camera
    for image in compare_metrics(jacobian, num_prefix, rank).record():
        for metric in ("euclidean", "rotation"):
            assert image[metric]["kappa_cap"] == pytest.approx(1, abs=1e-12)


def test_eight_directions_hold_a_pose_under_the_metric_of_rotations_alone(camera):
    jacobian, num_prefix, _ = camera
    for image in compare_metrics(jacobian, num_prefix, 8).record():
        assert image["rotation"]["kappa_cap"] == pytest.approx(1, abs=1e-12)
        assert image["euclidean"]["kappa_cap"] < 1 - 1e-9


@pytest.mark.parametrize("shape", [(9,), (2, 8), (1, 2, 9)])
def test_refuses_what_is_not_a_pose(shape):
    with pytest.raises(ValueError, match=r"poses must have shape \(B, 9\); got"):
        pose_factor(torch.ones(shape))


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_refuses_a_quaternion_without_a_direction(value):
    poses = torch.ones(2, 9)
    poses[1, 3:7] = value
    with pytest.raises(ValueError, match=r"finite and not zero; got .* for image 1\."):
        pose_factor(poses)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_refuses_a_weight_that_makes_a_part_free(value):
    with pytest.raises(ValueError, match="rotation must be positive and finite; got"):
        PoseWeights(rotation=value)
