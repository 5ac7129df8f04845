"""The two sides of a planned run: a saver that counts, and an engine that consists of its sizes.

`PlannedSaver` replaces the `MemorySaver` of a process, and `PlannedRollout` the engine.
"""

import contextlib
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from memsaver import Usage
from memsaver.memory import CachingAllocator
from memsaver.ops.layout import round_up
from memsaver.report import PAGE_POOL
from recipes.planner.planned_device import PAGE, PlannedDevice
from rollout import Completion, SamplingParams
from rollout.tag_names import ADAPTER_SLOTS, CUDA_GRAPH, KV_CACHE, WEIGHTS


class PlannedSaver:
    """Saver whose tags have sizes and states and no memory, with the methods a trainer needs.

    Attributes:
        planned: The device of the trainer.
        paused: Names of the paused tags.
        discarding: Names of tags whose content no pause keeps, which count as torch's memory.
        pooled: Bytes that the engine has handed over to the next tag that is resumed.
        used_by_peer: Returns the bytes that the other side uses of the same device.
    """

    device = torch.device("cpu")

    def __init__(self, device: PlannedDevice) -> None:
        self.planned = device
        self._direct = Counter[str]()
        self._regions = defaultdict[str, CachingAllocator](CachingAllocator)
        self.paused: set[str] = set()
        self.discarding: set[str] = set()
        self.pooled = 0
        self.used_by_peer: Callable[[], int] = lambda: 0

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, tag: str, content: str = "discard"
    ) -> Tensor:
        with self.planned.placing(CachingAllocator()):
            tensor = torch.empty(shape, dtype=dtype)
        self._direct[tag] += tensor.numel() * dtype.itemsize
        return tensor

    @contextlib.contextmanager
    def region(self, tag: str, content: str | None = None) -> Iterator[None]:
        with self.planned.placing(self._regions[tag]):
            yield

    def pause(self, *tags: str, content: str, release: str) -> None:
        self.paused |= set(tags)
        self.discarding |= set(tags if content == "discard" else ())

    def resume(self, *tags: str) -> None:
        self.paused -= set(tags)
        self.pooled = 0

    def forget_discarded(self) -> None:
        """Forget the allocations in regions whose content no pause keeps."""
        for tag in self.discarding:
            self._regions[tag].clear()

    @property
    def backend(self) -> Self:
        return self

    def bind_thread(self) -> None:
        """Do nothing, because no thread works on this device."""

    def is_paused(self, tag: str) -> bool:
        return tag in self.paused

    def discards(self, tag: str) -> int:
        return 0

    def unbacked_bytes(self, tag: str) -> int:
        return 0

    def mark_clean(self, tag: str, version: object) -> None:
        """Do nothing, because there is no content."""

    def leases(self, tag: str) -> int:
        return 0

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every tag while it has memory."""
        return {tag: size for tag, size in self._sizes().items() if tag not in self.discarding}

    def _sizes(self) -> dict[str, int]:
        tags = dict.fromkeys([*self._direct, *self._regions])
        held = {tag: self._direct[tag] + self._regions[tag].reserved for tag in tags}
        return {tag: round_up(nbytes, PAGE) for tag, nbytes in held.items()}

    @property
    def torch_bytes(self) -> int:
        """Return the bytes of torch's cache, and of tags that count as it."""
        return self.planned.allocator.reserved + self._discardable

    @property
    def _discardable(self) -> int:
        return sum(map(self._sizes().__getitem__, self.discarding - self.paused))

    def usage(self) -> Usage:
        """Return the trainer's usage; `device_used_bytes` counts both sides."""
        peak = self.planned.allocator.peak + self._discardable
        sizes = self.sizes() | {PAGE_POOL: self.pooled}
        usage = _usage(sizes, self.paused, self.torch_bytes, peak)
        return dataclasses.replace(usage, device_used_bytes=used_bytes(usage) + self.used_by_peer())

    def take_usage(self) -> Usage:
        """Return `usage` and reset torch's peak, as `MemorySaver.take_usage` does."""
        usage = self.usage()
        self.planned.allocator.reset_peak()
        return usage


PIECE = 1 << 30  # bytes by which an elastic tag grows and shrinks


@dataclass(frozen=True, kw_only=True)
class EngineSizes:
    """Bytes of one rank of an engine.

    Attributes:
        weights: Bytes of the weights.
        adapter_slots: Bytes of slots for adapters, which count as never asleep.
        kv_cache: Bytes of the whole KV pool.
        least: Bytes with which a growing pool wakes.
        wanted: Bytes that running requests use of a growing pool.
        grows: Whether the pool can begin small.
        cuda_graph: Bytes of CUDA graphs.
        idle: Bytes of torch in an idle engine.
        generating: Peak bytes of torch in a step.
    """

    weights: int = 0
    adapter_slots: int = 0
    kv_cache: int = 0
    least: int = 0
    wanted: int = 0
    grows: bool = False
    cuda_graph: int = 0
    idle: int = 0
    generating: int = 0

    @property
    def tags(self) -> dict[str, int]:
        return {WEIGHTS: self.weights, KV_CACHE: self.kv_cache, CUDA_GRAPH: self.cuda_graph}


