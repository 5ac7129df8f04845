"""Continuous batching: chooses the samples of each step, without tensors."""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from heapq import nlargest
from itertools import chain, compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache import Ledger, ReqHandle, pages_across
from kvcache.allocators import Int64Array
from rollout.config import EngineConfig
from rollout.requests import FinishReason, SamplingParams
from rollout.scheduling.beam import Candidates
from rollout.scheduling.prefix import PrefixBlocks
from rollout.scheduling.sample_rows import SampleRows
from rollout.scheduling.samples import BeamGroup, Chunk, EngineStats, Sample, Step
from rollout.weights.adapters import ServedAdapter


class Scheduler:
    """First-come, first-served policy, which owns the queue and the running samples.

    Samples of another priority come before or after all of this one.

    A prompt is admitted when all pages that it needs at any one time are free, plus one page for
    each of its samples and for each running sample, so that preemption is rare. Its pages are
    allocated chunk by chunk, and pages that its sliding window has left are freed. The token budget
    of a step cuts off at most one prompt. Other prompts are split only where the prefix cache keeps
    their beginning. Tokens from the prefix cache are not computed, and pages that the cache can
    evict count as free.

    When pages run out, the youngest running sample is preempted. It returns to the front of the
    queue. Later its tokens, including its answer, are computed again, or it continues from pages
    that were swapped out.
    """

    def __init__(self, blocks: PrefixBlocks, config: EngineConfig) -> None:
        self.blocks = blocks
        self.page_size, self.max_running = config.page_size, config.max_running
        self.max_prefill_tokens = config.max_prefill_tokens
        self._mixed_prefill_tokens = config.mixed_prefill_tokens or config.max_prefill_tokens
        self.waiting: deque[Sample] = deque()
        self.running: list[Sample] = []
        self.rows = SampleRows(blocks.blocks.req_to_token.size + 1)
        # The running samples that decode, and their rows; None after a change.
        self._decoding: tuple[list[Sample], Int64Array] | None = None
        # Samples that ended, and samples to be told that received tokens, since `take_news`.
        self.ended: list[Sample] = []
        self.told: list[Sample] = []
        self.preemptions = 0
        self.stats = EngineStats()

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _needed(self, ledger: Ledger, tokens: int) -> int:
        """Return the maximum number of pages of a sequence that grows to `tokens` tokens."""
        pages = self._pages(tokens)
        if ledger.window is None:
            return pages
        reach = ledger.window - 1 + min(tokens, self.max_prefill_tokens)
        return min(pages, pages_across(reach, self.page_size))

    def check_fits(self, name: str, prompt_len: int, params: SamplingParams) -> None:
        """Raise a ValueError, which calls the prompt `name`, if the request can never run.

        A sample must fit into the pool alone, and the branches of a beam search together.
        """
        for ledger in self.blocks.ledgers:
            needed = self._needed(ledger, prompt_len + params.max_tokens - 1)
            if needed > ledger.total:
                kind = "KV" if ledger.name == "kv" else "window"
                raise ValueError(
                    f"{name} needs {needed * self.page_size} {kind} tokens (prompt {prompt_len} + "
                    f"max_tokens {params.max_tokens}), the pool has "
                    f"{ledger.total * self.page_size}; raise "
                    f"{ledger.name}_tokens or lower max_tokens"
                    + ("" if ledger.window is None else ", or max_prefill_tokens")
                )
        together = self._together(prompt_len, params.max_tokens)
        if params.beam_width > 1 and together < params.beam_width:
            raise ValueError(
                f"{name} has beam_width={params.beam_width}, but at most {together} samples of it "
                f"run together; lower beam_width or max_tokens, or raise "
                f"max_running={self.max_running} or the tokens of the pool"
            )

    def _together(self, prompt_len: int, max_tokens: int) -> int:
        """Return how many samples that share a prompt can run to their ends together."""
        shared = prompt_len // self.page_size
        own = self._pages(prompt_len + max_tokens) - shared
        group = self.max_running
        for ledger in self.blocks.ledgers:
            most = self._needed(ledger, prompt_len + max_tokens)
            group = min(group, (ledger.total - min(shared, most)) // min(own, most))
        return group

    def add(self, samples: Sequence[Sample]) -> None:
        """Queue the samples of one prompt, in groups that can run to their ends together."""
        group = max(1, self._together(len(samples[0].prompt), samples[0].params.max_tokens))
        for first in range(0, len(samples), group):
            leader, *siblings = samples[first : first + group]
            leader.siblings = siblings
            self._queue(leader)

    def _queue(self, sample: Sample, first: bool = False) -> None:
        """Queue a sample as the last, or the first, of those that have its priority."""
        own, size = sample.params.priority, len(self.waiting)
        if first:
            behind = (at for at, s in enumerate(self.waiting) if s.params.priority >= own)
            place = next(behind, size)
        else:
            before = (at for at, s in enumerate(reversed(self.waiting)) if s.params.priority <= own)
            place = size - next(before, size)
        self.waiting.insert(place, sample)

    def wanted_tokens(self) -> int:
        """Return the tokens that samples can use together, with one extra page per sample."""
        pages = (1 + self._pages(len(s.prompt) + s.params.max_tokens) for s in self.unfinished)
        return sum(nlargest(self.max_running, pages)) * self.page_size

    @property
    def unfinished(self) -> list[Sample]:
        groups = ((sample, *sample.siblings) for sample in (*self.running, *self.waiting))
        return list(chain.from_iterable(groups))

    def schedule(self, collect: Callable[[], bool] = lambda: False) -> Step:
        """Choose the next step and allocate the pages that it needs.

        `collect` reads the results of steps under way, and returns whether there were any. It is
        called before a preemption, because samples that have ended have pages to free.
        """
        before = self.preemptions
        step = self._grow(collect)
        chunks = step.chunks
        # Pages of a sample that was just preempted are not for a new sample.
        if self.preemptions == before:
            begun = sum(chunk.length for chunk in chunks)
            chunks += self._admit(self._budget(step.decode) - begun)
            if not step.decode and not chunks:
                step = self._grow(collect)  # swapped samples that can decode again
                chunks = step.chunks
        mine = [chunk for chunk in chunks if not chunk.sample.remote]
        arriving = [chunk for chunk in chunks if chunk.sample.remote]
        loads = self.blocks.loads() if step.decode or mine else ()
        return replace(step, chunks=mine, arriving=arriving, loads=loads)

    def _grow(self, collect: Callable[[], bool]) -> Step:
        """Allocate pages for the decoding samples and for the next chunks of begun prefills.

        Preempt the youngest running samples while pages are short. Samples whose last token is
        under way have nothing to decode.
        """
        while self.running:
            decode, rows, lengths = self._next_decode()
            chunks = self._next_chunks(self._budget(decode))
            ends = [sample.computed + n for sample, n in chunks.items()]
            slots = self.blocks.grow(
                np.concatenate([rows, _rows(chunks)]),
                np.concatenate([lengths, np.array(ends, dtype=np.int64)]),
            )
            if slots is not None:
                decode_slots, *chunk_slots = slots.split([len(decode), *chunks.values()])
                return Step(
                    decode=decode,
                    rows=rows,
                    lengths=lengths,
                    decode_slots=decode_slots,
                    chunks=_chunks(chunks, chunk_slots),
                )
            if not collect():
                assert len(self.running) > 1, "check_fits admits only samples that can run alone"
                self._make_room(self.running[-1])
        none = np.empty(0, dtype=np.int64)
        return Step(decode=[], rows=none, lengths=none, decode_slots=None, chunks=[])

    def _next_decode(self) -> tuple[list[Sample], Int64Array, Int64Array]:
        """Return the samples that decode, their rows, and their numbers of tokens."""
        if self._decoding is None:
            prefilled = [sample for sample in self.running if sample.prefilled]
            self._decoding = prefilled, _rows(prefilled)
        samples, rows = self._decoding
        left = self.rows.length[rows] < self.rows.limit[rows]
        if not left.all():
            samples, rows = list(compress(samples, left)), rows[left]
        return samples, rows, self.rows.length[rows]

    def _budget(self, decode: Sequence[Sample]) -> int:
        """Return the number of prompt tokens in a step that also decodes the samples `decode`."""
        most = self.max_prefill_tokens
        return min(most, self._mixed_prefill_tokens) if decode else most

    def _next_chunks(self, budget: int) -> dict[Sample, int]:
        """Return the number of next tokens for each begun prefill, together at most `budget`."""
        lengths: dict[Sample, int] = {}
        if self._decoding is not None and len(self._decoding[0]) == len(self.running):
            return lengths  # all prefills are complete
        for sample in self.running:
            if not sample.prefilled and not sample.remote and budget > 0:
                lengths[sample] = self._chunk(sample, budget)
                budget -= lengths[sample]
        return lengths

    def _admit(self, budget: int) -> list[Chunk]:
        """Start waiting samples in order, and allocate the pages of their first chunks together.

        Pages that a new sample shares with running samples are already counted there. Its other
        cached pages count as taken, because they stay available until the sample locks them. If
        budget is left over, each begun prefill needs at most one more page in a later step, and
        that page is kept free.
        """
        lengths: dict[Sample, int] = {}
        if not self.waiting:
            return []
        ledgers = self.blocks.ledgers
        taken = [0] * len(ledgers)
        rows = sum(1 + len(sample.siblings) for sample in self.running)
        while self.waiting and budget > 0:
            sample = self.waiting[0]
            members = 1 + len(sample.siblings)
            if rows + members > self.max_running:
                break
            tokens = sample.tokens(0, sample.length)
            held = self.blocks.held_pages(tokens, sample.swapped, sample.namespace)
            needed = [self._needed(ledger, sample.length) - held for ledger in ledgers]
            wanted = [n + more for n, more in zip(taken, needed, strict=True)]
            pairs = zip(wanted, ledgers, strict=True)
            tight = any(n + members + rows > ledger.available for n, ledger in pairs)
            if tight and self.running:
                break
            rows, taken = rows + members, wanted
            self._start(sample)
            if not sample.prefilled:
                rest = sample.length - sample.computed
                lengths[sample] = rest if sample.remote else self._chunk(sample, budget)
                budget -= 0 if sample.remote else lengths[sample]
        return self._first_chunks(lengths) if lengths else []

    def _chunk(self, sample: Sample, budget: int) -> int:
        """Return the number of next tokens of a prefill, at most `budget`."""
        return min(budget, self._keep_at(sample) - sample.computed)

    def _keep_at(self, sample: Sample) -> int:
        return self.blocks.keep_at(_handle(sample), sample.computed, sample.prefill_len)

    def _start(self, sample: Sample) -> None:
        """Start the first sample of the queue, with a row and the cached pages that it shares."""
        swapped, sample.swapped = sample.swapped, None
        tokens = sample.tokens(0, sample.length)
        admitted = self.blocks.admit(tokens, swapped, sample.namespace)
        assert admitted is not None, "the request table has max_running rows"
        sample.handle, sample.computed = admitted
        sample.prefill_len = sample.length
        if sample.found is None:
            sample.found = sample.computed
        self._begin(sample)
        if swapped is not None and sample.computed >= swapped.tokens:
            self.stats.swapped_back += 1
            if sample.output and not sample.siblings and sample.computed == sample.length - 1:
                sample.prefill_len = sample.computed  # it was decoding, and continues with decode
        self.stats.prefix_hit_tokens += sample.computed
        self.stats.loaded_tokens = self.blocks.loaded_tokens
        self.running.append(self.waiting.popleft())

    def _first_chunks(self, lengths: dict[Sample, int]) -> list[Chunk]:
        """Allocate the pages of the admitted samples' first chunks."""
        ends = [sample.computed + n for sample, n in lengths.items()]
        slots = self.blocks.grow(_rows(lengths), np.array(ends, dtype=np.int64))
        assert slots is not None, "_admit or check_fits has counted the pages"
        return _chunks(lengths, slots.split(list(lengths.values())))

    def computed(self, step: Step) -> None:
        """Record that the step's keys and values are cached; free pages that left a window."""
        for chunk in step.chunks:
            sample, end = chunk.sample, self._keep_at(chunk.sample)
            sample.computed += chunk.length
            if sample.computed == end:
                self.blocks.keep(_handle(sample), sample.tokens(0, end))
            self._decoding = None
        self.stats.computed_tokens += step.tokens
        begun = _rows(chunk.sample for chunk in step.chunks)
        self.blocks.slide(np.concatenate([step.rows, begun]))

    def arrived(self, sample: Sample) -> None:
        """Record that the keys and values of a remote prompt are in the cache."""
        sample.computed, sample.remote = sample.prefill_len, False
        self._decoding = None
        self.blocks.keep(_handle(sample), sample.tokens(0, sample.prefill_len))

    def fork_siblings(self, sample: Sample) -> list[Sample]:
        """Fork the siblings of a sample whose prefill is complete, and return them.

        If a fork fails, it and the siblings before it still wait for the sample.
        """
        forked = deque[Sample]()
        while sample.siblings:
            self._fork(sample, sample.siblings[-1])
            forked.appendleft(sample.siblings.pop())
        return list(forked)

    def _fork(self, parent: Sample, child: Sample) -> None:
        child.handle = self.blocks.fork(_handle(parent))
        assert child.handle is not None, "rows were kept free at admission"
        child.computed = child.prefill_len = parent.prefill_len
        child.remote = False
        self._begin(child)
        child.routing, child.found = parent.routing.copy(), parent.found
        self.running.insert(self.running.index(parent) + 1, child)

    def branch(self, group: BeamGroup, candidates: Candidates, version: int) -> None:
        """Advance a beam search by one token. Dead branches free their pages before others fork."""
        if any(math.isnan(logprob) for _, logprob in chain.from_iterable(candidates)):
            self._break(group.members)
            return
        adapter = group.members[0].adapter
        forks = group.search.advance(candidates, version if adapter is None else adapter.version)
        if group.search.done:
            self._end(group)
            return
        for slot, _ in forks:
            self._release(group.members[slot])
        for slot, parent in forks:
            self._fork(group.members[parent], group.members[slot])
        group.show()

    def append(self, sample: Sample, token: int, logprob: float, version: int) -> None:
        """Record a token of a running sample that no step of this engine has chosen."""
        rows = _rows([sample])
        self.rows.length[rows] += 1
        self.receive(rows, np.array([token]), np.array([logprob]), version)

    def receive(
        self, rows: Int64Array, tokens: Int64Array, logprobs: NDArray[Any], version: int
    ) -> None:
        """Record a generated token of each of `rows`; end samples whose last it is.

        If ending a sample raises, the others are ended nevertheless.
        """
        ends = self.rows.receive(rows, tokens, logprobs, version)
        self.told += self.rows.streamed(rows)
        with contextlib.ExitStack() as stack:
            for end in reversed(ends):  # the last callback is called first
                sample = self.rows.sample(rows[end])
                stack.callback(self._note_end, sample, int(tokens[end]), float(logprobs[end]))

    def _note_end(self, sample: Sample, token: int, logprob: float) -> None:
        """End a sample if its newest token is the last."""
        if not math.isfinite(logprob):
            self._break([sample])
        elif token in sample.stop_ids:
            self._finish(sample, "stop")
        elif len(sample.output) == sample.params.max_tokens:
            self._finish(sample, "length")

    def _break(self, samples: Sequence[Sample]) -> None:
        """End samples with a log-probability that is not finite.

        Their keys and values, and those of the prefixes that they share, may be NaN. So no later
        request may use any prefix that is cached now.
        """
        self.blocks.new_weights()
        self.abort(samples, "error")

    def take_news(self) -> tuple[list[Sample], list[Sample]]:
        """Return the samples that received tokens since the last call, and those that ended.

        The first are only those with `stream`, and may be repeated.
        """
        news = self.told, self.ended
        self.told, self.ended = [], []
        return news

    def preempt_all(self) -> None:
        """Requeue every running sample, oldest first; cached pages stay."""
        while self.running:
            self.preempt(self.running[-1])

    def park_all(self) -> None:
        """Requeue every running sample, with its keys and values on the host if there is room."""
        while self.running:
            self._make_room(self.running[-1], private=True)

    def forget_parked(self) -> None:
        """Let all samples that wait with keys and values of their own compute them again."""
        for sample in self.waiting:
            if sample.swapped is not None and sample.swapped.private:
                self._forget_swapped(sample)

    def serve(self, adapter: ServedAdapter, again: bool) -> None:
        """Let samples go on under an adapter that was written over theirs.

        With `again`, their keys and values are computed again. Otherwise those that run keep them,
        and no other sample uses them.
        """
        mine = [s for s in self.unfinished if s.adapter and s.adapter.slot == adapter.slot]
        for sample in mine:
            sample.adapter = adapter
            if again or sample.swapped is None or not sample.swapped.private:
                self._forget_swapped(sample)
            if sample.rows is not None:
                self.rows.note_adapter(sample)
        for sample in reversed(mine):
            if again and sample.handle is not None:
                self.preempt(sample)

    def abort(self, samples: Iterable[Sample], reason: FinishReason = "abort") -> None:
        """End unfinished samples with their present answers; continue even if ending one raises."""
        with contextlib.ExitStack() as stack:
            for sample in samples:
                stack.callback(self._abort, sample, reason)
        self.waiting = deque(sample for sample in self.waiting if sample.finish_reason is None)

    def _abort(self, sample: Sample, reason: FinishReason) -> None:
        if sample.finish_reason is not None:
            return
        if sample.beams is None:
            self._finish(sample, reason)
            return
        self._end(sample.beams)
        for member in sample.beams.members:
            member.finish_reason = reason

    def _make_room(self, sample: Sample, private: bool = False) -> None:
        """Preempt the sample, and swap its pages out if the tiers do so."""
        if sample.beams is None:  # branches share pages and start over together
            tokens = sample.computed_tokens()
            sample.swapped = self.blocks.swap_out(_handle(sample), tokens, private)
        if sample.swapped is None:
            self.stats.preempted_recompute += 1
        else:
            self.stats.preempted_swap += 1
        self.preempt(sample)

    def preempt(self, sample: Sample) -> None:
        """Requeue a sample at the front; a beam search is requeued as a whole and starts over."""
        if sample.beams is None:
            self._release(sample)
        else:
            self._release_all(sample.beams)
            sample = sample.beams.restart()
        sample.remote = False  # keys and values that are still under way will be ignored
        self._queue(sample, first=True)
        self.preemptions += 1

    def _finish(self, sample: Sample, reason: FinishReason) -> None:
        sample.finish_reason = reason
        self.ended.append(sample)
        if sample.handle is not None:
            self._release(sample)
        self._forget_swapped(sample)

    def _forget_swapped(self, sample: Sample) -> None:
        if sample.swapped is not None:
            self.blocks.forget(sample.swapped)
            sample.swapped = None

    def _end(self, group: BeamGroup) -> None:
        self._release_all(group)
        group.end()
        self.ended += group.members

    def _release_all(self, group: BeamGroup) -> None:
        for member in group.members:
            if member.handle is not None:
                self._release(member)

    def _release(self, sample: Sample) -> None:
        # What is parked is all on the host already.
        parked = sample.swapped is not None and sample.swapped.private
        try:
            self.blocks.release(_handle(sample), () if parked else sample.kept_tokens())
        finally:
            self.rows.end(sample)
            self._decoding = sample.handle = None
            sample.computed = sample.prefill_len = 0
            self.running.remove(sample)

    def _begin(self, sample: Sample) -> None:
        self.rows.begin(sample)
        self._decoding = None


def _rows(samples: Iterable[Sample]) -> Int64Array:
    return np.array([sample.row for sample in samples], dtype=np.int64)


def _handle(sample: Sample) -> ReqHandle:
    assert sample.handle is not None
    return sample.handle


def _chunks(lengths: dict[Sample, int], slots: Sequence[Any]) -> list[Chunk]:
    pairs = zip(lengths.items(), slots, strict=True)
    return [
        Chunk(sample=sample, start=sample.computed, length=n, slots=mine)
        for (sample, n), mine in pairs
    ]
