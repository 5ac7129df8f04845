"""Continuous batching: which samples are computed in the next step. Policy only, no tensor is looked into."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from kvcache import ReqHandle
from rollout.types import Completion, FinishReason, SamplingParams


class Blocks(Protocol):
    """What the scheduler asks of kvcache.BlockManager. `extend` returns the new tokens' slots, opaque but for split."""

    @property
    def available_pages(self) -> int: ...
    @property
    def total_pages(self) -> int: ...
    def admit(self) -> ReqHandle | None: ...
    def extend(self, handles: Sequence[ReqHandle], new_lens: Sequence[int]) -> Any | None: ...
    def fork(self, handle: ReqHandle) -> ReqHandle | None: ...
    def release(self, handle: ReqHandle) -> None: ...


@dataclass(eq=False, kw_only=True)
class Sample:
    """One answer being generated. `siblings` wait for this sample's prefill and then fork from it."""

    request: int
    index: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    siblings: list["Sample"] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    handle: ReqHandle | None = None
    computed: int = 0  # leading tokens whose keys and values are in the cache
    prefill_len: int = 0  # tokens to compute in chunks before decode starts
    slots: Any = None  # of the prefill tokens

    @property
    def name(self) -> str:
        return f"{self.request}.{self.index}"

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def prefilled(self) -> bool:
        return self.computed >= self.prefill_len

    def tokens(self, first: int, last: int) -> list[int]:
        """Token ids [first, last) of prompt and answer together."""
        split = len(self.prompt)
        return self.prompt[first:last] + self.output[max(0, first - split) : max(0, last - split)]

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            token_ids=self.output,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            weight_versions=self.versions,
        )


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Tokens [start, start + length) of a sample that is being prefilled."""

    sample: Sample
    start: int
    length: int

    @property
    def last(self) -> bool:
        return self.start + self.length == self.sample.prefill_len


@dataclass(frozen=True, kw_only=True)
class Step:
    """One forward: a token of every sample in `decode`, then the prefill chunks. decode_slots: as `extend` returned."""

    decode: list[Sample]
    decode_slots: Any
    chunks: list[Chunk]


class Scheduler:
    """First come, first served. `running` is in order of admission; the youngest is preempted when pages run out.

    A prompt gets all its pages when it is admitted, one page for each of its samples being kept free besides, and one
    for each sample already running, so that preemption is rare. A preempted sample goes back to the front of the
    queue and is recomputed, its answer so far included.
    """

    def __init__(self, blocks: Blocks, *, page_size: int, max_running: int, max_prefill_tokens: int) -> None:
        self.blocks = blocks
        self.page_size = page_size
        self.max_running = max_running
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting: deque[Sample] = deque()
        self.running: list[Sample] = []
        self.preemptions = 0

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def check_fits(self, name: str, prompt_len: int, params: SamplingParams) -> None:
        """ValueError when a single sample could never run, even alone."""
        needed = self._pages(prompt_len + params.max_tokens - 1)
        if needed > self.blocks.total_pages:
            raise ValueError(
                f"{name} needs {needed * self.page_size} KV tokens (prompt {prompt_len} + max_tokens "
                f"{params.max_tokens}), the pool has {self.blocks.total_pages * self.page_size}; "
                f"raise kv_tokens or lower max_tokens"
            )

    def add(self, samples: Sequence[Sample]) -> None:
        """Queue the samples of one prompt, in groups that share its prefill and could run to their ends together."""
        prompt_len = len(samples[0].prompt)
        shared = prompt_len // self.page_size
        own = self._pages(prompt_len + samples[0].params.max_tokens) - shared
        group = max(1, min(self.max_running, (self.blocks.total_pages - shared) // own))
        for first in range(0, len(samples), group):
            leader, *siblings = samples[first : first + group]
            leader.siblings = siblings
            self.waiting.append(leader)

    @property
    def unfinished(self) -> list[Sample]:
        return [each for sample in (*self.running, *self.waiting) for each in (sample, *sample.siblings)]

    def schedule(self) -> Step:
        """Choose the next step and take the pages it needs."""
        before = self.preemptions
        decode, slots = self._extend_decode()
        chunks = self._continue_prefill()
        if self.preemptions == before:  # a page that was just taken from one sample is not for a newcomer
            chunks += self._admit(self.max_prefill_tokens - sum(chunk.length for chunk in chunks))
        return Step(decode=decode, decode_slots=slots, chunks=chunks)

    def _extend_decode(self) -> tuple[list[Sample], Any]:
        while decode := [sample for sample in self.running if sample.prefilled]:
            slots = self.blocks.extend([_handle(s) for s in decode], [s.length for s in decode])
            if slots is not None:
                return decode, slots
            assert len(self.running) > 1, "check_fits lets in only samples that can run alone"
            self._preempt(self.running[-1])
        return [], None

    def _continue_prefill(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        budget = self.max_prefill_tokens
        for sample in self.running:
            if not sample.prefilled and budget > 0:
                chunks.append(_next_chunk(sample, budget))
                budget -= chunks[-1].length
        return chunks

    def _admit(self, budget: int) -> list[Chunk]:
        """Let waiting samples in, first come, first served; all their pages are taken in one call."""
        admitted: list[Sample] = []
        chunks: list[Chunk] = []
        rows = sum(1 + len(each.siblings) for each in self.running)
        pages = 0
        while self.waiting and budget > 0:
            sample = self.waiting[0]
            members, needed = 1 + len(sample.siblings), self._pages(sample.length)
            if rows + members > self.max_running:
                break
            alone = not self.running and not admitted
            if not alone and pages + needed + members + rows > self.blocks.available_pages:
                break
            rows, pages = rows + members, pages + needed
            admitted.append(self.waiting.popleft())
            sample.computed, sample.prefill_len = 0, sample.length
            chunks.append(_next_chunk(sample, budget))
            budget -= chunks[-1].length
        self._take_pages(admitted)
        return chunks

    def _take_pages(self, admitted: Sequence[Sample]) -> None:
        if not admitted:
            return
        handles = [self.blocks.admit() for _ in admitted]
        assert None not in handles, "the request table has max_running rows"
        lengths = [sample.length for sample in admitted]
        slots = self.blocks.extend(cast("list[ReqHandle]", handles), lengths)
        assert slots is not None, "checked before, or the pool is empty and check_fits was called"
        for sample, handle, mine in zip(admitted, handles, slots.split(lengths), strict=True):
            sample.handle, sample.slots = handle, mine
            self.running.append(sample)

    def computed(self, step: Step) -> None:
        """Record that the step's keys and values are in the cache."""
        for chunk in step.chunks:
            chunk.sample.computed += chunk.length
            if chunk.last:
                chunk.sample.slots = None

    def fork_siblings(self, sample: Sample) -> list[Sample]:
        """After the sample's whole prefill was computed: its siblings, now running on the same pages."""
        siblings, sample.siblings = sample.siblings, []
        for sibling in siblings:
            sibling.handle = self.blocks.fork(_handle(sample))
            assert sibling.handle is not None, "rows were kept free at admission"
            sibling.computed = sibling.prefill_len = sample.prefill_len
        at = self.running.index(sample) + 1
        self.running[at:at] = siblings
        return siblings

    def append(self, sample: Sample, token: int, logprob: float, version: int) -> None:
        """Record a generated token; ends the sample, and frees its pages, if it was the last."""
        sample.output.append(token)
        sample.logprobs.append(logprob)
        sample.versions.append(version)
        if token in sample.stop_ids:
            self._finish(sample, "stop")
        elif len(sample.output) == sample.params.max_tokens:
            self._finish(sample, "length")

    def preempt_all(self) -> None:
        """Put every running sample back into the queue, oldest first; the pool is empty afterwards."""
        while self.running:
            self._preempt(self.running[-1])

    def abort(self, samples: Iterable[Sample]) -> None:
        """End unfinished samples with what they have."""
        for sample in samples:
            if sample.finish_reason is None:
                self._finish(sample, "abort")
        self.waiting = deque(sample for sample in self.waiting if sample.finish_reason is None)

    def _preempt(self, sample: Sample) -> None:
        self._release(sample)
        self.waiting.appendleft(sample)
        self.preemptions += 1

    def _finish(self, sample: Sample, reason: FinishReason) -> None:
        sample.finish_reason = reason
        if sample.handle is not None:
            self._release(sample)

    def _release(self, sample: Sample) -> None:
        self.blocks.release(_handle(sample))
        sample.handle = sample.slots = None
        sample.computed = sample.prefill_len = 0
        self.running.remove(sample)


def _handle(sample: Sample) -> ReqHandle:
    assert sample.handle is not None
    return sample.handle


def _next_chunk(sample: Sample, budget: int) -> Chunk:
    return Chunk(sample=sample, start=sample.computed, length=min(budget, sample.prefill_len - sample.computed))
