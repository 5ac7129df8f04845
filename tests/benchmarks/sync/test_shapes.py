"""Names and boxes against transformers, torch and a brute-force count of elements."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.benchmarks.common import QWEN25
from tests.benchmarks.sync.shapes import (
    TINY,
    aligned_box,
    count,
    moves,
    overlap,
    qwen_shapes,
    shard_box,
    tp_box,
    tp_dim,
    whole_box,
)

QUICK = settings(derandomize=True, deadline=None, max_examples=60)


@pytest.mark.parametrize(("size", "shape"), [("tiny", TINY), ("7b", QWEN25["7b"])])
def test_names_and_shapes_are_the_checkpoints(size: str, shape: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM, Qwen2Config

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**shape))
    assert {name: tuple(each.shape) for name, each in model.named_parameters()} == qwen_shapes(size)


def test_the_real_model_has_339_parameters() -> None:
    assert len(qwen_shapes("7b")) == 339 and count(qwen_shapes("7b")) == 7_615_616_512
    assert count(qwen_shapes("7b", 14)) == 4_352_807_424


@QUICK
@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 1))
def test_a_shard_is_what_torch_chunk_gives(length: int, size: int, dim: int) -> None:
    shape = (length, 3) if dim == 0 else (3, length)
    whole = torch.arange(math.prod(shape)).view(shape)
    chunks = list(whole.chunk(size, dim))
    for rank in range(size):
        (top, left), (rows, columns) = shard_box(shape, rank, size, dim)
        mine = whole[top : top + rows, left : left + columns]
        assert torch.equal(mine, chunks[rank]) if rank < len(chunks) else mine.numel() == 0


sides = st.tuples(st.integers(0, 5), st.integers(0, 5))
boxes = st.tuples(sides, sides)


@QUICK
@given(boxes, boxes)
def test_an_overlap_counts_the_elements_in_both(one: tuple, other: tuple) -> None:
    def elements(box: tuple) -> set:
        return set(itertools.product(*(range(start, start + length) for start, length in zip(*box, strict=True))))

    assert overlap(one, other) == len(elements(one) & elements(other))


@pytest.mark.parametrize("size", [1, 2])
def test_tensor_parallel_slices_cover_every_parameter(size: int) -> None:
    for name, shape in qwen_shapes("tiny").items():
        parts = sum(math.prod(tp_box(name, shape, rank, size)[1]) for rank in range(size))
        assert parts == math.prod(shape) * (size if tp_dim(name) is None else 1)


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight \(96, 32\): dimension 0 is no multiple of 5"):
        tp_box("model.embed_tokens.weight", (96, 32), 0, 5)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("needs", ["replica", "tp"])
def test_bytes_that_move_are_counted_by_element(needs: str, aligned: bool) -> None:
    local, linked = [0, 0], [0, 0]
    for name, shape in qwen_shapes("tiny").items():
        for mine, theirs in itertools.product(range(2), range(2)):
            need = whole_box(name, shape) if needs == "replica" else tp_box(name, shape, mine, 2)
            held = aligned_box(name, shape, theirs, 2) if aligned else shard_box(shape, theirs, 2)
            masks = [torch.zeros(shape, dtype=torch.bool) for _ in range(2)]
            for mask, (starts, lengths) in zip(masks, (need, held), strict=True):
                mask[tuple(slice(a, a + n) for a, n in zip(starts, lengths, strict=True))] = True
            (local if mine == theirs else linked)[mine] += int((masks[0] & masks[1]).sum())
    assert moves(qwen_shapes("tiny"), 2, needs, aligned) == (max(local), max(linked))


def test_aligned_shards_leave_only_norms_to_the_link() -> None:
    norms = sum(math.prod(shape) for name, shape in qwen_shapes("7b").items() if name.endswith("norm.weight"))
    assert moves(qwen_shapes("7b"), 2, "tp", aligned=True)[1] == norms // 2
    assert moves(qwen_shapes("7b"), 2, "replica") == (7_615_616_512 // 2, 7_615_616_512 // 2)
