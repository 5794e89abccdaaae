"""Oracle: the naive chain of ``reference_recovery``; closed forms."""

import pytest
import torch
from torch.testing import assert_close

from foveate.reduction.recover import Restore, recover
from foveate.reduction.regroup import Grouping, Memory, regroup
from foveate.tokens import Tokens
from tests import handmade
from tests import reference_reduction as ref

COUNTS = (11, 6, 4)


def grouping_to(tokens, keep, seed):
    """A random grouping: ``keep`` leads, every other patch with a random one of them."""
    draw = torch.Generator().manual_seed(seed)
    count = tokens.num_patches
    lead = torch.stack([
        torch.randperm(count, generator=draw)[:keep].sort().values for _ in tokens.x
    ])
    group = torch.randint(0, keep, (len(tokens.x), count), generator=draw)
    group = group.scatter(1, lead, torch.arange(keep).expand(len(lead), -1))
    return Grouping(lead, group)


def between(tokens, seed):
    """What the blocks between two steps do: every token moves."""
    draw = torch.Generator().manual_seed(seed)
    noise = torch.randn(tokens.x.shape, generator=draw, dtype=tokens.x.dtype)
    return tokens.with_(x=1.1 * tokens.x + 0.3 * noise)


def chain(memory, num_steps, moving=True, tokens=None):
    """Tokens after some steps, and what every step did."""
    tokens, steps = tokens or handmade.tokens(positions=True), []
    for step, keep in enumerate(COUNTS[:num_steps]):
        grouping = grouping_to(tokens, keep, 10 + step)
        after = regroup(tokens, grouping, memory)
        steps.append((grouping, tokens, after))
        tokens = between(after, 20 + step) if moving else after
    return tokens, steps


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_chains_of_steps_equal_the_reference(num_steps, alpha):
    tokens, steps = chain(Memory(alpha), num_steps)
    full = recover(tokens)
    for b in range(2):
        told = [
            ref.Step(g.group[b].numpy(), before.patches[b], after.patches[b])
            for g, before, after in steps
        ]
        truth = ref.recover(tokens.x[b], told, handmade.PREFIX, alpha)
        assert_close(full.patches[b], torch.from_numpy(truth), rtol=1e-12, atol=1e-12)
    assert torch.equal(full.prefix, tokens.prefix)


def test_the_whole_offset_restores_what_nothing_has_changed():
    start = handmade.tokens()
    tokens, _ = chain(Memory(1.0), 3, moving=False, tokens=start)
    assert tokens.num_patches == 4
    assert_close(recover(tokens).patches, start.patches, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_frozen_patches_come_back_with_the_feature_they_had(num_steps):
    tokens, steps = chain(Memory(freeze=True), num_steps)
    full = recover(tokens)
    for b in range(2):
        place = {n: n for n in range(15)}  # where each original patch is now
        for grouping, before, _ in steps:
            kept = {int(i): new for new, i in enumerate(grouping.lead[b])}
            for n, here in list(place.items()):
                if here not in kept:
                    assert torch.equal(full.patches[b, n], before.patches[b, here])
                    del place[n]
                else:
                    place[n] = kept[here]
        for n, here in place.items():
            assert torch.equal(full.patches[b, n], tokens.patches[b, here])


def test_several_stand_ins_speak_by_their_weights(generator):
    start = handmade.tokens()
    first = torch.stack([torch.randperm(15, generator=generator) for _ in range(2)])
    stand_in = torch.stack([first, (first + 4) % 15], dim=-1)
    weight = torch.rand(2, 15, 2, generator=generator, dtype=torch.float64)
    weight = weight / weight.sum(-1, keepdim=True)
    soft = start.with_(stand_in=stand_in, weight=weight)
    grouping = grouping_to(soft, 6, 3)
    reduced = regroup(soft, grouping, Memory(0.5))
    full = recover(reduced)
    for b in range(2):
        for n in range(15):
            truth = 0
            for s in range(2):
                mine = stand_in[b, n, s]
                joined = reduced.patches[b, grouping.group[b, mine]]
                lost = start.patches[b, mine] - joined
                truth = truth + weight[b, n, s] * (joined + 0.5 * lost)
            assert_close(full.patches[b, n], truth, rtol=1e-12, atol=1e-12)


def test_recovered_tokens_are_as_if_nothing_had_been_removed():
    start = handmade.tokens(positions=True)
    tokens, _ = chain(Memory(0.5), 2, tokens=start)
    full = recover(tokens.with_(proportional=True))
    assert full.position is start.position
    rest = ("size", "stand_in", "weight", "offset", "grid_position")
    assert [getattr(full, name) for name in rest] == [None] * 5
    assert not full.proportional
    assert full.num_patches == full.layout.num_patches == 15


def test_order_is_that_of_the_grid():  # ToMe#34, ToMe#45
    start = handmade.tokens((5, 7))
    here = torch.arange(35.0, dtype=torch.float64)[:, None].expand(2, 35, 6)
    start = start.with_(x=torch.cat([start.prefix, here], dim=1))
    reduced = regroup(start, grouping_to(start, 12, 5), Memory(1.0))
    assert_close(recover(reduced).patches[1, :, 0], torch.arange(35.0, dtype=torch.float64))


def test_full_tokens_are_left_alone():
    tokens = handmade.tokens()
    assert recover(tokens) is tokens
    assert Restore()(tokens, None) is tokens


def test_restore_is_a_step_before_the_block():
    tokens, _ = chain(Memory(0.5), 2)
    step = Restore()
    assert step.place == "before"
    restored = step(tokens, handmade.block(tokens))
    assert isinstance(restored, Tokens)
    assert torch.equal(restored.x, recover(tokens).x)


@pytest.mark.parametrize("memory", [Memory(1.0), Memory(freeze=True)])
def test_half_precision_stays_half_precision(memory):
    start = handmade.tokens(dtype=torch.bfloat16)
    tokens, _ = chain(memory, 1, moving=False, tokens=start)
    full = recover(tokens)
    assert full.x.dtype == torch.bfloat16
    if memory.alpha:
        assert_close(full.x.float(), start.x.float(), rtol=0.02, atol=0.02)


def test_wide_weights_do_not_widen_the_tokens():
    tokens = handmade.tokens(dtype=torch.bfloat16)
    itself = torch.arange(15).expand(2, -1)[..., None]
    soft = tokens.with_(stand_in=itself, weight=torch.ones(2, 15, 1))
    full = recover(soft)
    assert full.x.dtype == torch.bfloat16
    assert torch.equal(full.x, tokens.x)
