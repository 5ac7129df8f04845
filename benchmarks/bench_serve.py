"""Streaming clients of `memsaver serve` against blocking calls of the engine, and vLLM's server.

`make bench-rollout`, at the Qwen2.5-0.5B shape. 256 clients in a process of their own, each with
one streamed completion of token ids: tokens a second, times between two events of a stream, and the
first token of a request that comes beside 255 others. Each server has processes of its own, and the
same model folder. `--rival` adds vLLM's server, which must be importable:

    python -m benchmarks.bench_serve --shape qwen2.5-7b --rival
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Scale, fields_of, make_scale, parser, random_model, report, settle
from rollout import Engine, SamplingParams

PASSES = 5
START_SECONDS = 400
CONTEXT = 512
NAME = "m"


def write_model(scale: Scale, folder: Path, shape: str) -> int:
    """Save a random model, and a tokenizer with a word for each token; return the vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    random_model(scale, folder, shape, torch.bfloat16)
    settle(scale.device)
    size = int(fields_of(scale, shape)["vocab_size"])
    core = Tokenizer(
        models.WordLevel({f"w{token}": token for token in range(size)}, unk_token="w0")
    )
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="w1").save_pretrained(folder)
    return size


def blocking(scale: Scale, folder: Path, given: list[list[int]], answer: int, kv: int) -> float:
    """Return the seconds of a blocking call, the median after one that compiles."""
    plain: dict[str, Any] = {"kv_tokens": kv, "max_running": len(given), "prefix_cache": False}
    engine = Engine.from_pretrained(folder, scale.device, torch.bfloat16, **plain)
    params = SamplingParams(max_tokens=answer, ignore_eos=True)
    seconds = []
    for _ in range(PASSES + 1):
        began = time.perf_counter()
        engine.generate(given, params)
        seconds.append(time.perf_counter() - began)
    engine.saver.close()
    del engine
    settle(scale.device)
    return statistics.median(seconds[1:])


@contextlib.contextmanager
def server(command: list[str], port: int, log: Path) -> Iterator[None]:
    """Run a server, which the block may ask."""
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + START_SECONDS
            while not _answers(port):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the server did not start:\n{log.read_text()[-2000:]}")
                time.sleep(0.2)
            yield
        finally:
            process.terminate()
            process.wait(30)


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        return bool(urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5))
    return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


async def events(port: int, body: dict[str, Any]) -> AsyncIterator[bytes]:
    """Yield the events of a streamed completion, after an empty one when the request is sent."""
    sent = json.dumps({"model": NAME, "stream": True, "ignore_eos": True, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(sent)}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + sent)
    yield b""
    while (line := await reader.readline()) != b"data: [DONE]\n":
        assert line, "the server closed a stream"
        if line.startswith(b"data: "):
            assert b'"error"' not in line, line
            yield line.removeprefix(b"data: ")
    writer.close()


async def stream(port: int, prompt: list[int], answer: int) -> list[float]:
    """Return when a completion was asked for, and when each of its events came."""
    body = {"prompt": prompt, "max_tokens": answer}
    return [time.perf_counter() async for _ in events(port, body)]


async def clients(port: int, given: list[list[int]], answer: int) -> dict[str, float]:
    """Return the medians of asking for all completions at once, several times."""
    seconds, gaps, firsts = [], list[float](), []
    for number in range(PASSES + 1):
        began = time.perf_counter()
        times = await asyncio.gather(*(stream(port, prompt, answer) for prompt in given))
        took = time.perf_counter() - began
        others = [asyncio.create_task(stream(port, prompt, answer)) for prompt in given[1:]]
        await asyncio.sleep(took / 2)
        late = await stream(port, given[0], answer)
        await asyncio.gather(*others)
        if number:
            seconds.append(took)
            firsts.append(late[1] - late[0])
            for events in times:
                gaps += [then - first for first, then in pairwise(events[1:])]
    return {
        "seconds": statistics.median(seconds),
        "ms between events, median": 1e3 * statistics.median(gaps),
        "ms between events, p99": 1e3 * statistics.quantiles(gaps, n=100)[-1],
        "ms to the first token beside the others": 1e3 * statistics.median(firsts),
    }


def measure(scale: Scale, shape: str, rival: bool, out: Path | None) -> dict[str, Any]:
    count, prompt, answer = scale.choose(256, 4), scale.choose(128, 8), scale.choose(128, 8)
    kv = count * (prompt + answer + 16)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name) / "model", str(free_port())
        folder.mkdir()
        vocab = write_model(scale, folder, shape)
        torch.manual_seed(0)
        given = torch.randint(vocab, (count, prompt)).tolist()
        blocked = blocking(scale, folder, given, answer, kv)
        results["blocking"] = {"seconds": blocked}
        settings = [f"kv_tokens={kv}", f"max_running={count}", "prefix_cache=false"]
        sides = {"memsaver serve": [
            sys.executable, "-m", "memsaver", "serve", str(folder), "--name", NAME, "--port", port,
            *settings,
        ]}  # fmt: skip
        if rival:
            sides["vLLM's server"] = [
                sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
                "--served-model-name", NAME, "--port", port, "--max-model-len", str(CONTEXT),
                "--max-num-seqs", str(count), "--gpu-memory-utilization", "0.6",
                "--no-enable-prefix-caching",
            ]  # fmt: skip
        for side, command in sides.items():
            log = (out or folder) / f"bench_serve_{side.split()[0]}.log"
            with server(command, int(port), log):
                results[side] = asyncio.run(clients(int(port), given, answer))
        for figures in results.values():
            figures["tokens a second"] = count * answer / figures["seconds"]
            figures["of blocking"] = blocked / figures["seconds"]
    return results


Measure = Callable[[Scale, str, bool, Path | None], dict[str, Any]]
"""(scale, shape, whether to measure the rival, folder) -> figures by side."""


def compare(
    name: str, text: str | None, shape: str, measure: Measure, arguments: list[str] | None
) -> None:
    """Run a script that compares servers, of which `--rival` adds vLLM's; print its table."""
    options = parser(text)
    options.add_argument("--shape", default=shape, help="as a recipe's model.shape")
    options.add_argument("--rival", action="store_true", help="vLLM's server, too")
    args = options.parse_args(arguments)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    results = measure(make_scale(args), args.shape, args.rival, args.out)
    names = [*dict.fromkeys(name for figures in results.values() for name in figures)]
    rows = [[side, *(figures.get(name, "") for name in names)] for side, figures in results.items()]
    report(name, [args.shape, *names], rows, results, args.out)


def main(arguments: list[str] | None = None) -> None:
    compare("bench_serve", __doc__, "qwen2.5-0.5b", measure, arguments)


if __name__ == "__main__":
    main()
