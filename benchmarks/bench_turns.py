"""First tokens of later turns while tools take time: our tiers, recomputation, vLLM's prefix cache.

64 conversations of four turns, each turn with 950 new prompt tokens and 50 of an answer, tools of
0.1 to 10 s before each (log-normal, median 3.3 s, seed fixed), and device KV for a quarter of all
tokens. The floor asks for the new tokens of each turn alone, on the same schedule. `--rival` adds
vLLM's server, which must be importable:

    python -m benchmarks.bench_turns --shape qwen2.5-7b --rival
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import re
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import openai
import torch
import uvicorn

from benchmarks.bench_serve import NAME, compare, free_port, server, write_model
from benchmarks.common import Scale, settle
from rollout import AsyncEngine, Engine, KVTiers
from rollout.server import ChatFormat, ServerOptions, make_app

TURNS = 4


class Load(NamedTuple):
    """Conversations: the new prompt tokens of each turn, and the seconds of the tool before it."""

    prompts: list[list[list[int]]]
    tools: list[list[float]]
    answer: int

    @property
    def tokens(self) -> int:
        """Return the tokens of all conversations at their ends."""
        return self.new + self.answer * TURNS * len(self.prompts)

    @property
    def new(self) -> int:
        """Return the tokens of all prompts without those of earlier turns."""
        return sum(map(len, chain.from_iterable(self.prompts)))

    @property
    def longest(self) -> int:
        return self.tokens // len(self.prompts)

    @classmethod
    def drawn(cls, scale: Scale, vocab: int) -> Load:
        rng = random.Random(0)
        count, new, answer = scale.choose(64, 4), scale.choose(950, 12), scale.choose(50, 4)
        most = scale.choose(10.0, 0.1)
        prompts = [[rng.choices(range(vocab), k=new) for _ in range(TURNS)] for _ in range(count)]
        tools = [
            [
                min(most, max(most / 100, rng.lognormvariate(math.log(most / 3), 1.0)))
                for _ in range(TURNS)
            ]
            for _ in range(count)
        ]
        return cls(prompts, tools, answer)


async def ask(client: openai.AsyncOpenAI, prompt: list[int], most: int) -> tuple[float, list[int]]:
    """Return the seconds to the first token of a streamed answer, and its tokens."""
    began, first, ids = time.perf_counter(), 0.0, list[int]()
    extra = {"ignore_eos": True, "return_token_ids": True}
    events = await client.completions.create(
        model=NAME, prompt=prompt, max_tokens=most, stream=True, extra_body=extra
    )
    async for event in events:
        new: list[int] = getattr(event.choices[0], "token_ids", None) or []
        if new and not ids:
            first = time.perf_counter() - began
        ids += new
    assert len(ids) == most, f"{len(ids)} tokens came"
    return first, ids


async def converse(client: openai.AsyncOpenAI, load: Load, number: int, alone: bool) -> list[float]:
    """Return the seconds to the first token of each turn; `alone`: without earlier turns."""
    firsts, history = [], list[int]()
    for turn, new in enumerate(load.prompts[number]):
        await asyncio.sleep(load.tools[number][turn])
        history = new if alone else history + new
        first, answer = await ask(client, history, load.answer)
        firsts.append(first)
        history = history + answer
    return firsts


async def run(port: int, load: Load, alone: bool = False) -> dict[str, float]:
    """Let all conversations run; return figures of first tokens in later turns."""
    url, began = f"http://127.0.0.1:{port}/v1", time.perf_counter()
    async with openai.AsyncOpenAI(base_url=url, api_key="-") as client:
        numbers = range(len(load.prompts))
        all_turns = await asyncio.gather(*(converse(client, load, n, alone) for n in numbers))
    later = [first for firsts in all_turns for first in firsts[1:]]
    return {
        "ms to first, median": 1e3 * statistics.median(later),
        "ms to first, p90": 1e3 * statistics.quantiles(later, n=10)[-1],
        "seconds": time.perf_counter() - began,
    }


@contextlib.contextmanager
def own_server(scale: Scale, folder: Path, load: Load, host: float | None) -> Iterator[Any]:
    """Serve our engine, whose statistics the block can read; yield it and the port."""
    tiers = None if host is None else KVTiers(host_ratio=host)
    kv = load.tokens // 4
    how: Any = {"kv_tokens": kv, "max_running": len(load.prompts), "tiers": tiers}
    engine = Engine.from_pretrained(folder, scale.device, torch.bfloat16, **how)
    port, ready, ended = free_port(), threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(serve(engine, folder, port, ready, ended)))
    thread.start()
    try:
        assert ready.wait(120)
        yield engine, port
    finally:
        ended.set()
        thread.join()
        engine.saver.close()
        settle(scale.device)


async def serve(
    engine: Engine, folder: Path, port: int, ready: threading.Event, ended: threading.Event
) -> None:
    options = ServerOptions(model=NAME, max_context_len=engine.max_context_len)
    async with AsyncEngine(engine) as shared:
        app = make_app(shared, ChatFormat.of(folder), options)
        http = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
        running = asyncio.create_task(http.serve())
        while not http.started:
            await asyncio.sleep(0.01)
        ready.set()
        await asyncio.to_thread(ended.wait)
        http.should_exit = True
        await running


def computed_by_vllm(port: int) -> float:
    """Return the prompt tokens that vLLM has computed."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()

    def total(name: str) -> float:
        found = re.findall(rf"^vllm:{name}(?:_total)?{{[^}}]*}} (\S+)$", text, re.M)
        return sum(map(float, found))

    return total("prefix_cache_queries") - total("prefix_cache_hits")


