"""Work in a thread of its own that others need later: kernels compiled beside a model's start."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence

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
        self._jobs, self._device = tuple(jobs), device
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="warm-up", daemon=True)
        if self._jobs:
            self._thread.start()

    def close(self) -> None:
        """Waits for the job under way; those behind it are not done any more."""
        self._ended.set()
        if self._jobs:
            self._thread.join()

    def _run(self) -> None:
        for job in self._jobs:
            if self._ended.is_set():
                return
            try:
                with _current(self._device):
                    job()
            except Exception:
                _log.debug("warm-up: %s failed, and is done when it is needed", job, exc_info=True)


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
