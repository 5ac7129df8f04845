"""Mechanisms that no recipe uses, each through its public door: as a reader of docs/how-to would
use it, with a sleep or new weights in the middle, beside a plain engine or transformers.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rollout import Completion, DoubleSparsity, Engine, SamplingParams, heavy_channels
from rollout.disagg import DecodeEngine, MappedTransport, PrefillEngine
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
    """A model, and the same with other weights: where they lie, and as transformers has them."""
    paths = [str(tmp_path / f"model{seed}") for seed in range(2)]
    return [(path, save_tiny(path, "qwen3", seed, **SHAPE)) for seed, path in enumerate(paths)]


def nap(engine: Engine) -> None:
    """All memory goes back, and comes again."""
    engine.sleep()
    assert not engine.saver.report().committed_bytes
    engine.wake_up()


# ---------------------------------------------------------------- prefill and decode


def prefill(pipe: Connection, paths: list[str], address: str) -> None:
    """A program of the prefill side: serves each model in its turn."""
    engine = PrefillEngine.from_pretrained(paths[0], **SIZES)
    for path in paths:
        engine.load(path)
        engine.connect([address], KEY, MappedTransport())
        engine.serve()
        nap(engine)
    pipe.send(engine.stats.computed_tokens)


def test_prefill_and_decode_in_two_engines(
    two: list[tuple[str, PreTrainedModel]], tmp_path: Path
) -> None:
    paths, address = [path for path, _ in two], f"ipc://{tmp_path}/socket"
    sender = Peer(prefill, paths, address)
    plain = Engine.from_pretrained(paths[0], **SIZES)
    engine = DecodeEngine.from_pretrained(paths[0], **SIZES)
    for path in paths:
        for each in (plain, engine):
            each.load(path)
        engine.connect(address, KEY, MappedTransport(), prefill_ranks=1, ring_bytes=1 << 16)
        for params in (SAMPLED, GREEDY):
            assert ids(engine.generate(PROMPTS, params)) == ids(plain.generate(PROMPTS, params))
            engine.sleep()
            engine.wake_up()
        assert (engine.split.arrived, engine.split.recomputed) == (2 * len(PROMPTS), 0)
        engine.close()
    computed = plain.stats.computed_tokens - engine.stats.computed_tokens
    assert min(computed, sender.hear()) >= 2 * sum(map(len, PROMPTS)), "prompts came from there"


# ---------------------------------------------------------------- beam search


@torch.no_grad()
def searched(model: PreTrainedModel, prompt: list[int], params: SamplingParams) -> Any:
    """transformers' own answers, best first, and their scores."""
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


def test_beam_search_is_that_of_transformers(two: list[tuple[str, PreTrainedModel]]) -> None:
    """Before and after a sleep, with other weights, and beside a greedy request."""
    params = SamplingParams(max_tokens=8, beam_width=4, n=3)
    engine = Engine.from_pretrained(two[0][0], **SIZES)
    for path, model in two:
        engine.load(path)
        for _ in range(2):
            *found, plain = engine.generate([*PROMPTS, PROMPTS[0]], [params] * 3 + [GREEDY])
            for prompt, answers in zip(PROMPTS, found, strict=True):
                tokens, scores = searched(model, prompt, params)
                assert [each.token_ids for each in answers] == tokens
                assert [each.score for each in answers] == pytest.approx(scores, abs=GAP)
            assert plain[0].token_ids == greedy(model, PROMPTS[0], GREEDY.max_tokens)
            nap(engine)


# ---------------------------------------------------------------- double sparsity


def hot_channels(engine: Engine, prompt: list[int], count: int) -> Any:
    """As docs/how-to/decoding.md takes them."""
    engine.generate([prompt], SamplingParams(max_tokens=1, temperature=0))
    pages = torch.as_tensor(engine.prefixes.cache.match_prefix(prompt).pages)  # type: ignore[union-attr]
    size = engine.config.page_size
    slots = (pages[:, None] * size + torch.arange(size)).flatten()
    assert len(slots) >= len(prompt) - size
    return heavy_channels([engine.kv_pool.get_rows(layer, slots)[0] for layer in range(2)], count)


def test_double_sparsity_over_all_tokens_is_the_plain_engine(
    two: list[tuple[str, PreTrainedModel]],
) -> None:
    """Bit for bit, through a sleep and other weights; over few tokens something else."""
    plain = Engine.from_pretrained(two[0][0], **SIZES)
    channels = hot_channels(plain, PROMPTS[1], 4)

    def sparse(tokens: int) -> Engine:
        chosen = DoubleSparsity(heavy_channel_num=4, heavy_token_num=tokens, channels=channels)
        return Engine.from_pretrained(two[0][0], double_sparsity=chosen, **SIZES)

    every, few = sparse(64), sparse(4)
    for path, _ in two:
        for engine in (plain, every, few):
            engine.load(path)
        for params in (GREEDY, SAMPLED):
            expected = ids(plain.generate(PROMPTS, params))
            assert ids(every.generate(PROMPTS, params)) == expected
            nap(every)
        assert ids(few.generate(PROMPTS, SAMPLED)) != expected


# ---------------------------------------------------------------- shadow updates


def versions(answers: list[list[Completion]]) -> set[int]:
    return {version for group in answers for each in group for version in each.weight_versions}


def test_a_shadow_update_while_the_engine_answers(two: list[tuple[str, PreTrainedModel]]) -> None:
    """The old version until the commit, also of a sync that fails; then what a plain sync gives."""
    config = TrainerConfig(model_path=two[0][0], learning_rate=0.1, threads=1)
    with open_inprocess(config, SIZES) as (trainer, rollout):
        rollout.wake_up()
        trainer.sync_weights(1)
        old = rollout.generate(PROMPTS, GREEDY)
        assert ids(old) == [[greedy(two[0][1], prompt, 8)] for prompt in PROMPTS]
        served = rollout.report().committed_bytes
        batch = SequenceBatch(
            prompt_ids=PROMPTS,
            response_ids=[each.token_ids for (each,) in old],
            old_logprobs=[each.logprobs for (each,) in old],
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
