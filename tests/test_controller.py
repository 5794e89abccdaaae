"""Oracle: counts worked out by hand; the closed form of the readouts; exact rounding."""

import random
from fractions import Fraction

import pytest
import torch
from torch.testing import assert_close

from foveate.adaptive.allocation import settle
from foveate.adaptive.controller import Controller, Pruning

CHANNELS = 6


def pruning_of(**changes):
    return Pruning(**{"depths": (0, 2, 3), "remove": 17, **changes})


def controller_of(**changes):
    pruning = pruning_of(**changes)
    register = torch.randn(CHANNELS) if pruning.selection == "register" else None
    return Controller(CHANNELS, pruning, register)


def states(seed=0, batch=4):
    draw = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(batch, CHANNELS, generator=draw) + 1


def first_counts(controller, state):
    """What an untrained readout settles on, ``(depths,)``, alike for all images."""
    limits = controller.pruning.limits
    remaining = torch.full((len(state),), float(limits.total))
    counts = []
    for index in range(len(limits.least)):
        count = settle(limits, index, remaining, controller.share(index, state))
        assert len(set(count.tolist())) == 1
        counts.append(int(count[0]))
        remaining = remaining - count
    return counts


def test_starts_at_even_counts():
    controller = controller_of()
    assert controller.counts.tolist() == [6, 6, 5]
    assert first_counts(controller, states()) == [6, 6, 5]


@pytest.mark.parametrize("seed", range(40))
def test_starts_at_even_counts_within_any_bounds(seed):
    source = random.Random(seed)
    depths = tuple(range(source.randint(1, 9)))
    way = [source.randint(0, 80) for _ in depths]
    controller = controller_of(
        depths=depths,
        remove=sum(way),
        least=tuple(source.randint(0, w) for w in way),
        most=tuple(w + source.randint(0, 60) for w in way),
    )
    assert first_counts(controller, states(seed)) == controller.counts.tolist()


def test_starts_at_an_alpha_of_four_fifths():
    alpha = controller_of().alpha(states())
    assert alpha.shape == (4, 1, 1)
    assert_close(alpha, torch.full((4, 1, 1), 0.8))


def test_readouts_in_closed_form():
    """Sigmoid of a linear map of the normalised state; scale and shift do not matter."""
    controller, state = controller_of(), states()
    with torch.no_grad():
        for readout in (controller.allocate, controller.recover):
            readout.weight.normal_()
            readout.bias.normal_()
    centred = state - state.mean(1, keepdim=True)
    z = centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()
    for index in range(3):
        logit = z @ controller.allocate.weight[0] + controller.allocate.bias
        truth = (logit + controller.first[index]).sigmoid()
        assert_close(controller.share(index, state), truth)
    truth = (z @ controller.recover.weight[0] + controller.recover.bias).sigmoid()
    assert_close(controller.alpha(state)[:, 0, 0], truth)
    # One readout for all depths: what differs is where each starts.
    logits = [controller.share(i, state).logit() for i in range(3)]
    assert_close(logits[0] - logits[1], (logits[0] - logits[1])[:1].expand(4))


def test_readouts_take_half_and_double_precision():
    controller, state = controller_of(), states()
    with torch.no_grad():
        controller.recover.weight.normal_()
        controller.allocate.weight.normal_()
    truth = controller.alpha(state), controller.share(1, state)
    half = state.bfloat16()
    assert controller.alpha(half).dtype == torch.float32
    assert torch.equal(controller.alpha(half), controller.alpha(half.float()))
    double = controller.double()
    assert_close(double.alpha(state.double()).float(), truth[0])
    assert_close(double.share(1, state.double()).float(), truth[1])
    assert double.alpha(state.double()).dtype == torch.float64


@pytest.mark.parametrize("selection", ["register", "class"])
@pytest.mark.parametrize("allocation", ["learned", "static"])
@pytest.mark.parametrize("recovery", ["learned", 0.25, 0, 1])
def test_parts_of_every_combination(selection, allocation, recovery):
    controller = controller_of(
        selection=selection, allocation=allocation, recovery=recovery
    )
    truth = {
        "register": CHANNELS if selection == "register" else 0,
        "allocation": CHANNELS + 1 if allocation == "learned" else 0,
        "recovery": CHANNELS + 1 if recovery == "learned" else 0,
    }
    assert controller.parameter_counts() == truth
    assert sum(p.numel() for p in controller.parameters()) == sum(truth.values())
    assert all(p.requires_grad for p in controller.parameters())
    assert set(controller.state_dict()) >= {"counts"}
    if allocation == "static":
        with pytest.raises(ValueError, match="allocation must be 'learned'"):
            controller.share(0, states())
    if recovery != "learned":
        assert controller.alpha(states()) == recovery
        assert isinstance(controller.alpha(states()), float)


