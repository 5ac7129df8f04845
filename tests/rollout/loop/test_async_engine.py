"""Coroutines that share an engine: streams, pauses, a full queue, priorities, lost readers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from memsaver import StateError
from rollout import (
    AsyncEngine,
    AsyncReplicas,
    Completion,
    Engine,
    KVTiers,
    Output,
    QueueFull,
    SamplingParams,
    TokenStream,
)
from tests.helpers.case_selection import rounds
from tests.helpers.models import save_tiny
from tests.helpers.rollout.answers import random_prompts
from tests.helpers.rollout.loops import CONFIG, LONG, SHORT, overlapping, params, tokens
from tests.helpers.rollout.updates import answers, checkpoint, tiny, update
from tests.helpers.rollout.updates import expected as expected_answers

PROMPTS = random_prompts(tuple(range(3, 27)))
Use = Callable[[AsyncEngine], Coroutine[Any, Any, None]]


PARAMS = [params(number) for number in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    save_tiny(path, "qwen2")
    return str(path)


@pytest.fixture(scope="module")
def expected(path: str) -> list[list[Completion]]:
    return Engine.from_pretrained(path, **CONFIG).generate(PROMPTS, PARAMS)


def run(engine: Engine, use: Use, **options: Any) -> None:
    """Use an engine in a new event loop; afterwards it must be as it was before."""

    async def used() -> None:
        async with AsyncEngine(engine, **options) as shared:
            await asyncio.wait_for(use(shared), 60)

    asyncio.run(used())
    assert engine.owner is None and not engine.unfinished
    engine.check_integrity()
    assert len(engine.generate([[5]], SHORT)[0][0].token_ids) == 4


async def read(stream: TokenStream) -> list[Completion]:
    """Return the samples as the pieces of the stream tell them."""
    pieces: dict[int, list[Output]] = {}
    async for output in stream:
        pieces.setdefault(output.sample, []).append(output)
    told = [Completion.joined(pieces[sample]) for sample in sorted(pieces)]
    assert told == await stream.result()
    return told


def test_streams_of_staggered_requests_tell_the_answers_of_a_blocking_call(
    path: str, expected: list[list[Completion]]
) -> None:
    async def ask(shared: AsyncEngine, number: int) -> list[Completion]:
        await asyncio.sleep(random.Random(number).uniform(0, 0.05))
        return await read(shared.submit(PROMPTS[number], PARAMS[number]))

    async def use(shared: AsyncEngine) -> None:
        answers = await asyncio.gather(*(ask(shared, number) for number in range(len(PROMPTS))))
        assert tokens(answers) == tokens(expected)
        pairs = zip(PROMPTS, PARAMS, strict=True)
        whole = await asyncio.gather(*(shared.generate(*pair) for pair in pairs))
        assert tokens(whole) == tokens(expected)
        task = asyncio.create_task(shared.generate([5, 6], LONG))
        await asyncio.sleep(0.005)
        task.cancel()

    run(overlapping(path), use)


def test_slow_reader_gets_all_that_has_come_at_once(path: str) -> None:
    async def use(shared: AsyncEngine) -> None:
        stream = shared.submit([5, 6], LONG)
        (whole,) = await stream.result()
        pieces = [output async for output in stream]
        assert [piece.token_ids for piece in pieces] == [whole.token_ids]
        quick = [output async for output in shared.submit([5, 6], LONG)]
        assert len(quick) > 2 and Completion.joined(quick) == whole

    run(overlapping(path), use)


@pytest.mark.parametrize("mode", ["keep", "recompute"])
@pytest.mark.parametrize("asleep", [False, True])
def test_interrupted_requests_go_on_to_the_same_answers(
    mode: Any, asleep: bool, path: str, expected: list[list[Completion]]
) -> None:
    """Interrupt six requests several times, in different parts of their prompts and answers."""
    engine = overlapping(path, max_prefill_tokens=16)

    async def use(shared: AsyncEngine) -> None:
        streams = [shared.submit(PROMPTS[n], PARAMS[n]) for n in range(6)]
        readers = [asyncio.create_task(read(stream)) for stream in streams]
        for _ in range(4):
            await shared.pause_generation(mode)
            running = len(engine.scheduler.running)
            assert running <= (6 * 2 if mode == "keep" else 0)
            if asleep:
                await shared.call("sleep", unfinished="recompute")
                await shared.call("wake_up")
            before = engine.stats.computed_tokens
            await asyncio.sleep(0.01)
            assert engine.stats.computed_tokens == before  # no step runs
            await shared.resume_generation()
            await asyncio.sleep(0.002)
        assert tokens([await reader for reader in readers]) == tokens(expected[:6])

    run(engine, use)


def test_abort_ends_a_request_whether_generation_is_paused_or_not(path: str) -> None:
    async def use(shared: AsyncEngine) -> None:
        for paused in (False, True):
            stream, other = shared.submit([5, 6], LONG), shared.submit([7], LONG)
            await anext(stream)
            if paused:
                await shared.pause_generation()
            late = shared.submit([8], LONG)
            for ended in (stream, late):
                (sample,) = await ended.abort()
                assert sample.finish_reason == "abort" and len(sample.token_ids) < 200
            assert not paused or late.future.result()[0].token_ids == []
            assert not other.future.done()
            await shared.resume_generation()
            assert len((await other.result())[0].token_ids) == 200

    run(overlapping(path), use)


def test_pause_that_aborts_and_pause_that_waits(path: str) -> None:
    async def use(shared: AsyncEngine) -> None:
        stream = shared.submit([5, 6], LONG)
        await anext(stream)
        await shared.pause_generation("abort")
        (sample,) = await stream.result()
        assert sample.finish_reason == "abort" and 0 < len(sample.token_ids) < 200
        late = shared.submit([5, 6], LONG)
        await shared.resume_generation()
        await anext(late)
        pause = asyncio.create_task(shared.pause_generation("wait"))
        await asyncio.sleep(0)
        later = shared.submit([5], SHORT)
        await pause
        assert late.future.done() and not later.future.done()
        await shared.resume_generation()
        assert len((await later.result())[0].token_ids) == 4
        busy = shared.submit([5, 6], LONG)
        pause = asyncio.create_task(shared.pause_generation("wait"))
        await asyncio.sleep(0.005)
        await shared.resume_generation()
        with pytest.raises(StateError, match="resumed before all requests had ended"):
            await pause
        await shared.call("sleep", unfinished="recompute")
        with pytest.raises(StateError, match="cannot end before the pause: paused: weights"):
            await shared.pause_generation("wait")
        await shared.call("wake_up")
        assert len((await busy.result())[0].token_ids) == 200
        with pytest.raises(ValueError, match="mode='stop' must be one of keep, recompute"):
            await shared.pause_generation("stop")  # type: ignore[arg-type]

    run(overlapping(path), use)


def test_full_queue_refuses_at_once_and_says_how_much_waits(path: str) -> None:
    async def use(shared: AsyncEngine) -> None:
        await shared.submit([5], SHORT).result()
        await shared.pause_generation()
        first = [shared.submit([5, 6], SHORT), shared.submit([7], SHORT)]
        with pytest.raises(QueueFull, match=r"2 requests with 11 tokens wait, about \d+ s") as full:
            shared.submit([8], SHORT)
        assert (full.value.waiting, full.value.tokens) == (2, 11)
        assert full.value.seconds is not None and full.value.seconds > 0
        await shared.resume_generation()
        for stream in first:
            await anext(stream)
        await read(shared.submit([8], SHORT))
        for stream in first:
            await stream.result()
        with pytest.raises(ValueError, match="the prompt must be a sequence of token ids"):
            shared.submit(5, SHORT)  # type: ignore[arg-type]
        for bad, why in (([], "the prompt is empty"), ([-1], "has token ids outside")):
            with pytest.raises(ValueError, match=why):
                await anext(shared.submit(bad, SHORT))

    run(overlapping(path), use, max_waiting=2)
    with pytest.raises(ValueError, match="max_waiting"):
        AsyncEngine(overlapping(path), max_waiting=0)


def test_requests_of_lower_numbers_leave_the_queue_first(path: str) -> None:
    async def use(shared: AsyncEngine) -> None:
        order: list[int] = []

        async def ask(number: int, priority: int) -> None:
            wanted = SamplingParams(max_tokens=30, ignore_eos=True, priority=priority)
            async for _ in shared.submit([5 + number], wanted):
                if number not in order:
                    order.append(number)

        await shared.pause_generation()
        priorities = [1, 0, 2, 0, -1]
        tasks = [asyncio.create_task(ask(*pair)) for pair in enumerate(priorities)]
        await asyncio.sleep(0)
        await shared.resume_generation()
        await asyncio.gather(*tasks)
        assert order == [4, 1, 3, 0, 2]

    run(overlapping(path, max_running=1), use)
    with pytest.raises(ValueError, match=r"priority=0.5 must be an integer"):
        SamplingParams(priority=0.5)  # type: ignore[arg-type]


def test_reader_that_leaves_ends_its_request(path: str) -> None:
    engine = overlapping(path)

    async def use(shared: AsyncEngine) -> None:
        cancelled, left = shared.submit([5, 6], LONG), shared.submit([7], LONG)
        reader = asyncio.create_task(read(cancelled))
        async with left:
            await anext(left)
        await asyncio.sleep(0.002)
        reader.cancel()
        for stream in (cancelled, left):
            (sample,) = await stream.result()
            assert sample.finish_reason == "abort"

    run(engine, use)
    shared = AsyncEngine(engine)

    async def vanish() -> TokenStream:
        stream = shared.submit([5, 6], LONG)
        await anext(stream)
        return stream

    stream = asyncio.run(vanish())  # its event loop is closed with the request unfinished
    assert stream.future.result(60)[0].finish_reason == "abort"
    asyncio.run(shared.close())


def test_close_answers_what_is_open_and_an_error_says_why_it_cannot(path: str) -> None:
    engine = overlapping(path)

    async def used() -> None:
        shared = AsyncEngine(engine)
        with pytest.raises(StateError, match="the thread of an EngineLoop steps this engine"):
            engine.generate([[5]], SHORT)
        stream = shared.submit([5, 6], LONG)
        await shared.close()
        await shared.close()
        assert len((await stream.result())[0].token_ids) == 200
        with pytest.raises(StateError, match="is closed, and takes no requests"):
            shared.submit([5], SHORT)
        shared = AsyncEngine(engine)
        await shared.call("sleep")
        stream = shared.submit([5, 6], LONG)
        with pytest.raises(StateError, match="cannot end before the pause: paused"):
            await shared.close()
        with pytest.raises(StateError, match="ended with the loop of its engine"):
            await anext(stream)

    asyncio.run(used())
    engine.wake_up()
    engine.check_integrity()


def test_error_of_a_step_is_raised_after_the_last_tokens(path: str) -> None:
    engine = overlapping(path)
    usual, left = engine.runner.forward, [5]

    def forward(step: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError("no room")
        return usual(step)

    async def use(shared: AsyncEngine) -> None:
        engine.runner.forward = forward  # type: ignore[method-assign]
        told = []
        with pytest.raises(MemoryError, match="no room"):
            async for output in shared.submit([5, 6], LONG):
                told += output.token_ids
        assert len(told) == 5
        engine.runner.forward = usual  # type: ignore[method-assign]

    run(engine, use)


def test_weights_change_under_running_requests_from_another_thread(tmp_path: Path) -> None:
    tiny(0).save_pretrained(tmp_path)
    engine = Engine.from_pretrained(tmp_path, kv_tokens=1024)
    wanted = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)

    async def use(shared: AsyncEngine) -> None:
        stream = shared.submit([5, 6, 7], wanted)
        await anext(stream)
        await asyncio.to_thread(update, shared.engine, 1, seed=1, in_flight="keep")
        assert shared.engine.weights_version == 1
        (sample,) = await stream.result()
        assert {*sample.weight_versions} == {0, 1} and len(sample.token_ids) == 60
        new = await shared.submit([5, 6, 7], wanted).result()
        assert new == shared.engine.generate([[5, 6, 7]], wanted)[0]

    run(engine, use)


def test_replicas_share_requests_keep_sessions_together_and_outlive_one(path: str) -> None:
    engines = [overlapping(path) for _ in range(2)]

    async def used() -> None:
        replicas = AsyncReplicas([AsyncEngine(engine, max_waiting=3) for engine in engines])
        async with replicas:
            await replicas.pause_generation()
            talk = [replicas.submit([5, number], SHORT, session="talk") for number in range(3)]
            others = [replicas.submit([6, number], SHORT) for number in range(3)]
            with pytest.raises(QueueFull, match="3 requests with 18 tokens wait"):
                replicas.submit([7], SHORT)
            await replicas.resume_generation()
            for stream in (*talk, *others):
                assert len((await stream.result())[0].token_ids) == 4
            assert [engine.stats.computed_tokens for engine in engines] == [15, 15]
            assert await replicas.call("unavailable_reason") == [None, None]
            lost = replicas.submit([5], LONG, session="talk")
            await anext(lost)

            def fail() -> list[Output]:
                raise SystemExit("no engine survives this")

            engines[0].step = fail  # type: ignore[method-assign]
            with pytest.raises(StateError, match="takes no calls: SystemExit"):
                await lost.result()
            later = replicas.submit([5], SHORT, session="talk")
            assert len((await later.result())[0].token_ids) == 4
            assert engines[1].stats.computed_tokens == 15 + 4
            with pytest.raises(ValueError, match="the prompt must be a sequence"):
                replicas.submit(5, SHORT)  # type: ignore[arg-type]
        with pytest.raises(StateError, match="all engines have ended"):
            replicas.submit([5], SHORT)

    asyncio.run(used())


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2))
def test_requests_are_answered_or_refused_with_a_reason_whatever_happens(seed: int) -> None:
    """Mix arrivals, aborts, lost readers, pauses, sleeps, updates and preemptions at random.

    At the end, no cached prefix is of an older version.
    """
    count, draw = rounds(60, 2000), random.Random(seed)
    tiers = KVTiers(host_ratio=4.0) if seed else None
    engine = overlapping(str(checkpoint()), kv_tokens=256, max_running=6, tiers=tiers)
    left, ends, versions = [*range(count)], list[str](), [0]

    async def ask(shared: AsyncEngine) -> None:
        while left:
            number = left.pop()
            wanted = SamplingParams(
                max_tokens=draw.randrange(1, 20), n=draw.randrange(1, 4), priority=draw.randrange(3)
            )
            try:
                stream = shared.submit(PROMPTS[number % len(PROMPTS)], wanted)
            except QueueFull:
                left.append(number)
                await asyncio.sleep(0.005)
                continue
            fate = draw.random()
            if fate < 0.2:
                await asyncio.sleep(draw.uniform(0, 0.01))
                ends.append((await stream.abort())[0].finish_reason)
            elif fate < 0.4:
                async with stream:
                    await anext(stream)
                ends.append("left")
            else:
                ends.append((await read(stream))[0].finish_reason)

    async def disturb(shared: AsyncEngine, busy: asyncio.Future[Any]) -> None:
        while not busy.done():
            mode = draw.choice(["keep", "recompute", "abort", "wait"])
            await shared.pause_generation(mode)
            if draw.random() < 0.3:
                await shared.call("sleep", unfinished=draw.choice(["recompute", "keep"]))
                await shared.call("wake_up")
            elif draw.random() < 0.5:
                versions.append(versions[-1] + 1)
                how = {"seed": versions[-1] % 3, "in_flight": draw.choice(["keep", "recompute"])}
                await asyncio.to_thread(update, shared.engine, versions[-1], **how)
            await shared.call("check_integrity")
            await shared.resume_generation()
            await asyncio.sleep(draw.uniform(0, 0.02))

    async def use(shared: AsyncEngine) -> None:
        busy = asyncio.gather(*(ask(shared) for _ in range(12)))
        await asyncio.gather(busy, disturb(shared, busy))
        assert len(ends) == count and {*ends} <= {"stop", "length", "abort", "left"}

    run(engine, use, max_waiting=8)
    assert answers(engine) == expected_answers(versions[-1] % 3)
