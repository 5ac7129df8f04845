"""Stages and memory of the newest steps, for pictures and as a Chrome trace."""

from collections import defaultdict, deque
from functools import partial
from pathlib import Path
from typing import NamedTuple

from memsaver import Event
from memsaver.report import Timeline

STAGES = "stages"  # process of a trace for stages and parts of the run
KEPT = 25_000  # spans, and events of an owner: those of about 1000 steps
# Stages that few steps have.
_EXTRA = ("evaluate", "refresh_reference", "save_checkpoint", "export")


class Span(NamedTuple):
    """A stage or a part of the run ("step N"), with its times in seconds of `steady_time`."""

    name: str
    begin: float
    end: float

    @property
    def is_step(self) -> bool:
        return self.name.startswith("step ")


class StageTrace:
    """Record of this session, whose size is bounded in a run of any length.

    Attributes:
        spans: Stages and parts of the run.
        events: Memory events by owner.
    """

    def __init__(self) -> None:
        self.spans = deque[Span](maxlen=KEPT)
        self.events: dict[str, deque[Event]] = defaultdict(partial(deque, maxlen=KEPT))

    def one_step(self) -> Span | None:
        """Return the last step without a stage that few steps have, or else the last step."""
        steps = [span for span in self.spans if span.is_step]
        extra = [span for span in self.spans if span.name in _EXTRA]
        for step in reversed(steps):
            if not any(step.begin <= span.begin < step.end for span in extra):
                return step
        return steps[-1] if steps else None

    def write(self, file: Path) -> None:
        """Write a Chrome trace."""
        timeline = Timeline()
        for span in self.spans:
            timeline.span(*span, process=STAGES)
        for owner, events in self.events.items():
            for event in sorted(events, key=lambda event: event.time):
                begin, held = event.time - event.seconds, event.committed_bytes
                sizes = {"bytes": held, "backup": event.backup_bytes}
                timeline.span(f"{event.op} {event.tag}", begin, event.time, owner, **sizes)
                timeline.counter(event.tag, event.time, {"committed": held}, process=owner)
        timeline.write(file)
