"""The scheduler's objects: samples, beam groups, chunks, steps and statistics."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache import ReqHandle
from kvcache.allocators import Int64Array
from kvcache.tiers import HostTransfer
from rollout.model.guide import Guide
from rollout.requests import FinishReason, Output, SamplingParams, TokenScores
from rollout.scheduling.beam import BeamSearch
from rollout.scheduling.prefix import Swapped
from rollout.weights.adapters import ServedAdapter

RoutedExperts = NDArray[Any]
"""[tokens, layers with experts, top_k], uint8, or int16 for more than 256 experts."""


@dataclass(eq=False)
class SampleRouting:
    """The experts of a sample's tokens [start, end).

    A token that is computed repeatedly keeps the experts of its first forward, which produced the
    log-prob of the next token. Experts of tokens from a cache, and before them, are unknown.
    """

    start: int = 0
    end: int = 0
    parts: list[RoutedExperts] = field(default_factory=list)

    def add(self, first: int, experts: RoutedExperts) -> None:
        """Add the experts of the tokens from number `first` on."""
        if first > self.end or not self.parts:
            self.start = self.end = first
            self.parts = []
        new = experts[self.end - first :]
        if len(new):
            self.parts.append(new)
            self.end += len(new)

    def copy(self) -> "SampleRouting":
        return SampleRouting(self.start, self.end, list(self.parts))

    def joined(self) -> RoutedExperts | None:
        """Return the experts of all recorded tokens; None if there are none."""
        return np.concatenate(self.parts) if self.parts else None


@dataclass(eq=False)
class PromptScores:
    """Scores of a prompt's tokens but the first, by chunks as they come; all samples share them."""

    rows: list[TokenScores] = field(default_factory=list)
    attempt: int = 0  # number of losses, after which the prompt is computed anew

    def add(self, first: int, rows: list[TokenScores]) -> None:
        """Add the scores that follow token number `first`; known ones are not changed."""
        assert first <= len(self.rows), "scores were lost"
        self.rows += rows[len(self.rows) - first :]

    def lose(self) -> None:
        """Forget scores of which some were lost."""
        self.rows, self.attempt = [], self.attempt + 1


class NewTokens(Protocol):
    """Arrays by row of the request table that collect the new tokens of running samples."""

    seen: Int64Array  # number of tokens that the host knows, of prompt and answer together
    length: Int64Array  # the same with tokens that steps under way choose

    def hand_over(self, sample: "Sample") -> None:
        """Move the new tokens of a sample to its lists."""


