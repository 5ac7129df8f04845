"""One vLLM in a process of its own: its memory by its own allocator, or by ours, and its weights by
its own loader, or by our trainer's sync. Prints figures as JSON lines; `bench_vllm` starts it.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GIB = 1 << 30


def say(what: str, value: float, unit: str = "ms") -> None:
    print(json.dumps({"what": what, "value": value, "unit": unit}), flush=True)


def timed(run: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3


def used() -> float:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1000, 150000) for _ in range(length)] for _ in range(count)]


def checkpoint(path: str, seed: int) -> dict[str, Tensor]:
    """Random bf16 weights on the GPU by their Hugging Face names."""
    from rollout.model import parameter_shapes

    generator = torch.Generator("cuda").manual_seed(seed)
    found = {}
    for name, shape in parameter_shapes(path)[0].items():
        drawn = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        drawn.normal_(0, 0.05, generator=generator)
        found[name] = drawn.fill_(1) if "norm" in name else drawn
    return found


OPTIONS: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 256, "seed": 0}


class Rival:
    """vLLM as it comes."""

    def __init__(self, path: str, kv_tokens: int, eager: bool) -> None:
        import vllm

        self.path, self.vllm = path, vllm
        self.llm = vllm.LLM(
            model=path, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
            enable_sleep_mode=True, gpu_memory_utilization=0.01, enforce_eager=eager,
            num_gpu_blocks_override=kv_tokens // 16 + 1,
            kv_cache_memory_bytes=torch.cuda.mem_get_info()[1], **OPTIONS,
        )  # fmt: skip
        self.tensors = checkpoint(path, 1)
        self.load()

    def load(self) -> None:
        self.llm.apply_model(lambda model: len(model.load_weights(self.tensors.items())))

    sync = load

    def sleep(self, level: int) -> None:
        self.llm.sleep(level)

    def wake(self, tag: str) -> None:
        self.llm.wake_up([tag])

    def answers(self, count: int, length: int, new: int, temperature: float) -> Any:
        params = self.vllm.SamplingParams(
            max_tokens=new, temperature=temperature, ignore_eos=True, detokenize=False, logprobs=0,
            flat_logprobs=True,
        )  # fmt: skip
        asked = [{"prompt_token_ids": each} for each in prompts(count, length, 5)]
        found = self.llm.generate(asked, params, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in found]

    def check(self) -> None:
        self.llm.reset_prefix_cache()


class Ours(Rival):
    """The same engine on our tags, its weights from our trainer."""

    def __init__(self, path: str, kv_tokens: int, eager: bool) -> None:
        from memsaver import MemorySaver
        from rollout.vllm import VllmRollout
        from trainer_bridge import Trainer, TrainerConfig

        started = time.perf_counter()
        self.rollout = VllmRollout.from_pretrained(
            path, load_weights=False, kv_tokens=kv_tokens, max_running=256, max_context_len=1024,
            cuda_graphs=not eager,
        )  # fmt: skip
        say("engine built", time.perf_counter() - started, "s")
        self.path = path
        self.saver = MemorySaver("cuda:0")
        config = TrainerConfig(model_path=path, device="cuda:0", random_init=True, dtype="bfloat16")
        self.trainer = Trainer(config, self.saver)
        # what the rival has
        given = checkpoint(path, 1)
        for name, shard in self.trainer.shards().items():
            shard.detach().copy_(given.pop(name))
        del given
        torch.cuda.empty_cache()
        say("connect", timed(lambda: self.trainer.connect([self.rollout])))
        self.version = 0
        self.sync()

    def sync(self) -> None:
        self.version += 1
        self.receipt = self.trainer.sync_weights(self.version)

    def load(self) -> None:
        shards = self.trainer.shards().items()
        self.rollout.engine.load_weights((name, each.detach()) for name, each in shards)

    def sleep(self, level: int) -> None:
        self.rollout.sleep(level)

    def wake(self, tag: str) -> None:
        self.rollout.wake_up([tag])

    def answers(self, count: int, length: int, new: int, temperature: float) -> Any:
        from rollout import SamplingParams

        params = SamplingParams(max_tokens=new, temperature=temperature, ignore_eos=True)
        found = self.rollout.generate(prompts(count, length, 5), params)
        return [group[0].token_ids for group in found]

    def check(self) -> None:
        self.rollout.engine.reset_prefix_cache()


def median(run: Callable[[], Any], repeats: int) -> float:
    return statistics.median(timed(run) for _ in range(repeats))


def rate(side: Rival) -> float:
    side.check()
    ms = timed(lambda: side.answers(256, 128, 128, 1.0))
    return 256 * 128 / ms * 1e3


def measure(side: Rival, cycles: int) -> None:
    side.check()
    first = side.answers(64, 128, 16, 0.0)
    rate(side)
    say("tokens a second, before the sleeps", statistics.median(rate(side) for _ in range(3)), "/s")
    say("new weights, first", timed(side.sync))
    say("new weights", median(side.sync, 5))
    if isinstance(side, Ours):
        say("of it the copy", side.receipt.copy_seconds * 1e3)
        say("of it the verification", side.receipt.verify_seconds * 1e3)
        say("its own load_weights from the trainer's shards", median(side.load, 5))
    before = used()
    say("device, awake", before, "GiB")
    rows: dict[str, list[float]] = {}
    for level in (2, 1):
        for turn in range(3):
            key = f"level {level}: "
            slept = timed(lambda level=level: side.sleep(level))
            if (level, turn) == (1, 0):
                say("level 1: sleep, first", slept)
            else:
                rows.setdefault(f"{key}sleep", []).append(slept)
            asleep = used()
            rows.setdefault(f"{key}wake weights", []).append(timed(lambda: side.wake("weights")))
            if level == 2:
                rows.setdefault(f"{key}new weights", []).append(timed(side.sync))
            rows.setdefault(f"{key}wake kv_cache", []).append(timed(lambda: side.wake("kv_cache")))
        say(f"level {level}: device, asleep", asleep, "GiB")
    for what, values in rows.items():
        say(what, statistics.median(values))
    for _ in range(cycles):
        side.sleep(2)
        side.wake("weights")
        side.sync()
        side.wake("kv_cache")
    side.check()
    same = sum(map(list.__eq__, first, side.answers(64, 128, 16, 0.0)))
    say("greedy answers as before, of 64", same, "")
    say("tokens a second, after", statistics.median(rate(side) for _ in range(3)), "/s")


def main(kind: str, path: str, kv_tokens: int, cycles: int, eager: bool) -> None:
    side = {"ours": Ours, "rival": Rival}[kind](path, kv_tokens, eager)
    measure(side, cycles)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    which, folder, kv, rounds, *flags = sys.argv[1:]
    try:
        main(which, str(Path(folder)), int(kv), int(rounds), "eager" in flags)
    finally:
        sys.stdout.flush()
    os._exit(0)
