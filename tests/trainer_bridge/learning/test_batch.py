"""Configuration, batches, micro batches and losses, without a model."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.trainer_bridge.models import make_batch
from trainer_bridge import CriticConfig, PolicyLoss, SequenceBatch, TrainerConfig
from trainer_bridge.learning.batch import MicroBatch, dispatch, lay_out
from trainer_bridge.learning.critic import value_clip

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_path", ""),
        ("dtype", "float8"),
        ("param_dtype", "int8"),
        ("learning_rate", math.nan),
        ("betas", (0.9, 1.0)),
        ("adam_eps", 0.0),
        ("max_grad_norm", 0.0),
        ("loss", PolicyLoss(kl_coef=0.1)),  # without reference=True
        ("micro_batch_size", 0),
        ("device", "tpu"),
    ],
)
def test_config_with_bad_field_is_refused_with_its_value(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"CriticConfig\.value_clip=0"):
        CriticConfig(value_clip=0.0)
    with pytest.raises(ValueError, match=rf"TrainerConfig\.{name}="):
        TrainerConfig(**{"model_path": "m", name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"response_ids": [[1]]}, "response_ids has 1 entries for 2 prompts"),
        ({"prompt_ids": [[1], []]}, "prompt 1 is empty"),
        ({"old_logprobs": [[0.0], []]}, "old_logprobs 1 has 0 numbers for 2 response tokens"),
        ({"advantages": [1.0]}, "advantages has 1 entries"),
        (
            {"advantages": [[1.0], [1.0]]},
            "advantages 1 has 1 numbers for 2 response tokens; pass one per token",
        ),
        ({"advantages": [[1.0], 1.0]}, "advantages 1 has no list of numbers for"),
        ({"advantages": [1.0, [1.0, 2.0]]}, "advantages 0 has no list of numbers for"),
        ({"values": [0.0, 0.0]}, "values 0 has no list of numbers for"),
        ({"temperature": 0.0}, "temperature=0.0 must be finite and at least 1e-06"),
    ],
)
def test_batch_with_inconsistent_fields_is_refused(changes: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"prompt_ids": [[1], [2, 3]], "response_ids": [[4], [5, 6]]}
    with pytest.raises(ValueError, match=message):
        SequenceBatch(**{**fields, **changes})


@settings(max_examples=60)
@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_dispatch_gives_all_ranks_equal_numbers_of_chunks(
    count: int, world: int, size: int, packed: bool
) -> None:
    batch = make_batch(count, seed=count)
    limit = size * batch.max_length if packed else size
    shares = [dispatch(batch, rank, world, limit, packed=packed) for rank in range(world)]
    assert len({tuple(map(len, share)) for share in shares}) == 1, (
        "collectives of the ranks would not match"
    )
    rows = [row for share in shares for chunk in share for row in chunk if row >= 0]
    assert sorted(rows) == list(range(count))
    lengths = [*batch.lengths, 1]  # the last entry is a filler's
    for steps in zip(*shares, strict=True):
        longest = max(lengths[row] for row in chain(*steps))
        for step in steps:
            tokens = sum(lengths[row] for row in step) if packed else len(step) * longest
            assert tokens <= size * max(lengths)
        assert packed or len(steps[0]) == size or steps[0] is shares[0][-1]


@pytest.mark.parametrize("packed", [False, True])
def test_batch_without_sequences_has_no_chunks(packed: bool) -> None:
    empty = SequenceBatch(prompt_ids=[], response_ids=[])
    assert dispatch(empty, 0, 2, 3, packed=packed) == []


@settings(max_examples=30)
@given(st.lists(st.integers(1, 600), min_size=1, max_size=60), st.integers(1, 20))
def test_packed_micro_batches_have_few_sizes_and_fullest_comes_first(
    lengths: list[int], size: int
) -> None:
    batch = SequenceBatch(
        prompt_ids=[[0]] * len(lengths), response_ids=[[0] * (n - 1) for n in lengths]
    )
    limit = size * max(lengths)
    dispatched = dispatch(batch, 0, 1, limit, packed=True)
    micros = [lay_out(batch, rows, CPU, limit, packed=True) for rows in dispatched]
    tokens = [micro.input_ids.shape[1] for micro in micros]
    unit = 8 * math.ceil(max(lengths) * min(size, 16) / 16 / 8)
    assert tokens == sorted(tokens, reverse=True)
    assert all(count % unit == 0 for count in tokens)
    assert sum(tokens) < sum(lengths) + len(tokens) * unit
    assert [row for micro in micros for row in micro.rows if row >= 0] == [*chain(*dispatched)]


def predictions(micro: MicroBatch) -> list[tuple[int, int, int]]:
    """Return row, position and target of each response token."""
    places = micro.kept[micro.column].tolist()
    return list(zip(micro.row.tolist(), places, micro.target.tolist(), strict=True))


def test_padded_micro_batch_maps_response_tokens_to_logits() -> None:
    batch = SequenceBatch(prompt_ids=[[1, 2, 3], [4], [5, 6]], response_ids=[[7], [8, 9, 10], []])
    micro = lay_out(batch, [0, 1, 2, -1], CPU, 3, packed=False)
    assert micro.input_ids.tolist() == [[1, 2, 3, 7], [4, 8, 9, 10], [5, 6, 0, 0], [0, 0, 0, 0]]
    assert predictions(micro) == [(0, 2, 7), (1, 0, 8), (1, 1, 9), (1, 2, 10)]
    assert micro.inputs().keys() == {"input_ids", "use_cache"}
    batch = SequenceBatch(prompt_ids=[[1] * 6, [2] * 4], response_ids=[[3], [3, 3]])
    micro = lay_out(batch, [0, 1], CPU, 3, packed=False)
    assert (micro.kept.tolist(), micro.column.tolist()) == ([3, 4, 5], [2, 0, 1]), (
        "logits of positions that predict no response token"
    )


def test_packed_micro_batch_maps_response_tokens_to_logits_and_has_bounds() -> None:
    batch = SequenceBatch(prompt_ids=[[1, 2, 3], [4], [5, 6]], response_ids=[[7], [8, 9, 10], []])
    micro = lay_out(batch, [1, -1, 0, 2], CPU, 3 * batch.max_length, packed=True)
    assert micro.input_ids.tolist() == [[4, 8, 9, 10, 0, 1, 2, 3, 7, 5, 6, *[0] * 5]]  # 16
    assert predictions(micro) == [(0, 0, 8), (0, 1, 9), (0, 2, 10), (0, 7, 7)]
    assert micro.kept.tolist() == [0, 1, 2, 7]
    assert micro.packing is not None
    assert micro.packing.lengths == (4, 1, 4, 2, 5)
    assert micro.packing.bounds.tolist() == [0, 4, 5, 9, 11, 16]
    assert micro.packing.bounds.dtype == torch.int32
    places = [0, 1, 2, 3, 0, 0, 1, 2, 3, 0, 1, *range(5)]
    assert micro.packing.position_ids.tolist() == [places]
    nothing = lay_out(
        batch, [-1, 2], CPU, 3 * batch.max_length, packed=True
    )  # no response token at all
    assert (len(nothing.target), nothing.input_ids.shape) == (0, (1, 8))
    filled = lay_out(batch, [1, 0, 2], CPU, 16 * batch.max_length, packed=True)
    assert filled.packing is not None and filled.packing.lengths == (4, 4, 2, 6)
    assert (filled.rows, filled.input_ids.shape) == ((1, 0, 2, -1), (1, 16))
    assert predictions(filled) == [(0, 0, 8), (0, 1, 9), (0, 2, 10), (0, 6, 7)]


@pytest.mark.parametrize("advantages", [[0.5, 9.0, -1.0], [[0.5], [], [-1.0, -1.0]]])
def test_advantage_per_sequence_applies_to_each_of_its_tokens(advantages: Any) -> None:
    batch = SequenceBatch(
        prompt_ids=[[1], [2], [3]],
        response_ids=[[4], [], [5, 6]],
        advantages=advantages,
        returns=[[1.0], [], [2.0, 3.0]],
    )
    micro = lay_out(batch, [2, -1, 0, 1], CPU, 3 * batch.max_length, packed=True)
    assert batch.of_tokens("advantages", micro).tolist() == [-1.0, -1.0, 0.5]
    assert batch.of_tokens("returns", micro).tolist() == [2.0, 3.0, 1.0]
    part = batch.select([2, 0])
    assert (part.response_ids, part.advantages) == ([[5, 6], [4]], [advantages[2], advantages[0]])
    assert part.values is None


@pytest.mark.parametrize(
    ("value", "old", "wanted", "loss", "slope"),
    [
        (1.1, 1.0, 3.0, 1.9**2 / 2, -1.9),  # within the limit
        # Too far towards the return: clipped at 1.2, whose loss is larger.
        (2.0, 1.0, 3.0, 1.8**2 / 2, 0.0),
        (0.0, 1.0, 3.0, 3.0**2 / 2, -3.0),  # too far away from the return: not clipped
        (4.0, 1.0, 1.0, 3.0**2 / 2, 3.0),
    ],
)
def test_value_clip_gives_expected_loss_clip_count_and_gradient(
    value: float, old: float, wanted: float, loss: float, slope: float
) -> None:
    values = torch.tensor([value], requires_grad=True)
    value_loss, clipped = value_clip(values, torch.tensor([old]), torch.tensor([wanted]), 0.2)
    assert float(value_loss.detach()) == pytest.approx(loss)
    assert float(clipped) == float(slope == 0)
    value_loss.backward()
    assert values.grad is not None and float(values.grad) == pytest.approx(slope)


def test_value_within_limit_is_not_counted_as_clipped() -> None:
    """Expect no effect of rounding: old + (value - old) often exceeds a value far below old."""
    generator = torch.Generator().manual_seed(1)
    old, values = torch.empty(1000).uniform_(-0.15, 0.15, generator=generator), torch.empty(1000)
    values.uniform_(-0.01, 0.01, generator=generator)
    assert ((old + (values - old)).square() > values.square()).any()
    assert float(value_clip(values, old, torch.zeros(1000), 0.2)[1]) == 0
