"""Threads that own an engine: requests and calls of several callers, of one rank and of two."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from memsaver import StateError
from rollout import Completion, Engine, Output, SamplingParams
from rollout.errors import RankError
from rollout.loop import EngineLoop, FollowingLoop
from tests.helpers.models import save_tiny
from tests.helpers.ranks import results, start_ranks
from tests.helpers.rollout.answers import random_prompts
from tests.helpers.rollout.loops import CONFIG, LONG, SHORT, overlapping, params, tokens

PROMPTS = random_prompts(tuple(range(3, 43)))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    save_tiny(path, "qwen2", num_attention_heads=4, num_key_value_heads=2)
    return str(path)


@pytest.fixture(scope="module")
def expected(path: str) -> list[list[Completion]]:
    """Return the answers of a blocking call to 40 requests."""
    engine = Engine.from_pretrained(path, **CONFIG)
    return engine.generate(PROMPTS, [params(number) for number in range(len(PROMPTS))])


@pytest.fixture
def engine(path: str) -> Engine:
    return overlapping(path)


@pytest.fixture
def loop(engine: Engine) -> Iterator[EngineLoop]:
    loop = EngineLoop(engine)
    yield loop
    loop.close()
    assert len(engine.generate([[5]], SHORT)[0][0].token_ids) == 4 and not engine.unfinished
    engine.check_integrity()


def staggered(loop: EngineLoop) -> list[list[Completion]]:
    """Return the answers to 40 requests of four threads, with sleeps and pauses between them."""
    answers: dict[int, list[Completion]] = {}

    def ask(first: int) -> None:
        for number in range(first, len(PROMPTS), 4):
            time.sleep(random.Random(number).uniform(0, 0.01))
            future = loop.submit(PROMPTS[number], params(number), asleep="queue")
            answers[number] = future.result(60)

    threads = [threading.Thread(target=ask, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    sleep_and_wake(loop)
    for mode in ("keep", "recompute") * 2:
        loop.pause_generation(mode).result(60)  # type: ignore[arg-type]
        loop.resume_generation().result(60)
    for thread in threads:
        thread.join()
    return [answers[number] for number in range(len(PROMPTS))]


def sleep_and_wake(loop: EngineLoop | FollowingLoop) -> None:
    """Let an engine sleep three times; on two ranks, at different times of each."""
    engine: Any = loop.engine
    for number in range(3):
        time.sleep(random.Random(f"{number} {type(loop)}").uniform(0, 0.05))
        loop.call(lambda: engine.sleep(1, "recompute"), "sleep").result(60)
        assert loop.call(engine.report).result(60).committed_bytes == 0
        loop.call(engine.wake_up, "wake_up").result(60)


def test_staggered_requests_of_threads_get_the_answers_of_a_blocking_call(
    loop: EngineLoop, expected: list[list[Completion]]
) -> None:
    assert tokens(staggered(loop)) == tokens(expected)
    whole = [params(number) for number in range(len(PROMPTS))]
    assert loop.generate(PROMPTS, whole) == expected


def test_requests_overtake_and_tell_each_token_once(engine: Engine, loop: EngineLoop) -> None:
    outputs = list[Output]()
    long = loop.submit([5, 6], LONG, outputs.append)
    assert len(loop.generate([[7], [8]], SHORT)) == 2 and not long.done()
    with pytest.raises(StateError, match="the thread of an EngineLoop steps this engine"):
        engine.generate([[5]], SHORT)
    with pytest.raises(StateError, match="cannot sleep with unfinished requests"):
        loop.call(engine.sleep).result(60)
    (sample,) = long.result(60)
    told = [token for output in outputs for token in output.token_ids]
    assert told == sample.token_ids and len(told) == 200
    loop.call(engine.sleep).result(60)
    with pytest.raises(StateError, match="cannot generate: paused: weights, kv_cache"):
        loop.generate([[7], [8]], SHORT)
    loop.call(engine.wake_up).result(60)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        loop.generate([[7], []], SHORT)


def test_aborted_request_has_its_present_answer_and_a_cancelled_one_leaves(
    engine: Engine, loop: EngineLoop
) -> None:
    begun = threading.Event()
    aborted = loop.submit([5, 6], LONG, lambda output: begun.set())
    cancelled, other = loop.submit([6], LONG), loop.submit([7], SHORT)
    begun.wait(60)
    loop.abort(aborted, other, Future())
    assert cancelled.cancel()
    (sample,) = aborted.result(60)
    assert sample.finish_reason == "abort" and 0 < len(sample.token_ids) < 200
    assert len(other.result(60)[0].token_ids) <= 4
    loop.call(engine.sleep).result(60)  # refused if a request were left
    loop.call(engine.wake_up).result(60)


def test_error_ends_the_request_that_it_concerns(engine: Engine, loop: EngineLoop) -> None:
    def raises(output: Output) -> None:
        raise OSError("the reader is gone")

    only = SamplingParams(max_tokens=1)
    bad, last = loop.submit([5, 6], LONG, raises), loop.submit([5], only, raises)
    good = loop.submit([5, 6], LONG)
    for future in (bad, last):
        with pytest.raises(OSError, match="the reader is gone"):
            future.result(60)
    usual = engine.runner.forward
    failing = dict.fromkeys(range(2), MemoryError("no room"))

    def forward(step: Any) -> Any:
        if failing:
            raise failing.popitem()[1]
        return usual(step)

    engine.runner.forward = forward  # type: ignore[method-assign]
    with pytest.raises(MemoryError, match="no room"):
        good.result(60)
    assert len(loop.generate([[5]], SHORT)[0][0].token_ids) == 4


def test_loop_that_is_closed_ends_what_it_has_and_takes_nothing(engine: Engine) -> None:
    loop = EngineLoop(engine)
    with pytest.raises(StateError, match="the first rank, which decides"):
        FollowingLoop(engine)
    left = loop.submit([5, 6], LONG)
    loop.close()
    loop.close()
    for future, why in (
        (left, "ended with the loop of its engine"),
        (loop.submit([5], SHORT), "is closed, and takes no calls"),
        (loop.call(engine.report), "is closed, and takes no calls"),
    ):
        with pytest.raises(StateError, match=why):
            future.result(60)
    assert len(engine.generate([[5]], SHORT)[0][0].token_ids) == 4


# ---------------------------------------------------------------- two ranks


def share(rank: int, path: str) -> tuple[Any, ...]:
    """Return answers of a blocking call, of a loop on each rank, and of a call after the loops."""
    engine = overlapping(path, group=dist.group.WORLD, tensor_parallel_size=2)
    whole = [params(number) for number in range(len(PROMPTS))]
    blocking = engine.generate(PROMPTS, whole)
    if rank:
        following = FollowingLoop(engine)
        sleep_and_wake(following)
        following.close()
        looped = blocking
    else:
        loop = EngineLoop(engine)
        looped = staggered(loop)
        assert tokens(loop.generate(PROMPTS, whole)) == tokens(looped)
        loop.close()
    engine.check_integrity()
    return blocking, looped, engine.generate(PROMPTS, whole)


def lose(rank: int, path: str) -> str:
    """Return what the first rank's loop says of the other, which ends in a step."""
    engine = overlapping(path, group=dist.group.WORLD, tensor_parallel_size=2)
    if rank:
        usual = engine.runner.forward

        def forward(step: Any) -> Any:
            if engine.stats.computed_tokens > 20:
                raise OSError("cosmic ray")
            return usual(step)

        engine.runner.forward = forward  # type: ignore[method-assign]
        with pytest.raises(OSError, match="cosmic ray"):
            FollowingLoop(engine).call(lambda: None, "of the first rank").result()
        return ""
    loop = EngineLoop(engine)
    with pytest.raises(RankError) as caught:
        loop.generate([[5, 6], [7]], LONG)
    for asleep in ("queue", "refuse"):
        with pytest.raises(StateError, match="cannot generate: tensor-parallel rank"):
            loop.submit([5], SHORT, asleep=asleep).result(60)  # type: ignore[arg-type]
    return str(caught.value)


def test_loops_of_two_ranks_take_calls_between_the_same_steps(path: str, tmp_path: Path) -> None:
    first, second = results(start_ranks(share, 2, tmp_path / "store", path))
    assert first[0] == second[0] and first[2] == second[2]
    assert tokens(first[0]) == tokens(first[1]) == tokens(first[2])


def test_lost_rank_ends_the_requests_of_the_loop(path: str, tmp_path: Path) -> None:
    said, _ = results(start_ranks(lose, 2, tmp_path / "store", path, seconds=3.0))
    assert "rank 1 failed: OSError: cosmic ray" in said
