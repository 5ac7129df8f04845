"""Beam search: which branches of an answer go on, which end, and when it is over. No tensors.

The rules and answers are those of `transformers.generate(num_beams=width, do_sample=False)`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from rollout.requests import Completion, FinishReason, SamplingParams

Candidates = Sequence[Sequence[tuple[int, float]]]
"""[branch][(token, log-probability)], likeliest first."""


@dataclass(frozen=True)
class Branch:
    """An answer so far, one entry a token. total: the sum of its log-probabilities."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    total: float = 0.0


@dataclass(frozen=True)
class _Extension:
    """A token behind branch `parent`."""

    parent: int
    token: int
    logprob: float
    total: float


class BeamSearch:
    """`width` branches of one answer, each in a slot of its own. Of all extensions of all branches
    by a token the likeliest go on; what ends is ranked by total / length ** length_penalty, its end
    token counted, and the best `width` are kept.
    """

    def __init__(self, params: SamplingParams, stop_ids: Collection[int]) -> None:
        self.params = params
        self.stop_ids = stop_ids
        self.width = params.beam_width
        self.restart()

    @property
    def num_candidates(self) -> int:
        """Extensions that a branch has to offer: enough for `width`, however many end."""
        return _candidates_needed(self.width, len(self.stop_ids))

    def restart(self) -> None:
        """Starts again from the prompt."""
        self.branches = [Branch() for _ in range(self.width)]
        self.ended: list[Completion] = []  # best first
        self.done = False

    def advance(self, candidates: Candidates, version: int) -> list[tuple[int, int]]:
        """Takes the next token, made by weights `version`. candidates: of each branch.

        Returns (slot, parent): the branch in `slot` is dead, and one more from `parent` goes on
        there. A branch without such an entry goes on in its slot. Nothing goes on once `done`.
        """
        length = len(self.branches[0].tokens) + 1
        first, last = length == 1, length == self.params.max_tokens
        # before the first token all branches are the same
        best = self._best(candidates[:1] if first else candidates)
        ends = [each for each in best[: self.width] if last or each.token in self.stop_ids]
        for each in ends:
            self.ended.append(self._completion(self._extend(each, version), self._reason(each)))
        self.ended = sorted(self.ended, key=_score, reverse=True)[: self.width]
        alive = [each for each in best if not last and each.token not in self.stop_ids]
        chosen = alive[: self.width]
        self.done = last or self._decided(chosen[0].total, length)
        if self.done:
            return []
        slots, forks = _place(chosen, self.width)
        self.branches = [self._extend(each, version) for each in slots]
        return [] if first else forks

    def completions(self) -> list[Completion]:
        """`width` answers, best first; living branches fill the places, as aborted."""
        alive = (self._completion(each, "abort") for each in self.branches)
        return [*self.ended, *sorted(alive, key=_score, reverse=True)][: self.width]

    def _best(self, candidates: Candidates) -> list[_Extension]:
        every: list[_Extension] = []
        for slot, row in enumerate(candidates):
            total, best = self.branches[slot].total, row[: self.num_candidates]
            every += [_Extension(slot, token, logprob, total + logprob) for token, logprob in best]
        return sorted(every, key=lambda each: -each.total)[: self.num_candidates]

    def _decided(self, best_total: float, length: int) -> bool:
        """Tells whether nothing that lives is taken to come before the worst that has ended. Totals
        only fall, so that this is certain without a length penalty; with one the living are
        compared at this length, or the longest.
        """
        if len(self.ended) < self.width:
            return False
        if self.params.early_stopping is True:
            return True
        penalty = self.params.length_penalty
        at = length
        if self.params.early_stopping == "never" and penalty > 0:
            at = self.params.max_tokens
        return best_total / at**penalty <= _score(self.ended[-1])

    def _extend(self, one: _Extension, version: int) -> Branch:
        parent = self.branches[one.parent]
        tokens, logprobs = [*parent.tokens, one.token], [*parent.logprobs, one.logprob]
        return Branch(tokens, logprobs, [*parent.versions, version], one.total)

    def _reason(self, one: _Extension) -> FinishReason:
        return "stop" if one.token in self.stop_ids else "length"

    def _completion(self, branch: Branch, reason: FinishReason) -> Completion:
        return Completion(
            token_ids=branch.tokens,
            logprobs=branch.logprobs,
            finish_reason=reason,
            weight_versions=branch.versions,
            score=branch.total / max(1, len(branch.tokens)) ** self.params.length_penalty,
        )


def check_vocabulary(name: str, params: SamplingParams, num_stop_ids: int, vocab_size: int) -> None:
    """ValueError for a width that the vocabulary has too few tokens for."""
    needed = _candidates_needed(params.beam_width, num_stop_ids)
    if needed > vocab_size:
        raise ValueError(
            f"{name} has beam_width={params.beam_width} and {num_stop_ids} end tokens, so it "
            f"ranks {needed} next tokens, of a vocabulary of {vocab_size}; lower beam_width"
        )


def _candidates_needed(width: int, num_stop_ids: int) -> int:
    """Returns a number of best extensions of which at least `width` do not end."""
    return max(2, 1 + num_stop_ids) * width


def _score(completion: Completion) -> float:
    assert completion.score is not None
    return completion.score


def _place(
    chosen: Sequence[_Extension], width: int
) -> tuple[list[_Extension], list[tuple[int, int]]]:
    """A slot for each: its parent's for the first that goes on, a dead branch's for others."""
    slots: dict[int, _Extension] = {}
    others = []
    for each in chosen:
        if slots.setdefault(each.parent, each) is not each:
            others.append(each)
    dead = [slot for slot in range(width) if slot not in slots]
    slots |= zip(dead, others, strict=True)
    return [slots[i] for i in range(width)], [(slot, slots[slot].parent) for slot in dead]
