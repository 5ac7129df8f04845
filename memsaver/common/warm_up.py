"""Work in a thread of its own that others need later: kernels compiled beside a model's start."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

Job = Callable[[], object]

_log = logging.getLogger("memsaver")


class WarmUp:
    """Does jobs, one after the other, from the moment it is made.

    Nothing waits for them and nothing depends on them: what raises is logged, and is done where it
    is needed.
    """

    def __init__(self, jobs: Sequence[Job], device: torch.device) -> None:
        """device: current in the thread, if it is a GPU."""
        gpu = device.type == "cuda"
        self._device: Any = torch.cuda.device(device) if gpu else contextlib.nullcontext()
        self._ended = threading.Event()
        # no daemon: the end of Python waits for a compiler, which it would crash
        self._thread = threading.Thread(target=self._run, args=(jobs,), name="warm-up")
        if jobs:
            self._thread.start()

    def close(self) -> None:
        """Waits for the job under way; those behind it are not done any more."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self, jobs: Sequence[Job]) -> None:
        with self._device:
            for job in jobs:
                if self._ended.is_set() or not threading.main_thread().is_alive():
                    return
                try:
                    job()
                except Exception:
                    _log.debug("warm-up: %s failed: done when it is needed", job, exc_info=True)
