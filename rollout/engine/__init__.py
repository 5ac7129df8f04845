"""The native engine, and what all engines have: their memory, weight updates and steps."""

from rollout.engine.engine import Engine
from rollout.engine.engine_base import InFlight, PeerSaver, SaverSide, handing_over

__all__ = ["Engine", "InFlight", "PeerSaver", "SaverSide", "handing_over"]
