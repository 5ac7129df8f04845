"""One update of the actor: time, share of the hardware's limit, and where the device waits.

`make bench-update`. For each case: milliseconds, trained tokens a second, the share of the limit
that the operations of the forward and backward pass take (recomputed layers do not count), the
share of the update in which the device computes, and the launches of a micro batch. The rival is
transformers' model of the same shape in bf16 with torch's AdamW, sdpa attention, and the same
sequences in padded micro batches. The limit is what bf16 products reach on an H100 or H200.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
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
from trainer_bridge import SequenceBatch

LIMIT = 790e12  # operations a second


class Update(NamedTuple):
    """An update of the actor."""

    shape: str
    layers: int | None  # None: all
    sequences: int
    prompt: int
    answer: int | None  # log-normal lengths, if None
    micro_batch: int  # sequences
    recomputed: Any  # see `TrainerConfig.activation_checkpointing`
    optimizer: Any = "adamw"


CASES = {
    "0.5b": Update("qwen2.5-0.5b", None, 64, 256, 768, 64, "mlp"),
    "0.5b, log-normal": Update("qwen2.5-0.5b", None, 64, 256, None, 64, "mlp"),
    "smollm2": Update("smollm2-135m", None, 512, 28, 12, 512, "none"),
    "7b": Update("qwen2.5-7b", None, 64, 128, 512, 16, "layers", "adamw_8bit"),
    "30b-a3b, 8 layers": Update("qwen3-30b-a3b", 8, 16, 256, 768, 16, "layers"),
}
TINY = Update("qwen2.5-0.5b", None, 4, 6, 5, 2, "layers")


def operations(fields: dict[str, Any], update: Update) -> float:
    """Return the operations of forward and backward: 6 a token and parameter that it uses."""
    model, answers = meta_model(fields), answer_lengths(update.sequences, update.answer)
    config, used, head = model.config, 0.0, 0
    for name, parameter in model.named_parameters():
        if "lm_head" in name:
            head = parameter.numel()
        elif "embed_tokens" in name:
            head = head or parameter.numel()  # tied
        elif ".experts." in name:
            used += parameter.numel() * config.num_experts_per_tok / config.num_experts
        else:
            used += parameter.numel()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs = sum((update.prompt + answer) ** 2 / 2 for answer in answers)
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * width * pairs
    tokens = sum(update.prompt + answer for answer in answers)
    return 6 * (used * tokens + head * sum(answers)) + attention


@contextmanager
def memsaver_update(scale: Scale, update: Update) -> Iterator[Callable[[], Any]]:
    options: dict[str, Any] = {
        "micro_batch_size": update.micro_batch,
        "activation_checkpointing": update.recomputed,
        "optimizer": update.optimizer,
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
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    model.train()
    if update.recomputed != "none":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=scale.on_gpu)
    prompts, answers = sequences(update, config.vocab_size)
    ids = [torch.tensor(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]

    def step() -> None:
        for first in range(0, len(ids), update.micro_batch):
            rows = ids[first : first + update.micro_batch]
            whole = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(scale.device)
            kept = whole.shape[1] - update.prompt
            logits = model(whole, use_cache=False, logits_to_keep=kept + 1).logits[:, :-1]
            targets = whole[:, -kept:]
            F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    yield step


SIDES = {"memsaver": memsaver_update, "transformers": transformers_update}


def sequences(update: Update, vocab: int) -> tuple[list[list[int]], list[list[int]]]:
    """Draw prompts and answers."""
    rng = random.Random(0)

    def draw(counts: Sequence[int]) -> list[list[int]]:
        return [[rng.randrange(vocab) for _ in range(count)] for count in counts]

    answers = answer_lengths(update.sequences, update.answer)
    return draw([update.prompt] * update.sequences), draw(answers)


def of_device(scale: Scale, run: Callable[[], Any]) -> tuple[float, int]:
    """Return the milliseconds of all kernels of a run, and their number; 0 on the CPU."""
    if not scale.on_gpu:
        return 0.0, 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = profile.key_averages()
    return sum(e.self_device_time_total for e in events) / 1e3, sum(e.count for e in events)


def main(arguments: list[str] | None = None) -> None:
    args = parser(__doc__, CASES).parse_args(arguments)
    scale = make_scale(args)
    cases = {"tiny": TINY} if scale.tiny else {name: CASES[name] for name in args.cases}
    rows, results = list[list[object]](), dict[str, dict[str, float]]()
    for name, update in cases.items():
        answers = answer_lengths(update.sequences, update.answer)
        tokens = sum(update.prompt + answer for answer in answers)
        work = operations(fields_of(scale, update.shape, update.layers), update)
        parts = -(-update.sequences // update.micro_batch)
        for side, build in SIDES.items():
            with build(scale, update) as run:
                took = median_ms(run, scale.choose(5, 1), scale.choose(2, 0))
                busy, launches = of_device(scale, run)
            torch.cuda.empty_cache()
            results[f"{name}, {side}"] = figures = {
                "ms": took,
                "tokens a second": 1e3 * tokens / took,
                "of the limit, %": 1e5 * work / took / LIMIT,
                "device busy, %": 100 * busy / took,
                "launches a micro batch": launches / parts,
            }
            rows.append([f"{name}, {side}", *figures.values()])
    head = ["update", *next(iter(results.values()))]
    report("bench_update", head, rows, {"updates": results}, args.out)


if __name__ == "__main__":
    main()
