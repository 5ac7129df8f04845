"""Sleep, wake up, and the two-phase weight update."""

import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from memsaver import LeaseError, MemorySaver, StateError, attach
from memsaver.ops.digest import digest
from rollout import CommitReceipt, Engine, Rollout, SamplingParams, WeightOffer, WeightUpdateError, WriteReceipt
from tests.helpers.models import build_tiny, greedy, save_tiny
from tests.rollout.test_greedy import random_prompts

PROMPTS = random_prompts((3, 50, 20))
GREEDY = SamplingParams(max_tokens=8, temperature=0)
TINY = {"head_dim": 16, "tie_word_embeddings": True}


@pytest.fixture
def engine(tmp_path: Path, device: str) -> Engine:
    save_tiny(tmp_path, "qwen3", **TINY)
    return Engine.from_pretrained(tmp_path, device=device, kv_tokens=512)


def addresses(engine: Engine) -> list[int]:
    return [engine.store.tensor(piece.name).data_ptr() for piece in engine.manifest.slices]


def answers(engine: Engine) -> list[list[int]]:
    return [samples[0].token_ids for samples in engine.generate(PROMPTS, GREEDY)]


@lru_cache(maxsize=16)
def tiny(seed: int) -> PreTrainedModel:
    return build_tiny("qwen3", seed, **TINY)


def write(offer: WeightOffer, seed: int, **wrong: int | str) -> WriteReceipt:
    """A trainer in miniature: writes the parameters of another random model through a lease."""
    parameters = dict(tiny(seed).named_parameters())
    total, nbytes = 0, 0
    with attach(offer.ticket) as lease:
        for piece in offer.manifest.slices:
            if offer.names is not None and piece.name not in offer.names:
                continue
            target = lease.tensor(piece.shape, getattr(torch, piece.dtype), piece.offset)
            target.copy_(parameters[piece.name].detach())
            total += digest(target, piece.index_base)
            nbytes += target.nbytes
    fields = {"version": offer.version, "layout_hash": offer.manifest.layout_hash, "digest": total % 2**64}
    return WriteReceipt(**{**fields, "nbytes": nbytes, **wrong})  # type: ignore[arg-type]


def update(engine: Engine, version: int, seed: int, **how: Any) -> CommitReceipt:
    """A whole update to the parameters of another random model. how: of `begin_update`."""
    engine.verify_update(write(engine.begin_update(version, **how), seed))
    return engine.commit_update(version)


def test_engine_fulfils_the_protocol(engine: Engine) -> None:
    rollout: Rollout = engine
    assert rollout.unavailable_reason() is None and rollout.weights_version == 0


def test_sleep_level_1_gives_all_memory_back_and_keeps_the_answers(engine: Engine) -> None:
    before = answers(engine)
    pointers = addresses(engine)
    for _ in range(3):
        engine.sleep()
        report = engine.report()
        assert report.committed_bytes == 0
        assert report.tags["weights"].backup_bytes == report.tags["weights"].live_bytes > 0
        assert report.tags["kv_cache"].backup_bytes == 0
        engine.sleep()  # asleep already: nothing happens
        engine.wake_up(["weights"])
        engine.wake_up(["kv_cache", "cuda_graph"])
        assert answers(engine) == before
    assert addresses(engine) == pointers
    moves = [(event.op, event.tag) for event in engine.drain_events() if event.op in ("pause", "resume")]
    assert moves == [(op, tag) for op in ("pause", "resume") for tag in engine.tags] * 3


def test_page_zero_is_zero_after_wake_up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    resume = engine.saver.resume

    def resume_dirty(*tags: str) -> None:
        resume(*tags)
        for layer in range(engine.model.num_layers):
            for cache in engine.cache.pool.get_kv_buffer(layer):
                cache.fill_(float("nan"))

    monkeypatch.setattr(engine.saver, "resume", resume_dirty)
    engine.sleep()
    engine.wake_up()
    for layer in range(engine.model.num_layers):
        for cache in engine.cache.pool.get_kv_buffer(layer):
            assert not cache[: engine.config.page_size].any()


