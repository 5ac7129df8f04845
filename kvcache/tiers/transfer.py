"""Copies between tiers that are under way."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class Transfer:
    """An event for each layer that is copied; without any (on the CPU) all is done already."""

    def __init__(self, layers: range, events: Mapping[int, torch.cuda.Event]) -> None:
        self.layers = layers
        self._events = events

    @property
    def done(self) -> bool:
        return all(event.query() for event in self._events.values())

    def wait(self, layer: int | None = None) -> None:
        """What is queued on the current stream from now on waits for this layer (None: for all); the host does not.

        ValueError for a layer that is not copied here.
        """
        last = self.layers[-1] if layer is None else layer
        if last not in self.layers:
            raise ValueError(f"layer {layer} is not copied here, but layers {self.layers.start}..{self.layers[-1]} are")
        if last in self._events:  # layers follow each other on one stream
            torch.cuda.current_stream().wait_event(self._events[last])

    def synchronize(self) -> None:
        """The host waits for all layers: before the device pool is paused, or its host pages are read."""
        for event in self._events.values():
            event.synchronize()
