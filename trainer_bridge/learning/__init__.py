"""What an update takes: batches, losses, corrections, optimizers and the critic."""

from trainer_bridge.learning.correction import k3, mismatch, reference_figures
from trainer_bridge.learning.tokens import Numbers, Tokens, log_ratios

__all__ = ["Numbers", "Tokens", "k3", "log_ratios", "mismatch", "reference_figures"]