def test_says_why_it_does_not_generate(engine: Engine) -> None:
    engine.sleep()
    with pytest.raises(StateError, match=rf"cannot generate: paused: {', '.join(engine.tags)} \(call wake_up\)"):
        answers(engine)
    engine.wake_up(["weights"])
    with pytest.raises(StateError, match=rf"cannot generate: paused: {', '.join(engine.tags[1:])} \(call"):
        answers(engine)
    engine.wake_up()
    assert engine.unavailable_reason() is None
    engine.sleep(level=2)
    engine.wake_up()
    assert engine.report().backup_bytes == 0
    with pytest.raises(StateError, match=r"weights undefined: .*discarded by sleep\(level=2\)"):
        answers(engine)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda e: e.sleep(level=3), "sleep level=3"),
        (lambda e: e.sleep(unfinished="wait"), "unfinished='wait'"),
        (lambda e: e.wake_up(["weights", "params"]), r"unknown tags \['params'\]"),
    ],
)
def test_refuses_unknown_words(engine: Engine, call, match: str) -> None:  # type: ignore[no-untyped-def]
    engine.sleep()
    with pytest.raises(ValueError, match=match):
        call(engine)
    assert engine.saver.is_paused("weights") and engine.saver.is_paused("kv_cache")


def test_sleep_and_update_refuse_while_requests_run(engine: Engine) -> None:
    before = answers(engine)
    refused: list[str] = []

    def meddle(done: int, total: int, generated: int) -> None:
        if generated == 6:
            for call in (engine.sleep, lambda: engine.begin_update(1)):
                with pytest.raises(StateError) as caught:
                    call()
                refused.append(str(caught.value))

    out = engine.generate(PROMPTS, GREEDY, on_progress=meddle)
    assert [samples[0].token_ids for samples in out] == before
    assert "unfinished requests: 3.0, 4.0, 5.0" in refused[0] and "while requests run: 3.0, 4.0, 5.0" in refused[1]


def test_sleep_can_preempt_unfinished_requests(engine: Engine) -> None:
    before = answers(engine)

    def nap(done: int, total: int, generated: int) -> None:
        if generated in (6, 15):
            engine.sleep(unfinished="preempt")
            engine.check_integrity()
            engine.wake_up()

    out = engine.generate(PROMPTS, GREEDY, on_progress=nap)
    assert [samples[0].token_ids for samples in out] == before


def test_preempted_requests_go_on_under_the_new_version(engine: Engine) -> None:
    def swap(done: int, total: int, generated: int) -> None:
        if generated == 6:
            engine.sleep(level=2, unfinished="preempt")
            engine.wake_up()
            update(engine, 4, seed=5)

    for samples in engine.generate(PROMPTS, GREEDY, on_progress=swap):
        assert samples[0].weight_versions == [0, 0, 4, 4, 4, 4, 4, 4]


def test_sleep_can_abort_unfinished_requests(engine: Engine) -> None:
    before = answers(engine)

    def stop(done: int, total: int, generated: int) -> None:
        if generated == 6:
            engine.sleep(unfinished="abort")

    out = engine.generate(PROMPTS, GREEDY, on_progress=stop)
    assert [samples[0].token_ids for samples in out] == [ids[:2] for ids in before]
    assert {samples[0].finish_reason for samples in out} == {"abort"}
    engine.wake_up()
    engine.check_integrity()
    assert answers(engine) == before


