"""Sequences to score or to learn from, and how they become micro batches.

No model in here.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memsaver.ops.layout import round_up, send_together
from rollout.requests import COLDEST
from trainer_bridge.training.packing import Packing

_PARTS = 16  # of a chunk: one more or less, at most, goes to a filler
_ALIGNED = 8  # tokens: gradients of weights are sums over them, which tensor cores read by 16 bytes
PER_TOKEN = ("old_logprobs", "ref_logprobs", "values", "returns")


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Some sequences of a batch, in B rows of L positions: end to end in one, or one a row, padded
    on the right. N response tokens in all.

    rows: numbers of the sequences in the batch, -1 for a filler. counts: response tokens of each.
    input_ids: int64 [B, L]. real: bool [B, L], False for padding and fillers. packing: where the
    sequences lie end to end; None: padded. kept: int64 [K], the positions whose logits are needed.
    row, column, target: int64 [N], the token targets[n] is predicted by the logits at (row[n],
    kept[column[n]]), sequence by sequence. routed: int16 [B * L, layers, top_k], the experts to go
    to, -1 where they are not known; None: nowhere.
    """

    rows: tuple[int, ...]
    counts: tuple[int, ...]
    input_ids: Tensor
    real: Tensor
    packing: Packing | None
    kept: Tensor
    row: Tensor
    column: Tensor
    target: Tensor
    routed: Tensor | None = None

    def inputs(self) -> dict[str, Any]:
        """Return what a model of transformers is called with."""
        found: dict[str, Any] = {"input_ids": self.input_ids, "use_cache": False}
        if self.packing is not None:
            found |= {"packing": self.packing, "position_ids": self.packing.position_ids}
        return found

    def split(self, values: Sequence[float]) -> dict[int, list[float]]:
        """Split N numbers by sequence: {number of the sequence in the batch: its numbers}."""
        out, start = {}, 0
        for row, count in zip(self.rows, self.counts, strict=True):
            if row >= 0:
                out[row] = list(values[start : start + count])
            start += count
        return out


