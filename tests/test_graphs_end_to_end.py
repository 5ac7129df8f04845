"""CUDA graphs over the whole cycle: captured once, right for every version of the weights.

Between the stages another process fills the freed memory with 0xFF.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memsaver import MemorySaver
from memsaver.memory.torch_allocator import empty_torch_cache
from rollout import Completion, Engine, KVTiers, SamplingParams
from tests.helpers.case_selection import rounds
from tests.helpers.memory import Scribbler, counted, process_bytes
from tests.helpers.rollout.answers import GAP
from tests.helpers.trainer_bridge.models import config, write_model
from trainer_bridge import Cycle, Trainer, open_inprocess

pytestmark = pytest.mark.gpu

SHAPE: dict[str, Any] = {"max_position_embeddings": 640, "hidden_size": 64, "intermediate_size": 96}
ENGINE: dict[str, Any] = {"kv_tokens": 4096, "max_prefill_tokens": 96, "max_running": 12}
GREEDY = SamplingParams(max_tokens=12, temperature=0)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, seed=5, n=3)


@pytest.fixture
def scribbler() -> Iterator[Scribbler]:
    process = Scribbler("cuda:0")
    yield process
    process.close()


def prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(96) for _ in range(length)] for length in (1, 17, 64, 300)]


def tokens_of(out: list[list[Completion]]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in group] for group in out]


@torch.no_grad()
def randomize(trainer: Trainer, version: int) -> None:
    generator = torch.Generator("cuda:0").manual_seed(version)
    for name, shard in trainer.shards().items():
        noise = torch.empty_like(shard).normal_(0, 0.2, generator=generator)
        shard.copy_(noise if shard.ndim > 1 or name.endswith("bias") else 1 + noise)


def fresh_engine(path: str, trainer: Trainer) -> Engine:
    """Create an engine without graphs, which has never slept nor had other weights."""
    saver = MemorySaver("cuda:0")
    engine = Engine.from_pretrained(
        path, "cuda:0", saver=saver, load_weights=False, cuda_graphs=False, **ENGINE
    )
    engine.store.load(trainer.shards().items(), "the trainer")
    return engine


def check_against_fresh_engine(
    path: str, trainer: Trainer, cycle: Cycle, rollout: Engine, version: int
) -> None:
    """Compare the rollout, with new weights, to a fresh engine; leave the rollout awake."""
    randomize(trainer, version)
    fresh, inputs = fresh_engine(path, trainer), prompts(version)
    wanted = tokens_of(fresh.generate(inputs, GREEDY)), tokens_of(fresh.generate(inputs, SAMPLED))
    fresh.saver.close()
    del fresh
    assert (cycle.to_rollout(version).nbytes == 0) == (
        rollout.report().tags["weights"].committed_bytes == 0
    )
    got = tokens_of(rollout.generate(inputs, GREEDY)), tokens_of(rollout.generate(inputs, SAMPLED))
    assert got == wanted, f"version {version}"


@pytest.mark.alone
@pytest.mark.soak
@pytest.mark.parametrize("alias", [False, True])
def test_graphs_match_a_fresh_engine_in_cycles_with_new_weights(
    alias: bool, tmp_path: Path, scribbler: Scribbler, record_property: Callable[..., None]
) -> None:
    """Replay graphs on the engine's pages, or with `alias` on pages aliased again in each cycle."""
    path = write_model(tmp_path / "model", "qwen3", **SHAPE)
    count = 5 if alias else rounds(8, 100)
    with open_inprocess(config(path, device="cuda:0"), ENGINE, alias=alias) as (trainer, rollout):
        graphs = rollout.graphs
        assert graphs is not None
        captured, addresses = graphs.pool.captures, graphs.addresses()
        scribbler.fill(64 << 20)  # starts the process and its context before bytes are counted
        cycle = Cycle(trainer, rollout, alias=alias, on_stage=lambda *_: scribbler.fill(64 << 20))
        floors = set()
        for version in range(1, count + 1):
            check_against_fresh_engine(path, trainer, cycle, rollout, version)
            if alias:
                assert rollout.report().tags["weights"].committed_bytes == 0
                assert (
                    rollout.report().tags["weights"].aliased_bytes
                    == trainer.report().committed_bytes
                )
            else:
                # as a sleep does, with cuBLAS's workspaces (32 MiB, H100)
                empty_torch_cache(torch.device("cuda:0"))
                committed, before = rollout.report().committed_bytes, process_bytes("cuda:0")
                assert rollout.report().tags["cuda_graph"].committed_bytes > 0
                rollout.sleep(level=2)
                assert before - process_bytes("cuda:0") == counted(committed, "cuda:0", 3)
                rollout.wake_up()
                assert process_bytes("cuda:0") == counted(before, "cuda:0", 3)
            cycle.to_train()
            assert rollout.report().committed_bytes == 0
            empty_torch_cache(torch.device("cuda:0"))
            floors.add(process_bytes("cuda:0") - trainer.report().committed_bytes)
            trainer.saver.check_integrity()
            rollout.saver.check_integrity()
            rollout.check_integrity()
        assert graphs.pool.captures == captured and graphs.addresses() == addresses
        assert graphs.replays > (10 if alias else 20) * count
        assert max(floors) - min(floors) <= 4 << 20, "memory grew over the cycles"
    record_property("cycles", count)


