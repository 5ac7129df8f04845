"""vLLM in its own process, for `bench_vllm`.

It runs with its own allocator and loader, or on our tags with our sync. Our own engine can run the
same model, for throughput only. The process prints figures as JSON lines after it has read a line.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

GIB = 1 << 30
SEQUENCES = 256
WORKLOADS = {  # number of prompts, tokens of each, and of its answer (None: log-normal)
    "short": (256, 128, 128),
    "long": (256, 512, 512),
    "log-normal": (512, 128, None),
    "prompts": (64, 8192, 128),
}
MEAN, MOST = 390, 2048  # tokens of log-normal answers; sigma is 1
# for --quick: the engine is built in seconds
QUICK = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 16, 64, 128, 256],
}


def say(what: str, value: float, unit: str = "ms") -> None:
    print(json.dumps({"what": what, "value": value, "unit": unit}), flush=True)


def timed(run: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3


def median(run: Callable[[], Any], repeats: int = 5) -> float:
    return statistics.median(timed(run) for _ in range(repeats))


def used() -> float:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


class Size(NamedTuple):
    """Sizes of an engine."""

    kv_tokens: int
    context: int
    quick: bool  # few CUDA graphs, and no torch.compile
    adapters: int  # low-rank adapters, which requests take in turn


def prompts(count: int, length: int = 128) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(1000, 150000) for _ in range(length)] for _ in range(count)]


def answer_lengths(count: int, length: int | None) -> list[int]:
    """Return the numbers of new tokens, which are log-normal without a length."""
    if length is not None:
        return [length] * count
    rng, mu = random.Random(7), math.log(MEAN) - 0.5
    return [min(MOST, max(1, round(rng.lognormvariate(mu, 1)))) for _ in range(count)]


def checkpoint(path: str) -> dict[str, Tensor]:
    """Draw bf16 weights on the GPU, by Hugging Face name, which are the same in every process."""
    from rollout.model import parameter_shapes

    generator = torch.Generator("cuda").manual_seed(1)
    tensors = {}
    for name, shape in parameter_shapes(path)[0].items():
        drawn = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        drawn.normal_(0, 0.05, generator=generator)
        tensors[name] = drawn.fill_(1) if "norm" in name else drawn
    return tensors


def adapters(path: str, count: int) -> tuple[int, list[str]]:
    """Write `count` random adapters on all layers as PEFT does; return rank and folders."""
    from safetensors.torch import save_file

    from rollout.model import parameter_shapes

    rank = 32 if count == 1 else 16
    shapes = parameter_shapes(path)[0] if count else {}
    adapted = {name: shape for name, shape in shapes.items() if "_proj.weight" in name}
    modules = sorted({name.split(".")[-2] for name in adapted})
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
    folders = []
    for number in range(count):
        draw = torch.Generator().manual_seed(number)
        folder = Path(path) / f"adapter{number}"
        folder.mkdir(exist_ok=True)
        factors = {}
        for name, (rows, columns) in adapted.items():
            layer = "base_model.model." + name.removesuffix(".weight")
            for factor, shape in {"A": (rank, columns), "B": (rows, rank)}.items():
                drawn = torch.randn(shape, generator=draw, dtype=torch.bfloat16)
                factors[f"{layer}.lora_{factor}.weight"] = drawn * 1e-3
        save_file(factors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(described))
        folders.append(str(folder))
    return rank, folders


class Rival:
    """vLLM without changes."""

    tensors: dict[str, Tensor]
    folders: Sequence[str]  # of adapters
    keeps = True  # level 1 keeps the weights

    def __init__(self, path: str, size: Size) -> None:
        import vllm

        self.vllm = vllm
        rank, self.folders = adapters(path, size.adapters)
        lora = {"enable_lora": True, "max_loras": len(self.folders), "max_lora_rank": rank}
        self.llm = vllm.LLM(
            model=path,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enable_sleep_mode=True,
            gpu_memory_utilization=0.01,
            num_gpu_blocks_override=size.kv_tokens // 16 + 1,
            kv_cache_memory_bytes=torch.cuda.mem_get_info()[1],
            max_model_len=size.context,
            max_num_seqs=SEQUENCES,
            max_num_batched_tokens=8192,
            logprobs_mode="processed_logprobs",
            **(lora if self.folders else {}),
            **({"compilation_config": QUICK} if size.quick else {}),
        )

    def give(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def load(self) -> None:
        """Load the weights by vLLM's own loader."""
        self.llm.apply_model(lambda model: len(model.load_weights(self.tensors.items())))

    sync = load

    def prepare(self) -> None:
        """Prepare for level 1 in the background, if the side can."""

    def sleep(self, level: int) -> None:
        self.llm.sleep(level)

    def wake(self, tag: str) -> None:
        self.llm.wake_up([tag])

    def answers(
        self, given: list[list[int]], lengths: list[int], temperature: float
    ) -> list[list[int]]:
        params = [
            self.vllm.SamplingParams(
                max_tokens=new,
                temperature=temperature,
                ignore_eos=True,
                detokenize=False,
                logprobs=0,
                flat_logprobs=True,
            )
            for new in lengths
        ]
        requests = [{"prompt_token_ids": prompt} for prompt in given]
        how: dict[str, Any] = {"use_tqdm": False}
        if self.folders:
            from vllm.lora.request import LoRARequest

            made = [LoRARequest(path, at + 1, path) for at, path in enumerate(self.folders)]
            how["lora_request"] = [made[at % len(made)] for at in range(len(given))]
        completed = self.llm.generate(requests, params, **how)
        return [list(request.outputs[0].token_ids) for request in completed]

    def forget(self) -> None:
        self.llm.reset_prefix_cache()


