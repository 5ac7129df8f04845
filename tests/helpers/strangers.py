"""What a stranger might plant."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)