def test_the_register_is_a_copy():
    register = torch.randn(CHANNELS)
    controller = Controller(CHANNELS, pruning_of(), register)
    with torch.no_grad():
        controller.register.add_(1)
    assert_close(controller.register.detach(), register + 1)


def test_freeze_rounds_the_means_exactly():
    """Largest remainders of means in fractions; no count strays by one or more."""
    draw = torch.Generator().manual_seed(0)
    for images in (1, 2, 3, 7, 50):
        controller = controller_of(remove=40)
        first = torch.randint(0, 41, (images, 1), generator=draw)
        second = (torch.rand(images, 1, generator=draw) * (41 - first)).floor().long()
        counts = torch.cat([first, second, 40 - first - second], 1)
        controller.freeze(counts.float())
        means = [Fraction(sum(column), images) for column in counts.T.tolist()]
        found = controller.counts.tolist()
        assert sum(found) == 40
        floors = [int(m) for m in means]
        up = sorted(range(3), key=lambda i: (floors[i] - means[i], -means[i], i))
        for i in up[: 40 - sum(floors)]:
            floors[i] += 1
        assert found == floors
        assert controller.counts.dtype == torch.int64


def test_freeze_leaves_whole_means_as_they_are():
    controller = controller_of(remove=40, most=(25, 25, 25))
    controller.freeze(torch.tensor([[20.0, 4, 16], [10, 6, 24]]))
    assert controller.counts.tolist() == [15, 5, 20]


def test_freeze_rescales_nothing():
    controller = controller_of()
    with pytest.raises(ValueError, match=r"counts must sum to 17 in every row; got \[8"):
        controller.freeze(torch.tensor([[9.0, 4, 4], [8, 4, 4]]))
    assert sum(controller.counts.tolist()) == 17


def test_counts_travel_with_the_state():
    controller, other = controller_of(), controller_of()
    controller.freeze(torch.tensor([[1.0, 2, 14]]))
    other.load_state_dict(controller.state_dict())
    assert other.counts.tolist() == [1, 2, 14]
    assert other.whole == controller.whole == (1, 2, 14)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depths": ()}, r"depths must ascend; got \[\]"),
        ({"depths": (2, 1)}, r"depths must ascend; got \[2, 1\]"),
        ({"depths": (1, 1)}, r"depths must ascend; got \[1, 1\]"),
        ({"action": "drop"}, "action must be one of prune, merge; got 'drop'"),
        ({"selection": "cls"}, "selection must be one of register, class; got 'cls'"),
        ({"allocation": "even"}, "allocation must be one of learned, static; got 'even'"),
        ({"recovery": 1.5}, "recovery must be 'learned' or from 0 to 1; got 1.5"),
        ({"recovery": "full"}, "recovery must be 'learned' or from 0 to 1; got 'full'"),
        ({"recovery": float("nan")}, "recovery must be 'learned' or from 0 to 1; got nan"),
        ({"temperature": 0.0}, "temperature must be positive; got 0.0"),
        ({"temperature": float("nan")}, "temperature must be positive; got nan"),
        ({"remove": -1}, "least must be from 0 to most"),
        ({"most": (5, 5, 5)}, "total must be from 0 to 15 .*; got 17"),
        ({"least": (6, 6, 6)}, "total must be from 18 to 51 .*; got 17"),
        ({"least": (1, 1)}, "a number for every depth, 3 of them; got 2 and 3"),
        (
            {"least": (1, 1), "most": (9, 9)},
            "a number for every depth, 3 of them; got 2 and 2",
        ),
    ],
)
def test_numbers_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        pruning_of(**changes)


@pytest.mark.parametrize("selection", ["register", "class"])
def test_a_register_missing_or_in_vain_is_refused(selection):
    wrong = None if selection == "register" else torch.zeros(CHANNELS)
    with pytest.raises(ValueError, match="register must be given for selection"):
        Controller(CHANNELS, pruning_of(selection=selection), wrong)