class Ours(Rival):
    """The same engine on our tags; `sync` writes like a trainer with one rank."""

    folders: Sequence[str] = ()

    def __init__(self, path: str, size: Size) -> None:
        from rollout.hosted import VllmRollout

        self.rollout = VllmRollout.from_pretrained(
            path,
            load_weights=False,
            kv_tokens=size.kv_tokens,
            max_running=SEQUENCES,
            max_context_len=size.context,
            **({"compilation_config": QUICK} if size.quick else {}),
        )
        self.version = 0

    def give(self, tensors: dict[str, Tensor]) -> None:
        from memsaver.system.devices import place_of
        from trainer_bridge.sync.shards import shard_of
        from trainer_bridge.sync.weight_sync import WeightSync

        self.tensors = tensors
        shards = [shard_of(name, tensor, 0) for name, tensor in tensors.items()]
        place = place_of(torch.device("cuda:0"))

        def connect() -> None:
            self.writer = WeightSync(shards, lambda: tensors, [self.rollout], place=place)

        say("connect", timed(connect))

    def load(self) -> None:
        self.rollout.engine.model.load_weights(self.tensors.items())

    def sync(self) -> None:
        self.version += 1
        self.receipt = self.writer.sync(self.version)

    def prepare(self) -> None:
        self.rollout.prepare_sleep()

    def sleep(self, level: int) -> None:
        self.rollout.sleep(level)

    def wake(self, tag: str) -> None:
        self.rollout.wake_up([tag])

    def answers(
        self, given: list[list[int]], lengths: list[int], temperature: float
    ) -> list[list[int]]:
        from rollout import SamplingParams

        named = self.folders or [None]
        params = [
            SamplingParams(
                max_tokens=new,
                temperature=temperature,
                ignore_eos=True,
                adapter=named[at % len(named)],
            )
            for at, new in enumerate(lengths)
        ]
        return [group[0].token_ids for group in self.rollout.generate(given, params)]

    def forget(self) -> None:
        self.rollout.engine.reset_prefix_cache()


def draw_weights(engine: Any, path: str) -> None:
    """Give our own engine small weights, like vLLM's dummy weights."""
    from rollout.model import parameter_shapes

    made: Any = {"dtype": torch.bfloat16, "device": engine.saver.device}
    shapes = parameter_shapes(path)[0].items()
    drawn = ((name, torch.empty(shape, **made).uniform_(-1e-3, 1e-3)) for name, shape in shapes)
    engine.store.load(drawn, "drawn")


class Native(Ours):
    """Our own engine, with weights drawn like vLLM's dummy weights."""

    def __init__(self, path: str, size: Size) -> None:
        from rollout import AdapterSlots, Engine

        rank, self.folders = adapters(path, size.adapters)
        slots = AdapterSlots(slots=len(self.folders), rank=rank) if self.folders else None
        self.rollout = Engine.from_pretrained(
            path,
            device="cuda",
            dtype=torch.bfloat16,
            load_weights=False,
            kv_tokens=size.kv_tokens,
            max_running=SEQUENCES,
            max_context_len=size.context,
            max_prefill_tokens=4096,
            prefix_cache=False,
            adapters=slots,
        )
        draw_weights(self.rollout, path)
        for folder in self.folders:
            self.rollout.load_adapter(folder, folder)

    def forget(self) -> None:
        """Do nothing: there is no prefix cache."""


def greedy(side: Rival) -> list[list[int]]:
    side.forget()
    return side.answers(prompts(64), [16] * 64, 0.0)


