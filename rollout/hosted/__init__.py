"""Other projects' engines as rollouts: their memory on our tags, their weights written in place."""

from rollout.hosted.rollout import HostedEngine, HostedRollout

__all__ = ["HostedEngine", "HostedRollout"]
