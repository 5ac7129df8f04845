"""Reports and events of a saver, in bytes and seconds, and a timeline in Chrome's trace format."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memsaver.errors import format_bytes
from memsaver.system.files import replace_text
from memsaver.types import Content, Operation, TagState

PAGE_POOL = "the page pool"
"""Name of the page pool beside those of tags, in `Usage.tags` and among the holders of memory."""


@dataclass(frozen=True, kw_only=True)
class TagReport:
    """State of one tag on one device.

    Attributes:
        state: ``"active"`` or ``"paused"``.
        content: Where a pause keeps the content; ``"discard"`` keeps none.
        reserved_bytes: Address space, constant for the life of the tag.
        committed_bytes: Physical memory behind the tag now, rounded up to pages.
        aliased_bytes: Memory of another saver's tag behind this tag's addresses. It counts as
            committed there, not here.
        live_bytes: Allocations in use, by their requested sizes.
        backup_bytes: Host memory for the content of the paused tag: the content itself, or the
            buffers through which it is read back from disk.
        disk_bytes: Size of the file that holds the content of the paused tag.
        extents: Number of pieces of physical memory behind the tag.
        leases: Number of leases and aliases of the tag.
    """

    state: TagState
    content: Content
    reserved_bytes: int
    committed_bytes: int
    aliased_bytes: int
    live_bytes: int
    backup_bytes: int
    disk_bytes: int
    extents: int
    leases: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """State of one saver: its tags, its limit, and other holders of the device's memory.

    Attributes:
        device: ``"cpu"`` or ``"cuda:N"``.
        limit_bytes: Maximum of `committed_bytes`; ``None`` for no limit.
        committed_bytes: Physical memory of all tags and of the page pool.
        pool_bytes: Physical memory that the page pool retains.
        backup_bytes: Host memory for the content of paused tags.
        tags: Reports by tag, in the order of first use.
        others: Bytes of the device that stay in use while all tags are paused, by holder: torch,
            this process and other processes. Empty on the CPU, and where it was not asked for.
    """

    device: str
    limit_bytes: int | None
    committed_bytes: int
    pool_bytes: int
    backup_bytes: int
    tags: dict[str, TagReport]
    others: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return a table with one line per tag, followed by the other holders of memory."""
        rows: list[tuple[str, ...]] = [("tag", "state", "content", "committed", "live", "saved")]
        for name, tag in self.tags.items():
            sizes = tag.committed_bytes, tag.live_bytes, tag.backup_bytes + tag.disk_bytes
            rows.append((name, tag.state, tag.content, *map(format_bytes, sizes)))
        rest = {PAGE_POOL: self.pool_bytes, **self.others}
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
    """Record of one operation on one tag.

    Attributes:
        time: When the operation ended, by `steady_time`.
        seconds: Duration. An operation on several tags is divided equally among them.
        op: The operation. A region or a new tensor is recorded as ``"grow"`` if the tag grew.
        tag: The tag.
        committed_bytes: Physical memory behind the tag after the operation.
        backup_bytes: Host memory that holds the tag's content after the operation.
    """

    time: float
    seconds: float
    op: Operation
    tag: str
    committed_bytes: int
    backup_bytes: int


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Memory that one process uses on a saver's device.

    Attributes:
        tags: Committed bytes by tag; the page pool's, if any, are under `PAGE_POOL`.
        torch_bytes: Bytes that torch's own allocator has reserved outside of every tag; 0 on the
            CPU.
        torch_peak_bytes: Maximum of `torch_bytes` since the last `MemorySaver.take_usage`.
        device_used_bytes: Used bytes of the whole device, by all processes, including contexts and
            libraries; ``None`` on the CPU.
        host_bytes: Host memory for the content of paused tags.
    """

    tags: dict[str, int]
    torch_bytes: int
    torch_peak_bytes: int
    device_used_bytes: int | None
    host_bytes: int


class Timeline:
    """Collection of spans and counters, written as a Chrome trace.

    Times are seconds of `steady_time`, so that the processes of one machine line up.
    """

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._processes: dict[str, int] = {}

    def span(self, name: str, start: float, end: float, process: str = "main", **args: Any) -> None:
        """Add a named span of work.

        Args:
            name: Label of the span.
            start: Start of the span, in seconds.
            end: End of the span, in seconds.
            process: Process row that shows the span.
            **args: Details to show with the span.
        """
        times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
        self._add({"ph": "X", "name": name, **times, "tid": 1, "args": args}, process)

    def counter(
        self, name: str, time: float, values: Mapping[str, float], process: str = "main"
    ) -> None:
        """Add counter values that apply from a time on.

        Args:
            name: Label of the counter.
            time: When the values begin to apply, in seconds.
            values: Value by series, such as bytes by tag.
            process: Process row that shows the counter.
        """
        self._add({"ph": "C", "name": name, "ts": time * 1e6, "args": dict(values)}, process)

    def write(self, path: str | Path) -> None:
        """Write all events in order of time, and replace the file atomically.

        Args:
            path: JSON file, for chrome://tracing or Perfetto.
        """
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
