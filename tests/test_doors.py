"""Mechanisms that no recipe uses, each through its public API as docs/how-to shows it.

Each is compared with a plain engine or transformers, with a sleep or new weights in the middle.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rollout import Completion, DoubleSparsity, Engine, SamplingParams, heavy_channels
from rollout.split import MappedTransport, PromptServer, RemotePrompts
from tests.helpers.models import greedy, save_tiny
from tests.helpers.peers import Peer
from tests.helpers.rollout.answers import GAP, ids, random_prompts
from tests.helpers.trainer_bridge.sync_hooks import half_written
from trainer_bridge import SequenceBatch, TrainerConfig, open_inprocess

SHAPE: dict[str, Any] = {"head_dim": 16, "tie_word_embeddings": True}
SIZES: dict[str, Any] = {"kv_tokens": 512, "page_size": 16}
PROMPTS = random_prompts((3, 50, 20))
GREEDY = SamplingParams(max_tokens=8, temperature=0)
SAMPLED = SamplingParams(max_tokens=6, temperature=1.3, n=2, seed=5)
KEY = b"a secret of this test"


@pytest.fixture
def two(tmp_path: Path) -> list[tuple[str, PreTrainedModel]]:
    """Save two models that differ in their weights; return their paths and modules."""
    paths = [str(tmp_path / f"model{seed}") for seed in range(2)]
    return [(path, save_tiny(path, "qwen3", seed, **SHAPE)) for seed, path in enumerate(paths)]


def nap(engine: Engine) -> None:
    """Release all memory of an engine, and map it again."""
    engine.sleep()
    assert not engine.saver.report().committed_bytes
    engine.wake_up()


# ---------------------------------------------------------------- prefill and decode


def prefill(pipe: Connection, paths: list[str], address: str) -> None:
    """Serve each model in turn, as the program of the prefill side."""
    engine = Engine.from_pretrained(paths[0], **SIZES)
    for path in paths:
        engine.load(path)
        PromptServer(engine, [address], KEY, MappedTransport()).serve()
        nap(engine)
    pipe.send(engine.stats.computed_tokens)


def test_prefill_and_decode_in_two_engines_match_a_plain_engine(
    two: list[tuple[str, PreTrainedModel]], tmp_path: Path
) -> None:
    paths, address = [path for path, _ in two], f"ipc://{tmp_path}/socket"
    sender = Peer(prefill, paths, address)
    plain = Engine.from_pretrained(paths[0], **SIZES)
    engine = Engine.from_pretrained(paths[0], **SIZES)
    for path in paths:
        for side in (plain, engine):
            side.load(path)
        ring: dict[str, Any] = {"prefill_ranks": 1, "ring_bytes": 1 << 16}
        remote = RemotePrompts(engine, address, KEY, MappedTransport(), **ring)
        for params in (SAMPLED, GREEDY):
            assert ids(engine.generate(PROMPTS, params)) == ids(plain.generate(PROMPTS, params))
            engine.sleep()
            engine.wake_up()
        assert (remote.stats.arrived, remote.stats.recomputed) == (2 * len(PROMPTS), 0)
        remote.close()
    computed = plain.stats.computed_tokens - engine.stats.computed_tokens
    assert min(computed, sender.hear()) >= 2 * sum(map(len, PROMPTS)), (
        "the prefill side must compute the prompts"
    )


# ---------------------------------------------------------------- beam search


@torch.no_grad()
def searched(model: PreTrainedModel, prompt: list[int], params: SamplingParams) -> Any:
    """Return transformers' own answers, best first, and their scores."""
    out = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=params.max_tokens,
        do_sample=False,
        num_beams=params.beam_width,
        num_return_sequences=params.n,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    return out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist()


def test_beam_search_matches_transformers(two: list[tuple[str, PreTrainedModel]]) -> None:
    """Compare before and after a sleep, with other weights, and with a greedy request."""
    params = SamplingParams(max_tokens=8, beam_width=4, n=3)
    engine = Engine.from_pretrained(two[0][0], **SIZES)
    for path, model in two:
        engine.load(path)
        for _ in range(2):
            *beams, plain = engine.generate([*PROMPTS, PROMPTS[0]], [params] * 3 + [GREEDY])
            for prompt, answers in zip(PROMPTS, beams, strict=True):
                tokens, scores = searched(model, prompt, params)
                assert [answer.token_ids for answer in answers] == tokens
                assert [answer.score for answer in answers] == pytest.approx(scores, abs=GAP)
            assert plain[0].token_ids == greedy(model, PROMPTS[0], GREEDY.max_tokens)
            nap(engine)


