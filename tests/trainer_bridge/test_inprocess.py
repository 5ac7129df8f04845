"""A real trainer and a real engine in one process: syncs by copies and by aliased pages."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from memsaver import LeaseError, MemorySaver, OutOfMemory, StateError
from rollout import Engine, SamplingParams, WeightUpdateError
from rollout.weights import Manifest
from tests.helpers.case_selection import some
from tests.helpers.memory import family_bytes
from tests.helpers.memsaver.savers import driver_calls
from tests.helpers.peers import Peer
from tests.helpers.rollout.answers import ids
from tests.helpers.trainer_bridge.layouts import manifest, piece
from tests.helpers.trainer_bridge.models import config, make_batch, write_model
from trainer_bridge import Cycle, CycleError, Trainer, open_inprocess
from trainer_bridge.sync.alias import byte_offsets

ENGINE = {"kv_tokens": 512, "page_size": 16}
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, n=2, seed=3, ignore_eos=True)
KINDS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3", {"tie_word_embeddings": True}, "float32"),
    ("llama", {"tie_word_embeddings": False}, "bfloat16"),
    ("qwen2", {"tie_word_embeddings": False}, "float32"),
]


@pytest.fixture(autouse=True)
def short_lease_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time that an offload of aliased pages waits before it fails."""
    monkeypatch.setattr("memsaver.tag.transaction.LEASE_GRACE_SECONDS", 0.05)


def tokens_of(rollout: Any) -> list[list[int]]:
    return [sample.token_ids for group in rollout.generate(PROMPTS, SAMPLED) for sample in group]


def committed(side: Any) -> dict[str, int]:
    return {tag: entry.committed_bytes for tag, entry in side.report().tags.items()}


def cycles(
    trainer: Trainer, engine: Engine, alias: bool, count: int = 3, hand_over: bool = False
) -> list[list[list[int]]]:
    """Run rounds with an update after each, and return the tokens of each round."""
    cycle, tokens = Cycle(trainer, engine, alias=alias, hand_over=hand_over), []
    for version in range(1, count + 1):
        receipt = cycle.to_rollout(version)
        assert receipt.version == engine.weights_version == version
        assert (receipt.nbytes == 0) == alias
        assert len(receipt.digests) == (not alias or version == 1)
        tokens.append(tokens_of(engine))
        cycle.to_train()
        trainer.update_actor(make_batch(4, seed=version))
    return tokens


