"""Trainers and engines as Ray actors."""

from trainer_bridge.remote.group import RemoteGroup

__all__ = ["RemoteGroup"]
