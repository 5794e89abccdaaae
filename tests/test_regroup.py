"""Oracle: naive loops over images, groups and patches; invariants."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from foveate.reduction.regroup import (
    Grouping,
    Memory,
    lead_groups,
    pick,
    regroup,
    speak,
    sum_groups,
)
from foveate.tokens import Layout, Tokens, widen
from tests import handmade

GROUP = torch.tensor([
    [0, 1, 0, 2, 3, 3, 1, 0, 4, 0, 2, 0, 0, 4, 1],
    [0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 4, 3, 2],
])
# A member of each group, not always the first; the order of groups is the caller's.
LEAD = torch.tensor([[2, 6, 3, 4, 13], [0, 8, 9, 10, 11]])


def naive(tokens, weight):
    """Sum of weight x patch over the members of each group, ``(B, K', C)``."""
    found = torch.zeros(2, 5, tokens.x.shape[-1], dtype=tokens.x.dtype)
    for b in range(2):
        for i in range(tokens.num_patches):
            if GROUP[b, i] >= 0:
                found[b, GROUP[b, i]] += weight[b, i] * tokens.patches[b, i]
    return found


def naive_sizes(tokens):
    found = torch.zeros(2, 5)
    for b in range(2):
        for i in range(tokens.num_patches):
            found[b, GROUP[b, i]] += tokens.sizes()[b, i]
    return found


@pytest.mark.parametrize("sizes", [False, True])
def test_mean_weighs_by_size(sizes):
    tokens = handmade.tokens(sizes=sizes)
    merged = regroup(tokens, Grouping(LEAD, GROUP))
    total = naive_sizes(tokens)
    truth = naive(tokens, tokens.sizes()) / total[..., None]
    assert_close(merged.patches, truth, rtol=1e-12, atol=1e-12)
    assert torch.equal(merged.size, total)
    assert torch.equal(merged.prefix, tokens.prefix)
    assert merged.layout is tokens.layout
    assert merged.x.dtype == torch.float64


def test_lead_lends_its_feature():
    tokens = handmade.tokens(sizes=True)
    merged = regroup(tokens, Grouping(LEAD, GROUP, "lead"))
    assert torch.equal(merged.patches, pick(tokens.patches, LEAD))
    assert torch.equal(merged.size, naive_sizes(tokens))


def test_numbers_are_weights_of_a_sum():
    tokens = handmade.tokens(sizes=True)
    share = handmade.scores(tokens)
    merged = regroup(tokens, Grouping(LEAD, GROUP, share))
    assert_close(merged.patches, naive(tokens, share), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("share", ["mean", "weights"])
def test_patches_that_are_not_heard_are_spoken_for_alone(share):
    tokens = handmade.tokens(sizes=True)
    heard = torch.ones(2, 15, dtype=torch.bool)
    heard[0, 7] = heard[1, 12] = False
    weight = handmade.scores(tokens) + 0.25
    given = Grouping(LEAD, GROUP, "mean" if share == "mean" else weight, heard)
    merged = regroup(tokens, given)
    weight = (tokens.sizes() if share == "mean" else weight) * heard
    silent = tokens.with_(size=tokens.size * heard)
    truth = naive(tokens, weight)
    truth = truth / naive_sizes(silent)[..., None] if share == "mean" else truth
    assert_close(merged.patches, truth, rtol=1e-12, atol=1e-12)
    assert torch.equal(merged.size, naive_sizes(silent))
    assert torch.equal(merged.stand_in[..., 0], GROUP)


def test_a_patch_without_a_group_lends_nothing_and_has_no_stand_in():
    tokens = handmade.tokens()
    group = GROUP.clone()
    group[0, 7] = -1
    merged = regroup(tokens, Grouping(LEAD, group), Memory(alpha=1.0))
    others = [i for i in range(15) if GROUP[0, i] == 0 and i != 7]
    assert_close(merged.patches[0, 0], tokens.patches[0, others].mean(0))
    assert merged.size[0, 0] == len(others)
    assert merged.stand_in[0, 7, 0] == -1
    assert torch.equal(merged.offset[0, 7], tokens.patches[0, 7])  # all of it is lost


def test_a_shift_is_added_to_the_groups():
    tokens = handmade.tokens()
    shift = torch.linspace(-1, 1, 60, dtype=torch.float64).view(2, 5, 6)
    plain = regroup(tokens, Grouping(LEAD, GROUP))
    moved = regroup(tokens, Grouping(LEAD, GROUP, shift=shift), Memory(alpha=1.0))
    assert torch.equal(moved.patches, plain.patches + shift)
    assert_close(moved.offset, tokens.patches - pick(moved.patches, GROUP))


def test_sizes_sum_to_the_number_of_patches():  # ToMe#43
    tokens = handmade.tokens()
    once = regroup(tokens, Grouping(LEAD, GROUP))
    lead, group = torch.tensor([[1, 4]] * 2), torch.tensor([[0, 0, 1, 1, 1]] * 2)
    twice = regroup(once, Grouping(lead, group))
    for reduced in (once, twice):
        assert torch.equal(reduced.size.sum(1), torch.full((2,), 15.0))
        counted = torch.stack([
            one.bincount(minlength=reduced.num_patches) for one in reduced.stand_in[..., 0]
        ])
        assert torch.equal(reduced.size, counted.float())


def test_stand_ins_and_positions_follow_two_steps():
    tokens = handmade.tokens(positions=True)
    once = regroup(tokens, Grouping(LEAD, GROUP))
    lead, group = torch.tensor([[1, 4]] * 2), torch.tensor([[0, 0, 1, 1, 1]] * 2)
    twice = regroup(once, Grouping(lead, group))
    for b in range(2):
        for n in range(15):
            assert once.stand_in[b, n, 0] == GROUP[b, n]
            assert twice.stand_in[b, n, 0] == group[b, GROUP[b, n]]
        for k in range(2):
            kept = LEAD[b, lead[b, k]]
            assert torch.equal(twice.position[b, k], tokens.position[b, kept])
    assert twice.grid_position is tokens.position
    assert handmade.tokens().with_(x=tokens.x).position is None


def test_without_memory_nothing_is_stored():
    assert regroup(handmade.tokens(), Grouping(LEAD, GROUP)).offset is None


def test_512_tokens_of_value_100_do_not_overflow_float16():
    x = torch.full((1, 513, 4), 100.0, dtype=torch.float16)
    tokens = Tokens(x, Layout(1, (16, 32), (16, 32)), size=torch.full((1, 512), 2.0))
    grouping = Grouping(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 512).long())
    merged = regroup(tokens, grouping)
    assert torch.equal(merged.patches, torch.full((1, 1, 4), 100.0, dtype=torch.float16))
    assert merged.size.item() == 1024
    assert merged.with_(proportional=True).key_bias().isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype, generator):
    patches = (1 + torch.rand(1, 4096, 3, generator=generator)).to(dtype)
    tokens = Tokens(patches, Layout(0, (64, 64), (64, 64)))
    one_group = torch.zeros(1, 4096, dtype=torch.int64)
    merged = regroup(tokens, Grouping(one_group[:, :1], one_group))
    truth = patches.double().mean(1, keepdim=True)
    assert merged.x.dtype == dtype
    assert_close(merged.patches.double(), truth, rtol=torch.finfo(dtype).eps, atol=0)