def measure(scale: Scale, shape: str, rival: bool, out: Path | None) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        folder.mkdir()
        load = Load.drawn(scale, write_model(scale, folder, shape))
        sides = {"floor": (None, True), "host tier": (4.0, False), "no tier": (None, False)}
        for side, (host, alone) in sides.items():
            with own_server(scale, folder, load, host) as (engine, port):
                asyncio.run(run(port, warm(load), alone))
                before = vars(engine.stats).copy()
                results[side] = asyncio.run(run(port, load, alone))
                counts = {name: vars(engine.stats)[name] - before[name] for name in before}
                answered = load.answer * TURNS * len(load.prompts)
                results[side]["computed / new"] = (counts["computed_tokens"] - answered) / load.new
                results[side] |= {name: float(count) for name, count in counts.items()}
                print(side, results[side], flush=True)
        if rival:
            port = free_port()
            command = [
                sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
                "--served-model-name", NAME, "--port", str(port),
                "--max-model-len", str(load.longest + 16), "--max-num-seqs",
                str(len(load.prompts)), "--enable-prefix-caching", "--gpu-memory-utilization",
                "0.6", "--num-gpu-blocks-override", str(load.tokens // 4 // 16),
            ]  # fmt: skip
            with server(command, port, (out or folder) / "bench_turns_vllm.log"):
                asyncio.run(run(port, warm(load)))
                before = computed_by_vllm(port)
                results["vLLM"] = asyncio.run(run(port, load))
                results["vLLM"]["computed / new"] = (computed_by_vllm(port) - before) / load.new
    for figures in results.values():
        figures["of floor"] = (
            figures["ms to first, median"] / results["floor"]["ms to first, median"]
        )
    return results


def warm(load: Load) -> Load:
    """Return a few conversations with other tokens, for graphs and compiled kernels."""
    prompts = [[[*reversed(new)] for new in turns] for turns in load.prompts[:8]]
    return load._replace(prompts=prompts, tools=[[0.1] * TURNS] * 8)


def main(arguments: list[str] | None = None) -> None:
    compare("bench_turns", __doc__, "qwen2.5-7b", measure, arguments)


if __name__ == "__main__":
    main()
