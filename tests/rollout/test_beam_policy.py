"""The rules of beam search without a model, against enumeration of all answers; which slots die, step by step."""

import itertools
import math
import random

import pytest

from rollout import Completion, SamplingParams
from rollout.beam import BeamSearch

LENGTH = 4
WORDS = 3  # the vocabulary of the made-up models
Model = dict[tuple[int, ...], list[float]]


def random_model(seed: int) -> Model:
    """Prefix -> log-probability of each next token."""
    dice = random.Random(seed)
    model = {}
    for n in range(LENGTH):
        for prefix in itertools.product(range(WORDS), repeat=n):
            weights = [dice.random() for _ in range(WORDS)]
            model[prefix] = [math.log(each / sum(weights)) for each in weights]
    return model


def search(width: int, stop_ids: set[int] | None = None, **fields: object) -> BeamSearch:
    params = SamplingParams(**{"beam_width": width, "max_tokens": LENGTH, "early_stopping": "never", **fields})  # type: ignore[arg-type]
    return BeamSearch(params, stop_ids or set())


def run(beams: BeamSearch, model: Model) -> list[Completion]:
    """Follows the forks by copying lists, which have to be the search's own branches. What is missing of the candidates
    is filled up with impossible ones."""
    slots: list[list[int]] = [[] for _ in range(beams.width)]
    while not beams.done:
        rows = []
        for branch in beams.branches:
            likely = model.get(tuple(branch.tokens), [-math.inf] * WORDS)
            pairs = sorted(enumerate(likely), key=lambda pair: -pair[1])
            rows.append([*pairs, *((-1, -math.inf) for _ in range(beams.num_candidates - WORDS))])
        forks = beams.advance(rows, version=7)
        for slot, parent in forks:
            slots[slot] = list(slots[parent])
        if not beams.done:
            assert not {slot for slot, _ in forks} & {parent for _, parent in forks}
            possible = [i for i, branch in enumerate(beams.branches) if branch.total > -math.inf]
            assert [slots[i] for i in possible] == [beams.branches[i].tokens[:-1] for i in possible]
            slots = [list(branch.tokens) for branch in beams.branches]
    return beams.completions()


def every_answer(model: Model, stop_ids: set[int], penalty: float) -> list[tuple[float, list[int]]]:
    """All answers with their scores, best first."""
    found = []
    for n in range(1, LENGTH + 1):
        for tokens in itertools.product(range(WORDS), repeat=n):
            ends = tokens[-1] in stop_ids
            if stop_ids & set(tokens[:-1]) or not (ends or n == LENGTH):
                continue
            total = sum(model[tokens[:i]][tokens[i]] for i in range(n))
            found.append((total / n**penalty, list(tokens)))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("stop_ids", [set(), {1}, {0, 2}])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_wide_enough_it_finds_the_best_of_all(stop_ids: set[int], penalty: float) -> None:
    for seed in range(2):
        model = random_model(seed)
        expected = every_answer(model, stop_ids, penalty)
        got = run(search(len(expected), stop_ids, length_penalty=penalty), model)
        assert [each.token_ids for each in got] == [tokens for _, tokens in expected]
        assert [each.score for each in got] == pytest.approx([score for score, _ in expected])
        assert all(each.weight_versions == [7] * len(each.token_ids) for each in got)


def test_narrow_it_never_does_better_and_scores_are_those_of_its_answers() -> None:
    for seed in range(30):
        model = random_model(seed)
        scores = {tuple(tokens): score for score, tokens in every_answer(model, {1}, 1.0)}
        got = run(search(2, {1}), model)
        assert len({tuple(each.token_ids) for each in got}) == 2
        for each in got:
            assert each.score == pytest.approx(scores[tuple(each.token_ids)])
            assert each.finish_reason == ("stop" if each.token_ids[-1] == 1 else "length")
        assert got[0].score == max(each.score or 0 for each in got) <= max(scores.values()) + 1e-9


def test_survivors_stay_where_they_are_and_the_dead_make_room() -> None:
    beams = search(4, max_tokens=9)
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
    """Two answers have ended after two tokens; a branch that is better than the worse of them goes on unless True."""
    beams = search(2, {0}, early_stopping=early, length_penalty=0.0, max_tokens=9)
    far = [(6, -9.0), (7, -9.0)]
    beams.advance([[(1, -1.0), (0, -3.0), (2, -4.0), (3, -9.0)]] * 2, 0)  # -3 has ended
    beams.advance([[(0, -0.2), (5, -0.5), *far], [(5, -9.0), (4, -9.0), *far]], 0)  # and -1.2; -1.5 goes on
    if steps == 3:
        assert not beams.done
        beams.advance([[(5, -9.0)] * 4, [(5, -9.0)] * 4], 0)
    assert beams.done
    assert [each.score for each in beams.completions()] == pytest.approx([-1.2, -3.0])


def test_ended_before_it_is_done_the_living_fill_the_places() -> None:
    beams = search(3, {0}, max_tokens=9)
    assert [each.finish_reason for each in beams.completions()] == ["abort"] * 3
    beams.advance([[(0, -0.5), (1, -1.0), (2, -2.0), (3, -3.0), (4, -4.0), (5, -5.0)]] * 3, 0)
    got = beams.completions()
    assert [(each.token_ids, each.finish_reason) for each in got] == [([0], "stop"), ([1], "abort"), ([2], "abort")]