@dataclass(frozen=True, kw_only=True)
class SequenceBatch:
    """Prompts with their responses, one entry a sequence; the exact token ids that were generated,
    EOS included.

    One number a response token: old_logprobs, of the policy that generated it; ref_logprobs, of the
    reference; values, of the critic before its update, of what is to come when the token is chosen;
    returns, what the critic learns. advantages: one number a token, or one a sequence that is given
    to each of its tokens. `update_actor` needs old_logprobs and advantages (ref_logprobs with
    `kl_loss_coef`), `update_critic` values and returns, a score none. temperature: of the sampling;
    it divides the logits.

    routed_experts: integers [K, layers with experts, top_k], the experts of the K tokens before a
    sequence's last (`Completion.routed_experts`), None for a sequence of which none are known. The
    policy then goes to these, in scores as in updates, and chooses for the other tokens itself.
    """

    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    old_logprobs: list[list[float]] | None = None
    advantages: list[float] | list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    values: list[list[float]] | None = None
    returns: list[list[float]] | None = None
    routed_experts: Sequence[NDArray[Any] | None] | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        count = len(self.prompt_ids)
        for name in ("response_ids", "advantages", "routed_experts", *PER_TOKEN):
            value = getattr(self, name)
            if value is not None and len(value) != count:
                raise ValueError(
                    f"{name} has {len(value)} entries for {count} prompts; give one a sequence"
                )
        for i, prompt in enumerate(self.prompt_ids):
            if not prompt:
                raise ValueError(
                    f"prompt {i} is empty; give it at least a beginning-of-sequence token"
                )
        for name in (*PER_TOKEN, "advantages"):
            self._check_tokens(name)
        if not COLDEST <= self.temperature < float("inf"):
            rule = f"must be finite and at least {COLDEST:g} (score greedy samples with 1.0)"
            raise ValueError(f"temperature={self.temperature} {rule}")
        for i, routed in enumerate(self.routed_experts or ()):
            if routed is not None and len(routed) >= self.lengths[i]:
                text = f"routed_experts {i} are of {len(routed)} tokens"
                raise ValueError(f"{text}, the sequence has {self.lengths[i] - 1} before its last")

    def _check_tokens(self, name: str) -> None:
        entries = getattr(self, name)
        if entries is None:
            return
        if name not in PER_TOKEN and not any(isinstance(entry, list) for entry in entries):
            return
        for i, (entry, response) in enumerate(zip(entries, self.response_ids, strict=True)):
            got, want = len(entry) if isinstance(entry, list) else "no list of", len(response)
            if got != want:
                text = f"{name} {i} has {got} numbers for {want} response tokens"
                raise ValueError(f"{text}; give one a token")

    def of_tokens(self, name: str, micro: MicroBatch) -> Tensor:
        """Return fp32 [N]: the field's number of each response token, or of its sequence."""
        entries = getattr(self, name)
        found: list[float] = []
        for row in micro.rows:
            if row >= 0:
                entry = entries[row]
                found += entry if isinstance(entry, list) else [entry] * len(self.response_ids[row])
        host = torch.tensor(found, dtype=torch.float32)
        return send_together([host], micro.input_ids.device)[0]

    def select(self, rows: Sequence[int]) -> Self:
        """Return a batch of these sequences, in this order."""
        fields = ("prompt_ids", "response_ids", "advantages", "routed_experts", *PER_TOKEN)
        chosen: dict[str, Any] = {}
        for name in fields:
            if (value := getattr(self, name)) is not None:
                chosen[name] = [value[row] for row in rows]
        return dataclasses.replace(self, **chosen)

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Return the number of response tokens of all sequences."""
        return sum(map(len, self.response_ids))

    @property
    def max_length(self) -> int:
        """Return the tokens of the longest sequence, prompt included."""
        return max(self.lengths, default=0)

    @property
    def lengths(self) -> list[int]:
        """Return the tokens of each sequence, prompt included."""
        pairs = zip(self.prompt_ids, self.response_ids, strict=True)
        return [len(prompt) + len(response) for prompt, response in pairs]


def dispatch(
    batch: SequenceBatch, rank: int, world: int, size: int, *, packed: bool
) -> list[list[int]]:
    """Deal this rank sequences in chunks, the longest first.

    If `packed`, a chunk has no more tokens than `size` of the batch's longest: of short ones many.
    Else it has `size` sequences.

    Every rank gets as many chunks of as many sequences, -1 being a filler: the ranks' collectives
    must match.
    """
    lengths = batch.lengths
    order = sorted(range(len(batch)), key=lambda i: (-lengths[i], i))
    order += [-1] * (-len(order) % world)
    mine = order[rank::world]
    if not packed:
        return [mine[first : first + size] for first in range(0, len(mine), size)]
    longest = [lengths[row] for row in order[::world]]  # of the ranks' rows; the first is no filler
    return _fill(mine, longest, size * batch.max_length)


def _fill(rows: Sequence[int], lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Put rows, longest first, each into the first chunk that has room of `tokens` left; the
    fullest chunk first, for what the allocator took for it serves the others.
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
    batch: SequenceBatch, rows: Sequence[int], device: torch.device, size: int, *, packed: bool
) -> MicroBatch:
    """Return the micro batch of `rows`, which `dispatch` dispatched in chunks of `size`: end to
    end, or padded.

    The causal mask hides what lies to the right, so padding needs no mask of its own. End to end, a
    filler rounds the tokens up to sixteenths of the largest chunk: an allocator that cuts up what
    it has cached wastes much of it on chunks of nearly one size.
    """
    prompts = [batch.prompt_ids[i] if i >= 0 else [0] for i in rows]
    responses = [batch.response_ids[i] if i >= 0 else [] for i in rows]
    if packed:
        unit = round_up(-(-min(size, _PARTS) * batch.max_length // _PARTS), _ALIGNED)
        if spare := -sum(map(len, chain(prompts, responses))) % unit:
            rows, prompts, responses = [*rows, -1], [*prompts, [0] * spare], [*responses, []]
    sequences = [p + r for p, r in zip(prompts, responses, strict=True)]
    lengths = tuple(map(len, sequences))
    row, at = list[int](), list[int]()
    for i, end in enumerate(accumulate(lengths)):
        count = len(responses[i])
        last = (end if packed else lengths[i]) - 1  # predicts what nobody asks for
        row += [0 if packed else i] * count
        at += range(last - count, last)
    kept = sorted(set(at)) or [0]
    column = {position: index for index, position in enumerate(kept)}

    def laid(parts: Sequence[list[int]]) -> list[list[int]]:
        if packed:
            return [[*chain.from_iterable(parts)]]
        return [each + [0] * (max(lengths) - len(each)) for each in parts]

    integers = {
        "input_ids": laid(sequences),
        "kept": kept,
        "row": row,
        "column": [column[position] for position in at],
        "target": [*chain.from_iterable(responses)],
    }
    host = {name: torch.tensor(each, dtype=torch.int64) for name, each in integers.items()}
    real = [[int(number >= 0)] * length for number, length in zip(rows, lengths, strict=True)]
    host["real"] = torch.tensor(laid(real), dtype=torch.bool)
    if packed:
        host["bounds"] = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        host["position_ids"] = torch.tensor([[*chain.from_iterable(map(range, lengths))]])
    places = lengths if packed else (max(lengths),) * len(lengths)
    if (routed := _routed(batch, rows, lengths, places)) is not None:
        host["routed"] = torch.from_numpy(routed)
    # Together, and without a wait here: parameters may be on their way on the same link.
    sent = dict(zip(host, send_together([*host.values()], device), strict=True))
    packing = None
    if packed:
        bounds, position_ids = sent.pop("bounds"), sent.pop("position_ids")
        packing = Packing(lengths=lengths, bounds=bounds, position_ids=position_ids)
    counts = tuple(map(len, responses))
    return MicroBatch(rows=tuple(rows), counts=counts, packing=packing, **sent)


def _routed(
    batch: SequenceBatch, rows: Sequence[int], lengths: Sequence[int], places: Sequence[int]
) -> NDArray[np.int16] | None:
    """Lay `routed_experts` out: int16 [sum(places), layers, top_k]. places: of each of `rows`, as
    many as it has tokens or more.
    """
    given = batch.routed_experts or ()
    known = next((each for each in given if each is not None), None)
    if known is None:
        return None
    found = np.full((sum(places), *known.shape[1:]), -1, dtype=np.int16)
    for row, length, place, end in zip(rows, lengths, places, accumulate(places), strict=True):
        if row >= 0 and (routed := given[row]) is not None:
            last = end - place + length - 1
            found[last - len(routed) : last] = routed
    return found


def check_tokens(batch: SequenceBatch, model: Any) -> None:
    """Raise a ValueError for an id out of range, which would kill a GPU's context, or a position
    that would be scored wrongly.

    model: the configuration, with vocab_size and max_position_embeddings.
    """
    limit = model.max_position_embeddings
    if batch.max_length > limit:
        text = f"a sequence of {batch.max_length} tokens exceeds the model's {limit} positions"
        raise ValueError(f"{text}; shorten it")
    for i, ids in enumerate([*batch.prompt_ids, *batch.response_ids]):
        if ids and not 0 <= min(ids) <= max(ids) < model.vocab_size:
            raise ValueError(
                f"sequence {i % len(batch)} has token ids outside 0..{model.vocab_size - 1}"
            )


def check_learning(method: str, batch: SequenceBatch, model: Any, names: Sequence[str]) -> None:
    """Raise a ValueError where `method` cannot learn from the batch, for want of a field, too.

    model: as of `check_tokens`.
    """
    check_tokens(batch, model)
    if any(getattr(batch, name) is None for name in names):
        raise ValueError(f"{method} needs a SequenceBatch with {' and '.join(names)}")
    if not batch.num_tokens:
        raise ValueError(f"{method} got no response tokens to learn from; skip the step")
