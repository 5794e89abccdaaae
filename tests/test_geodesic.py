"""Oracle: arc lengths in closed form, scipy's rotations, scipy's quadrature."""

from math import asinh, pi, sqrt

import numpy as np
import pytest
import torch
from scipy.integrate import quad, simpson
from scipy.spatial.transform import Rotation
from torch.func import jvp
from torch.testing import assert_close

from foveate.diagnosis.geodesic import path_length, straight
from foveate.diagnosis.jacobian import TokenJacobian, open_tap
from foveate.diagnosis.pose_metric import PoseWeights, pose_factor
from tests.reference_jacobian import Bend, linear_jacobian, matrix_with

ARC = sqrt(5) / 2 + asinh(2) / 4  # of the parabola y = s^2 from 0 to 1


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def parabola(x):
    """``(s, s^2)`` for the one channel of the first token."""
    s = x[:, 0]
    return torch.cat([s, s**2], dim=1)


def test_under_a_linear_tail_it_is_the_length_of_the_pushed_change():
    matrices = torch.stack([matrix_with(torch.tensor([3.0, 1, 0.2]), 8, s) for s in (0, 1)])
    jacobian = linear_jacobian(matrices, 4)
    start, end = normal(2, 4, 2), normal(2, 4, 2, seed=1)
    found = path_length(jacobian.tail, straight(start, end), intervals=2)
    truth = jacobian.jvp((end - start)[None])[0].norm(dim=1)
    assert_close(found.length, truth, rtol=1e-14, atol=0)
    assert_close(found.chord, truth, rtol=1e-14, atol=0)
    assert found.error.max() < 1e-13


@pytest.mark.parametrize("intervals", [2, 4, 8, 16])
def test_a_parabola_has_its_arc_length_within_the_error(intervals):
    start, end = torch.zeros(1, 1, 1).double(), torch.ones(1, 1, 1).double()
    found = path_length(parabola, straight(start, end), intervals)
    gap = abs(float(found.length) - ARC)
    assert 0 < gap < float(found.error) < 0.01
    assert float(found.chord) == pytest.approx(sqrt(2))


def test_halving_the_steps_divides_the_error_by_sixteen():
    ends = torch.zeros(1, 1, 1).double(), torch.ones(1, 1, 1).double()
    gaps = [
        abs(float(path_length(parabola, straight(*ends), n).length) - ARC) for n in (16, 32)
    ]
    assert 12 < gaps[0] / gaps[1] < 20


def test_the_length_does_not_depend_on_how_fast_a_path_is_run():
    start, end = normal(2, 3, 4), normal(2, 3, 4, seed=1)
    tail = Bend(3, 4, 5)
    even = path_length(tail, straight(start, end), 64)
    rushed = path_length(tail, lambda s: start + s**2 * (end - start), 64)
    assert_close(even.length, rushed.length, rtol=1e-5, atol=0)
    assert (even.length > even.chord).all()


def test_a_detour_is_longer():
    start, end = normal(2, 3, 4), normal(2, 3, 4, seed=1)
    jacobian = linear_jacobian(
        torch.stack([matrix_with(torch.arange(5.0, 0, -1), 12, s) for s in (0, 1)]), 3
    )
    aside = normal(2, 3, 4, seed=2)

    def detour(s):
        return start + s * (end - start) + (pi * s).sin() * aside

    direct = path_length(jacobian.tail, straight(start, end), 32)
    around = path_length(jacobian.tail, detour, 32)
    assert (around.length > direct.length + 0.1).all()
    assert_close(around.chord, direct.chord)


def test_images_have_lengths_of_their_own_and_match_scipys_quadrature():
    start, end = normal(2, 3, 4), normal(2, 3, 4, seed=1)
    tail = Bend(3, 4, 5)
    found = path_length(tail, straight(start, end), 64)
    for image in range(2):

        def speed(s, image=image):
            at = start[image] + s * (end - start)[image]
            return float(jvp(tail, (at[None],), ((end - start)[image][None],))[1].norm())

        truth, _ = quad(speed, 0, 1, epsabs=1e-9, limit=200)
        assert float(found.length[image]) == pytest.approx(truth, rel=1e-4)
    s = np.linspace(0, 1, 129)
    assert_close(found.length, torch.from_numpy(simpson(found.speeds.numpy(), x=s)))


def test_a_turning_camera_goes_the_angle():
    """A tail that returns poses which turn by an angle; the chord is shorter."""
    half = 0.6

    def tail(x):
        angle = half * x[:, 0]
        zero, one = torch.zeros_like(angle), torch.ones_like(angle)
        turn = [zero, zero, angle.sin(), angle.cos()]
        return torch.cat([zero, zero, zero, *(3 * t for t in turn), one, one], dim=1)

    ends = torch.zeros(1, 1, 1).double(), torch.ones(1, 1, 1).double()
    found = path_length(tail, straight(*ends), factor=pose_factor)
    first, last = (Rotation.from_quat(tail(e)[0, 3:7].numpy()) for e in ends)
    truth = (first.inv() * last).magnitude()
    assert float(found.length) == pytest.approx(truth, rel=1e-12)
    weighted = path_length(
        tail, straight(*ends), factor=lambda y: pose_factor(y, PoseWeights(rotation=4))
    )
    assert float(weighted.length) == pytest.approx(2 * truth, rel=1e-12)


def test_attention_in_the_tail_is_differentiated(double_model, double_images):
    tap = open_tap(double_model.backbone, double_model.task("cls"), double_images, 1)
    start = tap.tokens.x
    step = 1e-4 * normal(*start.shape)
    found = path_length(tap.tail, straight(start, start + step), 2)
    pushed = TokenJacobian(tap.tail, start).jvp(step[None])[0].norm(dim=1)
    assert_close(found.length, pushed, rtol=1e-2, atol=0)
    assert found.speeds.shape == (2, 5)


def test_single_precision_stays_single_in_the_tail():
    seen = []

    def tail(x):
        seen.append(x.dtype)
        return x.flatten(1)

    found = path_length(tail, straight(torch.zeros(1, 2, 1), torch.ones(1, 2, 1)))
    assert set(seen) == {torch.float32}
    assert float(found.length) == pytest.approx(sqrt(2), rel=1e-6)


@pytest.mark.parametrize("intervals", [0, 1, 3, -2])
def test_refuses_intervals_that_the_rule_cannot_halve(intervals):
    path = straight(torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    with pytest.raises(ValueError, match=rf"even and at least 2; got {intervals}\."):
        path_length(lambda x: x.flatten(1), path, intervals)
