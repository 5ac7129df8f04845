"""One update of the actor: time, share of the hardware's limit, and where the device waits.

`make bench-update`. For each case: milliseconds, trained tokens a second, the share of the limit
that the operations of the forward and backward pass take (recomputed layers do not count), the
share of the update in which the device computes, that in which it communicates (also beside its
work), and the launches of a micro batch. The rival is transformers' model of the same shape with
the kernels of liger-kernel, torch's FlashAttention over the same sequences packed end to end, and
fused AdamW, all in bf16. The limit is what bf16 products reach on an H100 or H200. `--kernels N`
prints the N kernels that take longest. Without liger-kernel, a GPU measures memsaver alone.

Cases of several GPUs run by `torchrun --nproc-per-node N -m benchmarks.bench_update`, sharded by
FSDP2 on both sides. Figures are then those of the first rank, shares those of all.
"""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from benchmarks.common import (
    Scale,
    fields_of,
    make_scale,
    median_ms,
    parser,
    random_trainer,
    report,
)
from benchmarks.vllm_side import answer_lengths
from recipes.setup.model_files import meta_model
from recipes.setup.operations import Operations
from trainer_bridge import SequenceBatch
from trainer_bridge.models.packing import PACKED, Packing, pack_if_possible

LIMIT = 790e12  # operations a second


class Update(NamedTuple):
    """An update of the actor."""

    shape: str
    layers: int | None  # None: all
    sequences: int
    prompt: int
    answer: int | None  # log-normal lengths, if None
    micro_batch: int  # sequences
    recomputed: Any  # see `TrainerConfig.activation_checkpointing`; the rival recomputes layers
    dtype: Any = "float32"  # of our masters and moments
    cuda_graphs: bool = False  # see `TrainerConfig`
    ranks: int = 1


CASES = {
    "0.5b": Update("qwen2.5-0.5b", None, 64, 256, 768, 64, "none"),
    "0.5b, log-normal": Update("qwen2.5-0.5b", None, 64, 256, None, 64, "none"),
    "0.5b, 8 at a time": Update("qwen2.5-0.5b", None, 64, 256, 768, 8, "none", cuda_graphs=True),
    "smollm2": Update("smollm2-135m", None, 512, 28, 12, 512, "none", cuda_graphs=True),
    "7b": Update("qwen2.5-7b", None, 64, 128, 512, 16, "layers", "bfloat16"),
    "30b-a3b, 8 layers": Update("qwen3-30b-a3b", 8, 16, 256, 768, 16, "layers", "bfloat16"),
    "7b, log-normal": Update("qwen2.5-7b", None, 64, 128, None, 16, "layers", "bfloat16", ranks=2),
    "32b, 24 layers": Update("qwen2.5-32b", 24, 32, 256, 768, 16, "layers", "bfloat16", ranks=2),
    "30b-a3b, 16 layers": Update(
        "qwen3-30b-a3b", 16, 32, 256, 768, 16, "layers", "bfloat16", ranks=2
    ),
}
RANK, RANKS = (int(os.environ.get(name, at)) for name, at in (("RANK", 0), ("WORLD_SIZE", 1)))
TINY = Update("qwen2.5-0.5b", None, 4, 6, 5, 2, "layers", ranks=RANKS)


def operations(fields: dict[str, Any], update: Update) -> float:
    """Return the operations of forward and backward."""
    model, answers = meta_model(fields), answer_lengths(update.sequences, update.answer)
    shapes = {name: param.shape for name, param in model.named_parameters()}
    lengths = [update.prompt + answer for answer in answers]
    return Operations.of(model.config, shapes).update(lengths, sum(answers))


@contextmanager
def memsaver_update(scale: Scale, update: Update) -> Iterator[Callable[[], Any]]:
    options: dict[str, Any] = {
        "micro_batch_size": update.micro_batch,
        "activation_checkpointing": update.recomputed,
        "dtype": update.dtype,
        "cuda_graphs": update.cuda_graphs,
    }
    with random_trainer(scale, update.shape, update.layers, **options) as trainer:
        prompts, answers = sequences(update, trainer.model.config.vocab_size)
        batch = SequenceBatch(
            prompt_ids=prompts,
            response_ids=answers,
            old_logprobs=[[-10.0] * len(answer) for answer in answers],
            advantages=[1.0 if i % 2 else -1.0 for i in range(len(answers))],
        )
        yield lambda: trainer.update_actor(batch)