def test_rounds_of_sleep_update_wake_up(engine: Engine) -> None:
    for version in range(1, 6):
        engine.sleep(level=1 + version % 2)
        engine.wake_up(["weights"])
        offer = engine.begin_update(version)
        assert (offer.version, offer.manifest) == (version, engine.manifest)
        assert f"version {version} has not been committed" in str(engine.unavailable_reason())
        receipt = write(offer, seed=version)
        verified = engine.verify_update(receipt)
        assert f"version {version} has not been committed" in str(engine.unavailable_reason())
        committed = engine.commit_update(version)
        assert (committed.version, committed.digest) == (version, receipt.digest)
        assert (verified.version, verified.digest) == (version, receipt.digest)
        engine.wake_up()
        model = tiny(version)
        out = engine.generate(PROMPTS, GREEDY)
        assert [samples[0].token_ids for samples in out] == [greedy(model, prompt, 8) for prompt in PROMPTS]
        assert {v for samples in out for v in samples[0].weight_versions} == {version} == {engine.weights_version}


@pytest.mark.parametrize("wrong", [{"digest": 1}, {"version": 2}, {"layout_hash": "other"}, {"nbytes": 5}])
def test_a_receipt_that_does_not_match_poisons(engine: Engine, wrong: dict) -> None:
    (field,) = wrong
    with pytest.raises(WeightUpdateError, match=f"version 1 failed verification: the writer's {field}"):
        engine.verify_update(write(engine.begin_update(1), seed=1, **wrong))
    with pytest.raises(StateError, match=f"weights undefined: .*version 1 failed verification.*{field}"):
        answers(engine)
    engine.sleep()
    assert engine.report().backup_bytes == 0  # undefined weights are not worth keeping
    engine.wake_up()
    with pytest.raises(WeightUpdateError, match="no weight update is open"):
        update(engine, 1, seed=1) and engine.commit_update(1)
    assert engine.weights_version == 1 and engine.unavailable_reason() is None


def test_a_written_bit_that_flips_is_noticed(engine: Engine) -> None:
    receipt = write(engine.begin_update(1), seed=1)
    norm = engine.store.tensor("model.norm.weight")
    norm[0] = torch.nextafter(norm[0], norm[0] + 1)
    with pytest.raises(WeightUpdateError, match="digest"):
        engine.verify_update(receipt)


def test_abort_poisons_with_the_reason_until_a_commit(engine: Engine) -> None:
    engine.begin_update(1)
    engine.abort_update("trainer died in stage sync")
    with pytest.raises(StateError, match="trainer died in stage sync"):
        answers(engine)
    update(engine, 1, seed=1)
    assert len(answers(engine)) == 3


def test_begin_update_changes_nothing_when_refused(engine: Engine) -> None:
    update(engine, 3, seed=1)
    with pytest.raises(ValueError, match="version 2 is older than the engine's version 3"):
        engine.begin_update(2)
    assert engine.unavailable_reason() is None
    engine.sleep()
    with pytest.raises(StateError, match="tag weights is paused"):
        engine.begin_update(4)
    engine.wake_up()
    assert engine.unavailable_reason() is None


def test_loading_again_after_poison(engine: Engine, tmp_path: Path) -> None:
    before = answers(engine)
    engine.abort_update("broken")
    engine.load(tmp_path)
    assert answers(engine) == before and engine.weights_version == 0


def test_sleep_is_refused_while_a_writer_holds_the_pages(engine: Engine) -> None:
    offer = engine.begin_update(1)
    with attach(offer.ticket), pytest.raises(LeaseError):
        engine.sleep()
    assert not engine.saver.is_paused("weights") and not engine.saver.is_paused("kv_cache")


def test_two_engines_share_a_process(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    one, two = (Engine.from_pretrained(tmp_path, kv_tokens=256, saver=MemorySaver(device="cpu")) for _ in range(2))
    one.sleep()
    assert two.unavailable_reason() is None and len(answers(two)) == 3


def test_import_needs_neither_ray_nor_transformers() -> None:
    code = "import sys, rollout; print(sorted({'ray', 'transformers', 'omegaconf'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.strip() == "[]"
