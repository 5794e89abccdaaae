"""Oracle: AdamW by hand, the closed form of the rate, and the run that was not killed."""

import copy
import math
from itertools import chain

import pytest
import torch
from accelerate.state import AcceleratorState
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from foveate.training.loop import Recipe, Training, fit

COUNT, WIDTH = 11, 4


class Points:
    """Noisy values of a linear map; remembers which points were asked for."""

    def __init__(self, count=COUNT):
        draw = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, WIDTH, generator=draw)
        self.y = self.x @ torch.randn(WIDTH, 1, generator=draw) + 0.5
        self.asked = []

    def __len__(self):
        return len(self.x)

    def batch(self, index):
        self.asked.append(index.tolist())
        return {"x": self.x[index], "y": self.y[index]}


def make_network(seed=0):
    draw = torch.Generator().manual_seed(seed)
    network = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 1))
    with torch.no_grad():
        for p in network.parameters():
            p.copy_(torch.randn(p.shape, generator=draw))
    return network


def noisy(network, batch, generator):
    """Squared error of disturbed points, so that what is drawn matters."""
    noise = torch.randn(batch["x"].shape, generator=generator)
    return (network(batch["x"] + 0.1 * noise) - batch["y"]).square().mean()


def plain(network, batch, _):
    return (network(batch["x"]) - batch["y"]).square().mean()


def same(a, b):
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


class KilledError(Exception):
    """The run ends here."""


# --- the recipe ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"steps": 0}, "steps must be at least 1; got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1; got 0"),
        ({"accumulate": 0}, "accumulate must be at least 1; got 0"),
        ({"validate_every": -1}, "validate_every must be at least 1; got -1"),
        ({"learning_rate": 0.0}, r"learning_rate must be positive; got 0\.0"),
        ({"learning_rate": math.nan}, "learning_rate must be positive; got nan"),
        ({"clip": -1.0}, r"clip must be positive; got -1\.0"),
        ({"warmup": 1.0}, r"warmup must be from 0 to below 1; got 1\.0"),
        ({"warmup": -0.1}, r"warmup must be from 0 to below 1; got -0\.1"),
    ],
)
def test_numbers_out_of_range_are_refused(change, wrong):
    with pytest.raises(ValueError, match=wrong):
        Recipe(**{"steps": 3, **change})


def test_the_rate_is_a_line_up_to_the_peak_and_half_a_cosine_down_to_zero():
    recipe = Recipe(200, learning_rate=0.3, warmup=0.1)
    for step in range(20):
        assert recipe.rate(step) == pytest.approx(0.3 * (step + 1) / 21)
    for step in range(20, 200):
        assert recipe.rate(step) == pytest.approx(
            0.3 * math.cos(math.pi * (step - 20) / 180 / 2) ** 2
        )
    assert recipe.rate(20) == 0.3
    assert recipe.rate(110) == pytest.approx(0.15)
    assert 0 < recipe.rate(199) < 0.3 * 1e-4


@given(steps=st.integers(1, 50), warmup=st.floats(0, 0.99))
@settings(deadline=None, max_examples=60)
def test_no_rate_is_zero_or_above_the_peak(steps, warmup):
    recipe = Recipe(steps, learning_rate=2.0, warmup=warmup)
    rates = [recipe.rate(step) for step in range(steps)]
    assert all(0 < rate <= 2 for rate in rates)
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)


# --- what an update does ------------------------------------------------------------------


def test_updates_are_those_of_adamw_by_hand():
    recipe = Recipe(
        6, batch_size=4, learning_rate=0.05, weight_decay=0.3, clip=0.2, validate_every=2
    )
    points, network = Points(), make_network()
    twin = copy.deepcopy(network)
    found = fit(network, points, plain, recipe)
    first = {n: torch.zeros_like(p) for n, p in twin.named_parameters()}
    second, losses = copy.deepcopy(first), []
    for step, index in enumerate(points.asked):
        twin.zero_grad()
        loss = plain(twin, {"x": points.x[index], "y": points.y[index]}, None)
        loss.backward()
        losses.append(loss.item())
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in twin.parameters()))
        rate = recipe.rate(step)
        with torch.no_grad():
            for name, p in twin.named_parameters():
                g = p.grad * min(1.0, 0.2 / norm)
                first[name] = 0.9 * first[name] + 0.1 * g
                second[name] = 0.95 * second[name] + 0.05 * g.square()
                mean = first[name] / (1 - 0.9 ** (step + 1))
                square = second[name] / (1 - 0.95 ** (step + 1))
                p.mul_(1 - rate * (0.3 if p.ndim > 1 else 0.0))
                p.sub_(rate * mean / (square.sqrt() + 1e-8))
    for p, q in zip(network.parameters(), twin.parameters(), strict=True):
        assert_close(p, q, rtol=1e-4, atol=1e-5)
    means = [sum(losses[i : i + 2]) / 2 for i in (0, 2, 4)]
    assert found.losses == pytest.approx(means, rel=1e-4)
    assert (found.step, found.best_step, found.scores) == (6, 6, [])
    assert found.best_score is None
    assert not network.training


