"""Defines what a saver tells about itself, in bytes and seconds; and a timeline, a Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memsaver.errors import format_bytes
from memsaver.system.files import replace_text


@dataclass(frozen=True, kw_only=True)
class TagReport:
    """One tag on one device."""

    state: str
    """``"active"`` or ``"paused"``."""
    content: str
    """``"discard"``, ``"host"`` or ``"disk"``: what a pause does with the content."""
    reserved_bytes: int
    """Addresses, for life."""
    committed_bytes: int
    """Physical memory behind the tag now, page-rounded."""
    aliased_bytes: int
    """Of another saver's tag, behind this one in place of its own memory: committed there, not
    here.
    """
    live_bytes: int
    """Allocations in use, as asked for."""
    backup_bytes: int
    """Host memory that holds the content, or serves to read it back, while it is paused."""
    disk_bytes: int
    """Of the file that holds the content while it is paused."""
    extents: int
    leases: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """One saver: its tags, its limit, and who else holds memory of its device (GPU only)."""

    device: str
    limit_bytes: int | None
    committed_bytes: int
    """Of all tags, and what the page pool retains."""
    pool_bytes: int
    backup_bytes: int
    tags: dict[str, TagReport]
    others: dict[str, int] = field(default_factory=dict)
    """What stays while all tags are asleep, of this process and others, by name (GPU only)."""

    def __str__(self) -> str:
        """Return a table: a line a tag, then who else holds memory."""
        rows: list[tuple[str, ...]] = [("tag", "state", "content", "committed", "live", "saved")]
        for name, tag in self.tags.items():
            sizes = tag.committed_bytes, tag.live_bytes, tag.backup_bytes + tag.disk_bytes
            rows.append((name, tag.state, tag.content, *map(format_bytes, sizes)))
        rest = {"the page pool": self.pool_bytes, **self.others}
        rows += [(name, "", "", format_bytes(nbytes), "", "") for name, nbytes in rest.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        limit = self.limit_bytes
        head = f"{self.device}: {format_bytes(self.committed_bytes)} committed"
        head += "" if limit is None else f" of at most {format_bytes(limit)}"
        texts, numbers = ("{{:{}}}" * 3).format(*widths), ("{{:>{}}}" * 3).format(*widths[3:])
        table = f"{texts}{numbers}".replace("}{", "}  {")
        return "\n".join([head, *(table.format(*row).rstrip() for row in rows)])


@dataclass(frozen=True, kw_only=True)
class Event:
    """An operation on a tag: when it ended (``time.time()``), its length, the tag's bytes then."""

    time: float
    seconds: float
    op: str
    tag: str
    committed_bytes: int
    backup_bytes: int


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tells what one process holds of a saver's device; on the CPU the tags only."""

    tags: dict[str, int]
    """Committed bytes, the page pool's under ``"the page pool"``."""
    torch_bytes: int
    """Reserved by torch's own allocator, outside of every tag."""
    torch_peak_bytes: int
    """The most of these since the last ``take_usage``."""
    device_used_bytes: int | None
    """Of the whole device, by all processes, contexts and libraries included."""
    host_bytes: int
    """Saved content of paused tags."""


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