NO_ENGINE = EngineSizes()
"""Sizes beside a trainer whose GPU has no engine."""


class PlannedRollout:
    """Engine of known sizes whose answers all have the longest length (`Rollout`).

    It begins asleep. With `staged` each tag wakes on its own, else all tags wake with the first.

    Attributes:
        answered: Called when generation ends.
        handed_over: Bytes that either side handed over, by the tags that left and the tag that took
            their memory.
        peer: The trainer's saver, which receives memory.
    """

    weights_version = 0
    peer: PlannedSaver

    def __init__(self, sizes: EngineSizes, staged: bool = True) -> None:
        self._sizes, self._staged = sizes, staged
        self._asleep = set(sizes.tags)
        self._pool = self._grown = sizes.kv_cache  # bytes after waking, and during generation
        self._resident = self._pooled = 0
        self.answered: Callable[[], None] = lambda: None
        self.handed_over: dict[tuple[tuple[str, ...], str], int] = {}
        self._torch = self._peak = sizes.idle

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Any, on_progress: Any = None
    ) -> list[list[Completion]]:
        self._pool = self._grown
        # torch keeps this cached until the KV cache sleeps.
        self._torch = self._peak = self._sizes.generating
        self.answered()
        per_prompt = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        return [[_longest(param.max_tokens)] * param.n for param in per_prompt]

    def sleep(
        self,
        level: int = 1,
        unfinished: str = "raise",
        tags: Sequence[str] | None = None,
        into: str | None = None,
    ) -> None:
        chosen = set(self._sizes.tags if tags is None else tags)
        self._resident = self._sizes.weights if level == 1 and WEIGHTS in chosen else 0
        self._asleep |= chosen
        if into is not None:
            given = sum(self._sizes.tags[tag] for tag in chosen)
            self.peer.pooled = min(given, self.peer.sizes()[into])
            self.handed_over[tuple(sorted(chosen)), into] = self.peer.pooled
        if KV_CACHE in chosen:
            self._torch = self._sizes.idle

    def receive(self, sizes: Mapping[str, int], into: str) -> None:
        """Take over memory of trainer tags of these sizes for a tag that wakes up next."""
        self._pooled = min(sum(sizes.values()), self._sizes.tags[into])
        self.handed_over[tuple(sizes), into] = self._pooled

    def wake_up(self, tags: Sequence[str] | None = None, partly: bool = False) -> None:
        self._pooled = 0
        self._asleep -= set(self._sizes.tags if tags is None or not self._staged else tags)
        whole = self._sizes.kv_cache
        self._pool = min(whole, self._sizes.least) if partly else whole
        self._grown = min(whole, self._sizes.wanted) if partly else whole

    def prepare_sleep(self) -> None:
        """Do nothing: the plan counts host memory elsewhere."""

    def shrink(self) -> None:
        """Do nothing: the plan counts the pool at its largest."""

    def usage(self) -> Usage:
        tags = self._sizes.tags | {KV_CACHE: self._pool, PAGE_POOL: self._pooled}
        if self._sizes.adapter_slots:
            tags[ADAPTER_SLOTS] = self._sizes.adapter_slots
        return _usage(tags, self._asleep, self._torch, self._peak, self._resident)

    def take_usage(self) -> Usage:
        usage, self._peak = self.usage(), self._torch
        return usage

    def abort_update(self, reason: str) -> None:
        raise AssertionError(reason)


def used_bytes(usage: Usage) -> int:
    """Return the bytes that a process holds at present."""
    return sum(usage.tags.values()) + usage.torch_bytes


def _usage(
    sizes: Mapping[str, int], away: Set[str], torch_bytes: int, torch_peak: int, host: int = 0
) -> Usage:
    """Build the usage of a process whose tags are present except for those in `away`."""
    return Usage(
        tags={tag: 0 if tag in away else nbytes for tag, nbytes in sizes.items()},
        torch_bytes=torch_bytes,
        torch_peak_bytes=torch_peak,
        device_used_bytes=None,
        host_bytes=host,
    )


def _longest(tokens: int) -> Completion:
    return Completion(
        token_ids=[0] * tokens,
        logprobs=[0.0] * tokens,
        finish_reason="length",
        weight_versions=[0] * tokens,
    )
