"""A timeline of stages and bytes, written as a Chrome trace (chrome://tracing, Perfetto)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memsaver.common.files import replace_text


class Timeline:
    """Collects spans and counters at ``time.time()`` seconds: a machine's processes line up."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._processes: dict[str, int] = {}

    def span(self, name: str, start: float, end: float, process: str = "main", **args: Any) -> None:
        """A named piece of work of ``process``."""
        times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
        self._add({"ph": "X", "name": name, **times, "tid": 1, "args": args}, process)

    def counter(
        self, name: str, time: float, values: Mapping[str, float], process: str = "main"
    ) -> None:
        """Values (bytes by tag) that hold from ``time`` on."""
        self._add({"ph": "C", "name": name, "ts": time * 1e6, "args": dict(values)}, process)

    def write(self, path: str | Path) -> None:
        """Write all events in order of time; the file is replaced as a whole."""
        path = Path(path)
        names = [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
            for name, pid in self._processes.items()
        ]
        first = min((event["ts"] for event in self._events), default=0.0)
        events = [
            {**event, "ts": event["ts"] - first}
            for event in sorted(self._events, key=lambda e: e["ts"])
        ]
        replace_text(path, json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms"}))

    def _add(self, event: dict[str, Any], process: str) -> None:
        pid = self._processes.setdefault(process, len(self._processes) + 1)
        self._events.append({**event, "pid": pid})