def test_accumulated_passes_are_the_mean_of_their_batches():
    results = []
    for recipe in (
        Recipe(5, batch_size=6, seed=3, clip=0.1),
        Recipe(5, batch_size=2, seed=3, clip=0.1, accumulate=3),
    ):
        network, points = make_network(), Points()
        found = fit(network, points, plain, recipe)
        results.append((network, list(chain.from_iterable(points.asked)), found.losses))
    assert results[0][1] == results[1][1]
    for p, q in zip(results[0][0].parameters(), results[1][0].parameters(), strict=True):
        assert_close(p, q, rtol=1e-4, atol=1e-5)
    assert results[0][2] == pytest.approx(results[1][2], rel=1e-4)


@given(count=st.integers(1, 12), batch=st.integers(1, 9), seed=st.integers(0, 2**63 - 1))
@settings(deadline=None, max_examples=10)
def test_every_example_comes_once_an_epoch(count, batch, seed):
    points = Points(count)
    fit(make_network(), points, plain, Recipe(8, batch_size=batch, seed=seed))
    assert all(len(index) == batch for index in points.asked)
    order = list(chain.from_iterable(points.asked))
    epochs = [order[i : i + count] for i in range(0, len(order), count)]
    for epoch in epochs[:-1]:
        assert sorted(epoch) == list(range(count))
    assert len(set(epochs[-1])) == len(epochs[-1])


def test_the_order_is_a_function_of_the_seed_and_changes_with_the_epoch():
    orders = []
    for seed in (0, 0, 1):
        points = Points()
        fit(make_network(), points, noisy, Recipe(6, batch_size=COUNT, seed=seed))
        orders.append(points.asked)
    assert orders[0] == orders[1] != orders[2]
    assert len({tuple(epoch) for epoch in orders[0]}) == 6


def test_the_same_seed_gives_the_same_bits_and_another_one_does_not():
    networks = []
    for seed in (4, 4, 5):
        torch.manual_seed(len(networks))  # nothing may come from the global generator
        network = make_network()
        fit(network, Points(1), noisy, Recipe(5, batch_size=1, seed=seed))
        networks.append(network)
    assert same(networks[0], networks[1])
    assert not same(networks[0], networks[2])


def test_parameters_without_gradient_stay_as_they_are():
    network = make_network()
    network[0].requires_grad_(False)
    before = copy.deepcopy(network)
    fit(network, Points(), plain, Recipe(5, weight_decay=0.5))
    assert same(network[0], before[0])
    assert not same(network[2], before[2])


# --- validation ---------------------------------------------------------------------------


def scripted(scores, seen):
    """A validation whose scores are given; keeps the weights it was shown."""

    def validate(network):
        assert not network.training
        assert not torch.is_grad_enabled()
        seen.append(copy.deepcopy(network))
        return scores[len(seen) - 1]

    return validate


def test_the_best_weights_are_restored():
    network, seen, told = make_network(), [], []
    found = fit(
        network,
        Points(),
        plain,
        Recipe(7, validate_every=2),
        scripted([0.1, 0.7, 0.7, 0.3], seen),
        watch=lambda now: told.append((now.step, list(now.scores))),
    )
    assert found.scores == [0.1, 0.7, 0.7, 0.3]
    assert (found.best_score, found.best_step, found.step) == (0.7, 4, 7)
    assert same(network, seen[1])  # the first of equals
    assert not same(network, seen[2])
    assert [step for step, _ in told] == [2, 4, 6, 7]
    assert not found.stopped
    assert not network.training


def test_the_last_validation_may_be_the_best():
    network, seen = make_network(), []
    found = fit(
        network, Points(), plain, Recipe(5, validate_every=2), scripted([1, 2, 3], seen)
    )
    assert found.best_step == 5
    assert same(network, seen[2])


def test_patience_stops_after_so_many_validations_without_a_better_one():
    scores = [0.1, 0.5, 0.4, 0.5, 0.2, 0.9, 0.9]
    seen = []
    recipe = Recipe(7, validate_every=1, patience=3)
    network = make_network()
    found = fit(network, Points(), plain, recipe, scripted(scores, seen))
    assert (found.step, found.stopped, found.best_step) == (5, True, 2)
    assert found.scores == scores[:5]
    assert same(network, seen[1])
    assert not Training(scores=[1.0, 0.0]).is_late(None)


