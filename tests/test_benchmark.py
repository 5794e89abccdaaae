"""Oracle: a clock that ticks once a look; storages counted by hand; the untimed models."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from foveate.evaluation import benchmark as module
from foveate.evaluation import clock as clock_module
from foveate.evaluation.benchmark import Benchmark, Conditions, Memory, benchmark, noise
from foveate.evaluation.clock import Clock
from foveate.evaluation.memory import held_bytes, peak_bytes
from foveate.evaluation.timed import TimedCall
from foveate.reduction.plan import Plan
from foveate.reduction.presets import plan_for
from foveate.reduction.reduced_vit import reduce
from tests import tiny

GRID, N = tiny.GRID, 35
CPU = torch.device("cpu")
PLAN = Plan("agglomerate", "cls", GRID, ((1, 18),))


@pytest.fixture
def ticking(monkeypatch):
    """Let every look at the clock take one second."""
    looks = iter(range(10**6))
    monkeypatch.setattr(clock_module, "perf_counter", lambda: float(next(looks)))


def measured(full, reduced, **changes):
    """A benchmark of given seconds: pairs of encoder and model; steps take a fifth."""
    rounds = [
        tuple(
            {"encoder": e, "model": m, "steps": e / 5 if part else 0.0} for e, m in seconds
        )
        for part, seconds in enumerate((full, reduced))
    ]
    conditions = Conditions("cpu", 1, "float32", 8, (20, 28), len(full), 0)
    memory = Memory(held=1000, full=500, reduced=200)
    values = {"mac_ratio": 1.5, "memory": memory, **changes}
    mac_ratio, memory = values["mac_ratio"], values["memory"]
    return Benchmark("tiny", PLAN, conditions, mac_ratio, *rounds, memory)


def test_the_record_is_the_closed_form_of_its_seconds():
    full = [(2.0, 4.0), (3.0, 4.0), (6.0, 5.0)]
    found = measured(full, [(2.0, 2.0), (2.0, 4.0), (2.0, 2.5)])
    record = json.loads(json.dumps(found.record(), allow_nan=False))
    # Ratios 1, 1.5, 3: 10 % of the way is a fifth from the first to the second.
    assert record["speedup"] == pytest.approx({"low": 1.1, "median": 1.5, "high": 2.7})
    assert record["model_speedup"] == pytest.approx({"low": 1.2, "median": 2, "high": 2})
    assert record["quantiles"] == {"low": 0.1, "high": 0.9}
    assert record["realised"] == pytest.approx(1.5 / 1.5)
    assert record["overhead_share"] == pytest.approx(0.2)
    assert record["images_per_second"] == pytest.approx({"full": 2.0, "reduced": 3.2})
    assert record["peak_memory_ratio"] == pytest.approx(1500 / 1200)
    assert record["peak_memory"] == {"held": 1000, "full": 500, "reduced": 200}
    assert Plan.from_record(record["plan"]) == PLAN
    assert (record["method"], record["task"], record["pays"]) == (
        "agglomerate",
        "cls",
        True,
    )


@pytest.mark.parametrize(
    ("reduced", "words"), [(2.0, "pays"), (2.5, "pays"), (2.6, "does not pay")]
)
def test_one_line_says_whether_it_pays(reduced, words):
    found = measured([(2.5, 3.0)] * 3, [(reduced, 3.0)] * 3)
    ratio = 2.5 / reduced
    assert found.verdict == (
        f"Reduction {words} at batch size 8 and 20 x 28 pixels: the blocks run {ratio:.2f} "
        f"({ratio:.2f} to {ratio:.2f}) times as fast as the full model's."
    )


def test_a_device_without_a_record_of_memory_has_no_ratio():
    record = measured([(2.0, 2.0)] * 2, [(1.0, 1.0)] * 2, memory=None).record()
    assert record["peak_memory_ratio"] is None
    assert record["peak_memory"] is None


@pytest.mark.parametrize(
    ("method", "task", "settings"),
    [
        ("agglomerate", "cls", {}),
        ("tome", "saliency", {}),
        ("norm", "saliency", {"place": "before", "fuse_last": 0, "alpha": 0.5}),
        ("foveate-oracle", "saliency", {"options": {"num_probes": 3}}),
        ("resolution", "saliency", {}),
    ],
)
def test_a_timed_call_computes_the_same_bits(dense_model, images, method, task, settings):
    plan = plan_for(dense_model, method, task, GRID, {1: 20}, **settings)
    with torch.no_grad():
        found = TimedCall.by_plan(dense_model, plan)(images, Clock(CPU))
        assert torch.equal(found, reduce(dense_model, plan)(images))
        full = TimedCall(dense_model, task)(images, Clock(CPU))
    assert torch.equal(full, dense_model(images, task))
    assert not torch.equal(full, found)


def test_parts_of_a_call_lie_within_each_other(dense_model, images, ticking):
    def seconds(task, plan=None):
        clock = Clock(CPU)
        full = TimedCall(dense_model, task)
        (TimedCall.by_plan(dense_model, plan) if plan else full)(images, clock)
        return clock.seconds()

    # Looks: start of model and encoder; a pair for each step; end of encoder and model.
    assert seconds("cls") == {"model": 3.0, "encoder": 1.0}
    one = Plan("norm", "cls", GRID, ((0, 20),))
    assert seconds("cls", one) == {"model": 5.0, "encoder": 3.0, "steps": 1.0}
    # Two steps, the grid restored before the last block, and what is read recovered.
    two = Plan("norm", "saliency", GRID, ((0, 20), (1, 10)))
    assert seconds("saliency", two) == {"model": 11.0, "encoder": 9.0, "steps": 4.0}
    smaller = plan_for(dense_model, "resolution", "saliency", GRID, {1: 20})
    assert seconds("saliency", smaller) == {"model": 3.0, "encoder": 1.0}


def test_a_benchmark_is_consistent(dense_model, images, ticking):
    seen = []
    found = benchmark(
        dense_model, PLAN, images, 3, 4, 2, lambda done, of: seen.append((done, of))
    )
    record = found.record()
    assert record["speedup"] == pytest.approx({
        "low": 1 / 3,
        "median": 1 / 3,
        "high": 1 / 3,
    })
    assert record["realised"] == record["speedup"]["median"] / record["mac_ratio"]
    assert record["overhead_share"] == pytest.approx(1 / 3)
    assert record["images_per_second"] == pytest.approx({"full": 1.0, "reduced": 0.6})
    assert [len(record["seconds"][part]) for part in ("full", "reduced")] == [4, 4]
    expected = {
        "model": "tiny",
        "device": "cpu",
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "batch_size": 3,
        "image_size": [20, 28],
        "rounds": 4,
        "warmup": 2,
        "pays": False,
    }
    assert {key: record[key] for key in expected} == expected
    assert seen == [(i, 6) for i in range(1, 7)]
    C, macs = tiny.WIDTH, [(36, 36), (36, 19), (19, 19)]
    reduced = sum(4 * a * C**2 + 2 * a**2 * C + 8 * b * C**2 for a, b in macs)
    full = 3 * (12 * 36 * C**2 + 2 * 36**2 * C)
    assert record["mac_ratio"] == pytest.approx(full / reduced)


def test_full_and_reduced_take_turns_and_images_fill_the_batch(
    dense_model, images, monkeypatch
):
    seen = []

    class Spy(TimedCall):
        def __call__(self, images, clock):
            seen.append((bool(self.steps), images))
            return super().__call__(images, clock)

    monkeypatch.setattr(module, "TimedCall", Spy)
    benchmark(dense_model, PLAN, images, batch_size=5, rounds=3, warmup=1)
    pairs = [True, False, False, True, True, False, False, True]
    assert [reduced for reduced, _ in seen] == [*pairs, False, True]  # memory comes last
    assert all(torch.equal(batch, images[[0, 1, 0, 1, 0]]) for _, batch in seen)


def test_removing_nothing_saves_no_multiply_add_and_no_byte(dense_model, images):
    record = benchmark(dense_model, Plan("tome", "cls", GRID, ((1, N),)), images, 2, 2, 0)
    record = record.record()
    assert (record["mac_ratio"], record["peak_memory_ratio"]) == (1.0, 1.0)
    assert record["overhead_share"] == 0.0
    assert not record["back_propagates"]


def test_fewer_tokens_from_the_start_hold_less_and_probes_more(dense_model, images):
    plan = Plan("norm", "cls", GRID, ((0, 3),), place="before")
    memory = benchmark(dense_model, plan, images, 8, 2, 0).memory
    assert memory.reduced < memory.full
    probed = Plan("sensitivity", "cls", GRID, ((0, 3),), options={"num_probes": 16})
    record = benchmark(dense_model, probed, images, 8, 2, 0).record()
    assert record["back_propagates"]
    assert record["peak_memory"]["full"] == memory.full
    assert record["peak_memory"]["reduced"] > 2 * memory.full


def test_peak_bytes_are_counted_by_hand():
    def chain():
        x = torch.zeros(100)
        for _ in range(5):
            x = x + 1  # the old one lives until the new one is there
        return x

    given = torch.zeros(20, 30)
    assert peak_bytes(chain, CPU) == 800
    assert peak_bytes(lambda: [given.T, given.view(-1)[:5], given.add_(1)], CPU) == 0
    assert peak_bytes(lambda: given.T.contiguous().view(-1), CPU) == 2400
    assert peak_bytes(lambda: given.double().split(4), CPU) == 4800


def test_noise_has_the_size_and_precision_asked_for(double_model):
    square = noise(double_model, 3)
    assert (square.shape, square.dtype) == ((3, 3, 20, 20), torch.float64)
    wide = noise(double_model, 2, (5, 7), seed=1)
    assert wide.shape == (2, 3, 20, 28)
    assert torch.equal(wide, noise(double_model, 2, (5, 7), seed=1))
    assert not torch.equal(wide, noise(double_model, 2, (5, 7), seed=2))


def test_held_bytes_count_shared_weights_once():
    layer = nn.Linear(3, 5)
    tied = nn.Linear(3, 5)
    tied.weight = layer.weight
    module = nn.Sequential(layer, tied, nn.BatchNorm1d(5))
    assert held_bytes(module) == 4 * (15 + 5 + 5) + 4 * 4 * 5 + 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, r"at least 1, rounds 2 and warmup 0; got 2, 0, 2 and 0"),
        ({"rounds": 1}, r"got 2, 2, 1 and 0"),
        ({"warmup": -1}, r"got 2, 2, 2 and -1"),
        ({"images": torch.zeros(0, 3, 20, 28)}, r"got 0, 2, 2 and 0"),
        (
            {"images": torch.zeros(1, 3, 28, 20)},
            r"plan's patch grid \(5, 7\); got \(7, 5\)",
        ),
        (
            {"plan": Plan("norm", "fly", GRID, ((1, 9),))},
            r"task must be one of cls, saliency .*; got 'fly'",
        ),
        ({"plan": Plan("tome", "cls", GRID, ((1, 9),))}, r"keep must be from 18 .*; got 9"),
    ],
)
def test_wrong_input_is_named(dense_model, images, changes, message):
    words = {"plan": PLAN, "images": images, "batch_size": 2, "rounds": 2, "warmup": 0}
    with pytest.raises(ValueError, match=message):
        benchmark(dense_model, **{**words, **changes})


def test_parts_nest_by_the_real_clock_too(dense_model, images):
    found = benchmark(dense_model, PLAN, images, 2, 3, 0)
    for full, reduced in zip(found.full, found.reduced, strict=True):
        assert 0 < full["encoder"] < full["model"]
        assert 0 < reduced["steps"] < reduced["encoder"] < reduced["model"]
    assert np.isfinite(found.realised)
