"""Exact runs: a trainer with the engine's bits, and the trace of a mismatch."""

from trainer_bridge.exact.model import why_not_exact
from trainer_bridge.exact.trace import Compared, MismatchTrace, trace_mismatch

__all__ = ["Compared", "MismatchTrace", "trace_mismatch", "why_not_exact"]
