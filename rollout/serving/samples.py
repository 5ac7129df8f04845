"""The scheduler's objects: samples, groups and chunks of them, steps, and what was counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache import ReqHandle
from kvcache.tiers import HostTransfer
from rollout.requests import Completion, FinishReason, SamplingParams
from rollout.serving.beam import BeamSearch
from rollout.serving.prefix import Swapped

RoutedExperts = NDArray[Any]
"""[tokens, layers with experts, top_k], uint8, or int16 of more than 256 experts."""


@dataclass(eq=False)
class SampleRouting:
    """The experts of a sample's tokens [start, end): those by which a token was computed first, for
    these made the log-probability of the next one. Not known: what a cache had, and before.
    """

    start: int = 0
    end: int = 0
    parts: list[RoutedExperts] = field(default_factory=list)

    def add(self, first: int, experts: RoutedExperts) -> None:
        """experts: of the tokens from `first` on."""
        if first > self.end or not self.parts:
            self.start = self.end = first
            self.parts = []
        new = experts[self.end - first :]
        if len(new):
            self.parts.append(new)
            self.end += len(new)

    def copy(self) -> SampleRouting:
        return SampleRouting(self.start, self.end, list(self.parts))

    def joined(self) -> RoutedExperts | None:
        """Returns None where nothing was recorded."""
        return np.concatenate(self.parts) if self.parts else None


@dataclass(eq=False, kw_only=True)
class Sample:
    """One answer being generated. `siblings` wait for this sample's prefill and then fork from it.

    beams: the beam search whose branch it is; then output, logprobs and versions change as a whole.
    remote: another engine computes its prompt (`rollout.disagg`).
    """

    request: int
    index: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    siblings: list[Sample] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    handle: ReqHandle | None = None
    computed: int = 0  # leading tokens whose keys and values are in the cache
    prefill_len: int = 0  # tokens to compute in chunks before decode starts
    beams: BeamGroup | None = None
    score: float | None = None
    swapped: Swapped | None = None  # what waits on the host while the sample waits for pages
    remote: bool = False
    routing: SampleRouting = field(default_factory=SampleRouting)

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

    def computed_tokens(self) -> list[int]:
        """Tokens whose keys and values are in the cache; while it decodes all but the last."""
        return self.tokens(0, self.length - 1 if self.prefilled else self.computed)

    def kept_tokens(self) -> list[int]:
        """Returns the computed ones that the prefix cache may keep: of a branch its prompt."""
        return self.computed_tokens() if self.beams is None else self.tokens(0, self.computed)

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        whole = self.routing.end == self.length - 1  # not where a prompt was given up
        return Completion(
            token_ids=self.output,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            weight_versions=self.versions,
            score=self.score,
            routed_experts=self.routing.joined() if whole else None,
        )


@dataclass(frozen=True, eq=False)
class BeamGroup:
    """The samples of one search's branches, a slot each, which run, wait and end together."""

    search: BeamSearch
    members: list[Sample]

    @classmethod
    def of(cls, members: list[Sample]) -> BeamGroup:
        """Makes new samples of one prompt a group."""
        group = cls(BeamSearch(members[0].params, members[0].stop_ids), members)
        for member in members:
            member.beams = group
        return group

    def show(self) -> None:
        """Each member has the answer of its slot."""
        for member, branch in zip(self.members, self.search.branches, strict=True):
            member.output = branch.tokens
            member.logprobs = branch.logprobs
            member.versions = branch.versions

    def restart(self) -> Sample:
        """Starts again from the prompt; returns the member that the others wait for."""
        self.search.restart()
        self.show()
        leader, *siblings = self.members
        leader.siblings = siblings
        return leader

    def end(self) -> None:
        """Each member has one of the results, best first."""
        for member, result in zip(self.members, self.search.completions(), strict=True):
            member.output = result.token_ids
            member.logprobs = result.logprobs
            member.versions = result.weight_versions
            member.finish_reason, member.score = result.finish_reason, result.score


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Tokens [start, start + length) of a sample in prefill. slots: theirs, of `extend`."""

    sample: Sample
    start: int
    length: int
    slots: Any

    @property
    def last(self) -> bool:
        return self.start + self.length == self.sample.prefill_len


@dataclass(frozen=True, kw_only=True)
class Step:
    """One forward: a token of every sample in `decode`, then the prefill chunks. decode_slots: as
    `extend` returned.
    loads: copies that a layer's rows may still be on their way by. arriving: the rest of prompts
    just admitted that another engine computes, no part of the forward.
    """

    decode: list[Sample]
    decode_slots: Any
    chunks: list[Chunk]
    loads: tuple[HostTransfer, ...] = ()
    arriving: list[Chunk] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return len(self.decode) + sum(chunk.length for chunk in self.chunks)

    def record(self, experts: RoutedExperts) -> None:
        """Gives each sample its packed tokens' experts; branches of a beam search get none."""
        at = 0
        for sample in self.decode:
            if sample.beams is None:
                sample.routing.add(sample.length - 1, experts[at : at + 1])
            at += 1
        for chunk in self.chunks:
            if chunk.sample.beams is None:
                chunk.sample.routing.add(chunk.start, experts[at : at + chunk.length])
            at += chunk.length


@dataclass(kw_only=True)
class EngineStats:
    """Counts since the engine was made. computed_tokens: put through the model, answers included;
    prefix_hit_tokens: prompt tokens (answers of preempted samples included) that were not, because
    the prefix cache had them; loaded_tokens: of these, those that came from host or disk.
    Preemptions by the way that the samples were to come back; swapped_back: how many of the swapped
    ones went on without computing anything again.
    """

    computed_tokens: int = 0
    prefix_hit_tokens: int = 0
    loaded_tokens: int = 0
    preempted_recompute: int = 0
    preempted_swap: int = 0
    swapped_back: int = 0


def names_of(samples: Sequence[Sample], limit: int = 8) -> str:
    """Lists the samples' names for a message, `limit` of them at most."""
    names = [sample.name for sample in samples]
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
