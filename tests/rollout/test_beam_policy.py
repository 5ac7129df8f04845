"""The rules of beam search without a model: which slots die, step by step, and when a search is
over. That answers and scores are right is told against transformers, in test_beam_search.py.
"""

import pytest

from rollout import SamplingParams
from rollout.serving.beam import BeamSearch


def search(width: int, stop_ids: set[int] | None = None, **fields: object) -> BeamSearch:
    params = SamplingParams(
        **{"beam_width": width, "max_tokens": 9, "early_stopping": "never", **fields}
    )  # type: ignore[arg-type]
    return BeamSearch(params, stop_ids or set())


def test_survivors_stay_where_they_are_and_the_dead_make_room() -> None:
    beams = search(4)
    beams.advance([[(i, -1.0 - i) for i in range(8)]] * 4, 0)
    assert [each.tokens for each in beams.branches] == [[0], [1], [2], [3]]
    worst = [(9, -50.0)] * 8
    two = [[(5, -0.1), (6, -0.2), *worst[2:]], [(7, -0.1), (8, -0.2), *worst[2:]]]
    assert beams.advance([worst, *two, worst], 1) == [(0, 1), (3, 2)]
    assert [each.tokens for each in beams.branches] == [[1, 6], [1, 5], [2, 7], [2, 8]]
    assert [each.versions for each in beams.branches] == [[0, 1]] * 4
    beams.restart()
    assert [each.tokens for each in beams.branches] == [[]] * 4


@pytest.mark.parametrize(("early", "steps"), [(True, 2), (False, 3), ("never", 3)])
def test_early_stopping(early: bool | str, steps: int) -> None:
    """Two answers have ended after two tokens; a branch that is better than the worse of them goes
    on unless True.
    """
    beams = search(2, {0}, early_stopping=early, length_penalty=0.0)
    far = [(6, -9.0), (7, -9.0)]
    beams.advance([[(1, -1.0), (0, -3.0), (2, -4.0), (3, -9.0)]] * 2, 0)  # -3 has ended
    # -1.2 has ended, too; -1.5 goes on
    beams.advance([[(0, -0.2), (5, -0.5), *far], [(5, -9.0), (4, -9.0), *far]], 0)
    if steps == 3:
        assert not beams.done
        beams.advance([[(5, -9.0)] * 4, [(5, -9.0)] * 4], 0)
    assert beams.done
    assert [each.score for each in beams.completions()] == pytest.approx([-1.2, -3.0])


def test_ended_before_it_is_done_the_living_fill_the_places() -> None:
    beams = search(3, {0})
    assert [each.finish_reason for each in beams.completions()] == ["abort"] * 3
    beams.advance([[(0, -0.5), (1, -1.0), (2, -2.0), (3, -3.0), (4, -4.0), (5, -5.0)]] * 3, 0)
    got = beams.completions()
    assert [(each.token_ids, each.finish_reason) for each in got] == [
        ([0], "stop"),
        ([1], "abort"),
        ([2], "abort"),
    ]