def throughput(side: Rival, when: str, workload: str = "short", passes: int = 8) -> None:
    """Report the median, slowest and fastest of the passes after the first, which compiles."""
    rates = []
    count, prompt, answer = WORKLOADS[workload]
    given, lengths = prompts(count, prompt), answer_lengths(count, answer)
    for _ in range(passes):
        side.forget()
        rates.append(sum(lengths) / timed(lambda: side.answers(given, lengths, 1.0)) * 1e3)
    say(f"new tokens a second, {when}", statistics.median(rates[1:]), "")
    say(f"new tokens a second, {when}, slowest", min(rates[1:]), "")
    say(f"new tokens a second, {when}, fastest", max(rates[1:]), "")


def weights(side: Rival) -> None:
    say("new weights, first", timed(side.sync))
    say("new weights", median(side.sync))
    if hasattr(side, "receipt"):
        say("new weights: copy", side.receipt.copy_seconds * 1e3)
        say("new weights: verification", side.receipt.verify_seconds * 1e3)
        say("its own load_weights of the same tensors", median(side.load))


def level_2(side: Rival, asleep: float, turns: int = 5) -> None:
    """Measure sleeps of `asleep` seconds; the driver takes a moment to clear the freed memory."""
    rows: dict[str, list[float]] = defaultdict(list)
    for _ in range(turns):
        before = used()
        rows["sleep"].append(timed(lambda: side.sleep(2)))
        freed = before - used()
        time.sleep(asleep)
        rows["wake weights"].append(timed(lambda: side.wake("weights")))
        rows["new weights"].append(timed(side.sync))
        rows["wake kv_cache"].append(timed(lambda: side.wake("kv_cache")))
    say(f"level 2, {asleep} s: freed", freed, "GiB")
    for what, values in rows.items():
        say(f"level 2, {asleep} s: {what}", statistics.median(values))


def level_1(side: Rival, turns: int = 3) -> None:
    rows: dict[str, list[float]] = defaultdict(list)
    for turn in range(turns):
        rows["sleep" if turn else "sleep, first"].append(timed(lambda: side.sleep(1)))
        rows["wake weights"].append(timed(lambda: side.wake("weights")))
        rows["wake kv_cache"].append(timed(lambda: side.wake("kv_cache")))
    for what, values in rows.items():
        say(f"level 1: {what}", statistics.median(values))


def through_cycles(side: Rival, cycles: int, first: list[list[int]]) -> None:
    """Switch between two sets of weights, with a sleep before each; check the greedy answers."""
    wanted: dict[int, list[list[int]]] = {0: first}
    right = 0
    for turn in range(1, cycles + 1):
        side.sleep(2)
        for name, tensor in side.tensors.items():
            if "q_proj" in name:
                tensor.neg_()  # exact, and undone by the next turn
        side.wake("weights")
        side.sync()
        side.wake("kv_cache")
        right += wanted.setdefault(turn % 2, answers := greedy(side)) == answers
    assert cycles < 1 or wanted[1] != first
    say(f"cycles of {cycles} whose 64 greedy answers are right", right, "")


def main(
    kinds: dict[str, Any], kind: str, path: str, size: Size, cycles: int, workloads: list[str]
) -> None:
    started = time.perf_counter()
    side = kinds[kind](path, size)
    say("engine built", time.perf_counter() - started, "s")
    print("ready", flush=True)
    sys.stdin.readline()
    for workload in workloads:
        throughput(side, workload, workload, 8 if workload == "short" else 3)
    if workloads:
        return
    side.give(checkpoint(path))
    weights(side)
    first = greedy(side)
    print(json.dumps({"answers": first}), flush=True)
    for asleep in (0.0, 0.5):
        level_2(side, asleep)
    throughput(side, "before the cycles")
    if side.keeps:
        side.prepare()  # a cycle does so when it is made; later it would overlap with timed work
    through_cycles(side, cycles, first)
    throughput(side, "after")
    if side.keeps:
        level_1(side)
    same = sum(map(list.__eq__, greedy(side), first))
    say("greedy answers of 64 equal to the first, at the end", same, "")


def run(kinds: dict[str, Any], words: list[str]) -> None:
    """Run the measurement that `bench_vllm` asks for, and end this process."""
    kind, folder, kv, context, quick, count, cycles, *workloads = words
    try:
        main(
            kinds,
            kind,
            folder,
            Size(int(kv), int(context), quick == "quick", int(count)),
            int(cycles),
            workloads,
        )
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    run({"ours": Ours, "rival": Rival, "native": Native}, sys.argv[1:])