def test_prefetched_params_return_as_last_requests_end(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limit the device so that params can only return after the KV pool has shrunk."""
    sizes = {"kv_tokens": 2048, "page_size": 4, "max_context_len": 128, "max_running": 64}
    prompts = [[5, 6, 7]] * 31 + [[8]]
    params = [dataclasses.replace(SAMPLED, max_tokens=12)] * 31
    params.append(dataclasses.replace(SAMPLED, max_tokens=110))
    with open_inprocess(config(model_path), sizes) as (trainer, engine):
        Cycle(trainer, engine).to_rollout(1)
        expected = ids(engine.generate(prompts, params))
    with open_inprocess(config(model_path), {**sizes, "elastic": True}) as (trainer, engine):
        savers, states = (trainer.saver, engine.saver), list[tuple[bool, int]]()
        held = trainer.saver.report().tags

        def free() -> int:
            return room - sum(saver.backend.committed_bytes for saver in savers)

        def watch(done: int, total: int, tokens: int) -> None:
            states.append((trainer.saver.is_paused("params"), engine.kv_pool.size))
            time.sleep(0.006)

        room = sum(held[tag].committed_bytes for tag in ("params", "optim"))
        room += engine.saver.report().tags["weights"].live_bytes
        room += held["params"].committed_bytes // 2
        monkeypatch.setattr("memsaver.memory.memfd.available_memory", free)
        cycle = Cycle(trainer, engine, overlap=["params", "optim"])
        cycle.to_rollout(1)
        cycle.prefetch()
        assert ids(engine.generate(prompts, params, watch)) == expected
        fullest = max(size for _, size in states)
        assert all(paused for paused, size in states if size == fullest)
        assert not states[-1][0] and states[-1][1] < fullest // 2, (
            "params are there before the answers"
        )
        engine.check_integrity()
        cycle.to_score()
        trainer.compute_log_prob(make_batch(4))
        cycle.to_train()
        trainer.update_actor(make_batch(4))


@pytest.mark.parametrize("alias", [False, True])
def test_handed_over_memory_is_not_created_by_the_driver(
    alias: bool, model_path: str, device: str
) -> None:
    """Expect the same tokens from handed-over pages, which hold old bytes, and no retained page."""
    rounds, created = [], []
    for hand_over in (False, True):
        with open_inprocess(config(model_path, device=device), ENGINE, alias=alias) as sides:
            saver = sides[0].saver
            rounds.append(cycles(*sides, alias, hand_over=hand_over))
            savers = saver, sides[1].saver
            created.append(sum(driver_calls(owner)["create"].nbytes for owner in savers))
            for owner in savers:
                assert owner.report().pool_bytes == 0
                owner.check_integrity()
            params = saver.report().tags["params"].committed_bytes
    assert rounds[0] == rounds[1]
    assert created[0] - created[1] >= 4 * params, "two of three rounds hand over in both directions"


def modules(pipe: Connection) -> None:
    importlib.import_module("trainer_bridge.coordinator")
    importlib.import_module("trainer_bridge.trainer")
    pipe.send(set(sys.modules))


def test_import_does_not_import_ray() -> None:
    peer = Peer(modules)
    assert "ray" not in peer.hear()
    peer.bury()


@pytest.mark.gpu
@pytest.mark.alone
def test_wake_up_without_room_changes_nothing_and_can_be_repeated(model_path: str) -> None:
    large = {**ENGINE, "kv_tokens": 1 << 20}  # 512 MiB
    batch = make_batch(4)
    with open_inprocess(config(model_path, device="cuda:0"), large) as (trainer, engine):
        scores = trainer.compute_log_prob(batch)
        cycle = Cycle(trainer, engine)
        trainer.empty_cache()
        hog = torch.empty(
            torch.cuda.mem_get_info()[0] - (256 << 20), dtype=torch.uint8, device="cuda:0"
        )
        with pytest.raises(
            CycleError, match=r"stage 'wake_kv_cache' failed: .*needs 5\d\d.* MiB"
        ) as caught:
            cycle.to_rollout(1)
        cause = caught.value.cause
        assert isinstance(cause, OutOfMemory)
        assert cause.holders["torch's tensors"] >= hog.nbytes and cause.requested_bytes >= 512 << 20
        tags = engine.report().tags
        assert tags["weights"].state == "active"
        assert tags["kv_cache"].state == tags["cuda_graph"].state == "paused"
        del hog
        torch.cuda.empty_cache()
        engine.wake_up()
        assert len(engine.generate([[5, 6, 7]], SAMPLED)[0][0].token_ids) == 12
        engine.sleep(level=2)
        trainer.reload()
        assert trainer.compute_log_prob(batch) == scores


# ---------------------------------------------------------------- aliased pages


@pytest.mark.parametrize(("family", "shape", "dtype"), some(*KINDS[:2], whole=KINDS[2:]))
def test_aliased_weights_give_the_same_tokens_as_copies(
    family: str, shape: dict[str, Any], dtype: str, device: str, tmp_path: Path
) -> None:
    settings = config(write_model(tmp_path, family, **shape), device=device, dtype=dtype)
    rounds = []
    for alias in (False, True):
        with open_inprocess(settings, ENGINE, alias=alias) as (trainer, engine):
            rounds.append(cycles(trainer, engine, alias))
    assert rounds[0] == rounds[1] and rounds[0][0] != rounds[0][1] != rounds[0][2]


@pytest.mark.alone
def test_aliased_weights_are_on_the_device_once(device: str, model_path: str) -> None:
    with open_inprocess(config(model_path, device=device), ENGINE, alias=True) as (trainer, engine):
        cycle = Cycle(trainer, engine, alias=True)
        full, asleep, held = committed(trainer), committed(engine), family_bytes(device)
        names = [piece.name for piece in engine.manifest.slices]
        pointers = [engine.store.tensor(name).data_ptr() for name in names]
        assert set(asleep.values()) == {0}
        for version in (1, 2, 3):
            cycle.to_rollout(version)
            assert committed(trainer) == {"params": full["params"], "optim": 0}
            tag = engine.report().tags["weights"]
            assert (tag.committed_bytes, tag.aliased_bytes) == (0, full["params"])
            if device == "cpu":
                assert (
                    family_bytes(device) == held - full["optim"] + engine.report().committed_bytes
                )
            scores = trainer.compute_log_prob(make_batch(2))  # reading is allowed
            cycle.to_score()
            assert committed(trainer) == {"params": full["params"], "optim": 0}
            assert committed(engine) == asleep
            assert engine.report().tags["weights"].aliased_bytes == 0
            assert trainer.saver.leases("params") == 0
            assert trainer.compute_log_prob(make_batch(2)) == scores
            cycle.to_train()
            assert committed(trainer) == full
        assert device != "cpu" or family_bytes(device) == held
        assert pointers == [engine.store.tensor(name).data_ptr() for name in names]
        assert trainer.report().backup_bytes == engine.report().backup_bytes == 0


def test_aliased_parameters_cannot_be_changed_or_offloaded(
    device: str, model_path: str, tmp_path: Path
) -> None:
    with open_inprocess(config(model_path, device=device), ENGINE, alias=True) as (trainer, engine):
        cycle = Cycle(trainer, engine, alias=True, resident=["optim"])
        trainer.save_checkpoint(str(tmp_path / "step"))
        cycle.to_rollout(1)
        before = tokens_of(engine)
        for change in (
            lambda: trainer.update_actor(make_batch(2)),
            lambda: trainer.load_checkpoint(str(tmp_path / "step")),
        ):
            with pytest.raises(
                StateError, match=r"would change parameters that a rollout serves; put the rollout"
            ):
                change()
        with pytest.raises(LeaseError, match="'params'"):
            trainer.offload("params")
        trainer.save_checkpoint(str(tmp_path / "step"))
        assert tokens_of(engine) == before
        cycle.to_train()
        trainer.update_actor(make_batch(2))
        trainer.load_checkpoint(str(tmp_path / "step"))
        cycle.to_rollout(2)
        assert tokens_of(engine) == before
        cycle.to_train()
        trainer.offload()
        trainer.reload()


def test_syncs_by_alias_and_by_copies_may_alternate(model_path: str) -> None:
    with open_inprocess(config(model_path), ENGINE, alias=True) as (trainer, engine):
        tokens = []
        for version in range(1, 5):
            if version % 2:
                trainer.alias_weights(version)
            else:
                engine.wake_up(["weights"])
                trainer.sync_weights(version)
            engine.wake_up(["kv_cache"])
            tokens.append(tokens_of(engine))
            engine.sleep(level=2)
        assert tokens == tokens[:1] * 4
        with pytest.raises(ValueError, match="version 2 is stale: version 3 has been shared"):
            trainer.alias_weights(2)
        with pytest.raises(ValueError, match="version 3 is older than the engine's version 4"):
            trainer.alias_weights(3)


def swapped(layout: Manifest) -> Manifest:
    """Exchange the offsets of two parameters of one shape, keeping the layout's hash."""
    first, second = (f"model.layers.{i}.mlp.down_proj.weight" for i in (0, 1))
    offsets = {piece.name: piece.offset for piece in layout.slices}
    moved = {first: offsets[second], second: offsets[first]}
    slices = tuple(
        dataclasses.replace(p, offset=moved.get(p.name, p.offset)) for p in layout.slices
    )
    return dataclasses.replace(layout, slices=slices)


def test_first_alias_detects_a_wrong_layout(
    device: str, model_path: str, make_trainer: Callable[..., Trainer]
) -> None:
    engine = Engine.from_pretrained(model_path, device, load_weights=False, **ENGINE)
    trainer = make_trainer(model_path, device=device, layout=swapped(engine.manifest))
    trainer.connect([engine])
    with pytest.raises(WeightUpdateError, match="pages of version 1 have digest"):
        trainer.alias_weights(1)
    engine.wake_up()
    with pytest.raises(
        StateError, match="weights undefined: WeightUpdateError: the pages of version 1 have digest"
    ):
        tokens_of(engine)
    trainer.offload()
    trainer.reload()
    with pytest.raises(WeightUpdateError, match="pages of version 2 have digest"):
        trainer.alias_weights(2)
    engine.saver.close()


def test_alias_that_one_engine_refuses_is_undone_on_all(
    model_path: str, make_trainer: Callable[..., Trainer]
) -> None:
    engines = [Engine.from_pretrained(model_path, load_weights=False, **ENGINE) for _ in range(2)]
    trainer = make_trainer(model_path, layout=engines[0].manifest)
    trainer.connect(engines)
    assert len(trainer.alias_weights(1).digests) == 2
    assert tokens_of(engines[0]) == tokens_of(engines[1])
    assert trainer.saver.leases("params") == 2
    engines[1].saver.empty((4,), tag="weights2")
    engines[1].store.last_version = 9
    with pytest.raises(ValueError, match="version 2 is older than the engine's version 9"):
        trainer.alias_weights(2)
    assert trainer.saver.leases("params") == 0
    for engine in engines:
        with pytest.raises(StateError, match="version 2 is older"):
            tokens_of(engine)
        engine.saver.close()


def test_alias_without_a_fitting_layout_is_refused(
    model_path: str, tmp_path: Path, make_trainer: Callable[..., Trainer]
) -> None:
    engine = Engine.from_pretrained(model_path, load_weights=False, **ENGINE)
    with pytest.raises(
        StateError, match="weights undefined: the weights were never loaded; commit a weight update"
    ):
        tokens_of(engine)
    trainer = make_trainer(model_path)
    trainer.connect([engine])
    with pytest.raises(
        StateError, match=r"create the trainer with layout=engine.manifest, and call connect"
    ):
        trainer.alias_weights(1)
    with pytest.raises(
        ValueError,
        match=r"cannot be laid.*embed_tokens.weight: torch.bfloat16 in the trainer, torch.float",
    ):
        make_trainer(model_path, dtype="bfloat16", layout=engine.manifest)
    with pytest.raises(
        ValueError, match=r"embed_tokens.weight: shape \(64, 32\) in the trainer, \(96, 32\) in"
    ):
        make_trainer(write_model(tmp_path, vocab_size=64), layout=engine.manifest)
    engine.saver.close()


def test_parameters_not_at_the_start_of_their_tag_are_refused(model_path: str) -> None:
    engine = Engine.from_pretrained(model_path, load_weights=False, **ENGINE)
    saver = MemorySaver("cpu")
    front = saver.empty((64,), tag="params", content="host")
    trainer = Trainer(config(model_path), saver, layout=engine.manifest)
    trainer.connect([engine])
    with pytest.raises(WeightUpdateError, match="pages of version 1 have digest"):
        trainer.alias_weights(1)
    assert saver.leases("params") == 0
    trainer.close()
    del front


# ---------------------------------------------------------------- layouts


def test_byte_offsets_lists_all_parameters_that_do_not_fit() -> None:
    layout = manifest(
        piece("same", 0, (4, 2)),
        piece("wide", 64, (4, 2), "bfloat16"),
        piece("strided", 128, (4, 2), strides=(4, 1)),
        piece("half", 256, (2, 2), global_shape=(4, 2), start=(2, 0)),
        aliases={"tied": "same"},
    )
    params = {name: torch.empty(4, 2) for name in ("tied", "wide", "strided", "half")}
    with pytest.raises(ValueError) as caught:
        byte_offsets(dataclasses.replace(layout, zeros=((1024, 4),)), params)
    assert str(caught.value) == (
        "the trainer's parameters cannot be laid out like the rollout's: wide: torch.float32 in "
        "the trainer, torch.bfloat16 in the rollout; strided: its elements are not adjacent in the "
        "rollout; half: the rollout has a part (2, 2) of (4, 2); the rollout's layout has padding, "
        "like one rank of several; omit layout, and sync by copies"
    )
    with pytest.raises(ValueError, match="missing in the trainer: wide"):
        byte_offsets(layout, {"same": params["tied"]})


# ---------------------------------------------------------------- an engine that dies
