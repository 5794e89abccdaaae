"""What a diagnosis means: four regimes, decided from rank and from localisation."""

from enum import StrEnum

__all__ = [
    "BUDGET_RANK",
    "LOCALISED_CV",
    "LOW_RANK_KAPPA",
    "Regime",
    "advice",
    "decide",
]

LOW_RANK_KAPPA = 0.75
LOCALISED_CV = 0.5
BUDGET_RANK = 200.0


class Regime(StrEnum):
    """How a task depends on the tokens."""

    LOW_RANK_LOCALISED = "low rank, localised"
    LOW_RANK_DELOCALISED = "low rank, delocalised"
    HIGH_RANK_LOCALISED = "high rank, localised"
    BEYOND_BUDGET = "high rank, beyond budget"


def decide(kappa_cap: float, cv: float, rank_entropy: float) -> Regime:
    """Decide the regime."""
    is_localised = cv >= LOCALISED_CV
    if kappa_cap >= LOW_RANK_KAPPA:
        return Regime.LOW_RANK_LOCALISED if is_localised else Regime.LOW_RANK_DELOCALISED
    if is_localised and rank_entropy < BUDGET_RANK:
        return Regime.HIGH_RANK_LOCALISED
    return Regime.BEYOND_BUDGET


def advice(regime: Regime) -> str:
    """Say what to run next."""
    return regime.value
