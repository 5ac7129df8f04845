"""What router replay costs and what it mends: layers of Qwen3-30B-A3B with random weights, bf16,
trained and served on one device. `make bench-replay`.

256 prompts of 128 tokens and as many new ones each: generation with and without experts returned,
the trainer's scores and update (bf16 masters) with and without replay, and the mismatch between
both sides' log-probabilities, beside that of a dense model of the same width.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3MoeConfig

from memsaver import MemorySaver
from rollout import Completion, Engine, SamplingParams
from tests.benchmarks.common import Scale, make_scale, median_ms, parser, report
from trainer_bridge import SequenceBatch, Trainer, TrainerConfig

Answers = list[list[Completion]]


def describe(scale: Scale, folder: Path, kind: Any, layers: int) -> str:
    choose = scale.choose
    config = kind(
        hidden_size=choose(2048, 32), intermediate_size=choose(6144, 48), num_hidden_layers=layers,
        num_attention_heads=choose(32, 4), num_key_value_heads=choose(4, 2),
        head_dim=choose(128, 16), vocab_size=choose(151936, 96), tie_word_embeddings=False,
        eos_token_id=None, bos_token_id=None, pad_token_id=None, max_position_embeddings=4096,
    )  # fmt: skip
    config.architectures = [f"{kind.__name__.removesuffix('Config')}ForCausalLM"]
    if kind is Qwen3MoeConfig:
        config.num_experts, config.num_experts_per_tok = choose(128, 8), choose(8, 2)
        config.moe_intermediate_size, config.norm_topk_prob = choose(768, 16), True
    config.save_pretrained(folder)
    GenerationConfig(eos_token_id=None).save_pretrained(folder)
    return str(folder)


def serve(scale: Scale, trainer: Trainer, returned: bool, time: bool = True) -> tuple[Any, ...]:
    """Prompts, what an engine with the trainer's weights answers to them, and its milliseconds."""
    batch, tokens = scale.choose(256, 6), scale.choose(128, 8)
    engine = Engine.from_pretrained(
        trainer.config.model_path, device=scale.device, dtype=torch.bfloat16, load_weights=False,
        kv_tokens=batch * 2 * (tokens + 16), max_running=batch, prefix_cache=False,
        max_prefill_tokens=scale.choose(8192, 32), return_routed_experts=returned,
        graph_batch_sizes=(batch,),
    )  # fmt: skip
    trainer.connect([engine])
    trainer.sync_weights(1)
    torch.manual_seed(0)
    prompts = torch.randint(engine.model.vocab_size, (batch, tokens)).tolist()
    params = SamplingParams(max_tokens=tokens, seed=0, ignore_eos=True)
    generate = partial(engine.generate, prompts, params)
    answers = generate()
    ms = median_ms(generate, scale.choose(3, 1), 0, scale.device) if time else 0.0
    engine.sleep(level=2)
    engine.saver.close()
    return prompts, answers, ms


def make_batch(prompts: list[list[int]], answers: Answers) -> SequenceBatch:
    said = [each for (each,) in answers]
    return SequenceBatch(
        prompt_ids=prompts,
        response_ids=[each.token_ids for each in said],
        old_logprobs=[each.logprobs for each in said],
        advantages=[1.0 - 2.0 * (i % 2) for i in range(len(said))],
    )


def mismatch(trainer: Trainer, batch: SequenceBatch) -> float:
    assert batch.old_logprobs is not None
    rows = zip(trainer.compute_log_prob(batch), batch.old_logprobs, strict=True)
    apart = (torch.tensor(one) - torch.tensor(other) for one, other in rows)
    return float(torch.stack([*apart]).abs().mean())


def made(scale: Scale, path: str) -> Trainer:
    config = TrainerConfig(
        model_path=path, random_init=True, device=str(scale.device), dtype="bfloat16",
        micro_batch_size=32, activation_checkpointing="layers", learning_rate=1e-9,
    )  # fmt: skip
    return Trainer(config, MemorySaver(device=scale.device))


def in_turn(scale: Scale, runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Medians of milliseconds, one of each after another, so that a slow second hits all."""
    rounds = [
        {name: median_ms(run, 1, int(i == 0), scale.device) for name, run in runs.items()}
        for i in range(scale.choose(3, 1))
    ]
    return {name: statistics.median(each[name] for each in rounds) for name in runs}


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, default=6)
    args = options.parse_args(arguments)
    scale = make_scale(args)
    layers = 2 if scale.tiny else args.layers
    mismatches, ms = dict[str, float](), dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        trainer = made(scale, describe(scale, Path(folder), Qwen3Config, layers))
        prompts, answers, _ = serve(scale, trainer, returned=False, time=False)
        mismatches["dense"] = mismatch(trainer, make_batch(prompts, answers))
        trainer.close()
        trainer.saver.close()
        del trainer
    with tempfile.TemporaryDirectory() as folder:
        trainer = made(scale, describe(scale, Path(folder), Qwen3MoeConfig, layers))
        _, _, ms["generate, without"] = serve(scale, trainer, returned=False)
        prompts, answers, ms["generate, with"] = serve(scale, trainer, returned=True)
        own = make_batch(prompts, answers)
        routed = [each.routed_experts for (each,) in answers]
        replayed = dataclasses.replace(own, routed_experts=routed)
        mismatches |= {
            "experts, without": mismatch(trainer, own),
            "experts, with": mismatch(trainer, replayed),
        }
        print(mismatches, ms, flush=True)
        for name in ("compute_log_prob", "update_actor"):
            run = getattr(trainer, name)
            both = {f"{name}, without": partial(run, own), f"{name}, with": partial(run, replayed)}
            ms |= in_turn(scale, both)
        trainer.close()
        trainer.saver.close()
    rows = [[name, value] for name, value in ms.items()]
    rows += [[f"mismatch, mean, {name}", value] for name, value in mismatches.items()]
    report(
        "bench_replay",
        [f"{layers} layers", "ms, or nats"],
        rows,
        {"ms": ms, "mismatches": mismatches},
        args.out,
    )


if __name__ == "__main__":
    main()
