"""First tokens of later turns while tools take time: our tiers, recomputation, vLLM's prefix cache.

64 conversations of four turns, each turn with 950 new prompt tokens and 50 of an answer, tools of
0.1 to 10 s before each (log-normal, median 3.3 s, seed fixed), and device KV for a quarter of all
tokens. The floor asks for the new tokens of each turn alone, on the same schedule. `--rival` adds
vLLM's server, which must be importable:

    python -m benchmarks.bench_turns --shape qwen2.5-7b --rival
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.bench_serve import NAME, compare, events, free_port, server, write_model
from benchmarks.common import Scale

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


class Turn(NamedTuple):
    """One answer: the seconds to its first token, its tokens, and what the prompt cost."""

    first: float
    ids: list[int]
    computed: int  # prompt tokens that did not come from the prefix cache


async def ask(port: int, prompt: list[int], most: int) -> Turn:
    """Ask for an answer as a stream."""
    body = {"prompt": prompt, "max_tokens": most, "return_token_ids": True}
    body["stream_options"] = {"include_usage": True}
    began = first = 0.0
    ids, cached = list[int](), 0
    async for event in events(port, body):
        now = time.perf_counter()
        began = began or now
        told = json.loads(event or b"{}")
        for choice in told.get("choices", ()):
            ids += choice.get("token_ids") or []
            first = first or (now if ids else 0.0)
        if usage := told.get("usage"):
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    assert len(ids) == most, f"{len(ids)} tokens came"
    return Turn(first - began, ids, len(prompt) - cached)


async def converse(port: int, load: Load, number: int, alone: bool) -> list[Turn]:
    """Return the turns of a conversation; `alone`: each without the earlier ones."""
    turns, history = list[Turn](), list[int]()
    for turn, new in enumerate(load.prompts[number]):
        await asyncio.sleep(load.tools[number][turn])
        history = new if alone else history + new
        turns.append(await ask(port, history, load.answer))
        history = history + turns[-1].ids
    return turns


async def run(port: int, load: Load, alone: bool = False) -> dict[str, float]:
    """Let all conversations run; return figures of first tokens in later turns."""
    began, numbers = time.perf_counter(), range(len(load.prompts))
    talks = await asyncio.gather(*(converse(port, load, number, alone) for number in numbers))
    later = [turn.first for turns in talks for turn in turns[1:]]
    return {
        "ms to first, median": 1e3 * statistics.median(later),
        "ms to first, p90": 1e3 * statistics.quantiles(later, n=10)[-1],
        "computed / new": sum(turn.computed for turn in chain.from_iterable(talks)) / load.new,
        "seconds": time.perf_counter() - began,
    }


def measure(scale: Scale, shape: str, rival: bool, out: Path | None) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name) / "model", str(free_port())
        folder.mkdir()
        load = Load.drawn(scale, write_model(scale, folder, shape))
        running = len(load.prompts)
        own = [
            sys.executable, "-m", "memsaver", "serve", str(folder), "--name", NAME, "--port", port,
            f"kv_tokens={load.tokens // 4}", f"max_running={running}",
        ]  # fmt: skip
        sides = {"floor": own, "host tier": [*own, "tiers.host_ratio=4.0"], "no tier": own}
        if rival:
            sides["vLLM"] = [
                sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
                "--served-model-name", NAME, "--port", port, "--max-model-len",
                str(load.longest + 16), "--max-num-seqs", str(running), "--enable-prefix-caching",
                "--enable-prompt-tokens-details", "--gpu-memory-utilization", "0.6",
                "--num-gpu-blocks-override", str(load.tokens // 4 // 16),
            ]  # fmt: skip
        for side, command in sides.items():
            log = (out or folder) / f"bench_turns_{side.split()[0]}.log"
            with server(command, int(port), log):
                asyncio.run(run(int(port), warm(load), side == "floor"))
                results[side] = asyncio.run(run(int(port), load, side == "floor"))
                print(side, results[side], flush=True)
    floor = results["floor"]["ms to first, median"]
    for figures in results.values():
        figures["of floor"] = figures["ms to first, median"] / floor
    return results


def warm(load: Load) -> Load:
    """Return a few conversations with other tokens, for graphs and compiled kernels."""
    prompts = [[[*reversed(new)] for new in turns] for turns in load.prompts[:8]]
    return load._replace(prompts=prompts, tools=[[0.1] * TURNS] * 8)


def main(arguments: list[str] | None = None) -> None:
    compare("bench_turns", __doc__, "qwen2.5-7b", measure, arguments)


if __name__ == "__main__":
    main()
