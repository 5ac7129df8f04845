"""Recipes of before, read with today's keys."""

import re
import sys
from collections.abc import Sequence
from typing import Any

from recipes.config.sections import LoopSection

ONLY: dict[str, dict[str, Any]] = {
    "sampling": {"top_k": 0, "top_p": 1.0},
    "trainer": {"batch_invariant": False},
}
"""Keys of older recipes by section, each with the only value that is still read."""
GONE = {
    "trainer.batch_invariant": (
        "is gone, and the bits of the weights depend on trainer.micro_batch_size; leave the key out"
    )
}
"""What is said of keys of older recipes with another value, instead of unknown key."""

SHARED = tuple(LoopSection.__dataclass_fields__)
"""Keys of `loop`, which older recipes have in the sections `grpo` and `ppo`."""


def values_now(values: dict[str, Any], algorithm: Any) -> dict[str, Any]:
    """Return the values of a recipe's file with its keys and figures as they are now.

    Args:
        values: The values as they are written.
        algorithm: The algorithm of the run, whose section has the older keys that count.
    """
    return _figures_now(_loop_now(_dropped(values), algorithm))


def words_now(overrides: Sequence[str], algorithm: Any) -> list[str]:
    """Return `key=value` overrides with their keys as they are now."""
    older = re.compile(rf"{re.escape(str(algorithm))}\.({'|'.join(SHARED)})=")
    return [older.sub(r"loop.\1=", word) for word in overrides]


def _dropped(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values without older keys that have their only value."""
    for name, only in ONLY.items():
        if isinstance(section := values.get(name), dict):
            kept = [item for item in section.items() if item not in only.items()]
            values = {**values, name: dict(kept)}
    return values


def _loop_now(values: dict[str, Any], algorithm: Any) -> dict[str, Any]:
    moved: dict[str, Any] = {}
    for name in ("grpo", "ppo"):
        section = values.get(name)
        if not isinstance(section, dict) or not section.keys() & {*SHARED}:
            continue
        values = {**values, name: {k: v for k, v in section.items() if k not in SHARED}}
        if name == algorithm:
            moved = {key: section[key] for key in SHARED if key in section}
    section = values.get("loop", {})
    if not moved or not isinstance(section, dict):
        return values
    keys = ", ".join(f"{algorithm}.{key}" for key in moved)
    print(f"memsaver: {keys}: keys of loop now, and read so", file=sys.stderr)
    return {**values, "loop": moved | section}


def _figures_now(values: dict[str, Any]) -> dict[str, Any]:
    section = values.get("eval")
    best = section.get("best") if isinstance(section, dict) else None
    if not (isinstance(best, str) and best.startswith("exact_match")):
        return values
    now = best.replace("exact_match", "correct", 1)
    print(f"memsaver: eval.best={best}: is called {now} now and read so", file=sys.stderr)
    return {**values, "eval": {**values["eval"], "best": now}}
