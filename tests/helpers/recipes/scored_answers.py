"""Records of scored answers."""

from __future__ import annotations

from typing import Any

from recipes.rewards import Answer, Scored


def scored(reward: float | None, **fields: Any) -> Scored:
    """Return the record of an answer whose texts do not matter."""
    return Scored(answer=Answer(prompt="", text=""), reward=reward, **fields)