def test_replays_equal_eager_steps_for_every_batch_size(tmp_path: Path) -> None:
    """Compare batches, from 1 to beyond the largest graphs, with the engine without graphs.

    Padded rows and tokens must change nothing.
    """
    path = write_model(tmp_path / "model", "llama", **SHAPE, num_key_value_heads=1)
    engines = [
        Engine.from_pretrained(
            path, "cuda:0", **{**ENGINE, "max_running": 40}, cuda_graphs=graphs, **sizes
        )
        for graphs, sizes in (
            (True, {"graph_batch_sizes": (1, 2, 4, 8, 16), "graph_prefill_tokens": 60}),
            (False, {}),
        )
    ]
    assert engines[1].graphs is None and engines[0].graphs is not None
    rng = random.Random(0)
    for batch in [1, 2, 3, 5, 8, 9, 16, 17, 33]:
        inputs = [[rng.randrange(96) for _ in range(rng.randint(1, 70))] for _ in range(batch)]
        replayed, eager = (
            engine.generate(inputs, SAMPLED if batch < 6 else GREEDY) for engine in engines
        )
        assert tokens_of(replayed) == tokens_of(eager), f"batch {batch}"
        for ours, theirs in zip(
            (s for g in replayed for s in g), (s for g in eager for s in g), strict=True
        ):
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=GAP)
        for engine in engines:
            engine.check_integrity()
            assert not engine.kv_pool.stored["k"][:, 1:16].isnan().any()
    prompts = engines[0].runner.prompt_graphs
    assert engines[0].graphs.replays > 0 and prompts is not None and prompts.replays > 0


def test_prompts_behind_pages_that_still_load_are_replayed(tmp_path: Path) -> None:
    """A graph reads all layers, so it waits for the whole load: equal to computing the prefix."""
    path = write_model(tmp_path / "model", "llama", **SHAPE)
    small: dict[str, Any] = {**ENGINE, "kv_tokens": 512, "graph_prefill_tokens": 96}
    tiers = KVTiers(host_ratio=16.0)
    tiered = Engine.from_pretrained(path, "cuda:0", tiers=tiers, **small)
    plain = Engine.from_pretrained(path, "cuda:0", prefix_cache=False, **small)
    rng = random.Random(0)
    turns = [[rng.randrange(96) for _ in range(300)] for _ in range(8)]
    for turn in range(3):
        for number, ids in enumerate(turns):
            before = tiered.runner.prompt_graphs.replays
            (answer,), (wanted,) = (engine.generate([ids], GREEDY)[0] for engine in (tiered, plain))
            assert answer.token_ids == wanted.token_ids, (turn, number)
            assert answer.logprobs == pytest.approx(wanted.logprobs, abs=GAP)
            assert answer.cached_tokens == (0 if turn == 0 else (len(ids) - 21) // 16 * 16)
            assert tiered.runner.prompt_graphs.replays > before
            turns[number] = [*ids, *answer.token_ids, *rng.choices(range(96), k=20)]
    assert tiered.stats.loaded_tokens >= 2 * 8 * 288


def test_engine_refuses_to_generate_while_its_graphs_are_paused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", "qwen2", **SHAPE)
    # a hit sums in another order
    engine = Engine.from_pretrained(path, "cuda:0", **ENGINE, prefix_cache=False)
    before = engine.generate(prompts(0), GREEDY)
    engine.sleep(tags=["cuda_graph"])
    with pytest.raises(RuntimeError, match="paused: cuda_graph"):
        engine.generate(prompts(0), GREEDY)
    engine.wake_up(["cuda_graph"])
    assert engine.generate(prompts(0), GREEDY) == before


def test_capture_without_room_names_the_limit(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", "qwen2", **SHAPE)
    saver = MemorySaver("cuda:0", limit_bytes=8 << 20)
    with pytest.raises((torch.OutOfMemoryError, MemoryError)) as caught:
        Engine.from_pretrained(path, "cuda:0", saver=saver, **ENGINE)
    text = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "limit" in text or "max_running" in text
    torch.cuda.synchronize()
