"""Conversations as token ids: what was sampled is kept, and never rendered again."""

from rollout.chats.session_record import RecordedRow, RecordedTurn, SessionRecord
from rollout.chats.turn_bridge import TurnBridge

__all__ = ["RecordedRow", "RecordedTurn", "SessionRecord", "TurnBridge"]
