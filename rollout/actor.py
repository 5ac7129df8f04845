"""The engine as a Ray actor: `RolloutActor.options(...).remote(path, ...)`. Only this file imports ray."""

import os
from collections.abc import Sequence
from typing import Any

import ray
import torch

from memsaver import Event, MemorySaver, Report, Ticket, Usage
from rollout.engine import Engine
from rollout.protocols import Progress
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
    """Same methods as `Engine`, one call at a time. Properties of the engine are methods here."""

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
        self._engine = Engine.from_pretrained(
            path,
            device=device,
            dtype=getattr(torch, dtype),
            kv_tokens=kv_tokens,
            load_weights=load_weights,
            saver=MemorySaver(device=device, limit_bytes=limit_bytes),
            **(engine or {}),
        )

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