# ---------------------------------------------------------------- double sparsity


def hot_channels(engine: Engine, prompt: list[int], count: int) -> Any:
    """Choose the heavy channels as docs/how-to/decoding.md does."""
    engine.generate([prompt], SamplingParams(max_tokens=1, temperature=0))
    pages = torch.as_tensor(engine.prefixes.cache.match_prefix(prompt).pages)  # type: ignore[union-attr]
    size = engine.config.page_size
    slots = (pages[:, None] * size + torch.arange(size)).flatten()
    assert len(slots) >= len(prompt) - size
    return heavy_channels([engine.kv_pool.get_rows(layer, slots)[0] for layer in range(2)], count)


def test_double_sparsity_over_all_tokens_equals_the_plain_engine(
    two: list[tuple[str, PreTrainedModel]],
) -> None:
    """Compare bit for bit, through a sleep and other weights; few heavy tokens differ."""
    plain = Engine.from_pretrained(two[0][0], **SIZES)
    channels = hot_channels(plain, PROMPTS[1], 4)

    def sparse(tokens: int) -> Engine:
        chosen = DoubleSparsity(heavy_channel_num=4, heavy_token_num=tokens, channels=channels)
        return Engine.from_pretrained(two[0][0], double_sparsity=chosen, **SIZES)

    complete, few = sparse(64), sparse(4)
    for path, _ in two:
        for engine in (plain, complete, few):
            engine.load(path)
        for params in (GREEDY, SAMPLED):
            expected = ids(plain.generate(PROMPTS, params))
            assert ids(complete.generate(PROMPTS, params)) == expected
            nap(complete)
        assert ids(few.generate(PROMPTS, SAMPLED)) != expected


# ---------------------------------------------------------------- shadow updates


def versions(answers: list[list[Completion]]) -> set[int]:
    return {version for group in answers for s in group for version in s.weight_versions}


def test_shadow_update_serves_old_version_until_commit(
    two: list[tuple[str, PreTrainedModel]],
) -> None:
    """Serve the old version also after a failed sync; after a commit, match a plain sync."""
    config = TrainerConfig(model_path=two[0][0], learning_rate=0.1, threads=1)
    with open_inprocess(config, SIZES) as (trainer, rollout):
        rollout.wake_up()
        trainer.sync_weights(1)
        old = rollout.generate(PROMPTS, GREEDY)
        assert ids(old) == [[greedy(two[0][1], prompt, 8)] for prompt in PROMPTS]
        served = rollout.report().committed_bytes
        batch = SequenceBatch(
            prompt_ids=PROMPTS,
            response_ids=[answer.token_ids for (answer,) in old],
            old_logprobs=[answer.logprobs for (answer,) in old],
            advantages=[1.0, -1.0, 1.0],
        )
        trainer.update_actor(batch)
        meanwhile = []

        def ask() -> None:
            meanwhile.append(rollout.generate(PROMPTS, GREEDY))
            assert rollout.report().committed_bytes > served

        def fail() -> None:
            ask()
            raise RuntimeError("a cosmic ray")

        with pytest.raises(RuntimeError, match="a cosmic ray"), half_written(fail):
            trainer.sync_weights(2, shadow=True)
        meanwhile.append(rollout.generate(PROMPTS, GREEDY))
        rollout.sleep()
        rollout.wake_up()
        with half_written(ask):
            trainer.sync_weights(2, shadow=True)
        assert meanwhile == [old] * 3 and versions(old) == {1}
        new = rollout.generate(PROMPTS, GREEDY)
        assert rollout.report().committed_bytes == served
        rollout.sleep(level=2)
        rollout.wake_up()
        trainer.sync_weights(3)
        plain = rollout.generate(PROMPTS, GREEDY)
        assert ids(new) == ids(plain) != ids(old)
        assert (versions(new), versions(plain)) == ({2}, {3})
