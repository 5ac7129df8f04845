"""Continuous batching: requests are checked and made into samples, and which samples are computed
next. Policy, no tensor is looked into.
"""

import contextlib
from collections import deque
from collections.abc import Iterable, Sequence
from heapq import nlargest
from itertools import chain
from typing import Any

import numpy as np

from kvcache import Ledger, ReqHandle, pages_across
from memsaver.ops.hash import splitmix64_int
from rollout.config import EngineConfig
from rollout.model.decoder import ModelConfig
from rollout.requests import FinishReason, SamplingParams
from rollout.serving.beam import Candidates, check_vocabulary
from rollout.serving.prefix import PrefixBlocks
from rollout.serving.samples import BeamGroup, Chunk, EngineStats, Sample, Step


class Scheduler:
    """First come, first served. When pages run out the youngest of `running` is preempted.

    A prompt is admitted when all pages that it holds at a time are free, one page for each of its
    samples being kept free besides, and one for each sample already running, so that preemption is
    rare. It takes them chunk by chunk, and gives back what its sliding window has left. At most one
    prompt waits for the rest of a step's tokens; others are partly computed only where a chunk ends
    so that what precedes is kept. A preempted sample goes back to the front of the queue and is
    recomputed, its answer so far included, or goes on from pages that were swapped out. What the
    prefix cache has of a prompt is not computed, and what it could evict counts as free.
    """

    def __init__(self, blocks: PrefixBlocks, config: EngineConfig) -> None:
        self.blocks = blocks
        self.page_size, self.max_running = config.page_size, config.max_running
        self.max_prefill_tokens = config.max_prefill_tokens
        self.waiting: deque[Sample] = deque()
        self.running: list[Sample] = []
        self.preemptions = 0
        self.stats = EngineStats()

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _needed(self, ledger: Ledger, tokens: int) -> int:
        """Pages that a sequence holds at most while it grows to `tokens` tokens."""
        pages = self._pages(tokens)
        if ledger.window is None:
            return pages
        reach = ledger.window - 1 + min(tokens, self.max_prefill_tokens)
        return min(pages, pages_across(reach, self.page_size))

    def check_fits(self, name: str, prompt_len: int, params: SamplingParams) -> None:
        """ValueError when a single sample could never run, even alone."""
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
        """Returns how many samples that share a prompt could run to their ends together."""
        shared = prompt_len // self.page_size
        own = self._pages(prompt_len + max_tokens) - shared
        group = self.max_running
        for ledger in self.blocks.ledgers:
            most = self._needed(ledger, prompt_len + max_tokens)
            group = min(group, (ledger.total - min(shared, most)) // min(own, most))
        return group

    def add(self, samples: Sequence[Sample]) -> None:
        """Queue the samples of one prompt, in groups that could run to their ends together."""
        group = max(1, self._together(len(samples[0].prompt), samples[0].params.max_tokens))
        for first in range(0, len(samples), group):
            leader, *siblings = samples[first : first + group]
            leader.siblings = siblings
            self.waiting.append(leader)

    def wanted_tokens(self) -> int:
        """Tokens that samples which may run together can hold, and a page more for each."""
        pages = (1 + self._pages(len(s.prompt) + s.params.max_tokens) for s in self.unfinished)
        return sum(nlargest(self.max_running, pages)) * self.page_size

    @property
    def unfinished(self) -> list[Sample]:
        groups = ((sample, *sample.siblings) for sample in (*self.running, *self.waiting))
        return list(chain.from_iterable(groups))

    def schedule(self) -> Step:
        """Choose the next step and take the pages it needs."""
        before = self.preemptions
        decode, slots, chunks = self._grow()
        # a page that was just taken from one sample is not for a newcomer
        if self.preemptions == before:
            chunks += self._admit(self.max_prefill_tokens - sum(chunk.length for chunk in chunks))
            if not decode and not chunks:
                decode, slots, chunks = self._grow()  # those that came back with nothing to compute
        mine = [chunk for chunk in chunks if not chunk.sample.remote]
        arriving = [chunk for chunk in chunks if chunk.sample.remote]
        loads = self.blocks.loads() if decode or mine else ()
        return Step(decode=decode, decode_slots=slots, chunks=mine, arriving=arriving, loads=loads)

    def _grow(self) -> tuple[list[Sample], Any, list[Chunk]]:
        """A token of every sample that decodes, with slots, and chunks of begun prefills."""
        while self.running:
            decode = [sample for sample in self.running if sample.prefilled]
            lengths = self._next_chunks()
            ends = [sample.length for sample in decode]
            ends += [sample.computed + n for sample, n in lengths.items()]
            slots = self.blocks.extend([_handle(each) for each in (*decode, *lengths)], ends)
            if slots is not None:
                mine, *others = slots.split([len(decode), *lengths.values()])
                return decode, mine, _chunks(lengths, others)
            assert len(self.running) > 1, "check_fits lets in only samples that can run alone"
            self._make_room(self.running[-1])
        return [], None, []

    def _next_chunks(self) -> dict[Sample, int]:
        """Returns how many tokens of each prefill under way come next."""
        lengths: dict[Sample, int] = {}
        budget = self.max_prefill_tokens
        for sample in self.running:
            if not sample.prefilled and not sample.remote and budget > 0:
                lengths[sample] = self._chunk(sample, budget)
                budget -= lengths[sample]
        return lengths

    def _admit(self, budget: int) -> list[Chunk]:
        """Let waiting samples in, in order; their first chunks' pages are taken in one call.

        Pages that it shares with running samples count as theirs; other cached ones that it begins
        with count as taken, since they are available until it locks them. With budget left over no
        prefill under way needs more than a page in a later step, and that is kept free.
        """
        lengths: dict[Sample, int] = {}
        ledgers = self.blocks.ledgers
        taken = [0] * len(ledgers)
        rows = sum(1 + len(each.siblings) for each in self.running)
        while self.waiting and budget > 0:
            sample = self.waiting[0]
            members = 1 + len(sample.siblings)
            if rows + members > self.max_running:
                break
            held = self.blocks.held_pages(sample.tokens(0, sample.length))
            needed = [self._needed(each, sample.length) - held for each in ledgers]
            wanted = [n + more for n, more in zip(taken, needed, strict=True)]
            pairs = zip(wanted, ledgers, strict=True)
            tight = any(n + members + rows > each.available for n, each in pairs)
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
        """Returns how many tokens of a prefill come next, `budget` at most."""
        return min(budget, self._keep_at(sample) - sample.computed)

    def _keep_at(self, sample: Sample) -> int:
        return self.blocks.keep_at(_handle(sample), sample.computed, sample.prefill_len)

    def _start(self, sample: Sample) -> None:
        """A row for the first of the queue, and the pages that it shares."""
        swapped, sample.swapped = sample.swapped, None
        admitted = self.blocks.admit(sample.tokens(0, sample.length), swapped)
        assert admitted is not None, "the request table has max_running rows"
        sample.handle, sample.computed = admitted
        sample.prefill_len = sample.length
        if swapped is not None and sample.computed >= swapped.tokens:
            self.stats.swapped_back += 1
            if sample.output and not sample.siblings and sample.computed == sample.length - 1:
                sample.prefill_len = sample.computed  # it was decoding and goes on so
        self.stats.prefix_hit_tokens += sample.computed
        self.stats.loaded_tokens = self.blocks.loaded_tokens
        self.running.append(self.waiting.popleft())

    def _first_chunks(self, lengths: dict[Sample, int]) -> list[Chunk]:
        """Pages of so many more tokens for the admitted samples."""
        ends = [sample.computed + n for sample, n in lengths.items()]
        slots = self.blocks.extend([_handle(sample) for sample in lengths], ends)
        assert slots is not None, "checked before, or the pool is empty and check_fits was called"
        return _chunks(lengths, slots.split(list(lengths.values())))

    def computed(self, step: Step) -> None:
        """Record that the step's keys and values are cached; what left a window is free."""
        for chunk in step.chunks:
            sample, end = chunk.sample, self._keep_at(chunk.sample)
            sample.computed += chunk.length
            if sample.computed == end:
                self.blocks.keep(_handle(sample), sample.tokens(0, end))
        self.stats.computed_tokens += step.tokens
        computed = [*step.decode, *(chunk.sample for chunk in step.chunks)]
        self.blocks.slide([_handle(sample) for sample in computed])

    def arrived(self, sample: Sample) -> None:
        """Record that the keys and values of a remote prompt are in the cache."""
        sample.computed, sample.remote = sample.prefill_len, False
        self.blocks.keep(_handle(sample), sample.tokens(0, sample.prefill_len))

    def fork_siblings(self, sample: Sample) -> list[Sample]:
        """Returns, after the sample's whole prefill, its siblings, now running on its pages."""
        siblings, sample.siblings = sample.siblings, []
        for sibling in reversed(siblings):
            self._fork(sample, sibling)
        return siblings

    def _fork(self, parent: Sample, child: Sample) -> None:
        child.handle = self.blocks.fork(_handle(parent))
        assert child.handle is not None, "rows were kept free at admission"
        child.computed = child.prefill_len = parent.prefill_len
        child.routing = parent.routing.copy()
        self.running.insert(self.running.index(parent) + 1, child)

    def branch(self, group: BeamGroup, candidates: Candidates, version: int) -> None:
        """The next token of a beam search. Dead branches free their pages before others fork."""
        forks = group.search.advance(candidates, version)
        if group.search.done:
            self._end(group)
            return
        for slot, _ in forks:
            self._release(group.members[slot])
        for slot, parent in forks:
            self._fork(group.members[parent], group.members[slot])
        group.show()

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
        """Put every running sample back into the queue, oldest first; cached pages stay."""
        while self.running:
            self.preempt(self.running[-1])

    def abort(self, samples: Iterable[Sample]) -> None:
        """End unfinished samples with what they have; all of them, even when one raises."""
        with contextlib.ExitStack() as each:
            for sample in samples:
                each.callback(self._abort, sample)
        self.waiting = deque(sample for sample in self.waiting if sample.finish_reason is None)

    def _abort(self, sample: Sample) -> None:
        if sample.finish_reason is not None:
            return
        if sample.beams is None:
            self._finish(sample, "abort")
        else:
            self._end(sample.beams)

    def _make_room(self, sample: Sample) -> None:
        """Preempt the sample, and swap its pages out where `KVTiers.preemption` says so."""
        if sample.beams is None:  # branches share pages, and start over together
            sample.swapped = self.blocks.swap_out(_handle(sample), sample.computed_tokens())
        if sample.swapped is None:
            self.stats.preempted_recompute += 1
        else:
            self.stats.preempted_swap += 1
        self.preempt(sample)

    def preempt(self, sample: Sample) -> None:
        """Requeue a sample at the front; a beam search goes as a whole, and starts over."""
        if sample.beams is None:
            self._release(sample)
        else:
            self._release_all(sample.beams)
            sample = sample.beams.restart()
        sample.remote = False  # what is on its way comes too late
        self.waiting.appendleft(sample)
        self.preemptions += 1

    def _finish(self, sample: Sample, reason: FinishReason) -> None:
        sample.finish_reason = reason
        if sample.handle is not None:
            self._release(sample)
        if sample.swapped is not None:
            self.blocks.forget(sample.swapped)
            sample.swapped = None

    def _end(self, group: BeamGroup) -> None:
        self._release_all(group)
        group.end()

    def _release_all(self, group: BeamGroup) -> None:
        for member in group.members:
            if member.handle is not None:
                self._release(member)

    def _release(self, sample: Sample) -> None:
        try:
            self.blocks.release(_handle(sample), sample.kept_tokens())
        finally:
            sample.handle = None
            sample.computed = sample.prefill_len = 0
            self.running.remove(sample)


def _handle(sample: Sample) -> ReqHandle:
    assert sample.handle is not None
    return sample.handle


def _chunks(lengths: dict[Sample, int], slots: Sequence[Any]) -> list[Chunk]:
    pairs = zip(lengths.items(), slots, strict=True)
    return [
        Chunk(sample=sample, start=sample.computed, length=n, slots=mine)
        for (sample, n), mine in pairs
    ]


def for_each(
    prompts: Sequence[object], params: SamplingParams | Sequence[SamplingParams]
) -> list[SamplingParams]:
    """One for every prompt. ValueError where there are as many neither as one nor as prompts."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise ValueError(
            f"{len(prompts)} prompts but {len(each)} SamplingParams; pass one, or one a prompt"
        )
    return each


def _token_ids(name: str, prompt: Sequence[int]) -> np.ndarray:
    """Return the prompt as an array of integers; ValueError, calling it `name`, if it is none."""
    with contextlib.suppress(ValueError):  # of sequences of different lengths
        ids = np.asarray(prompt)
        if ids.ndim == 1 and ids.dtype.kind in "iu":
            return ids
    raise ValueError(f"{name} must be a sequence of token ids (integers); encode text first")


class Intake:
    """Numbers requests in the order in which they come; seeds not given follow from that."""

    def __init__(
        self, model: ModelConfig, scheduler: Scheduler, *, max_context_len: int, seed: int
    ) -> None:
        self._model = model
        self._scheduler = scheduler
        self._max_context_len = max_context_len
        self._seed = seed
        self._requests = 0

    def check(self, name: str, prompt: Sequence[int], params: SamplingParams) -> None:
        """ValueError for what could never be answered, calling the prompt `name`."""
        if not len(prompt):
            raise ValueError(f"{name} is empty; it needs at least one token")
        ids = _token_ids(name, prompt)
        if ids.min() < 0 or ids.max() >= self._model.vocab_size:
            raise ValueError(
                f"{name} has token ids outside [0, {self._model.vocab_size}); check the tokenizer"
            )
        self._scheduler.check_fits(name, len(prompt), params)
        if len(prompt) + params.max_tokens > self._max_context_len:
            raise ValueError(
                f"{name} needs {len(prompt) + params.max_tokens} positions (prompt {len(prompt)} + "
                f"max_tokens {params.max_tokens}), max_context_len is {self._max_context_len}; "
                f"lower max_tokens or raise max_context_len"
            )
        if params.beam_width > 1:
            check_vocabulary(name, params, len(self._stop_ids(params)), self._model.vocab_size)

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        """The request's samples, which wait from here on."""
        seed = params.seed
        if seed is None:
            seed = splitmix64_int(splitmix64_int(self._seed) + self._requests) >> 1
        ids, stop_ids = list(prompt), self._stop_ids(params)
        samples = [
            Sample(
                request=self._requests,
                index=i,
                prompt=ids,
                params=params,
                seed=seed,
                stop_ids=stop_ids,
            )
            for i in range(max(params.n, params.beam_width))
        ]
        if params.beam_width > 1:
            BeamGroup.of(samples)
        self._requests += 1
        self._scheduler.add(samples)
        return samples

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        stop_ids = frozenset(params.stop_token_ids or ())
        return stop_ids if params.ignore_eos else stop_ids | self._model.stop_token_ids
