"""The whole cycle with real models: the rollout generates what transformers generates with the
trainer's weights.

After every stage that frees memory another process fills what was freed with 0xFF.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memsaver import StateError
from rollout import Completion, SamplingParams
from tests.helpers.effort import rounds
from tests.helpers.memory import Scribbler, memory_maps, settled_fds
from tests.helpers.models import DEEPSEEK_MOE, MLA
from tests.helpers.trainer_bridge.models import config, make_batch, reference, write_model
from tests.helpers.trainer_bridge.tolerance import assert_scores
from trainer_bridge import Cycle, SequenceBatch, Trainer, open_inprocess

MODELS = {
    "llama": {"tie_word_embeddings": False, "num_key_value_heads": 1, "attention_bias": False},
    "qwen2": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "qwen3_moe": {"tie_word_embeddings": True, "num_experts": 5, "norm_topk_prob": True},
    "deepseek_v3": {**MLA, **DEEPSEEK_MOE, "head_dim": 8, "tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": False, "num_key_value_heads": 2, "head_dim": 24},
}
LONG = ("llama", "deepseek_v3")
LENGTHS = [1, 2, 15, 16, 17, 64, 200, 500]


@pytest.fixture
def scribbler(device: str) -> Iterator[Scribbler]:
    other = Scribbler(device)
    yield other
    other.close()


def prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(96) for _ in range(length)] for length in LENGTHS]


@torch.no_grad()
def expected(trainer: Trainer, path: str, inputs: list[list[int]], tokens: int) -> list[list[int]]:
    """Greedy continuations by `transformers.generate` with the trainer's present weights."""
    model = reference(path).to(trainer.device)
    own = dict(model.named_parameters())
    for name, shard in trainer.shards().items():
        own[name].copy_(shard)
    out = []
    for ids in inputs:
        given = torch.tensor([ids], device=trainer.device)
        mask = torch.ones_like(given)
        full = model.generate(
            given, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
        out.append(full[0, len(ids) :].tolist())
    return out


def ids_of(out: list[list[Completion]]) -> list[list[int]]:
    return [group[0].token_ids for group in out]


def committed(side: Any) -> dict[str, int]:
    return {tag: entry.committed_bytes for tag, entry in side.report().tags.items()}


def check_scores(out: list[list[Completion]], inputs: list[list[int]], trainer: Trainer) -> None:
    """The rollout's log-probabilities are the trainer's."""
    samples = [(ids, sample) for ids, group in zip(inputs, out, strict=True) for sample in group]
    batch = SequenceBatch(
        prompt_ids=[ids for ids, _ in samples], response_ids=[list(s.token_ids) for _, s in samples]
    )
    assert_scores(trainer.compute_log_prob(batch), [sample.logprobs for _, sample in samples])


@pytest.mark.soak
@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=[pytest.mark.extended] * (each in LONG)) for each in MODELS],
)
def test_rounds_match_transformers(
    family: str, device: str, tmp_path: Path, scribbler: Scribbler
) -> None:
    shape: dict[str, Any] = {"max_position_embeddings": 640, **MODELS[family]}
    path = write_model(tmp_path / family, family, **shape)
    engine = {"kv_tokens": 2048, "page_size": 16, "max_prefill_tokens": 96}
    trainer_config = config(path, device=device, learning_rate=3e-3)
    with open_inprocess(trainer_config, engine) as (trainer, rollout):
        cycle = Cycle(trainer, rollout, on_stage=lambda *_: scribbler.fill(8 << 20))
        counts, full = [], committed(trainer)
        assert rollout.report().committed_bytes == 0
        last = rounds(8, 100)
        for version in range(1, last + 1):
            before = {name: shard.clone() for name, shard in trainer.shards().items()}
            thorough = version in (1, last)
            inputs, tokens = (prompts(version), 12) if thorough else (prompts(version)[1:5:2], 4)
            wanted = expected(trainer, path, inputs, tokens)
            assert cycle.to_rollout(version).version == rollout.weights_version == version
            assert trainer.report().committed_bytes == 0 < min(committed(rollout).values())
            assert trainer.report().backup_bytes == sum(
                tag.live_bytes for tag in trainer.report().tags.values()
            )
            greedy = rollout.generate(inputs, SamplingParams(max_tokens=tokens, temperature=0))
            assert ids_of(greedy) == wanted
            sampled = rollout.generate(inputs, SamplingParams(max_tokens=8, seed=version, n=2))
            assert {v for group in sampled for s in group for v in s.weight_versions} == {version}
            cycle.to_score()
            assert rollout.report().committed_bytes == 0 == committed(trainer)["optim"]
            with pytest.raises(StateError, match="kv_cache"):
                rollout.generate(inputs, SamplingParams())
            for name, shard in trainer.shards().items():
                assert torch.equal(shard, before[name]), f"{name} changed while it was parked"
            check_scores(sampled, inputs, trainer)
            cycle.to_train()
            assert committed(trainer) == full and trainer.report().backup_bytes == 0
            trainer.update_actor(make_batch(6, seed=version))
            trainer.saver.check_integrity()
            rollout.saver.check_integrity()
            rollout.check_integrity()
            if version in (3, last):
                counts.append((settled_fds(), memory_maps(), trainer.report().committed_bytes))
        first, after = counts
        assert after[2] == first[2]
        # 5 rounds that leak would show 5
        assert after[0] < first[0] + 5 and after[1] < first[1] + 5
