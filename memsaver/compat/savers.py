"""The memory savers behind a drop-in: one for each device of the process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from memsaver.saver import MemorySaver


def current_device() -> torch.device:
    """The current CUDA device; the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class Savers:
    """One ``MemorySaver`` a device, made when it is first asked for.

    A forked child begins with none.
    """

    def __init__(self, device: Callable[[], torch.device] = current_device, **options: Any) -> None:
        """device: tells which is the current one. options: of every ``MemorySaver``."""
        self._device = device
        self._options = options
        # a child must not drop its parent's
        self._made: dict[tuple[int, torch.device], MemorySaver] = {}

    def current(self) -> MemorySaver:
        key = os.getpid(), self._device()
        if key not in self._made:
            self._made.setdefault(key, MemorySaver(key[1], **self._options))
        return self._made[key]

    def __iter__(self) -> Iterator[MemorySaver]:
        """Those of this process, in the order in which they were made."""
        return iter([saver for (pid, _), saver in list(self._made.items()) if pid == os.getpid()])

    def set_disk_dir(self, path: Path) -> None:
        """Sets where content ``"disk"`` is saved from now on."""
        self._options["disk_dir"] = path
        for saver in self:
            saver.disk_dir = path
