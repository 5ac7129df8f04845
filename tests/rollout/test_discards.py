"""Content that another user of the engine's saver discarded is never served.

For every tag and every operation, the engine answers as before, or refuses and names the tag.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig

from kvcache.pools import TokenPool
from memsaver import MemorySaver, StateError
from rollout import Engine, KVTiers, SamplingParams, WeightUpdateError
from rollout.hosted import VllmRollout
from rollout.tag_names import KV_CACHE, WEIGHTS
from tests.helpers.case_selection import rounds
from tests.helpers.ranks import results, start_ranks
from tests.helpers.rollout.answers import GREEDY, ids, random_prompts
from tests.helpers.rollout.fused import KINDS, FusedEngine, random_directory, same
from tests.helpers.rollout.poison import fill
from tests.helpers.rollout.saved import Saved
from tests.helpers.rollout.updates import Owner, answers, expected, update, write

Fields = dict[str, Any]
ENGINES: dict[str, Fields] = {
    "plain": {},
    "tiers": {"tiers": KVTiers(host_ratio=4.0)},
    "elastic": {"elastic": True},
    "hybrid": {},
}
(COMMON,) = random_prompts((40,))
PROMPTS = [COMMON, *random_prompts((33,), seed=1), [*COMMON[:36], 1, 2, 3, 4]]


class Meddler:
    """Another user of the engine's saver, with a twin tag of equal size for each engine tag."""

    def __init__(self, saver: MemorySaver) -> None:
        self.saver = saver
        self.twins: dict[str, torch.Tensor] = {}
        for tag in (WEIGHTS, KV_CACHE):
            size = saver.report().tags[tag].committed_bytes
            twin = saver.empty(size, torch.uint8, tag=f"twin of {tag}", elastic=True)
            self.twins[tag] = twin.fill_(0x3C)

    def bytes_of(self, tag: str) -> int:
        return self.twins[tag].nbytes

    def pause(self, tag: str) -> None:
        self.saver.pause(tag, content="discard")
        self.saver.resume(tag)

    def pause_all(self, tag: str) -> None:
        self.saver.pause(content="discard")
        self.saver.resume()

    def keep(self, tag: str) -> None:
        """Resume the tag with pages of its twin."""
        self.saver.pause(tag, f"twin of {tag}", content="discard", release="retain")
        self.saver.resume(tag)
        self.saver.resume()

    def swap(self, tag: str) -> None:
        twin = f"twin of {tag}"
        self.saver.pause(twin, content="host")
        self.saver.swap(pause=tag, resume=twin, content="discard")
        self.saver.swap(pause=twin, resume=tag, content="host")
        self.saver.resume()

    def exchange(self, tag: str) -> None:
        sizes = self.saver.report().tags
        if sizes[tag].committed_bytes == sizes[f"twin of {tag}"].committed_bytes:
            self.saver.exchange(tag, f"twin of {tag}")

    def shrink(self, tag: str) -> None:
        self.saver.resize(tag, self.bytes_of(tag) // 2)

    def shrink_and_grow(self, tag: str) -> None:
        self.shrink(tag)
        self.saver.resize(tag, self.bytes_of(tag))

    def leave_asleep(self, tag: str) -> None:
        self.saver.pause(tag, content="discard")

    def save(self, tag: str) -> None:
        self.saver.pause(tag, content="host")
        self.saver.resume(tag)


MEDDLING = ["pause", "pause_all", "keep", "swap", "exchange", "shrink", "shrink_and_grow"]
MEDDLING += ["leave_asleep", "save"]


def ruin(engine: Engine, before: int) -> None:
    """Overwrite a mapped KV cache that has lost its content, as the data of foreign pages would."""
    saver, pool = engine.saver, engine.kv_pool
    lost = saver.discards(KV_CACHE) != before and not saver.unbacked_bytes(KV_CACHE)
    if lost and isinstance(pool, TokenPool):
        fill(pool, slice(None))


def mend(engine: Engine, path: Path, meddler: Meddler) -> None:
    """Follow the remedy that the refusal names."""
    engine.wake_up()
    for tag in (WEIGHTS, KV_CACHE):
        engine.saver.resize(tag, meddler.bytes_of(tag))
    if engine.served_version() is None:
        engine.load(path)


@pytest.mark.parametrize("kind", ENGINES)
def test_engine_answers_as_before_or_refuses_after_any_operation_on_its_saver(
    kind: str, path: Path, saved: Saved, device: str
) -> None:
    """Run operations at random between answers, during answers, and around the engine's sleeps."""
    where = saved("qwen3_next")[0] if kind == "hybrid" else path
    sizes: Fields = {"kv_tokens": 512, "page_size": 4, "device": device, **ENGINES[kind]}
    engine = Engine.from_pretrained(where, **sizes)
    right = ids(Engine.from_pretrained(where, **sizes).generate(PROMPTS, GREEDY))
    saver, rng, refused = engine.saver, random.Random(kind), 0
    meddler = Meddler(saver)

    def meddle() -> None:
        before = saver.discards(KV_CACHE)
        if active := [tag for tag in (WEIGHTS, KV_CACHE) if not saver.is_paused(tag)]:
            getattr(meddler, rng.choice(MEDDLING))(rng.choice(active))
        ruin(engine, before)

    def meanwhile(done: int, total: int, tokens: int) -> None:
        if due and tokens >= due[-1]:
            due.pop()
            meddle()

    for _ in range(rounds(15, 2000)):
        due = list[int]()
        move = rng.randrange(5)
        if move == 0:
            engine.sleep(rng.choice([1, 2]), tags=rng.choice([None, [KV_CACHE], [WEIGHTS]]))
            meddle() if rng.randrange(2) else saver.resume()
            engine.wake_up(partly=bool(rng.randrange(2)))
        elif move == 1:
            due.append(rng.randrange(1, 24))
        else:
            meddle()
        try:
            assert ids(engine.generate(PROMPTS, GREEDY, meanwhile)) == right
        except StateError as error:
            refused += 1
            assert any(tag in str(error) for tag in engine.tags) or "level=2" in str(error)
            mend(engine, where, meddler)
            assert ids(engine.generate(PROMPTS, GREEDY)) == right
        engine.check_integrity()
    assert refused


@pytest.mark.parametrize("shadow", [False, True])
@pytest.mark.parametrize("verified", [False, True])
def test_update_is_not_served_when_its_pages_are_discarded(
    path: Path, shadow: bool, verified: bool
) -> None:
    engine = Engine.from_pretrained(path)
    before = answers(engine)
    offer = engine.begin_update(1, shadow=shadow)
    receipt = write(offer, seed=1)
    if verified:
        engine.verify_update(receipt)
    tag = "weights_shadow" if shadow else "weights"
    engine.saver.pause(tag)
    if verified:
        engine.saver.resume(tag)
        with pytest.raises(WeightUpdateError, match=f"'{tag}' was discarded .* begin it again"):
            engine.commit_update(1)
    else:
        with pytest.raises((WeightUpdateError, StateError), match=tag):
            engine.verify_update(receipt)
        engine.wake_up()
    if shadow:
        assert answers(engine) == before
    else:
        with pytest.raises(StateError, match="weights undefined"):
            answers(engine)
    update(engine, 1, seed=1, shadow=shadow)
    assert answers(engine) == expected(1)


def test_update_of_some_parameters_is_refused_when_the_rest_was_discarded(path: Path) -> None:
    engine = Engine.from_pretrained(path)
    engine.saver.pause()
    engine.saver.resume()
    assert engine.served_version() is None
    with pytest.raises(StateError, match="'weights' was discarded .* update all of them first"):
        engine.begin_update(1, names=["model.norm.weight"])
    engine.sleep(1)  # neither repairs nor saves the content
    assert not engine.report().backup_bytes
    engine.wake_up()
    with pytest.raises(StateError, match=r"commit a weight update"):
        answers(engine)
    update(engine, 1, seed=1)
    assert answers(engine) == expected(1)


def test_aliased_pages_are_not_served_after_others_give_them_back(path: Path) -> None:
    engine = Engine.from_pretrained(path)
    owner = Owner(engine)
    owner.alias(engine, 1, seed=1)
    assert answers(engine) == expected(1)
    engine.saver.pause("weights")
    engine.saver.resume("weights")
    with pytest.raises(StateError, match="'weights' was discarded"):
        answers(engine)
    owner.alias(engine, 2, seed=1)
    assert answers(engine) == expected(1)


# ---------------------------------------------------------------- tensor-parallel ranks


def discard_on_one(rank: int, path: str, tag: str) -> list[Any]:
    engine = Engine.from_pretrained(
        path, tensor_parallel_size=2, group=dist.group.WORLD, kv_tokens=512, page_size=4
    )
    outcomes: list[Any] = [ids(engine.generate(PROMPTS, GREEDY))]
    if rank == 1:
        engine.saver.pause(tag)
        engine.saver.resume(tag)
        ruin(engine, 0)
    try:
        outcomes.append(ids(engine.generate(PROMPTS, GREEDY)))
    except StateError as error:
        outcomes.append(str(error))
        engine.load(path)
        outcomes.append(ids(engine.generate(PROMPTS, GREEDY)))
    return outcomes


@pytest.mark.parametrize("tag", [KV_CACHE, WEIGHTS])
def test_ranks_decide_alike_when_one_rank_lost_content(
    tag: str, path: Path, tmp_path: Path
) -> None:
    (first, *intact), (again, *lossy) = results(
        start_ranks(discard_on_one, 2, tmp_path / "store", str(path), tag)
    )
    assert first == again
    if tag == KV_CACHE:
        assert intact == lossy == [first]
    else:
        assert intact == ["cannot generate: tensor-parallel rank 1 cannot", first]
        assert "tag 'weights' was discarded" in lossy[0] and lossy[1:] == [first]


# ---------------------------------------------------------------- hosted engines


class Stepping(FusedEngine):
    """An engine that answers nothing in three steps, and calls `meanwhile` after each step."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def run(self, prompts: Any, params: Any, on_step: Any) -> None:
        for _ in range(3):
            on_step([])
            self.meanwhile()


@pytest.fixture(scope="module")
def hosted_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_directory(tmp_path_factory.mktemp("hosted"), "qwen3")


def hosted(path: str, device: str) -> VllmRollout:
    engine = Stepping(AutoConfig.from_pretrained(path), device, **KINDS["qwen3"])
    rollout = VllmRollout(engine, path)  # type: ignore[arg-type]
    rollout.store.define(0)
    return rollout


@pytest.mark.parametrize("middle", [False, True], ids=["between", "in the middle"])
@pytest.mark.parametrize("tag", [WEIGHTS, KV_CACHE])
@pytest.mark.parametrize("how", MEDDLING)
def test_hosted_engine_forgets_or_refuses_discarded_content(
    how: str, tag: str, middle: bool, hosted_path: str, device: str
) -> None:
    rollout = hosted(hosted_path, device)
    engine: Any = rollout.engine
    written, params = engine.model.tensors(), SamplingParams(max_tokens=1)
    engine.kv_cache.fill_(5)
    meddler = Meddler(rollout.saver)
    rollout.generate([], params)
    resets = engine.resets
    before = {name: rollout.saver.discards(name) for name in (WEIGHTS, KV_CACHE)}
    if middle:
        engine.meanwhile = lambda: (getattr(meddler, how)(tag), engine.__dict__.pop("meanwhile"))
    else:
        getattr(meddler, how)(tag)
    refused = ""
    try:
        rollout.generate([], params)
    except StateError as error:
        refused = str(error)
    if how == "save":
        assert not refused and engine.resets == resets
    lost = {name for name, count in before.items() if rollout.saver.discards(name) != count}
    assert not refused or any(name in refused for name in lost)
    assert bool(refused) == bool(lost) if middle else refused or WEIGHTS not in lost
    # Follow the remedy that the refusal names.
    rollout.saver.resume()
    for name in (WEIGHTS, KV_CACHE):
        rollout.saver.resize(name, meddler.bytes_of(name))
    rollout.wake_up()
    if rollout.served_version() is None:
        assert WEIGHTS in lost
        for name, param in engine.model.named_parameters():
            param.copy_(written[name])
        rollout.store.define(1)
    rollout.generate([], params)
    same(engine.model, written)
    assert engine.tables.tolist() == [7] * 16
    assert (engine.resets > resets) == (KV_CACHE in lost)
    rollout.saver.close()


def test_buffers_that_start_at_one_address_all_survive_a_sleep(
    hosted_path: str, device: str
) -> None:
    engine = FusedEngine(AutoConfig.from_pretrained(hosted_path), device, **KINDS["qwen3"])
    table = engine.saver.empty((4, 6), torch.float32, tag=WEIGHTS)
    table.copy_(torch.arange(24.0).view(4, 6))
    engine.model.register_buffer("table", table)
    engine.model.register_buffer("first_rows", table[:2])
    engine.model.register_buffer("columns", table.t()[:3])
    engine.model.register_buffer("repeated", table[0, :1].expand(9))
    rollout = VllmRollout(engine, hosted_path)  # type: ignore[arg-type]
    rollout.sleep(2)
    rollout.wake_up()
    assert torch.equal(table.cpu(), torch.arange(24.0).view(4, 6))
    engine.close()