def test_widen_raises_half_precision_alone():
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    wide = [widen(torch.ones(2, dtype=kind)).dtype for kind in kinds]
    assert wide == [torch.float32, torch.float32, torch.float32, torch.float64]


def test_sum_groups_and_pick_equal_loops(generator):
    values = torch.randn(2, 15, 3, generator=generator)
    found = sum_groups(values, GROUP, 6)  # one more group than is used
    for b in range(2):
        for g in range(6):
            members = [i for i in range(15) if GROUP[b, i] == g]
            assert_close(found[b, g], values[b, members].sum(0))
            assert torch.equal(pick(values, LEAD)[b, g % 5], values[b, LEAD[b, g % 5]])


def test_speak_sums_weighted_stand_ins(generator):
    values = torch.randn(2, 5, 3, generator=generator)
    stand_in = torch.randint(-1, 5, (2, 15, 3), generator=generator)
    weight = torch.rand(2, 15, 3, generator=generator)
    found = speak(values, stand_in, weight)
    for b in range(2):
        for n in range(15):
            said = [
                w * values[b, s]
                for s, w in zip(stand_in[b, n], weight[b, n], strict=True)
                if s >= 0
            ]
            assert_close(found[b, n], sum(said, torch.zeros(3)))
    assert torch.equal(
        speak(values, stand_in[..., :1], None),
        speak(values, stand_in[..., :1], weight[..., :1] * 0 + 1),
    )


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_lead_groups_number_what_points_at_leads(data):
    num_patches = data.draw(st.integers(1, 12))
    leads = sorted(data.draw(st.sets(st.integers(0, num_patches - 1), min_size=1)))
    target = [
        i if i in leads else data.draw(st.sampled_from([*leads, -1]))
        for i in range(num_patches)
    ]
    is_lead = torch.tensor([[i in leads for i in range(num_patches)]])
    lead, group = lead_groups(is_lead, torch.tensor([target]), len(leads))
    assert lead.tolist() == [leads]
    assert group.tolist() == [[-1 if t < 0 else leads.index(t) for t in target]]
