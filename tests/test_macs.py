"""Oracle: the hand formula, and torch's FLOP counter under a math attention kernel."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from foveate.backbones import open_backbone
from foveate.forward import run
from foveate.reduction.macs import block_macs, encoder_macs, token_counts
from foveate.tokens import Layout
from tests import reference_budget as reference
from tests import tiny

LAYOUT = Layout(5, (5, 7), (20, 28))


class FirstPatches:
    """Keep the first patches; merged sizes make attention proportional."""

    def __init__(self, keep, place):
        self.keep, self.place = keep, place

    def __call__(self, tokens, block):
        last = tokens.layout.num_prefix + self.keep
        size = torch.full((len(tokens.x), self.keep), 2.0)
        position = None if tokens.position is None else tokens.position[:, : self.keep]
        return tokens.with_(
            x=tokens.x[:, :last], size=size, position=position, proportional=True
        )


def counted(backbone, schedule, place):
    """Multiply-adds of one image by the FLOP counter, and the layout."""
    tokens = backbone.embed(tiny.random_images()[:1])
    steps = {depth: [FirstPatches(keep, place)] for depth, keep in schedule.items()}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run(backbone, tokens, 0, backbone.num_blocks, steps)
    return counter.get_total_flops() // 2, tokens.layout


@pytest.mark.parametrize("place", ["before", "between"])
@pytest.mark.parametrize("name", tiny.BACKBONES)
def test_count_equals_the_flop_counter(name, place):
    backbone = open_backbone(tiny.BACKBONES[name]())
    for schedule in ({}, {0: 20, 2: 9}):
        macs, layout = counted(backbone, schedule, place)
        counts = token_counts(backbone.num_blocks, layout, schedule, place)
        assert encoder_macs(backbone, counts) == macs


def test_count_equals_the_hand_formula():
    backbone, channels = open_backbone(tiny.hf_dinov2()), tiny.WIDTH
    for n in (36, 11):
        by_hand = 4 * n * channels**2 + 2 * n**2 * channels + 8 * n * channels**2
        assert block_macs(backbone, 1, n, n) == by_hand
    pairs = [(36, 20), (20, 20), (20, 9)]
    attended, transformed = zip(*pairs, strict=True)
    truth = reference.macs(attended, transformed, channels, 4 * channels)
    assert encoder_macs(backbone, pairs) == truth
    assert encoder_macs(backbone, pairs, extra=17) == truth + 17


def test_step_between_leaves_its_own_attention_full():
    assert token_counts(4, LAYOUT, {1: 20, 2: 9}) == [
        (40, 40),
        (40, 25),
        (25, 14),
        (14, 14),
    ]


def test_step_before_shortens_its_own_attention():
    counts = token_counts(4, LAYOUT, {1: 20, 2: 9}, "before")
    assert counts == [(40, 40), (25, 25), (14, 14), (14, 14)]


def test_restored_blocks_see_the_full_grid():
    counts = token_counts(4, LAYOUT, {0: 20}, "between", restore_depth=2)
    assert counts == [(40, 25), (25, 25), (40, 40), (40, 40)]


def test_empty_schedule_is_the_full_model():
    assert token_counts(3, LAYOUT, {}) == [(40, 40)] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({4: 20},), r"depths in 0 to 3; got 4\."),
        (({-1: 20},), r"depths in 0 to 3; got -1\."),
        (({2: 20}, "before", 2), r"depths in 0 to 1; got 2\."),
        (({}, "before", 5), r"restore_depth must be in 0 to 4; got 5\."),
        (({1: 36},), r"keep 1 to 35 patches at depth 1; got 36\."),
        (({1: 20, 3: 21},), r"keep 1 to 20 patches at depth 3; got 21\."),
        (({1: 0},), r"keep 1 to 35 patches at depth 1; got 0\."),
    ],
)
def test_impossible_schedules_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        token_counts(4, LAYOUT, *arguments)


def test_counts_for_other_than_all_blocks_are_refused():
    backbone = open_backbone(tiny.hf_dinov2())
    with pytest.raises(ValueError, match=r"each of 3 blocks; got 2\."):
        encoder_macs(backbone, [(36, 36)] * 2)
