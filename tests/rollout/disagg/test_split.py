"""Two engines of different tensor-parallel sizes give one engine's answers, through rings that
wrap.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from rollout import Engine, SamplingParams
from tests.helpers.case_selection import rounds, some
from tests.helpers.ranks import results, start_ranks
from tests.helpers.rollout.answers import GAP, GREEDY, assert_same, random_prompts
from tests.helpers.rollout.saved import Saved
from tests.helpers.rollout.split import CONFIG, MODEL, TOKEN, Split, run, tokens

SAMPLED = SamplingParams(max_tokens=6, temperature=1.3, top_p=0.95, n=3, seed=5)
LENGTHS = (1, 15, 16, 17, 33, 40, 64, 70)
REQUESTS, TIGHTLY = rounds(60, 200), rounds(14, 30)
TOPOLOGIES = some(
    (4, 2, True), (2, 4, False), (4, 2, False), whole=[(2, 4, True), (1, 2, True), (1, 2, False)]
)
BURST, TIGHT, SEARCH, MEDDLED = range(len(TOPOLOGIES), len(TOPOLOGIES) + 4)
LONG = SamplingParams(max_tokens=40, temperature=0)
BEAMS = SamplingParams(max_tokens=8, beam_width=4, n=3)
SMALL: dict[str, Any] = {"kv_tokens": 160, "max_running": 12, "max_prefill_tokens": 48}


def calls() -> list[tuple[list[list[int]], SamplingParams]]:
    """Greedy, then prompts of which some begin like earlier ones, sampled."""
    prompts = random_prompts(LENGTHS)
    longer = [prompts[5] + tail for tail in random_prompts((3, 20), seed=1)]
    return [(prompts, GREEDY), (longer + random_prompts((5, 21), seed=2), SAMPLED)]


def searches() -> list[tuple[list[list[int]], list[SamplingParams]]]:
    """Beam searches beside prompts that are sent; then two that begin like what was sent, and like
    a search.
    """
    prompts = random_prompts(LENGTHS)
    again = [prompts[6] + [3, 4], prompts[7][:50]]
    return [(prompts, [GREEDY, BEAMS] * 4), (again, [BEAMS, BEAMS])]


def burst() -> list[list[int]]:
    lengths = tuple(12 + i % 9 for i in range(REQUESTS))
    return random_prompts(lengths, seed=3)


@pytest.fixture(scope="module")
def path(saved: Saved) -> str:
    return str(saved("qwen3", **MODEL)[0])


@pytest.fixture(scope="module")
def found(path: str, tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """[topology][rank]"""
    splits = [
        Split(path=path, prefill=prefill, decode=decode, mapped=mapped, calls=calls())
        for prefill, decode, mapped in TOPOLOGIES
    ]
    wide = CONFIG | {"kv_tokens": REQUESTS * 64, "max_running": REQUESTS}
    few = SMALL | {"kv_tokens": 64, "max_running": 3}
    splits.append(Split(path=path, calls=[(burst(), GREEDY)], decode_config=wide))
    splits.append(
        Split(
            path=path,
            calls=[(burst()[:TIGHTLY], LONG)],
            prefill_config=few,
            decode_config=SMALL,
            nap=True,
        )
    )
    splits.append(Split(path=path, calls=searches()))
    splits.append(replace(splits[TIGHT], decode=1, nap=False, meddled=True))
    folder = tmp_path_factory.mktemp("ranks")
    by_rank = results(
        start_ranks(run, 6, folder / "store", splits, str(folder)), seconds=rounds(200, 1200)
    )
    return [list(of) for of in zip(*by_rank, strict=True)]


@pytest.mark.parametrize(
    "nth", range(len(TOPOLOGIES)), ids=[f"{a}to{b}{'' if m else '-gloo'}" for a, b, m in TOPOLOGIES]
)
def test_answers_are_one_engines(path: str, found: list[list[Any]], nth: int) -> None:
    engine = Engine.from_pretrained(path, **CONFIG)
    alone = [engine.generate(prompts, params) for prompts, params in calls()]
    prefill, decode, _ = TOPOLOGIES[nth]
    for seen in found[nth][prefill : prefill + decode]:
        assert seen["error"] is None and seen["reason"] is None
        assert tokens(seen["answers"]) == tokens(alone)
        for mine, its in zip(chain(*seen["answers"]), chain(*alone), strict=True):
            assert_same(mine, its)
        assert (seen["split"].arrived, seen["split"].recomputed) == (12, 0)
        assert seen["outstanding"] == 0
        generated = sum(
            len(sample.token_ids) - 1 for call in alone for request in call for sample in request
        )
        assert seen["stats"]["computed_tokens"] == generated, (
            "prompts, and first tokens, are computed elsewhere"
        )
        assert seen["stats"]["prefix_hit_tokens"] == 2 * 32, "what the decode side has is not sent"


@pytest.mark.parametrize("nth", range(len(TOPOLOGIES)))
def test_one_copy_a_transfer_and_peer(found: list[list[Any]], nth: int) -> None:
    prefill, decode, _ = TOPOLOGIES[nth]
    sent = [*LENGTHS, 11, 28, 5, 21]  # the two longer ones without the 32 tokens that are there
    ranges = sum(-(-n // 40) for n in sent)
    pairs = max(prefill, decode)  # each rank of the larger side has one peer
    seen = found[nth][:prefill]
    assert sum(each["requests"] for each in seen) == ranges * pairs
    assert sum(each["bytes"] for each in seen) == sum(sent) * TOKEN


@pytest.mark.soak
def test_a_burst_through_a_small_ring(path: str, found: list[list[Any]]) -> None:
    """All requests in flight at once; a ring of 40 tokens."""
    alone = Engine.from_pretrained(path, **CONFIG).generate(burst(), GREEDY)
    for seen in found[BURST][1:3]:
        assert tokens(seen["answers"]) == tokens([alone])
        assert seen["in_flight"] == REQUESTS and seen["split"].rounds >= rounds(15, 50)
        assert seen["split"].arrived == REQUESTS and seen["outstanding"] == 0


def test_prompts_under_way_are_preempted(path: str, found: list[list[Any]]) -> None:
    """By a sleep or a discard, after the first were asked for: what comes for a sample that has
    lost its pages is left in the ring, and the sample is computed here; later ones as pages run
    out.
    """
    alone = Engine.from_pretrained(path, **CONFIG).generate(burst()[:TIGHTLY], LONG)
    for seen in [*found[TIGHT][1:3], found[MEDDLED][1]]:
        assert tokens(seen["answers"]) == tokens([alone])
        assert seen["preemptions"] > 0 and seen["outstanding"] == 0
        assert 0 < seen["split"].arrived < TIGHTLY


def test_beams_are_one_engines(path: str, found: list[list[Any]]) -> None:
    """Searches are computed where they are decoded, prompts beside them are sent."""
    engine = Engine.from_pretrained(path, **CONFIG)
    alone = [engine.generate(prompts, params) for prompts, params in searches()]
    assert any(len({tuple(each.token_ids) for each in request}) == 3 for request in alone[1]), (
        "beams that differ"
    )
    for seen in found[SEARCH][1:3]:
        assert seen["error"] is None and seen["reason"] is None
        assert tokens(seen["answers"]) == tokens(alone)
        for mine, theirs in zip(chain(*seen["answers"]), chain(*alone), strict=True):
            assert [each.score for each in mine] == pytest.approx(
                [each.score for each in theirs], abs=GAP
            )
        assert (seen["split"].arrived, seen["split"].recomputed, seen["outstanding"]) == (4, 0, 0)
        assert seen["stats"]["prefix_hit_tokens"] == 64 + 48
    assert found[SEARCH][0]["bytes"] == sum(LENGTHS[::2]) * TOKEN
