"""Mini-batches of a step, and the mean figures of its updates."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.loops.updates import mini_batches, update
from trainer_bridge import SequenceBatch

EXACT = settings(max_examples=100)


@EXACT
@given(st.integers(1, 40), st.integers(1, 3), st.data())
def test_mini_batches_of_a_pass_have_each_answer_once_in_even_parts(
    count: int, epochs: int, data: st.DataObject
) -> None:
    wanted = data.draw(st.integers(1, count + 2))
    parts, parts_a_pass = mini_batches(count, epochs, wanted, 0, 1), min(wanted, count)
    assert len(parts) == epochs * parts_a_pass and all(parts)
    for epoch in range(epochs):
        of_pass = parts[epoch * parts_a_pass : (epoch + 1) * parts_a_pass]
        assert sorted(row for part in of_pass for row in part) == list(range(count))
        assert max(map(len, of_pass)) - min(map(len, of_pass)) <= 1


def test_order_of_mini_batches_is_a_function_of_seed_and_step() -> None:
    first = mini_batches(30, 2, 3, 0, 1)
    assert first == mini_batches(30, 2, 3, 0, 1)
    assert first[:3] != first[3:]
    places = itertools.product(range(3), repeat=2)
    assert len({str(mini_batches(30, 1, 2, seed, step)) for seed, step in places}) == 9


def test_update_returns_means_of_figures_and_passes_each_part_once() -> None:
    batches: list[SequenceBatch] = []

    class Trainer:
        def update_critic(self, batch: SequenceBatch) -> dict[str, float]:
            batches.append(batch)
            return {"value_loss": float(len(batches))}

    fields: dict[str, Any] = {
        "values": [[1.0], [2.0, 3.0], [4.0]],
        "returns": [[0.0], [0.0, 0.0], [0.0]],
    }
    batch = SequenceBatch(
        prompt_ids=[[1], [2], [3]], response_ids=[[4], [5, 6], [7]], temperature=0.7, **fields
    )
    assert update(Trainer().update_critic, batch, [[2, 0], [1]]) == {"value_loss": 1.5}
    assert [part.prompt_ids for part in batches] == [[[3], [1]], [[2]]]
    assert [part.values for part in batches] == [[[4.0], [1.0]], [[2.0, 3.0]]]
    assert {part.temperature for part in batches} == {0.7}
    assert batches[0].old_logprobs is None and batches[0].advantages is None


def test_without_answers_there_is_no_update_and_no_figure() -> None:
    batch = SequenceBatch(prompt_ids=[], response_ids=[])
    assert update(lambda _: {"loss": 0.0}, batch, mini_batches(0, 2, 3, 0, 1)) == {}
