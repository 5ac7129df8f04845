"""The engine as a Ray actor: `RolloutActor.options(...).remote(path, ...)`, then `build`. Here alone is ray."""

import os
from collections.abc import Sequence
from typing import Any

import ray
import torch

from memsaver import Event, MemorySaver, Report, Ticket, Usage
from rollout.engine import Engine
from rollout.protocols import Progress
from rollout.rendezvous import Seat, join, open_store
from rollout.types import (
    CommitReceipt,
    Completion,
    PackedBox,
    SamplingParams,
    VerifyReceipt,
    WeightLayout,
    WeightOffer,
    WriteReceipt,
)


@ray.remote
class RolloutActor:
    """Same methods as `Engine`, one call at a time. Properties of the engine are methods here.

    Made empty, so that the process starts while others work; `build` takes the memory.
    """

    def __init__(
        self,
        path: str,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        kv_tokens: int = 4096,
        load_weights: bool = True,
        limit_bytes: int | None = None,
        threads: int | None = None,
        engine: dict[str, Any] | None = None,
    ) -> None:
        """path: model directory. threads: torch's CPU threads in this process. engine: further EngineConfig fields."""
        if threads is not None:
            torch.set_num_threads(threads)
        self._device = torch.device(device)
        self._limit_bytes = limit_bytes
        self._arguments = {"kv_tokens": kv_tokens, "load_weights": load_weights, **(engine or {})}
        self._arguments |= {"path": path, "device": device, "dtype": getattr(torch, dtype)}
        self._store: Any = None

    def meet(self) -> tuple[str, int]:
        """Host and port at which the other ranks of a tensor-parallel engine join this one, which is rank 0."""
        host = ray.util.get_node_ip_address()
        self._store = open_store(host)
        return host, self._store.port

    def build(self, seat: Seat | None = None) -> None:
        """Make the engine. seat: among tensor-parallel ranks, all of which call this at the same time."""
        group = None if seat is None else join(seat, self._device, self._store)
        saver = MemorySaver(device=self._device, limit_bytes=self._limit_bytes)
        self._engine = Engine.from_pretrained(**self._arguments, saver=saver, group=group)

    def pid(self) -> int:
        return os.getpid()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_progress: Progress | None = None,
    ) -> list[list[Completion]]:
        """on_progress runs in this process; pass something picklable that sends the numbers on."""
        return self._engine.generate(prompts, params, on_progress)

    def sleep(self, level: int = 1, unfinished: str = "raise", tags: Sequence[str] | None = None) -> None:
        self._engine.sleep(level, unfinished, tags)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self._engine.wake_up(tags)

    def weight_layout(self) -> WeightLayout:
        return self._engine.weight_layout()

    def begin_update(self, version: int, *, shadow: bool = False, names: Sequence[str] | None = None) -> WeightOffer:
        return self._engine.begin_update(version, shadow=shadow, names=names)

    def write_update(self, boxes: Sequence[PackedBox], data: torch.Tensor) -> None:
        self._engine.write_update(boxes, data)

    def verify_update(self, receipt: WriteReceipt) -> VerifyReceipt:
        return self._engine.verify_update(receipt)

    def commit_update(self, version: int) -> CommitReceipt:
        return self._engine.commit_update(version)

    def adopt_update(self, version: int, ticket: Ticket, layout_hash: str, digest: int | None = None) -> CommitReceipt:
        return self._engine.adopt_update(version, ticket, layout_hash, digest)

    def abort_update(self, reason: str) -> None:
        self._engine.abort_update(reason)

    def weights_version(self) -> int:
        return self._engine.weights_version

    def served_version(self) -> int | None:
        return self._engine.served_version()

    def unavailable_reason(self) -> str | None:
        return self._engine.unavailable_reason()

    def report(self) -> Report:
        return self._engine.report()

    def drain_events(self) -> list[Event]:
        return self._engine.drain_events()

    def take_usage(self) -> Usage:
        return self._engine.take_usage()
