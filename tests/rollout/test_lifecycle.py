"""Sleep, wake up, and the two-phase weight update."""

from pathlib import Path

import pytest
import torch

from memsaver import StateError
from rollout import Engine, WeightUpdateError
from tests.helpers.rollout.answers import GREEDY, check, ids
from tests.helpers.rollout.updates import PROMPTS, addresses, answers, expected, tiny, update, write


@pytest.fixture
def engine(path: Path, device: str) -> Engine:
    return Engine.from_pretrained(path, device=device, kv_tokens=512)


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
    moves = [
        (event.op, event.tag) for event in engine.drain_events() if event.op in ("pause", "resume")
    ]
    assert moves == [(op, tag) for op in ("pause", "resume") for tag in engine.tags] * 2


def test_says_why_it_does_not_generate(engine: Engine) -> None:
    engine.sleep()
    with pytest.raises(
        StateError, match=rf"cannot generate: paused: {', '.join(engine.tags)} \(call wake_up\)"
    ):
        answers(engine)
    engine.wake_up(["weights"])
    with pytest.raises(
        StateError, match=rf"cannot generate: paused: {', '.join(engine.tags[1:])} \(call"
    ):
        answers(engine)
    engine.wake_up()
    assert engine.unavailable_reason() is None
    engine.sleep(level=2)
    engine.wake_up()
    assert engine.report().backup_bytes == 0
    with pytest.raises(StateError, match=r"weights undefined: .*discarded by sleep\(level=2\)"):
        answers(engine)


def test_an_update_in_place_is_served_once_it_is_committed_and_never_where_a_bit_flipped(
    engine: Engine,
) -> None:
    for flip in (False, True):
        offer = engine.begin_update(1)
        assert (offer.version, offer.manifest) == (1, engine.manifest)
        assert "version 1 has not been committed" in str(engine.unavailable_reason())
        receipt = write(offer, seed=1)
        if flip:
            norm = engine.store.tensor("model.norm.weight")
            norm[0] = torch.nextafter(norm[0], norm[0] + 1)
            with pytest.raises(
                WeightUpdateError, match="version 1 failed verification: the writer's digest"
            ):
                engine.verify_update(receipt)
        else:
            verified = engine.verify_update(receipt)
            assert "version 1 has not been committed" in str(engine.unavailable_reason())
            committed = engine.commit_update(1)
            assert {(each.version, each.digest) for each in (verified, committed)} == {
                (1, receipt.digest)
            }
            assert answers(engine) == expected(1)
    with pytest.raises(
        StateError, match="weights undefined: .*version 1 failed verification.*digest"
    ):
        answers(engine)
    engine.sleep()
    assert engine.report().backup_bytes == 0  # undefined weights are not worth keeping


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


def test_preempted_requests_go_on_under_the_new_version(engine: Engine) -> None:
    def swap(done: int, total: int, generated: int) -> None:
        if generated == 6:
            engine.sleep(level=2, unfinished="preempt")
            engine.wake_up()
            update(engine, 4, seed=5)

    for samples in engine.generate(PROMPTS, GREEDY, on_progress=swap):
        assert samples[0].weight_versions == [0, 0, 4, 4, 4, 4, 4, 4]
    check(tiny(5), PROMPTS, engine.generate(PROMPTS, GREEDY))


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
