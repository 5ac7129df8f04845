"""Concurrent requests to one engine, and the size of its KV pool, without verl."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from memsaver import StateError
from rollout import Completion, Engine, EngineConfig, SamplingParams, pool_size
from rollout.loop import EngineLoop
from rollout.model import load_model_config
from rollout.pool_size import PoolSizeError
from tests.helpers.models import save_tiny
from trainer_bridge.adoption.verl.engine_rank import in_verls_words
from trainer_bridge.adoption.verl.named_requests import NamedRequests

LONG = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


class OneRank(EngineLoop):
    """The only rank of an engine, in this process."""

    def start(self, method: str, *args: Any) -> list[Future[Any]]:
        return [self.call(partial(getattr(self.engine, method), *args))]


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    save_tiny(tmp_path, "qwen2")
    return Engine.from_pretrained(tmp_path, kv_tokens=1024)


@pytest.fixture
def requests(engine: Engine) -> Iterator[NamedRequests]:
    rank: Any = OneRank(engine)
    yield NamedRequests(rank)
    rank.close()
    engine.check_integrity()


def test_short_requests_overtake_a_long_one(requests: NamedRequests) -> None:
    async def run() -> None:
        long = asyncio.ensure_future(requests.answer("long", [5, 6], LONG))
        await asyncio.sleep(0)
        shorts = await asyncio.gather(*[requests.answer(f"{n}", [7, n], SHORT) for n in range(3)])
        assert [len(short.token_ids) for short in shorts] == [4] * 3 and not long.done()
        with pytest.raises(ValueError, match="request long is unfinished"):
            await requests.answer("long", [5], SHORT)
        with pytest.raises(ValueError, match="the prompt needs 1200 KV tokens"):
            await requests.answer("much", [5] * 1000, LONG)
        await requests.call("forget_prefixes")
        assert not long.done()
        assert len((await long).token_ids) == 200
        await requests.drained()

    asyncio.run(run())


def test_request_whose_caller_left_leaves_the_engine(
    engine: Engine, requests: NamedRequests
) -> None:
    async def run() -> None:
        asked = asyncio.ensure_future(requests.answer("left", [5, 6], LONG))
        await requests.answer("other", [7], SHORT)
        asked.cancel()
        await requests.drained()
        while engine.unfinished:
            await asyncio.sleep(0.01)
        assert engine.stats.computed_tokens < 200

    asyncio.run(run())


@pytest.mark.parametrize("by_caller", [True, False])
def test_name_of_a_cancelled_request_is_free_before_the_engine_notices(
    by_caller: bool, requests: NamedRequests
) -> None:
    async def run() -> None:
        asked = [asyncio.ensure_future(requests.answer("same", [5, 6], LONG))]
        for _ in range(3):
            await asyncio.sleep(0)
            if by_caller:
                asked[-1].cancel()
                await asyncio.sleep(0)
            else:
                assert requests.cancel("same") == ["same"] and requests.cancel("same") == []
            asked.append(asyncio.ensure_future(requests.answer("same", [5, 6], SHORT)))
        *left, last = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(last, Completion) and len(last.token_ids) == 4
        ended = asyncio.CancelledError if by_caller else Completion
        assert all(isinstance(result, ended) for result in left)

    asyncio.run(run())


def test_error_of_the_engine_reaches_every_request(requests: NamedRequests) -> None:
    async def run() -> None:
        await requests.call("sleep")
        asked = [requests.answer(f"{n}", [n], SHORT) for n in range(2)]
        errors = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(error) for error in errors] == [StateError] * 2
        await requests.call("wake_up")
        assert len((await requests.answer("0", [5], SHORT)).token_ids) == 4

    asyncio.run(run())


def test_pool_that_is_too_small_is_refused_in_verls_words(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen2")
    model, config = load_model_config(tmp_path), EngineConfig(max_context_len=128)
    for total, remedy in (
        (1 << 30, r"set it to 0\.\d+, or lower"),
        (1 << 20, "tokens takes \\d+; lower"),
    ):
        with pytest.raises(PoolSizeError) as caught:
            pool_size(model, config, total, 0.01)
        error = str(in_verls_words(caught.value))
        assert re.search(rf"gpu_memory_utilization=0.01: .*{remedy} rollout.max_model_len", error)
