"""Batches of sequences to score or to learn from, and their division into micro batches."""

import dataclasses
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, groupby
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memsaver.ops.layout import round_up, send_together
from rollout.model import longest_context
from rollout.requests import COLDEST
from trainer_bridge.learning.tokens import Rows, Tokens, places_of
from trainer_bridge.models.packing import Packing

_PARTS = 16  # a filler rounds a chunk's tokens up to multiples of 1 / 16 of the largest chunk
_ALIGNED = 8  # tokens; weight gradients are sums over tokens, which tensor cores read by 16 bytes
NUMBERS = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "weights", "values", "returns")
PER_TOKEN = (*NUMBERS, "mask")
_PER_SEQUENCE = ("advantages", "routed_experts", "answers")


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Sequences of a batch in B rows of L positions, with N response tokens to learn in all.

    The sequences are packed end to end in one row, or there is one per row, padded on the right.
    Token target[n] is predicted by the logits at (row[n], kept[column[n]]), sequence by sequence.
    """

    rows: tuple[int, ...]  # index of each sequence in the batch; -1 for a filler
    counts: tuple[int, ...]  # response tokens to learn of each sequence
    input_ids: Tensor  # int64 [B, L]
    real: Tensor  # bool [B, L], False for padding and fillers
    packing: Packing | None  # None if padded
    kept: Tensor  # int64 [K], positions whose logits are needed
    row: Tensor  # int64 [N]
    column: Tensor  # int64 [N]
    target: Tensor  # int64 [N], response tokens to learn
    # Experts to replay, int16 [B * L, layers, top_k], -1 if unknown; None without replay.
    routed: Tensor | None = None

    def inputs(self) -> dict[str, Any]:
        """Return the arguments for a model of transformers."""
        arguments: dict[str, Any] = {"input_ids": self.input_ids, "use_cache": False}
        if self.packing is not None:
            arguments |= {"packing": self.packing, "position_ids": self.packing.position_ids}
        return arguments

    def token_counts(self) -> Tensor:
        """Return `counts`, int64, on the micro batch's device."""
        counts = torch.tensor(self.counts, dtype=torch.int64)
        return send_together([counts], self.input_ids.device)[0]


