"""Environments for tests: their tools work, fail, hang, crash, and take what they can get."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class World:
    """It has tools of every kind, and rewards the number of its calls."""

    def reset(self, **row: Any) -> str | None:
        self.calls = 0
        return row.get("says")

    def add(self, a: int, b: int = 1) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        self.calls += 1
        return a + b

    async def wait(self, seconds: float) -> str:
        """Wait.

        Args:
            seconds: How long.
        """
        await asyncio.sleep(seconds)
        return "waited"

    def fail(self) -> str:
        """Fail."""
        raise RuntimeError("no luck\nat all")

    def leave(self) -> str:
        """Leave, as a script that calls exit."""
        sys.exit("left")

    def hang(self) -> str:
        """Hang."""
        time.sleep(60)
        return "late"

    def crash(self) -> str:
        """End the process."""
        os._exit(3)

    def print_much(self) -> str:
        """Print 20 MB."""
        for _ in range(20):
            print("x" * (1 << 20))
        return "printed"

    def talk(self, count: int) -> str:
        """Return a long text.

        Args:
            count: Its length.
        """
        return "y" * count

    def parts(self, kind: str) -> list[dict[str, str]]:
        """Return parts of a message.

        Args:
            kind: The type of the last.
        """
        return [{"type": "text", "text": "a"}, {"type": kind, "text": "b"}]

    def take_memory(self) -> int:
        """Take 20 GB of memory."""
        return len(bytearray(20_000_000_000))

    def fill_file(self, path: str) -> str:
        """Write 2 GB.

        Args:
            path: Where.
        """
        with Path(path).open("wb") as file:
            file.truncate(2 << 30)
        return "filled"

    def fork(self) -> str:
        """Start a process that stays."""
        return str(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid)

    def get_reward(self) -> float:
        return float(self.calls)


class Echo:
    """It replies what it hears, and ends at `stop`; it gives no reward."""

    def reset(self, **row: Any) -> None:
        pass

    def __call__(self, answer: str) -> str | None:
        return None if answer.startswith("stop") else f"heard {answer}"


class Friend(Echo):
    """It rewards answers for being many and short."""

    def reset(self, **row: Any) -> None:
        self.heard = list[int]()

    def __call__(self, answer: str) -> str | None:
        self.heard.append(len(answer))
        return super().__call__(answer)

    def get_reward(self) -> float:
        return len(self.heard) - sum(self.heard) / 100


def by_calls(
    environments: list[Any], completions: list[Any], number: list[int], **columns: Any
) -> list[float]:
    """Reward conversations by their environments, as reward functions of TRL do."""
    lengths = map(len, completions)
    rows = zip(environments, lengths, number, strict=True)
    return [len(world.heard) + turns / 10 + of / 1000 for world, turns, of in rows]


class Unrewarding:
    """Its reward cannot be computed."""

    def reset(self) -> None:
        pass

    def __call__(self, answer: str) -> None:
        return None

    def get_reward(self) -> float:
        raise ValueError("no score today")


class Useless:
    """It has nothing to call."""

    def reset(self) -> None:
        pass


class Unmade:
    """It cannot be made."""

    def __init__(self) -> None:
        raise OSError("the board is missing")


class Endless:
    """It has no method reset."""

    def move(self) -> str:
        """Move."""
        return ""
