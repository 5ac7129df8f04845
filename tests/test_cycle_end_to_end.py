"""The whole cycle with real models generates the same tokens as transformers.

After every stage that frees memory, another process fills the freed memory with 0xFF.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memsaver import StateError
from rollout import Completion, Engine, SamplingParams
from tests.helpers.case_selection import rounds
from tests.helpers.memory import Scribbler, memory_maps, process_bytes, settled_fds, status_bytes
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
LONG = ("llama", "qwen2", "deepseek_v3")
LENGTHS = [1, 2, 15, 16, 17, 64, 200, 500]


@pytest.fixture
def scribbler(device: str) -> Iterator[Scribbler]:
    process = Scribbler(device)
    yield process
    process.close()


def prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(96) for _ in range(length)] for length in LENGTHS]


@torch.no_grad()
def expected(trainer: Trainer, path: str, inputs: list[list[int]], tokens: int) -> list[list[int]]:
    """Return greedy answers by `transformers.generate` with the trainer's current weights."""
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


@pytest.mark.soak
def test_cycles_with_elastic_pool_match_fixed_pool_and_leak_nothing(
    device: str, tmp_path: Path
) -> None:
    """Overlap offloads with answers of random lengths, with random room for the elastic pool.

    The tokens equal those of an engine with a fixed pool, and every cycle ends with the same bytes.
    On a GPU a pool this small is a single extent, which comes and goes as a whole.
    """
    rng = random.Random(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    path = write_model(tmp_path, "qwen3", **MODELS["qwen3"] | heads)
    sizes = {"kv_tokens": 2048, "page_size": 4, "max_context_len": 64, "max_running": 32}
    settings = config(path, device=device, leaving=("params", "optim"))
    held, shrunk = list[list[int]](), 0
    with open_inprocess(settings, {**sizes, "elastic": True}) as (trainer, engine):
        fixed = Engine.from_pretrained(path, device=device, **sizes)
        cycle = Cycle(trainer, engine, overlap=["params", "optim"])
        saver, spare = engine.saver, 0 if device == "cpu" else 1 << 30
        before = committed(trainer), committed(engine)
        for turn in range(rounds(4, 1000)):
            given = [[rng.randrange(96) for _ in range(rng.randint(1, 30))] for _ in range(12)]
            params = [
                SamplingParams(max_tokens=rng.choice([2, 4, 6]), temperature=0.7, seed=turn, n=2)
                for _ in given
            ]
            params[0] = SamplingParams(max_tokens=rng.randint(2, 30), temperature=0)
            cycle.to_rollout(turn + 1)
            saver.limit_bytes = saver.report().committed_bytes + spare + rng.randint(0, 16 << 20)
            cycle.prefetch()
            pool_sizes = [engine.kv_pool.size]

            def watch(*_: int, pool_sizes: list[int] = pool_sizes) -> None:
                pool_sizes.append(engine.kv_pool.size)

            out, same = engine.generate(given, params, watch), fixed.generate(given, params)
            for ours, theirs in zip(out, same, strict=True):
                assert [s.token_ids for s in ours] == [s.token_ids for s in theirs]
            shrunk += pool_sizes[-1] < max(pool_sizes)
            saver.limit_bytes = None
            cycle.to_score()
            cycle.to_train()
            engine.check_integrity()
            assert (committed(trainer), committed(engine)) == before
            if turn % 20 == 19:
                trainer.empty_cache()
                host = trainer.saver.pinned_arena.committed_bytes
                held.append([process_bytes(device), host, status_bytes("RssAnon")])
    assert shrunk >= rounds(1, 100) or device != "cpu"
    # memory that Python, malloc and the driver keep has settled after the first fifth
    settled = held[len(held) // 5 :]
    if settled:
        device_bytes, pinned, own = (
            last - first for first, last in zip(settled[0], settled[-1], strict=True)
        )
        assert pinned == 0 and own < 16 << 20
        assert device_bytes <= (0 if device == "cpu" else 2 << 20)


def ids_of(out: list[list[Completion]]) -> list[list[int]]:
    return [group[0].token_ids for group in out]


def committed(side: Any) -> dict[str, int]:
    return {tag: entry.committed_bytes for tag, entry in side.report().tags.items()}


def check_scores(out: list[list[Completion]], inputs: list[list[int]], trainer: Trainer) -> None:
    """Check that the rollout's log-probabilities equal the trainer's."""
    samples = [(ids, sample) for ids, group in zip(inputs, out, strict=True) for sample in group]
    batch = SequenceBatch(
        prompt_ids=[ids for ids, _ in samples], response_ids=[list(s.token_ids) for _, s in samples]
    )
    assert_scores(trainer.compute_log_prob(batch), [sample.logprobs for _, sample in samples])


@pytest.mark.soak
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.extended] * (name in LONG)) for name in MODELS]
)
def test_every_round_of_the_cycle_matches_transformers(
    family: str, device: str, tmp_path: Path, scribbler: Scribbler
) -> None:
    shape: dict[str, Any] = {"max_position_embeddings": 640, **MODELS[family]}
    path = write_model(tmp_path / family, family, **shape)
    engine = {"kv_tokens": 2048, "page_size": 16, "max_prefill_tokens": 96}
    trainer_config = config(path, device=device, learning_rate=3e-3)
    hand_over = family in ("llama", "qwen3")
    with open_inprocess(trainer_config, engine) as (trainer, rollout):
        fill = lambda *_: scribbler.fill(8 << 20)  # noqa: E731
        cycle = Cycle(trainer, rollout, on_stage=fill, hand_over=hand_over)
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
                assert torch.equal(shard, before[name]), f"{name} changed while it was offloaded"
            check_scores(sampled, inputs, trainer)
            cycle.to_train()
            assert committed(trainer) == full and trainer.report().backup_bytes == 0
            assert trainer.report().pool_bytes == rollout.report().pool_bytes == 0
            trainer.update_actor(make_batch(6, seed=version))
            trainer.saver.check_integrity()
            rollout.saver.check_integrity()
            rollout.check_integrity()
            if version in (3, last):
                counts.append((settled_fds(), memory_maps(), trainer.report().committed_bytes))
        first, after = counts
        assert after[2] == first[2]
        # a leak would show at least 5 in 5 rounds
        assert after[0] < first[0] + 5 and after[1] < first[1] + 5
