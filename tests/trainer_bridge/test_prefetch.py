"""Reloads that overlap with computation.

Each FSDP unit waits for its own parameters, the optimizer step for the moments, and other calls for
whole tags.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from memsaver import BackendError, MemorySaver, OutOfMemory, StateError
from tests.helpers.memsaver.prefetches import gated
from tests.helpers.memsaver.savers import until
from tests.helpers.ranks import results, start_ranks
from tests.helpers.trainer_bridge.models import config, make_batch, write_model
from tests.helpers.trainer_bridge.states import assert_same_bits, bits
from trainer_bridge import LoraConfig, Trainer
from trainer_bridge.models import sharded_model as model_module
from trainer_bridge.sync.shards import local_shard

Make = Callable[..., Trainer]
PIECE = 1 << 10
UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
LORA = LoraConfig(rank=3, alpha=6.0, target_modules=("q_proj", "down_proj"))
VARIANTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    (UNTIED, {"activation_checkpointing": "layers"}),
    ({}, {"activation_checkpointing": "mlp", "param_dtype": "bfloat16"}),
    (UNTIED, {"lora": LORA}),
    ({}, {"optimizer_offload": True, "param_dtype": "bfloat16"}),
]


def record_layers(trainer: Trainer, into: list[str]) -> None:
    """Record each layer whose forward has run."""
    model: Any = trainer.model
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, number=number: into.append(f"layer {number}"))


def offload_and_prefetch(trainer: Trainer, *tags: str) -> None:
    """Offload all tags, and reload the memory of `tags`; content arrives as the gate opens."""
    trainer.offload()
    for tag in tags:
        trainer.reload(tag, wait="memory")


def test_unit_runs_while_later_units_are_still_reloading(
    device: str, tmp_path: Path, make_trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, "UNIT_BYTES", 1)  # each layer is a unit
    path = write_model(tmp_path, num_hidden_layers=3, **UNTIED)
    trainer, batch, ran = make_trainer(path, device=device), make_batch(3), list[str]()
    saver = trainer.saver
    scores = trainer.compute_log_prob(batch)
    record_layers(trainer, ran)
    with gated(saver, PIECE) as gate, ThreadPoolExecutor(1) as thread:
        offload_and_prefetch(trainer, "params")
        assert not saver.is_paused("params") and saver.is_paused("optim")
        later = thread.submit(trainer.compute_log_prob, batch)
        for number in range(3):
            assert wait_for([later], 0.02).not_done and len(ran) == number
            while len(ran) == number:
                gate.let(1)
                wait_for([later], 0.003)
            assert ran == [f"layer {layer}" for layer in range(number + 1)]
            assert pieces(trainer) - len(gate.passed) >= pieces(trainer) // 5 * (2 - number)
        gate.let(1000)
        assert later.result(60) == scores
    assert len(gate.passed) == pieces(trainer)
    trainer.reload()
    assert trainer.compute_log_prob(batch) == scores


def pieces(trainer: Trainer) -> int:
    saver = trainer.saver
    return -(-saver.report().tags["params"].live_bytes // PIECE)


@pytest.mark.parametrize(("shape", "changes"), VARIANTS)
def test_update_during_prefetch_is_bit_identical_to_plain_reload(
    shape: dict[str, Any], changes: dict[str, Any], device: str, tmp_path: Path, make_trainer: Make
) -> None:
    path = write_model(tmp_path, **shape)
    trainer = make_trainer(path, device=device, **changes)
    twin = make_trainer(path, device=device, **changes)
    for step in range(2):
        batch = make_batch(5, seed=step)
        twin.offload()
        twin.reload()
        with gated(trainer.saver, PIECE) as gate, ThreadPoolExecutor(1) as thread:
            offload_and_prefetch(trainer, "params", "optim")
            trickle = thread.submit(gate.trickle)
            assert trainer.update_actor(batch) == twin.update_actor(batch)
            trickle.result(60)
        assert_same_bits(bits(trainer), bits(twin))
        assert_same_bits(trainer.shards(), twin.shards())
        trainer.saver.check_integrity()


@pytest.mark.parametrize("verb", ["update_actor", "save_checkpoint", "offload", "reload", "shards"])
def test_calls_that_need_all_content_wait_for_it(
    verb: str, model_path: str, make_trainer: Make, tmp_path: Path
) -> None:
    trainer, batch = make_trainer(model_path), make_batch(2)
    before = bits(trainer)
    work: Callable[[], Any] = {
        "update_actor": partial(trainer.update_actor, batch),
        "save_checkpoint": partial(trainer.save_checkpoint, str(tmp_path / "c")),
    }.get(verb, getattr(trainer, verb))
    with gated(trainer.saver, PIECE) as gate, ThreadPoolExecutor(1) as thread:
        offload_and_prefetch(trainer, "params", "optim")
        gate.let(pieces(trainer))  # the parameters, but not the moments behind them
        later = thread.submit(work)
        assert wait_for([later], 0.1).not_done
        gate.let(100_000)
        later.result(60)
    if verb != "update_actor":
        trainer.reload()
        assert_same_bits(bits(trainer), before)


@pytest.mark.parametrize("begun", [False, True])
def test_failed_prefetch_is_raised_by_its_reader_and_can_be_retried(
    begun: bool, model_path: str, make_trainer: Make
) -> None:
    trainer, batch = make_trainer(model_path), make_batch(2)
    scores, saver = trainer.compute_log_prob(batch), trainer.saver
    with gated(saver, PIECE) as gate:
        gate.failing = RuntimeError("the cable is out")
        trainer.offload()
        trainer.reload("params", wait="memory" if not begun else False)
        until(lambda: not saver.is_paused("params"))
        gate.let(1)
        with pytest.raises(
            BackendError, match="of 'params' was not restored: the cable is out; resume again"
        ):
            trainer.compute_log_prob(batch)
        with pytest.raises(StateError, match="'params', which is offloaded"):
            trainer.compute_log_prob(batch)
    trainer.reload("params", wait="memory")
    assert trainer.compute_log_prob(batch) == scores
    trainer.reload()
    trainer.offload()
    saver.limit_bytes = 1
    for wait in (True, "memory"):
        with pytest.raises(OutOfMemory):
            trainer.reload("params", wait=wait)
        with pytest.raises(StateError, match="'params', which is offloaded"):
            trainer.compute_log_prob(batch)
    saver.limit_bytes = None
    trainer.reload(wait="memory")
    trainer.reload("params", wait="memory")  # has no effect
    assert trainer.compute_log_prob(batch) == scores


def test_moments_arrive_after_prefetched_parameters(model_path: str, make_trainer: Make) -> None:
    trainer, batch = make_trainer(model_path), make_batch(2)
    twin = make_trainer(model_path)
    saver = trainer.saver
    with gated(saver, PIECE) as gate:
        offload_and_prefetch(trainer, "params")
        trainer.reload("optim", wait=False)
        until(lambda: not saver.is_paused("optim"))  # memory does not wait for other tags' content
        first = saver.report().tags["params"]
        gate.let(100_000)
        assert trainer.update_actor(batch) == twin.update_actor(batch)
        assert first.backup_bytes and not saver.report().tags["params"].backup_bytes
        assert len(gate.passed) > pieces(trainer)
    base = local_shard(next(iter(trainer.model.parameters()))).data_ptr()
    size = saver.report().tags["params"].reserved_bytes
    on_params = [abs(at - base) < size // 2 for at in gate.passed]
    assert on_params == sorted(on_params, reverse=True)
    assert_same_bits(bits(trainer), bits(twin))


def worker(rank: int, path: str) -> bool:
    settings = config(path, device=f"cuda:{rank}")
    saver = MemorySaver(settings.device)
    trainer, twin = Trainer(settings, saver), Trainer(settings)
    for step in range(2):
        batch = make_batch(5, seed=step)
        with gated(saver, PIECE) as gate, ThreadPoolExecutor(1) as thread:
            offload_and_prefetch(trainer, "params", "optim")
            thread.submit(gate.trickle)
            assert trainer.compute_log_prob(batch) == twin.compute_log_prob(batch)
            assert trainer.update_actor(batch) == twin.update_actor(batch)
        assert_same_bits(bits(trainer), bits(twin))
    return True


@pytest.mark.gpus(2)
def test_nccl_streams_wait_for_prefetched_parameters(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", **UNTIED)
    ranks = start_ranks(worker, 2, tmp_path / "store", path, backend="nccl")
    assert results(ranks) == [True, True]
