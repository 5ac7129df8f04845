"""Prefill and decode engines of different tensor-parallel sizes: answers equal a single engine's.

The rings are small, so allocation wraps around.
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
REQUESTS, TIGHTLY = rounds(40, 200), rounds(14, 30)
TOPOLOGIES = some(
    (4, 2, True), (2, 4, False), whole=[(4, 2, False), (2, 4, True), (1, 2, True), (1, 2, False)]
)
STEPPED, TIGHT, SEARCH, MEDDLED = range(len(TOPOLOGIES), len(TOPOLOGIES) + 4)
LONG = SamplingParams(max_tokens=24, temperature=0)
BEAMS = SamplingParams(max_tokens=8, beam_width=4, n=3)
SMALL: dict[str, Any] = {"kv_tokens": 160, "max_running": 12, "max_prefill_tokens": 48}


def calls() -> list[tuple[list[list[int]], SamplingParams]]:
    """Return a greedy call, then a sampled one in which some prompts share earlier prefixes."""
    prompts = random_prompts(LENGTHS)
    longer = [prompts[5] + tail for tail in random_prompts((3, 20), seed=1)]
    return [(prompts, GREEDY), (longer + random_prompts((5, 21), seed=2), SAMPLED)]


def searches() -> list[tuple[list[list[int]], list[SamplingParams]]]:
    """Return calls that mix beam searches with prompts that are sent.

    In the second call, one search begins like a prompt that was sent, the other like a search.
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
def reports(path: str, tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """Run all topologies; return the ranks' reports as [topology][rank]."""
    splits = [
        Split(path=path, prefill=prefill, decode=decode, mapped=mapped, calls=calls())
        for prefill, decode, mapped in TOPOLOGIES
    ]
    wide = CONFIG | {"kv_tokens": REQUESTS * 64, "max_running": REQUESTS}
    few = SMALL | {"kv_tokens": 64, "max_running": 3}
    splits.append(Split(path=path, calls=[(burst(), SAMPLED)], decode_config=wide, stepped=True))
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
    return [list(topology) for topology in zip(*by_rank, strict=True)]


@pytest.mark.parametrize(
    "nth", range(len(TOPOLOGIES)), ids=[f"{a}to{b}{'' if m else '-gloo'}" for a, b, m in TOPOLOGIES]
)
def test_answers_equal_those_of_single_engine(
    path: str, reports: list[list[Any]], nth: int
) -> None:
    engine = Engine.from_pretrained(path, **CONFIG)
    alone = [engine.generate(prompts, params) for prompts, params in calls()]
    prefill, decode, _ = TOPOLOGIES[nth]
    for report in reports[nth][prefill : prefill + decode]:
        assert report["error"] is None and report["reason"] is None
        assert tokens(report["answers"]) == tokens(alone)
        for mine, its in zip(chain(*report["answers"]), chain(*alone), strict=True):
            assert_same(mine, its)
        assert (report["split"].arrived, report["split"].recomputed) == (12, 0)
        assert report["outstanding"] == 0
        generated = sum(
            len(sample.token_ids) - 1 for call in alone for request in call for sample in request
        )
        assert report["stats"]["computed_tokens"] == generated, (
            "the prefill engine computes prompts and first tokens"
        )
        assert report["stats"]["prefix_hit_tokens"] == 2 * 32, "cached prefixes are not sent"


@pytest.mark.parametrize("nth", range(len(TOPOLOGIES)))
def test_each_transfer_is_one_copy_per_peer(reports: list[list[Any]], nth: int) -> None:
    prefill, decode, _ = TOPOLOGIES[nth]
    sent = [*LENGTHS, 11, 28, 5, 21]  # the two longer prompts without their 32 cached tokens
    ranges = sum(-(-n // 40) for n in sent)
    pairs = max(prefill, decode)  # each rank of the larger side has one peer
    senders = reports[nth][:prefill]
    assert sum(report["requests"] for report in senders) == ranges * pairs
    assert sum(report["bytes"] for report in senders) == sum(sent) * TOKEN


def test_requests_that_arrive_between_steps_get_the_tokens_of_single_engine(
    path: str, reports: list[list[Any]]
) -> None:
    alone = Engine.from_pretrained(path, **CONFIG).generate(burst(), SAMPLED)
    for report in reports[STEPPED][1:3]:
        assert report["error"] is None
        assert tokens(report["answers"]) == tokens([alone])
        assert report["split"].rounds >= rounds(10, 50), "the ring of 40 tokens is used again"
        assert report["split"].arrived == REQUESTS and report["outstanding"] == 0


def test_preempted_prompts_in_flight_are_recomputed(path: str, reports: list[list[Any]]) -> None:
    # A sleep or a discard preempts the first samples after their prompts were requested, and full
    # pools preempt later ones. The decode side computes all of them itself.
    alone = Engine.from_pretrained(path, **CONFIG).generate(burst()[:TIGHTLY], LONG)
    for report in [*reports[TIGHT][1:3], reports[MEDDLED][1]]:
        assert tokens(report["answers"]) == tokens([alone])
        assert report["preemptions"] > 0 and report["outstanding"] == 0
        assert 0 < report["split"].arrived < TIGHTLY


def test_beam_searches_equal_those_of_single_engine(path: str, reports: list[list[Any]]) -> None:
    # the decode engine computes the prompts of searches; other prompts of the call are sent
    engine = Engine.from_pretrained(path, **CONFIG)
    alone = [engine.generate(prompts, params) for prompts, params in searches()]
    assert any(len({tuple(beam.token_ids) for beam in request}) == 3 for request in alone[1]), (
        "beams differ"
    )
    for report in reports[SEARCH][1:3]:
        assert report["error"] is None and report["reason"] is None
        assert tokens(report["answers"]) == tokens(alone)
        for mine, theirs in zip(chain(*report["answers"]), chain(*alone), strict=True):
            assert [beam.score for beam in mine] == pytest.approx(
                [beam.score for beam in theirs], abs=GAP
            )
        split = report["split"]
        assert (split.arrived, split.recomputed, report["outstanding"]) == (4, 0, 0)
        assert report["stats"]["prefix_hit_tokens"] == 64 + 48
    assert reports[SEARCH][0]["bytes"] == sum(LENGTHS[::2]) * TOKEN