@contextmanager
def transformers_update(scale: Scale, update: Update) -> Iterator[Callable[[], Any]]:
    config = meta_model(fields_of(scale, update.shape, update.layers)).config
    with scale.device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    pack_if_possible(model, PACKED)
    if scale.on_gpu:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        # The products of experts are transformers' own, for all experts at once.
        _apply_liger_kernel_to_instance(model, swiglu=not hasattr(config, "num_experts"))
    model.train()
    if update.recomputed == "layers":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if update.ranks > 1:
        for unit in (*model.get_decoder().layers, model):
            fully_shard(unit)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=scale.on_gpu)
    pairs = [*zip(*sequences(update, config.vocab_size), strict=True)]
    pairs, size = pairs[RANK :: update.ranks], update.micro_batch
    parts = [packed(scale, pairs[at : at + size]) for at in range(0, len(pairs), size)]

    def step() -> None:
        for part in parts:
            model(**part, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    yield step


def packed(scale: Scale, pairs: Sequence[tuple[list[int], list[int]]]) -> dict[str, Any]:
    """Return the arguments of a model for prompts with their answers, which are to be learned."""
    lengths = tuple(len(prompt) + len(answer) for prompt, answer in pairs)
    ids = [token for prompt, answer in pairs for token in prompt + answer]
    labels = [token for prompt, answer in pairs for token in [-100] * len(prompt) + answer]
    places = [place for length in lengths for place in range(length)]
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    tensors = (torch.tensor([row]).to(scale.device) for row in (ids, labels, places))
    named = dict(zip(("input_ids", "labels", "position_ids"), tensors, strict=True))
    packing = Packing(lengths, bounds.to(scale.device), named["position_ids"])
    return {**named, "packing": packing}


SIDES = {"memsaver": memsaver_update, "transformers": transformers_update}


def sequences(update: Update, vocab: int) -> tuple[list[list[int]], list[list[int]]]:
    """Draw prompts and answers."""
    rng = random.Random(0)

    def draw(counts: Sequence[int]) -> list[list[int]]:
        return [[rng.randrange(vocab) for _ in range(count)] for count in counts]

    answers = answer_lengths(update.sequences, update.answer)
    return draw([update.prompt] * update.sequences), draw(answers)


def of_device(scale: Scale, run: Callable[[], Any]) -> list[Any]:
    """Return the profiler's sums over a run for each kernel, the longest first."""
    if not scale.on_gpu:
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sorted(profile.key_averages(), key=lambda kernel: -kernel.self_device_time_total)


def measure(scale: Scale, update: Update, side: str, kernels: int) -> dict[str, float]:
    """Return a side's figures of an update, and print the kernels that take longest."""
    answers = answer_lengths(update.sequences, update.answer)
    work = operations(fields_of(scale, update.shape, update.layers), update)
    with SIDES[side](scale, update) as run:
        took = median_ms(run, scale.choose(5, 1), scale.choose(2, 0))
        times = of_device(scale, run)
    times = [kernel for kernel in times if kernel.self_device_time_total]  # without calls of CUDA
    for kernel in times[:kernels]:
        took_ms = kernel.self_device_time_total / 1e3
        print(f"  {took_ms:9.2f} ms, {kernel.count:6d} x {kernel.key[:100]}")
    moving = [kernel for kernel in times if "nccl" in kernel.key]
    busy, moved = (sum(k.self_device_time_total for k in part) / 1e3 for part in (times, moving))
    return {
        "ms": took,
        "tokens a second": 1e3 * sum(update.prompt + answer for answer in answers) / took,
        "of the limit, %": 1e5 * work / took / LIMIT / update.ranks,
        "device busy, %": 100 * (busy - moved) / took,
        "communication, %": 100 * moved / took,
        "launches a micro batch": sum(kernel.count for kernel in times)
        / -(-update.sequences // (update.ranks * update.micro_batch)),
    }


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__, CASES)
    options.add_argument("--kernels", type=int, default=0, help="kernels to print of each update")
    options.add_argument("--sides", nargs="+", choices=SIDES, default=[*SIDES])
    args = options.parse_args(arguments)
    scale = make_scale(args)
    if RANKS > 1:
        if scale.on_gpu:
            torch.cuda.set_device(scale.device)
        dist.init_process_group(device_id=scale.device if scale.on_gpu else None)
    named = {"tiny": TINY} if scale.tiny else {name: CASES[name] for name in args.cases}
    cases = {name: update for name, update in named.items() if update.ranks == RANKS}
    if not cases:
        raise SystemExit(f"no case is for {RANKS} processes; torchrun starts several")
    if scale.on_gpu and importlib.util.find_spec("liger_kernel") is None:
        print("transformers is left out: liger-kernel is not installed")
        args.sides = [side for side in args.sides if side != "transformers"]
    rows, results = list[list[object]](), dict[str, dict[str, float]]()
    # One side after the other: liger-kernel changes modules of transformers for the whole process.
    for side, (name, update) in product(args.sides, cases.items()):
        print(f"{name}, {side} ...", flush=True)
        try:
            results[f"{name}, {side}"] = figures = measure(scale, update, side, args.kernels)
        except torch.OutOfMemoryError:
            print("  out of memory")
            continue
        finally:
            torch.cuda.empty_cache()
        rows.append([f"{name}, {side}", *figures.values()])
    if RANK:
        return
    head = ["update", *next(iter(results.values()))]
    report("bench_update", head, rows, {"updates": results}, args.out)


if __name__ == "__main__":
    main()