# --- what is killed -----------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("at", [0, 2, 3])
def test_a_killed_run_ends_as_the_one_that_was_not(tmp_path, at, accumulate):
    recipe = Recipe(
        20, batch_size=3, learning_rate=0.1, validate_every=5, accumulate=accumulate, seed=2
    )
    score = lambda network: -float(plain(network, Points().batch(torch.arange(3)), 0))  # noqa: E731
    truth = make_network()
    expected = fit(truth, Points(), noisy, recipe, score)

    def kill(now):
        if len(now.scores) == at + 1:
            raise KilledError

    state = tmp_path / "deep/run.state"
    with pytest.raises(KilledError):
        fit(make_network(), Points(), noisy, recipe, score, state, kill)
    assert [file.name for file in state.parent.iterdir()] == ["run.state"]
    network, points = make_network(seed=9), Points()
    found = fit(network, points, noisy, recipe, score, state)
    assert found == expected
    assert len(points.asked) == (20 - 5 * (at + 1)) * accumulate
    assert same(network, truth)


def test_what_is_done_is_not_done_again(tmp_path):
    recipe, state = Recipe(4, validate_every=2, patience=1), tmp_path / "run.state"
    network = make_network()
    scores = iter([2.0, 1.0])
    found = fit(network, Points(), plain, recipe, lambda _: next(scores), state)
    points, again = Points(), make_network(seed=9)
    assert fit(again, points, plain, recipe, lambda _: 1 / 0, state) == found
    assert not points.asked
    assert same(again, network)


def test_a_kill_while_the_state_is_written_leaves_the_one_before(tmp_path, monkeypatch):
    recipe, state = Recipe(6, validate_every=2), tmp_path / "run.state"
    truth = make_network()
    fit(truth, Points(), noisy, recipe)
    save, calls = torch.save, []

    def half(saved, file):
        calls.append(file)
        save(saved, file)
        if len(calls) == 2:
            file.write_bytes(file.read_bytes()[:50])
            raise KilledError

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(KilledError):
        fit(make_network(), Points(), noisy, recipe, state=state)
    network = make_network(seed=9)
    assert fit(network, Points(), noisy, recipe, state=state).step == 6
    assert same(network, truth)


def test_the_state_of_another_recipe_is_refused(tmp_path):
    state = tmp_path / "run.state"
    fit(make_network(), Points(), plain, Recipe(2), state=state)
    with pytest.raises(ValueError, match=r"state must belong to this recipe; .*run\.state"):
        fit(make_network(), Points(), plain, Recipe(2, seed=1), state=state)


def test_the_state_of_another_network_is_refused(tmp_path):
    state = tmp_path / "run.state"
    fit(make_network(), Points(), plain, Recipe(2), state=state)
    with pytest.raises(ValueError, match=r"(?s)state must belong to this network; .*bias"):
        fit(nn.Linear(WIDTH, 1), Points(), plain, Recipe(2), state=state)


@pytest.mark.parametrize("content", [b"", b"garbage" * 20, b"PK\x03\x04" + 60 * b"x"])
def test_a_state_that_is_none_is_refused(tmp_path, content):
    state = tmp_path / "run.state"
    state.write_bytes(content)
    with pytest.raises(ValueError, match=r"state must be of a training; .*run\.state"):
        fit(make_network(), Points(), plain, Recipe(2), state=state)


# --- what goes wrong ----------------------------------------------------------------------


def test_no_examples_are_refused():
    with pytest.raises(ValueError, match="examples must hold at least one; got none"):
        fit(make_network(), Points(0), plain, Recipe(2))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_refused_at_its_step(bad):
    losses = iter([1.0, 1.0, bad])
    objective = lambda n, b, g: plain(n, b, g) * next(losses)  # noqa: E731
    with pytest.raises(ValueError, match=f"loss must be finite; got {bad} at step 2"):
        fit(make_network(), Points(), objective, Recipe(5))


def test_a_score_that_is_no_number_is_refused(tmp_path):
    state = tmp_path / "run.state"
    with pytest.raises(ValueError, match="score must be finite; got nan"):
        fit(make_network(), Points(), plain, Recipe(2), lambda _: math.nan, state)
    assert not state.exists()


def test_a_last_update_that_breaks_the_weights_is_refused():
    objective = lambda n, b, g: (n(b["x"]) * 0).square().sum().sqrt()  # noqa: E731
    with pytest.raises(ValueError, match="weights must be finite"):
        fit(make_network(), Points(), objective, Recipe(1))


# --- half precision -----------------------------------------------------------------------


@pytest.fixture
def fresh_accelerator():
    """The precision of a process is set once."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_bfloat16_is_used_in_training_and_gone_after_it(fresh_accelerator):
    dtypes = set()
    network = make_network()
    network[1].register_forward_hook(lambda m, given, out: dtypes.add(given[0].dtype))
    found = fit(network, Points(), plain, Recipe(40, learning_rate=0.05, precision="bf16"))
    assert dtypes == {torch.bfloat16}
    assert all(p.dtype == torch.float32 for p in network.parameters())
    assert network.forward.__func__ is nn.Sequential.forward
    x = Points().x
    by_hand = network[2](network[1](network[0](x)))
    assert torch.equal(network(x), by_hand)
    assert found.losses[-1] < 2.0
