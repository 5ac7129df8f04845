"""Rewards of answers: reward functions, their calls in worker processes, and their failures.

Importing this package imports no torch, so worker processes and loops of your own start fast.
"""

from recipes.rewards.reward_set import RewardSet
from recipes.rewards.rewards import Rewards
from recipes.rewards.score import Answer, Score, Scored

__all__ = ["Answer", "RewardSet", "Rewards", "Score", "Scored"]
