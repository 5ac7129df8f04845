"""Defines what the wake-up cycle drives: an `Engine`, or a handle on a `RolloutActor`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from memsaver import Ticket
from rollout.engine_base import PeerSaver
from rollout.requests import Completion, SamplingParams
from rollout.weights.messages import (
    PackedBox,
    UpdateReceipt,
    WeightLayout,
    WeightOffer,
    WriteReceipt,
)

Progress = Callable[[int, int, int], None]
"""Called after every step with (finished samples, total samples, tokens generated so far). A beam
search counts as beam_width samples; its tokens count anew when it is preempted.
"""


class UpdatableEngine(Protocol):
    """A target whose weights can be replaced in place.

    Contracts: `Engine`; order: `rollout/weights/update.py`.
    """

    def weight_layout(self) -> WeightLayout: ...

    def served_version(self) -> int | None: ...

    def begin_update(
        self, version: int, *, shadow: bool = False, names: Sequence[str] | None = None
    ) -> WeightOffer: ...

    def write_update(self, boxes: Sequence[PackedBox], data: Tensor) -> None: ...

    def verify_update(self, receipt: WriteReceipt) -> UpdateReceipt: ...

    def commit_update(self, version: int) -> UpdateReceipt: ...

    def alias_update(
        self,
        version: int,
        ticket: Ticket,
        layout_hash: str,
        digest: int | None = None,
        buffers: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> UpdateReceipt: ...

    def abort_update(self, reason: str) -> None: ...


class Rollout(UpdatableEngine, Protocol):
    """A generating engine whose memory can be put to sleep and whose weights can be replaced in
    place.
    """

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[list[Completion]]: ...

    def sleep(
        self, level: int = 1, *, tags: Sequence[str] | None = None, into: str | None = None
    ) -> None: ...

    def wake_up(self, tags: Sequence[str] | None = None, partly: bool = False) -> None: ...

    def prepare_sleep(self) -> None: ...

    def as_peer(self) -> PeerSaver: ...

    def hand_over_to(self, peer: PeerSaver | None) -> None: ...

    def shrink(self) -> None: ...