@dataclass(frozen=True, kw_only=True)
class SequenceBatch:
    """Sequences to score or to learn from, checked on construction.

    All fields but `temperature` have one entry per sequence. Lists become `Tokens`, which sends,
    selects and computes numbers of tokens as one array. Scores need only the token ids.
    `update_actor` also needs `advantages`, either `old_logprobs` or `rollout_logprobs`, and
    `ref_logprobs` with `PolicyLoss.kl_coef`. `update_critic` needs `values` and `returns`. A
    ValueError names a field whose length does not match.

    Attributes:
        prompt_ids: Token ids of each prompt; none is empty.
        response_ids: Token ids exactly as generated, including EOS.
        mask: Per response token, whether it is learned; the others, such as the results of a tool,
            are only read. They count in no loss, mean, length or figure; numbers for them are
            ignored, and scores have 0 for them. None: all tokens are learned.
        old_logprobs: Per response token, the log-probability under the policy that generated it.
        rollout_logprobs: Per response token, the log-probability in the rollout, for the first
            update after the sampling. It takes its own log-probabilities as the old ones, without
            a pass to compute them before, and reports how they differ from the rollout's.
        advantages: Per response token, or one number per sequence that applies to all its tokens.
        ref_logprobs: Per response token, the log-probability under the reference.
        weights: Per response token, a factor of its term in the policy's loss, without effect on
            the number of tokens that the loss averages over (`correct`). None: all are 1.
        values: Per response token, the critic's value before its update.
        returns: Per response token, the critic's target.
        routed_experts: Per sequence, integers [K, layers with experts, top_k]: the experts of the
            last K tokens before the final one (`Completion.routed_experts`), or None if they are
            unknown. The policy uses these experts in scores and updates, and its own choice for all
            other tokens.
        answers: Per sequence, a number that the parts of one answer have in common, such as the
            forks of a conversation; they are adjacent. The loss weighs answers, not their parts.
            None: each sequence is an answer.
        temperature: Sampling temperature, which divides the logits; finite and positive. Score
            greedy samples with 1.0.
    """

    prompt_ids: Rows
    response_ids: Rows
    mask: Rows | None = None
    old_logprobs: Rows | None = None
    rollout_logprobs: Rows | None = None
    advantages: Sequence[float] | Rows | None = None
    ref_logprobs: Rows | None = None
    weights: Rows | None = None
    values: Rows | None = None
    returns: Rows | None = None
    routed_experts: Sequence[NDArray[Any] | None] | None = None
    answers: Sequence[int] | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        count = len(self.prompt_ids)
        for name in ("response_ids", *_PER_SEQUENCE, *PER_TOKEN):
            value = getattr(self, name)
            if value is not None and len(value) != count:
                raise ValueError(
                    f"{name} has {len(value)} entries for {count} prompts; pass one per sequence"
                )
        for name in ("prompt_ids", "response_ids"):
            object.__setattr__(self, name, Tokens.of(getattr(self, name), np.int64))
        for i in np.flatnonzero(Tokens.of(self.prompt_ids).lengths == 0):
            rule = f"prompt {i} is empty; it needs at least a beginning-of-sequence token"
            raise ValueError(rule)
        for name in (*PER_TOKEN, "advantages"):
            self._take_tokens(name)
        if not COLDEST <= self.temperature < float("inf"):
            rule = f"must be finite and at least {COLDEST:g} (score greedy samples with 1.0)"
            raise ValueError(f"temperature={self.temperature} {rule}")
        for i, routed in enumerate(self.routed_experts or ()):
            if routed is not None and len(routed) >= self.lengths[i]:
                text = f"routed_experts {i} has entries for {len(routed)} tokens"
                raise ValueError(f"{text}, the sequence has {self.lengths[i] - 1} before its last")

    def _take_tokens(self, name: str) -> None:
        """Make Tokens of a field with numbers for each token, and check their lengths."""
        entries = getattr(self, name)
        if entries is None:
            return
        if name not in PER_TOKEN and not any(map(_is_row, entries)):
            return
        wanted = Tokens.of(self.response_ids).lengths.tolist()
        if isinstance(entries, Tokens):
            sizes: list[int | str] = entries.lengths.tolist()
        else:
            sizes = [len(entry) if _is_row(entry) else "no list of" for entry in entries]
        for i, (got, want) in enumerate(zip(sizes, wanted, strict=True)):
            if got != want:
                text = f"{name} {i} has {got} numbers for {want} response tokens"
                raise ValueError(f"{text}; pass one per token")
        object.__setattr__(self, name, Tokens.of(entries, bool if name == "mask" else np.float64))

    def tokens(self, name: str) -> Tokens:
        """Return a field's numbers of the tokens to learn.

        Args:
            name: Field with a number per response token.

        Returns:
            The numbers.
        """
        return self.learned(Tokens.of(getattr(self, name)))

    def learned(self, numbers: Tokens) -> Tokens:
        """Return the numbers of the tokens to learn.

        Args:
            numbers: A number for each response token.

        Returns:
            Those of tokens to learn.
        """
        return numbers if self.mask is None else numbers.where(Tokens.of(self.mask))

    def whole(self, learned: Tokens) -> Tokens:
        """Return numbers of all response tokens; the inverse of `learned`.

        Args:
            learned: A number for each token to learn.

        Returns:
            These numbers, and 0 for the other response tokens.
        """
        return learned if self.mask is None else learned.spread(Tokens.of(self.mask))

    def of_tokens(self, name: str, micro: MicroBatch) -> Tensor:
        """Return a field's values for the tokens of a micro batch that are to be learned.

        Args:
            name: Field with numbers per token or per sequence.
            micro: Micro batch of this batch.

        Returns:
            fp32 [N], on the micro batch's device.
        """
        entries, rows = getattr(self, name), [row for row in micro.rows if row >= 0]
        if isinstance(entries, Tokens):
            values = self._select(name, rows).values
        else:
            counts = [n for row, n in zip(micro.rows, micro.counts, strict=True) if row >= 0]
            values = np.repeat([entries[row] for row in rows], counts)
        host = torch.from_numpy(values.astype(np.float32))
        return send_together([host], micro.input_ids.device)[0]

    def _select(self, name: str, rows: Sequence[int]) -> Tokens:
        """Return `tokens(name)` of selected sequences."""
        chosen: Tokens = getattr(self, name).select(rows)
        return chosen if self.mask is None else chosen.where(Tokens.of(self.mask).select(rows))

    def select(self, rows: Sequence[int]) -> Self:
        """Return a batch of selected sequences.

        Args:
            rows: Indices of the sequences, in the order of the result.

        Returns:
            The new batch.
        """
        chosen: dict[str, Any] = {}
        for name in ("prompt_ids", "response_ids", *_PER_SEQUENCE, *PER_TOKEN):
            value = getattr(self, name)
            if isinstance(value, Tokens):
                chosen[name] = value.select(rows)
            elif value is not None:
                chosen[name] = [value[row] for row in rows]
        return dataclasses.replace(self, **chosen)

    def of_answers(self, answers: Sequence[int]) -> Self:
        """Return a batch of selected answers with all of their parts.

        Args:
            answers: Places of the answers among those of the batch, in the order of the result.

        Returns:
            The new batch.
        """
        return self.select([*chain.from_iterable(self._parts[answer] for answer in answers)])

    def by_answer(self, numbers: Tokens) -> Tokens:
        """Return numbers of tokens by answer.

        Args:
            numbers: Numbers by sequence.

        Returns:
            The same numbers; the parts of an answer follow each other.
        """
        begins = [part.start for part in self._parts]
        lengths = np.add.reduceat(numbers.lengths, begins) if begins else numbers.lengths
        return Tokens(numbers.values, lengths)

    @property
    def num_answers(self) -> int:
        """Return the number of answers, which have one part or several."""
        return len(self._parts)

    @cached_property
    def answer_sizes(self) -> NDArray[np.int64]:
        """Return, for each sequence, the number of tokens to learn of the whole answer."""
        lengths = self.by_answer(self.tokens("response_ids")).lengths
        return np.repeat(lengths, [*map(len, self._parts)])

    @cached_property
    def _parts(self) -> list[range]:
        """Return the sequences of each answer."""
        owners = range(len(self)) if self.answers is None else self.answers
        counts = [len([*run]) for _, run in groupby(owners)]
        ends = accumulate(counts)
        return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Return the number of response tokens to learn of all sequences."""
        return len(self.tokens("response_ids").values)

    @property
    def max_length(self) -> int:
        """Return the number of tokens of the longest sequence, including its prompt."""
        return max(self.lengths, default=0)

    @cached_property
    def lengths(self) -> list[int]:
        """Return the number of tokens of each sequence, including its prompt."""
        both = Tokens.of(self.prompt_ids).lengths + Tokens.of(self.response_ids).lengths
        return both.tolist()


def _is_row(entry: Any) -> bool:
    """Return whether an entry has a number per token; a tensor may be a number."""
    return isinstance(entry, Sized) and bool(getattr(entry, "ndim", 1))


def dispatch(
    batch: SequenceBatch, rank: int, world: int, limit: int, *, packed: bool
) -> list[list[int]]:
    """Dispatch the batch to ranks, and return the indices of this rank's sequences in chunks.

    Long sequences come first, and -1 is a filler. All ranks get the same numbers of chunks and of
    sequences per chunk, because their collectives must match. `limit` is the most sequences of a
    chunk, or its most tokens if `packed`, at least those of the longest sequence.
    """
    lengths = batch.lengths
    order = sorted(range(len(batch)), key=lambda i: (-lengths[i], i))
    order += [-1] * (-len(order) % world)
    own_rows = order[rank::world]
    if not packed:
        return [own_rows[first : first + limit] for first in range(0, len(own_rows), limit)]
    # The longest sequence among the ranks at each position. Rank 0 never has a filler.
    longest = [lengths[row] for row in order[::world]]
    return _fill(own_rows, longest, limit)


def _fill(rows: Sequence[int], lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Pack rows into chunks of at most `tokens` tokens, each row into the first chunk with room.

    Rows are sorted by descending length. The fullest chunk comes first, so that the allocator can
    reuse its blocks for all others.
    """
    chunks, left = list[list[int]](), list[int]()
    for row, length in zip(rows, lengths, strict=True):
        fit = next((i for i, room in enumerate(left) if room >= length), len(chunks))
        if fit == len(chunks):
            chunks.append([])
            left.append(tokens)
        chunks[fit].append(row)
        left[fit] -= length
    return [chunks[i] for i in sorted(range(len(chunks)), key=left.__getitem__)]


