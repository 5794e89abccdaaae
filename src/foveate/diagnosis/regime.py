"""What a diagnosis means for reducing tokens: four regimes, and what to run next."""

from enum import StrEnum

__all__ = ["BUDGET_RANK", "LOCALISED_CV", "LOW_RANK_KAPPA", "Regime", "advise", "decide"]

LOW_RANK_KAPPA = 0.75
"""Share of the energy from which on the leading directions stand for the task.

A metric of that rank then misses less than a quarter. Class tokens of DINOv2 lie below
(0.3-0.7 at rank 20), early taps of dense decoders and heads with few outputs above (0.9-1).
"""

LOCALISED_CV = 0.5
"""Spread over tokens from which on a score per token means something.

DPT depth has 0.026, and scores rank its tokens at Spearman 0.2; class tokens and saliency
have 1-15, and scores rank theirs at 0.998.
"""

BUDGET_RANK = 200.0
"""Entropy rank from which on scores of a few leading directions say too little.

VGGT's dense heads have 212 and 282, DINOv2's class tokens 54-170.
"""


class Regime(StrEnum):
    """How a task depends on the tokens at a tap."""

    LOW_RANK_LOCALISED = "low rank, localised"
    LOW_RANK_DELOCALISED = "low rank, delocalised"
    HIGH_RANK_LOCALISED = "high rank, localised"
    BEYOND_BUDGET = "high rank, beyond budget"


def decide(kappa_cap: float, cv: float, rank_entropy: float) -> Regime:
    """Decide the regime from rank and localisation.

    Low rank is ``kappa_cap >= LOW_RANK_KAPPA``, which a head with no more outputs than the
    rank has by structure; localised is ``cv >= LOCALISED_CV``. A high rank is within budget
    if scores per token can still carry it: localised, and ``rank_entropy < BUDGET_RANK``.

    Args:
        kappa_cap: Share of the energy in the leading directions, from 0 to 1.
        cv: Coefficient of variation over tokens of the energy of the leading directions.
        rank_entropy: Exponential of the entropy of the energies.

    Returns:
        The regime.

    Raises:
        ValueError: If a figure is out of its range.
    """
    if not 0 < kappa_cap <= 1 + 1e-9:
        raise ValueError(f"kappa_cap must be in (0, 1]; got {kappa_cap}.")
    if not cv >= 0:
        raise ValueError(f"cv must be at least 0; got {cv}.")
    if not rank_entropy >= 1 - 1e-9:
        raise ValueError(f"rank_entropy must be at least 1; got {rank_entropy}.")
    is_localised = cv >= LOCALISED_CV
    if kappa_cap >= LOW_RANK_KAPPA:
        return Regime.LOW_RANK_LOCALISED if is_localised else Regime.LOW_RANK_DELOCALISED
    if is_localised and rank_entropy < BUDGET_RANK:
        return Regime.HIGH_RANK_LOCALISED
    return Regime.BEYOND_BUDGET


LATEST_STEP = 8
"""Latest block at which the advice places a step: later ones save little."""

_ADVICE = {
    Regime.LOW_RANK_LOCALISED: (
        "Few directions and few patches carry the task, so scores per patch and "
        "merging by directions both work. Run `{compare} --methods "
        "sensitivity,foveate-oracle,tome` to see which costs less on your images."
    ),
    Regime.LOW_RANK_DELOCALISED: (
        "Few directions carry the task, but they are spread over all patches: do not score "
        "patches. Merge by those directions instead: `{compare} --methods "
        "foveate-oracle,agglomerate` shows what they are worth, and `foveate distill "
        "metric --task {task} --depth {depth}` learns them."
    ),
    Regime.HIGH_RANK_LOCALISED: (
        "Many directions carry the task, but few patches hold them, so scores per patch "
        "mean something (`foveate distill importance --task {task} --depth {depth}` learns "
        "them), and merging pairs loses less still. Run `{compare} --methods "
        "foveate-oracle,sensitivity,tome`."
    ),
    Regime.BEYOND_BUDGET: (
        "More directions carry the task than scores or a metric of this rank can hold, so "
        "trust neither here. Run `{compare} --methods agglomerate,tome,foveate-oracle` to "
        "see what merging costs, and `foveate diagnose --task {task}` at an earlier depth."
    ),
}


def advise(regime: Regime, task: str, depth: int) -> str:
    """Say in plain words what a regime means and what to run next.

    Args:
        regime: The regime.
        task: Name of the task, for the command.
        depth: Depth of the tap; the command reduces there, or at ``LATEST_STEP``.

    Returns:
        Two or three sentences.
    """
    compare = f"foveate compare --task {task} --depths {min(depth, LATEST_STEP)}"
    return _ADVICE[regime].format(task=task, depth=depth, compare=compare)