@dataclass(eq=False, kw_only=True)
class Sample:
    """One answer that is being generated; the scheduler owns it.

    While it runs, its new tokens are collected in `rows`, and move to its lists when these are
    read. A beam search replaces the lists of its branches as a whole.
    """

    request: int  # number of the request
    index: int  # number of the sample in its request
    prompt: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]  # token ids that end the sample
    # Samples that wait for this sample's prefill, and then fork from it.
    siblings: "list[Sample]" = field(default_factory=list)
    adapter: ServedAdapter | None = None  # None: the base alone
    guide: Guide | None = None  # where it is in its grammar; None: it has none
    stream: bool = False  # whether tokens are told before the sample's end
    told: int = 0  # number of tokens that `news` has returned
    finish_reason: FinishReason | None = None  # None while the sample is unfinished
    error: Exception | None = None  # why the sample ended with "error"; None: a log-prob is NaN
    handle: ReqHandle | None = None  # the running sequence; None while the sample waits
    rows: NewTokens | None = None  # None while the sample waits
    computed: int = 0  # number of leading tokens whose keys and values are cached
    found: int | None = None  # what of them the prefix cache had at the sample's first start
    prefill_len: int = 0  # number of tokens to compute in chunks before decode starts
    beams: "BeamGroup | None" = None  # the search of which this sample is a branch
    score: float | None = None  # rank value of a beam search's finished answer
    swapped: Swapped | None = None  # keys and values on the host, while the sample waits for pages
    remote: bool = False  # whether another engine computes the prompt (`rollout.split`)
    routing: SampleRouting = field(default_factory=SampleRouting)
    scores: PromptScores | None = None
    top: list[TokenScores] = field(default_factory=list)  # at each place, if it is told
    _output: list[int] = field(default_factory=list, init=False)
    _logprobs: list[float] = field(default_factory=list, init=False)
    _versions: list[int] = field(default_factory=list, init=False)

    @property
    def name(self) -> str:
        return f"{self.request}.{self.index}"

    @property
    def namespace(self) -> int | None:
        """Return the key of its prefixes in the cache, equal for equal weights of adapters.

        Prompts that are scored share with nobody, or their tokens would not be computed.
        """
        if self.scores is not None:
            return -1 - (self.request << 8) - self.scores.attempt % 256
        return None if self.adapter is None else self.adapter.key

    @property
    def row(self) -> int:
        """Return its row of the request table, which it has while it runs."""
        assert self.handle is not None
        return self.handle.row

    @property
    def output(self) -> list[int]:
        """Return the tokens of the answer that the host knows."""
        self._complete()
        return self._output

    @property
    def logprobs(self) -> list[float]:
        """Return the log-probabilities of `output`."""
        self._complete()
        return self._logprobs

    @property
    def versions(self) -> list[int]:
        """Return the versions of the weights that generated `output`."""
        self._complete()
        return self._versions

    @property
    def length(self) -> int:
        """Return the number of tokens, of prompt and answer, including those of steps under way."""
        return self.seen if self.rows is None else int(self.rows.length[self.row])

    @property
    def seen(self) -> int:
        """Return the number of tokens that the host knows, of prompt and answer together."""
        if self.rows is None:
            return len(self.prompt) + len(self._output)
        return int(self.rows.seen[self.row])

    @property
    def prefilled(self) -> bool:
        return self.computed >= self.prefill_len

    def add_tokens(self, tokens: list[int], logprobs: list[float], version: int) -> None:
        """Add tokens that weights of `version` have generated."""
        self._output += tokens
        self._logprobs += logprobs
        self._versions += [version] * len(tokens)

    def set_answer(self, tokens: list[int], logprobs: list[float], versions: list[int]) -> None:
        """Set the whole answer, which a beam search has chosen."""
        self._output, self._logprobs, self._versions = tokens, logprobs, versions
        if self.rows is not None:
            seen, length = self.rows.seen, self.rows.length
            seen[self.row] = length[self.row] = len(self.prompt) + len(tokens)

    def _complete(self) -> None:
        if self.rows is not None:
            self.rows.hand_over(self)

    @cached_property
    def prompt_ids(self) -> frozenset[int]:
        """Return the tokens that occur in the prompt."""
        return frozenset(self.prompt)

    def tokens(self, first: int, last: int) -> list[int]:
        """Return token ids [first, last) of prompt and answer together."""
        split = len(self.prompt)
        return self.prompt[first:last] + self.output[max(0, first - split) : max(0, last - split)]

    def computed_tokens(self) -> list[int]:
        """Return the tokens whose keys and values are cached; during decode all but the last."""
        return self.tokens(0, self.seen - 1 if self.prefilled else self.computed)

    def kept_tokens(self) -> list[int]:
        """Return the computed tokens that may be cached; of a beam search only the prompt."""
        return self.computed_tokens() if self.beams is None else self.tokens(0, self.computed)

    def news(self, error: Exception | None = None) -> Output:
        """Return the tokens since the last call, and at the end why it ended."""
        first, self.told = self.told, len(self.output)
        ended = self.finish_reason is not None
        whole = ended and self.routing.end == self.length - 1  # false if the prefill was aborted
        return Output(
            self.request,
            self.index,
            self.output[first:],
            self.logprobs[first:],
            self.versions[first:],
            self.finish_reason,
            error,
            self.score,
            self.top[first : self.told],
            self.scores.rows if ended and self.scores is not None else None,
            self.routing.joined() if whole else None,
            self.found or 0,
        )