def lay_out(
    batch: SequenceBatch,
    rows: Sequence[int],
    device: torch.device,
    limit: int,
    *,
    packed: bool,
    alike: bool = False,
) -> MicroBatch:
    """Build the micro batch of one chunk, packed end to end or padded.

    Padding is on the right, where the causal mask hides it. In a packed row, a filler rounds the
    number of tokens up to a multiple of 1 / 16 of the largest chunk, or of the longest sequence if
    that is shorter and chunks need not be `alike`. Without it, chunks of slightly different sizes
    would fragment the allocator's cache.

    `rows` is a chunk of `dispatch`, called with the same `limit` and `packed`.
    """
    prompts = [Tokens.of(batch.prompt_ids).array(i) if i >= 0 else _pads(1) for i in rows]
    responses = [Tokens.of(batch.response_ids).array(i) if i >= 0 else _pads(0) for i in rows]
    if packed:
        most = limit if alike else min(limit, _PARTS * batch.max_length)
        unit = round_up(-(-most // _PARTS), _ALIGNED)
        if spare := -sum(map(len, chain(prompts, responses))) % unit:
            rows, prompts = [*rows, -1], [*prompts, _pads(spare)]
            responses = [*responses, _pads(0)]
    arrays, lengths, counts = _arrays(batch, rows, [*zip(prompts, responses, strict=True)], packed)
    # One transfer without a wait: parameters may be reloading over the same link.
    sent = send_together([*map(torch.from_numpy, arrays.values())], device)
    tensors = dict(zip(arrays, sent, strict=True))
    packing = None
    if packed:
        packing = Packing(lengths, tensors.pop("bounds"), tensors.pop("position_ids"))
    return MicroBatch(rows=tuple(rows), counts=counts, packing=packing, **tensors)


def _arrays(
    batch: SequenceBatch,
    rows: Sequence[int],
    parts: Sequence[tuple[NDArray[Any], NDArray[Any]]],
    packed: bool,
) -> tuple[dict[str, NDArray[Any]], tuple[int, ...], tuple[int, ...]]:
    """Compute a micro batch's arrays by field, the lengths of its sequences, and its counts.

    `parts` are prompt and response of each row.
    """
    lengths = tuple(len(prompt) + len(response) for prompt, response in parts)
    values, sizes = np.concatenate([*chain.from_iterable(parts)]), np.array(lengths)
    sequence = np.repeat(np.arange(len(sizes)), sizes)  # of each token
    place = places_of(sizes)
    shape = (1, len(values)) if packed else (len(sizes), max(lengths))
    at = np.arange(len(values)) if packed else sequence * shape[1] + place  # in the rows

    def laid(of_tokens: NDArray[Any]) -> NDArray[Any]:
        rows = np.zeros(shape, of_tokens.dtype)
        rows.ravel()[at] = of_tokens
        return rows

    answered = place >= np.array([len(prompt) for prompt, _ in parts])[sequence]
    if batch.mask is not None:
        own = Tokens.of(batch.mask).select([row for row in rows if row >= 0])
        answered[answered] = own.values
    counts = np.bincount(sequence[answered], minlength=len(sizes))
    row, position = np.divmod(at[answered] - 1, shape[1])  # the token before predicts
    kept, column = np.unique(position, return_inverse=True)
    arrays = {
        "input_ids": laid(values),
        "kept": kept if len(kept) else np.zeros(1, np.int64),
        "row": row,
        "column": column,
        "target": values[answered],
        "real": laid(np.array(rows)[sequence] >= 0),
    }
    if packed:
        arrays["bounds"] = np.array([0, *accumulate(lengths)], np.int32)
        arrays["position_ids"] = place[None]
    places = lengths if packed else (max(lengths),) * len(lengths)
    if (routed := _routed(batch, rows, lengths, places)) is not None:
        arrays["routed"] = routed
    return arrays, lengths, tuple(counts.tolist())


def _pads(count: int) -> NDArray[np.int64]:
    return np.zeros(count, np.int64)


def _routed(
    batch: SequenceBatch, rows: Sequence[int], lengths: Sequence[int], places: Sequence[int]
) -> NDArray[np.int16] | None:
    """Lay out `routed_experts` by position: int16 [sum(places), layers, top_k], -1 if unknown.

    Row i has lengths[i] tokens in places[i] positions. The result is None if no experts are known.
    """
    given = batch.routed_experts or ()
    known = next((routed for routed in given if routed is not None), None)
    if known is None:
        return None
    laid = np.full((sum(places), *known.shape[1:]), -1, dtype=np.int16)
    for row, length, place, end in zip(rows, lengths, places, accumulate(places), strict=True):
        if row >= 0 and (routed := given[row]) is not None:
            last = end - place + length - 1
            laid[last - len(routed) : last] = routed
    return laid


def check_tokens(batch: SequenceBatch, model: Any) -> None:
    """Raise a ValueError for token ids or lengths that the model's configuration excludes.

    An id outside the vocabulary would destroy a GPU's context, and a position beyond the limit
    would be scored wrongly.
    """
    limit = longest_context(model)
    if batch.max_length > limit:
        text = f"a sequence of {batch.max_length} tokens exceeds the model's {limit} positions"
        raise ValueError(f"{text}; shorten it")
    words = model.vocab_size
    for ids in (Tokens.of(batch.prompt_ids), Tokens.of(batch.response_ids)):
        wrong = ids.answers_at((ids.values < 0) | (ids.values >= words))
        if len(wrong):
            raise ValueError(f"sequence {wrong[0]} has token ids outside 0..{words - 1}")


def check_learning(method: str, batch: SequenceBatch, model: Any, names: Sequence[str]) -> None:
    """Raise a ValueError if `method`, which needs fields `names`, cannot learn from the batch."""
    check_tokens(batch, model)
    if any(getattr(batch, name) is None for name in names):
        raise ValueError(f"{method} needs a SequenceBatch with {' and '.join(names)}")
    if batch.rollout_logprobs is not None:
        if batch.old_logprobs is not None:
            raise ValueError(f"{method} takes old_logprobs or rollout_logprobs, not both")
        if not np.isfinite(batch.tokens("rollout_logprobs").values).all():
            raise ValueError(f"{method}: rollout_logprobs are not all finite")
    if not batch.num_tokens:
        raise ValueError(f"{method} got no response tokens to learn from; skip the step")
