"""Exact runs: a trainer with the engine's bits, its plan, and the trace of a mismatch."""

from trainer_bridge.exact.model import why_not_exact
from trainer_bridge.exact.planned import plan_exact
from trainer_bridge.exact.trace import Compared, MismatchTrace, trace_mismatch

__all__ = ["Compared", "MismatchTrace", "plan_exact", "trace_mismatch", "why_not_exact"]