@dataclass(frozen=True, eq=False)
class BeamGroup:
    """The branches of one beam search, one sample per slot, which run, wait and end together."""

    search: BeamSearch
    members: list[Sample]

    @classmethod
    def of(cls, members: list[Sample]) -> "BeamGroup":
        """Start a beam search over new samples of one prompt."""
        group = cls(BeamSearch(members[0].params, members[0].stop_ids), members)
        for member in members:
            member.beams = group
        return group

    def show(self) -> None:
        """Copy each branch's answer to the sample of its slot."""
        for member, branch in zip(self.members, self.search.branches, strict=True):
            member.set_answer(branch.tokens, branch.logprobs, branch.versions)

    def restart(self) -> Sample:
        """Start again from the prompt; return the sample for whose prefill the others wait."""
        self.search.restart()
        self.show()
        leader, *siblings = self.members
        leader.siblings = siblings
        return leader

    def end(self) -> None:
        """Copy the final answers to the samples, best first."""
        for member, result in zip(self.members, self.search.completions(), strict=True):
            member.set_answer(result.token_ids, result.logprobs, result.weight_versions)
            member.finish_reason, member.score = result.finish_reason, result.score


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Tokens [start, start + length) of a sample in prefill, with their slots."""

    sample: Sample
    start: int
    length: int
    slots: Any

    @property
    def last(self) -> bool:
        return self.start + self.length == self.sample.prefill_len


@dataclass(frozen=True, kw_only=True)
class Step:
    """One forward: one token of every decoding sample, then the prefill chunks.

    `rows` are the decoding samples' rows of the request table, and `lengths` their numbers of
    tokens, both int64 [n]; `decode_slots` are as `grow` returned them. `loads` are copies from
    lower tiers that may still be under way, for which each layer waits. `arriving` are prompts just
    admitted that another engine computes; they are not part of the forward.
    """

    decode: list[Sample]
    rows: Int64Array
    lengths: Int64Array
    decode_slots: Any
    chunks: list[Chunk]
    loads: tuple[HostTransfer, ...] = ()
    arriving: list[Chunk] = field(default_factory=list)

    @property
    def samples(self) -> list[Sample]:
        return [*self.decode, *(chunk.sample for chunk in self.chunks)]

    @property
    def tokens(self) -> int:
        return len(self.decode) + sum(chunk.length for chunk in self.chunks)

    def record(self, experts: RoutedExperts) -> None:
        """Record the experts of the chunks' tokens in their samples, except in beam searches."""
        at = len(self.decode)
        for chunk in self.chunks:
            if chunk.sample.beams is None:
                chunk.sample.routing.add(chunk.start, experts[at : at + chunk.length])
            at += chunk.length


@dataclass(kw_only=True)
class EngineStats:
    """Counts since the engine was built.

    Attributes:
        computed_tokens: Tokens of prompts and answers that went through the model.
        prefix_hit_tokens: Tokens of prompts, and of answers of preempted samples, that the prefix
            cache provided instead.
        loaded_tokens: Prefix hit tokens that came from host or disk.
        preempted_recompute: Preempted samples whose tokens had to be computed again.
        preempted_swap: Preempted samples that were copied to the host.
        swapped_back: Swapped samples that continued without any recomputation.
    """

    computed_tokens: int = 0
    prefix_hit_tokens: int = 0
    loaded_tokens: int = 0
    preempted_recompute: int = 0
    preempted_swap: int = 0
    swapped_back: int = 0


def names_of(samples: Sequence[Sample], limit: int = 8) -> str:
    """Join the names of at most `limit` samples for a message."""
    names = [sample.name for sample in samples]
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
