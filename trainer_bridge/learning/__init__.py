"""What an update takes: batches, losses, corrections, optimizers and the critic."""

from trainer_bridge.learning.correction import k3, mismatch, reference_figures
from trainer_bridge.learning.token_numbers import Numbers, PerToken, by_answer, flat, log_ratios

__all__ = [
    "Numbers",
    "PerToken",
    "by_answer",
    "flat",
    "k3",
    "log_ratios",
    "mismatch",
    "reference_figures",
]
