"""Copies between tiers that are under way."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Holds what a copy is measured by.

    start: recorded before it on its stream; None where it took `seconds` and is over.
    """

    nbytes: int
    to_host: bool
    start: torch.cuda.Event | None = None
    seconds: float = 0.0


class Transfer:
    """An event for each layer that is copied; without any (on the CPU) all is done already."""

    def __init__(
        self, layers: range, events: Mapping[int, torch.cuda.Event], clock: Clock | None = None
    ) -> None:
        self.layers = layers
        self.clock = clock
        self._events = events

    @property
    def done(self) -> bool:
        return all(event.query() for event in self._events.values())

    @property
    def seconds(self) -> float:
        """Returns, once it is done, how long it took on its stream, waits for what was queued
        before left out.
        """
        assert self.clock is not None and self.done, "not measured, or not over yet"
        if self.clock.start is None:
            return self.clock.seconds
        return self.clock.start.elapsed_time(self._events[self.layers[-1]]) / 1e3

    def wait(self, layer: int | None = None) -> None:
        """Makes what is queued on the current stream from now on wait for this layer (None: for
        all); the host does not wait.

        Raises ValueError for a layer that is not copied here.
        """
        last = self.layers[-1] if layer is None else layer
        if last not in self.layers:
            raise ValueError(
                f"layer {layer} is not copied here, "
                f"but layers {self.layers.start}..{self.layers[-1]} are"
            )
        if last in self._events:  # layers follow each other on one stream
            torch.cuda.current_stream().wait_event(self._events[last])

    def synchronize(self) -> None:
        """The host waits for all layers: before the device pool is paused, or its host pages are
        read.
        """
        for event in self._events.values():
            event.synchronize()
