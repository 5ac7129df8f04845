"""Tensor-parallel engines and the exact trainer that follows them, on the same ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from rollout import Completion, Engine, SamplingParams
from trainer_bridge import SequenceBatch, Trainer, TrainerConfig

HEAT = 0.7
SAMPLED = SamplingParams(max_tokens=8, temperature=HEAT, seed=5)
Prompts = Sequence[list[int]]


def sampled_batch(prompts: Prompts, answers: Sequence[Completion]) -> SequenceBatch:
    """Return the batch of one answer to each prompt."""
    return SequenceBatch(
        prompt_ids=prompts,
        response_ids=[answer.token_ids for answer in answers],
        rollout_logprobs=[answer.logprobs for answer in answers],
        advantages=[1.0 if number % 3 else -1.0 for number in range(len(answers))],
        temperature=HEAT,
    )


def sample(engine: Engine, prompts: Prompts) -> list[Completion]:
    return [answer for (answer,) in engine.generate(prompts, SAMPLED)]


def unequal_in_rounds(
    rank: int, config: TrainerConfig, engines: Sequence[dict[str, Any]], prompts: Prompts
) -> list[float]:
    """Return the counts of unequal tokens in two rounds of sync, sampling and an update.

    All ranks, `config.exact_ranks` of them, share the trainer and each of the engines, which differ
    in how they batch.
    """
    if config.device != "cpu":
        config = dataclasses.replace(config, device=f"cuda:{rank}")
    trainer = Trainer(config)
    settings: dict[str, Any] = {
        "dtype": getattr(torch, config.param_dtype or "float32"), "exact": True,
        "tensor_parallel_size": config.exact_ranks, "expert_parallel": config.exact_expert_parallel,
        "group": dist.group.WORLD, "load_weights": False,
    }  # fmt: skip
    made = [
        Engine.from_pretrained(config.model_path, config.device, **settings, **options)
        for options in engines
    ]
    trainer.connect(made)
    counts = []
    for version in (1, 2):
        trainer.sync_weights(version)
        first, *others = (sample(engine, prompts) for engine in made)
        for answers in others:
            assert [a.token_ids for a in answers] == [a.token_ids for a in first]
            assert [a.logprobs for a in answers] == [a.logprobs for a in first]
        batch = sampled_batch(prompts, first)
        assert trainer.compute_log_prob(batch) == batch.rollout_logprobs
        figures = trainer.update_actor(batch)
        assert figures["mismatch_max"] == 0 < figures["grad_norm"]
        counts.append(figures["unequal_tokens"])
    trainer.close()
    return counts
