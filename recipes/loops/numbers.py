"""Arithmetic on the numbers of many tokens or answers, in fp64.

A deviation is the sample's: the sum of squares is divided by n - 1.
"""

import numpy as np
from numpy.typing import ArrayLike

from trainer_bridge.learning import Numbers


def centered(numbers: ArrayLike) -> Numbers:
    """Return the numbers minus their mean; exactly 0 for equal numbers, however large."""
    array = np.asarray(numbers, dtype=np.float64)
    # Differences of similar numbers are exact, while the mean of large numbers is rounded.
    differences = array - array[:1]
    differences -= differences.mean()
    return differences


def deviation(numbers: ArrayLike) -> float:
    """Return the sample deviation; 0 for equal numbers and for a single number."""
    differences = centered(numbers)
    return float(np.sqrt(differences @ differences / max(1, len(differences) - 1)))
