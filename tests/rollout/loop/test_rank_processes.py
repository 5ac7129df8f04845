"""An engine of two ranks in processes of its own, which this process starts and calls."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from memsaver import StateError
from rollout import AsyncEngine, Completion, Engine, Output, SamplingParams, TokenStream
from rollout.loop.loop_actor import LoopActor
from rollout.loop.rank_processes import RankProcesses
from rollout.process_group import RankAddress
from tests.helpers.models import save_tiny
from tests.helpers.peers import server
from tests.helpers.rollout.loops import LONG, SHORT

ANSWER = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)


class Rank(LoopActor):
    """One rank of an engine on the CPU."""

    def __init__(self, path: str, rank: int) -> None:
        super().__init__()
        self._path, self._rank = path, rank

    def build(self, address: RankAddress | None) -> None:
        if not self._path:
            raise OSError(f"no model for rank {self._rank}")
        torch.set_num_threads(1)
        group = self._join(address, "cpu")
        sizes = {"kv_tokens": 1024, "tensor_parallel_size": address.size if address else 1}
        self.held = Engine.from_pretrained(self._path, group=group, **sizes)
        self.own()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start processes without their imports."""
    context = "rollout.loop.rank_processes.multiprocessing.get_context"
    monkeypatch.setattr(context, lambda _: server)


def test_ranks_answer_and_stream_together_and_end_together(tmp_path: Path) -> None:
    """Whole answers, then a fast, a slow and a lost reader, pauses, and the death of a process."""
    save_tiny(tmp_path, "qwen2", num_attention_heads=4, num_key_value_heads=2)
    ranks = RankProcesses(partial(Rank, str(tmp_path)), 2)
    expected = ranks.submit([5, 6], ANSWER).result(60)

    def ask() -> None:
        left, cancelled = ranks.submit([5, 6], LONG), ranks.submit([6], LONG)
        shorts = [ranks.submit([7, number], SHORT) for number in range(3)]
        assert [len(short.result(60)[0].token_ids) for short in shorts] == [4, 4, 4]
        assert not left.done() and cancelled.cancel()
        with pytest.raises(StateError, match="cannot sleep with unfinished requests"):
            ranks.call("sleep")
        ranks.abort(left)
        assert left.result(60)[0].finish_reason == "abort"
        ranks.call("sleep")
        assert [report.committed_bytes for report in ranks.call("report")] == [0, 0]
        with pytest.raises(StateError, match="cannot generate: paused"):
            ranks.submit([5], SHORT).result(60)
        ranks.call("wake_up")
        with pytest.raises(ValueError, match="the prompt is empty"):
            ranks.submit([], SHORT).result(60)

    async def slow(stream: TokenStream) -> list[Output]:
        pieces = []
        async for output in stream:
            pieces.append(output)
            await asyncio.sleep(0.03)
        return pieces

    async def use() -> None:
        shared = AsyncEngine(ranks, max_waiting=8)
        quick = [output async for output in shared.submit([5, 6], ANSWER)]
        assert len(quick) > 2 and Completion.joined(quick) == expected[0]
        pieces = await slow(shared.submit([5, 6], ANSWER))
        assert len(pieces) > 2 and Completion.joined(pieces) == expected[0]
        stream = shared.submit([5, 6], ANSWER)
        await anext(stream)
        await shared.pause_generation("keep")
        await shared.call("sleep", unfinished="recompute")
        assert (await shared.call("report")).committed_bytes == 0
        await shared.call("wake_up")
        await shared.resume_generation()
        assert (await stream.result())[0].token_ids == expected[0].token_ids
        reader = asyncio.create_task(slow(shared.submit([5, 6], ANSWER)))
        await asyncio.sleep(0.1)
        reader.cancel()
        assert len((await shared.generate([5, 6], SHORT))[0].token_ids) == 4
        with pytest.raises(ValueError, match="the prompt is empty"):
            await anext(shared.submit([], SHORT))
        with pytest.raises(ValueError, match="mode"):
            await shared.pause_generation("no mode")  # type: ignore[arg-type]
        stream = shared.submit([5, 6], replace(ANSWER, max_tokens=900))
        await anext(stream)
        os.kill(ranks.call("pid")[1], signal.SIGKILL)
        with pytest.raises(StateError, match="a process of the engine has ended"):
            async for _ in stream:
                pass
        for future in ranks.start("report"):
            with pytest.raises(StateError, match="a process of the engine has ended"):
                future.result(60)
        assert shared.ended
        await shared.close()

    try:
        ask()
        asyncio.run(asyncio.wait_for(use(), 180))
    finally:
        ranks.close()


def test_error_of_a_rank_at_its_start_is_raised_here(forked: None) -> None:
    with pytest.raises(OSError, match="no model for rank 0"):
        RankProcesses(partial(Rank, ""), 1)
