"""Oracle: the backbone's own methods called one by one, and invariants of the loop."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch.testing import assert_close

from foveate.backbones import open_backbone
from foveate.forward import run
from tests import tiny


@dataclass(frozen=True)
class Record:
    """A step that writes down what it was shown, and changes the tokens."""

    place: str
    seen: list
    change: Callable = lambda tokens: tokens

    def __call__(self, tokens, block):
        self.seen.append((block.depth, self.place, tokens.x, block.heads))
        return self.change(tokens)


@pytest.fixture
def backbone():
    return open_backbone(tiny.hf_dinov2().double())


@pytest.fixture
def start(backbone, double_images):
    return backbone.embed(double_images)


def test_two_halves_equal_the_whole(backbone, start):
    whole, _ = run(backbone, start, 0, 3)
    half, _ = run(backbone, start, 0, 1)
    assert torch.equal(run(backbone, half, 1, 3)[0].x, whole.x)


def test_no_blocks_change_nothing(backbone, start):
    assert run(backbone, start, 2, 2)[0] is start


def test_taps_are_the_tokens_that_enter(backbone, start):
    end, kept = run(backbone, start, 0, 3, taps=(0, 2, 3))
    assert sorted(kept) == [0, 2, 3]
    assert kept[0] is start
    assert kept[3] is end
    assert torch.equal(kept[2].x, run(backbone, start, 0, 2)[0].x)


def test_a_tap_is_taken_before_any_step(backbone, start):
    step = Record("before", [], lambda tokens: tokens.with_(x=2 * tokens.x))
    _, kept = run(backbone, start, 0, 3, {1: (step,)}, taps=(1,))
    assert torch.equal(kept[1].x, run(backbone, start, 0, 1)[0].x)


def test_steps_stand_where_they_say(backbone, start):
    seen = []
    steps = {1: (Record("between", seen), Record("before", seen))}
    end, _ = run(backbone, start, 0, 3, steps)
    entering, _ = run(backbone, start, 0, 1)
    heads = backbone.project(1, entering)
    (depth, place, x, given), (depth2, place2, x2, given2) = seen
    assert (depth, place, depth2, place2) == (1, "before", 1, "between")
    assert torch.equal(x, entering.x)
    assert given is None
    assert torch.equal(x2, backbone.attend(1, entering, heads).x)
    assert torch.equal(given2.key, heads.key)
    assert torch.equal(end.x, run(backbone, start, 0, 3)[0].x)


def test_projections_are_given_to_the_first_step_between_alone(backbone, start):
    seen = []
    steps = {0: (Record("between", seen), Record("between", seen))}
    run(backbone, start, 0, 1, steps)
    assert [heads is None for *_, heads in seen] == [False, True]


def test_a_block_projects_tokens_when_asked(backbone, start):
    found = []

    class Ask:
        place = "before"

        def __call__(self, tokens, block):
            found.append(block.project(tokens))
            return tokens

    run(backbone, start, 0, 1, {0: (Ask(),)})
    assert torch.equal(found[0].query, backbone.project(0, start).query)


def test_a_step_changes_what_follows(backbone, start):
    step = Record("before", [], lambda tokens: tokens.with_(x=tokens.x[:, :9]))
    end, _ = run(backbone, start, 0, 3, {1: (step,)})
    entering, _ = run(backbone, start, 0, 1)
    truth, _ = run(backbone, entering.with_(x=entering.x[:, :9]), 1, 3)
    assert_close(end.x, truth.x, rtol=0, atol=0)


@pytest.mark.parametrize(("first", "last"), [(-1, 2), (2, 1), (0, 4)])
def test_blocks_that_do_not_exist_are_refused(backbone, start, first, last):
    with pytest.raises(ValueError, match=rf"<= 3 blocks; got {first} and {last}\."):
        run(backbone, start, first, last)
