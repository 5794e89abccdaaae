"""Slow and obvious recovery of ONE image's original patches. Only tests import this."""

from typing import NamedTuple

import numpy as np

from tests.reference_scoring import array


class Step(NamedTuple):
    """What one reduction step did.

    Attributes:
        group: (K_before,), index below K_after of what stands for each patch.
        before: (K_before, C), patches right before the step.
        after: (K_after, C), patches right after it.
    """

    group: np.ndarray
    before: np.ndarray
    after: np.ndarray


def recover(x_final, steps, num_prefix, alpha):
    """Features of the original patches: (N, C).

    Follows every patch n through the steps. Its offset is the sum over the steps of (what
    stood for n before the step) - (what stands for n after it), zero where nothing happened
    to it, and its feature is x_final[stand-in] + alpha x offset. The chain telescopes only
    if nothing lies between the steps; blocks between them change ``before``.
    """
    patches = array(x_final)[num_prefix:]
    num_original = len(steps[0].group) if steps else len(patches)
    recovered = []
    for n in range(num_original):
        stand_in, offset = n, np.zeros(patches.shape[1])
        for step in steps:
            joined = int(step.group[stand_in])
            offset += array(step.before)[stand_in] - array(step.after)[joined]
            stand_in = joined
        recovered.append(patches[stand_in] + alpha * offset)
    return np.stack(recovered)
