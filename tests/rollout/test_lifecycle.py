"""Sleep, wake up, and the two-phase weight update."""

from pathlib import Path

import pytest
import torch

from memsaver import LeaseError, MemorySaver, StateError, attach
from rollout import Engine, Rollout, WeightUpdateError
from tests.helpers.rollout.answers import GREEDY, check, ids
from tests.helpers.rollout.poison import fill
from tests.helpers.rollout.updates import PROMPTS, addresses, answers, tiny, update, write


@pytest.fixture
def engine(path: Path, device: str) -> Engine:
    return Engine.from_pretrained(path, device=device, kv_tokens=512)


def test_engine_fulfils_the_protocol(engine: Engine) -> None:
    rollout: Rollout = engine
    assert rollout.unavailable_reason() is None and rollout.weights_version == 0


def test_sleep_level_1_gives_all_memory_back_and_keeps_the_answers(engine: Engine) -> None:
    before = answers(engine)
    pointers = addresses(engine)
    for _ in range(2):
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
    assert moves == [(op, tag) for op in ("pause", "resume") for tag in engine.tags] * 2


def test_page_zero_is_zero_after_wake_up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    resume = engine.saver.resume

    def resume_dirty(*tags: str) -> None:
        resume(*tags)
        fill(engine.kv_pool, slice(None))

    monkeypatch.setattr(engine.saver, "resume", resume_dirty)
    engine.sleep()
    engine.wake_up()
    for part in engine.kv_pool.stored.values():
        assert not part[:, : engine.config.page_size].any() and part[:, engine.config.page_size :].isnan().all()


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
    assert ids(out) == [[each] for each in before]
    assert "unfinished requests: 3.0, 4.0, 5.0" in refused[0] and "while requests run: 3.0, 4.0, 5.0" in refused[1]


def test_sleep_can_preempt_unfinished_requests(engine: Engine) -> None:
    before = answers(engine)

    def nap(done: int, total: int, generated: int) -> None:
        if generated in (6, 15):
            engine.sleep(unfinished="preempt")
            engine.check_integrity()
            engine.wake_up()

    out = engine.generate(PROMPTS, GREEDY, on_progress=nap)
    assert ids(out) == [[each] for each in before]


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
    assert ids(out) == [[each[:2]] for each in before]
    assert {samples[0].finish_reason for samples in out} == {"abort"}
    engine.wake_up()
    engine.check_integrity()
    assert answers(engine) == before


def test_rounds_of_sleep_update_wake_up(engine: Engine) -> None:
    for version in range(1, 4):
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
        out = engine.generate(PROMPTS, GREEDY)
        check(tiny(version), PROMPTS, out)
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


def test_sleep_is_refused_while_a_writer_holds_the_pages(engine: Engine) -> None:
    offer = engine.begin_update(1)
    with attach(offer.ticket), pytest.raises(LeaseError):
        engine.sleep()
    assert not engine.saver.is_paused("weights") and not engine.saver.is_paused("kv_cache")


def test_two_engines_share_a_process(path: Path) -> None:
    one, two = (Engine.from_pretrained(path, kv_tokens=256, saver=MemorySaver(device="cpu")) for _ in range(2))
    one.sleep()
    assert two.unavailable_reason() is None and len(answers(two)) == 3
