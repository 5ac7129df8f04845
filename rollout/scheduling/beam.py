"""Beam search on token ids and log-probs: which branches continue, which end, and when it is over.

Rules and answers agree with `transformers.generate(num_beams=width, do_sample=False)`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from rollout.requests import Completion, FinishReason, SamplingParams

Candidates = Sequence[Sequence[tuple[int, float]]]
"""[branch][(token, log-probability)], likeliest first."""


@dataclass(frozen=True)
class Branch:
    """An unfinished answer. Its lists have one entry per generated token."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the weights that generated the tokens
    total: float = 0.0  # sum of the log-probs


@dataclass(frozen=True)
class _Extension:
    """A candidate token after branch `parent`; `total` includes its log-prob."""

    parent: int
    token: int
    logprob: float
    total: float


class BeamSearch:
    """Search for one prompt's answers with `width` branches, each of which has a slot.

    The likeliest of all branches' extensions continue. Ended answers are ranked by
    total / length ** length_penalty, including the end token, and the best `width` are kept.
    """

    def __init__(self, params: SamplingParams, stop_ids: Collection[int]) -> None:
        self.params = params
        self.stop_ids = stop_ids
        self.width = params.beam_width
        self.restart()

    @property
    def num_candidates(self) -> int:
        """Return the number of extensions per branch: at least `width` of them do not end."""
        return _candidates_needed(self.width, len(self.stop_ids))

    def restart(self) -> None:
        """Start again from the prompt."""
        self.branches = [Branch() for _ in range(self.width)]
        self.ended: list[Completion] = []  # best first
        self.done = False

    def advance(self, candidates: Candidates, version: int) -> list[tuple[int, int]]:
        """Extend the branches by one token; weights of `version` scored the candidates.

        Returns:
            Pairs (slot, parent): the branch in `slot` is dead, and another extension of `parent`
            takes the slot. All other branches continue in their slots. Empty once `done`, and for
            the first token, before which all branches are identical.
        """
        length = len(self.branches[0].tokens) + 1
        first, last = length == 1, length == self.params.max_tokens
        # Before the first token, all branches are identical.
        best = self._best(candidates[:1] if first else candidates)
        for extension in best[: self.width]:
            if last or extension.token in self.stop_ids:
                branch, reason = self._extend(extension, version), self._reason(extension)
                self.ended.append(self._completion(branch, reason))
        self.ended = sorted(self.ended, key=_score, reverse=True)[: self.width]
        alive = [e for e in best if not last and e.token not in self.stop_ids]
        chosen = alive[: self.width]
        self.done = last or self._decided(chosen[0].total, length)
        if self.done:
            return []
        slots, forks = _place(chosen, self.width)
        self.branches = [self._extend(extension, version) for extension in slots]
        return [] if first else forks

    def completions(self) -> list[Completion]:
        """Return `width` answers, best first; unfinished branches fill up the list as aborted."""
        alive = (self._completion(branch, "abort") for branch in self.branches)
        return [*self.ended, *sorted(alive, key=_score, reverse=True)][: self.width]

    def _best(self, candidates: Candidates) -> list[_Extension]:
        every: list[_Extension] = []
        for slot, row in enumerate(candidates):
            total, best = self.branches[slot].total, row[: self.num_candidates]
            every += [_Extension(slot, token, logprob, total + logprob) for token, logprob in best]
        return sorted(every, key=lambda extension: -extension.total)[: self.num_candidates]

    def _decided(self, best_total: float, length: int) -> bool:
        """Return whether no living branch is expected to rank above the worst ended answer.

        Totals only fall, so that this is certain without a length penalty. With one, the branches
        are compared at their present length or at the greatest length.
        """
        if len(self.ended) < self.width:
            return False
        if self.params.early_stopping is True:
            return True
        penalty = self.params.length_penalty
        compared_length = length
        if self.params.early_stopping == "never" and penalty > 0:
            compared_length = self.params.max_tokens
        return best_total / compared_length**penalty <= _score(self.ended[-1])

    def _extend(self, extension: _Extension, version: int) -> Branch:
        parent = self.branches[extension.parent]
        tokens = [*parent.tokens, extension.token]
        logprobs = [*parent.logprobs, extension.logprob]
        return Branch(tokens, logprobs, [*parent.versions, version], extension.total)

    def _reason(self, extension: _Extension) -> FinishReason:
        return "stop" if extension.token in self.stop_ids else "length"

    def _completion(self, branch: Branch, reason: FinishReason) -> Completion:
        return Completion(
            token_ids=branch.tokens,
            logprobs=branch.logprobs,
            finish_reason=reason,
            weight_versions=branch.versions,
            score=branch.total / max(1, len(branch.tokens)) ** self.params.length_penalty,
        )


def check_vocabulary(name: str, params: SamplingParams, num_stop_ids: int, vocab_size: int) -> None:
    """Raise a ValueError if the vocabulary has too few tokens for the beam width."""
    needed = _candidates_needed(params.beam_width, num_stop_ids)
    if needed > vocab_size:
        raise ValueError(
            f"{name} has beam_width={params.beam_width} and {num_stop_ids} end tokens, so it "
            f"ranks {needed} next tokens, of a vocabulary of {vocab_size}; lower beam_width"
        )


def _candidates_needed(width: int, num_stop_ids: int) -> int:
    """Return a number of best extensions of which at least `width` do not end."""
    return max(2, 1 + num_stop_ids) * width


def _score(completion: Completion) -> float:
    assert completion.score is not None
    return completion.score


def _place(
    chosen: Sequence[_Extension], width: int
) -> tuple[list[_Extension], list[tuple[int, int]]]:
    """Return the extension in each slot, and pairs (slot, parent) for the slots of dead branches.

    A parent's first extension stays in its slot, and the others take the slots of dead branches.
    """
    slots: dict[int, _Extension] = {}
    forks = []
    for extension in chosen:
        if slots.setdefault(extension.parent, extension) is not extension:
            forks.append(extension)
    dead = [slot for slot in range(width) if slot not in slots]
    slots |= zip(dead, forks, strict=True)
    return [slots[i] for i in range(width)], [(slot, slots[slot].parent) for slot in dead]
