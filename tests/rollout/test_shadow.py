"""Shadow pages: a version is written and verified beside the one that is served."""

from pathlib import Path

import pytest
import torch

from memsaver import LeaseError, MemorySaver, OutOfMemory, StateError, attach
from rollout import Engine, WeightUpdateError
from rollout.shadow import ShadowPages
from rollout.tags import WEIGHTS, WEIGHTS_SHADOW
from tests.helpers.memory import family_bytes
from tests.helpers.rollout.answers import GREEDY
from tests.helpers.rollout.updates import (
    PROMPTS,
    addresses,
    answers,
    expected,
    shadow_bytes,
    tiny,
    update,
    write,
)

NORMS = ("model.norm.weight", "model.layers.0.self_attn.q_norm.weight")


@pytest.fixture
def engine(path: Path, device: str) -> Engine:
    return Engine.from_pretrained(path, device=device, kv_tokens=512)


def test_the_old_version_answers_until_the_commit_and_addresses_stay(engine: Engine) -> None:
    before, pointers = answers(engine), addresses(engine)
    for version in (1, 2, 3):
        offer = engine.begin_update(version, shadow=True)
        assert offer.shadow and offer.names is None and offer.manifest == engine.manifest
        assert answers(engine) == before
        engine.verify_update(write(offer, seed=version))
        assert answers(engine) == before and engine.weights_version == version - 1
        assert engine.commit_update(version).version == version == engine.weights_version
        before = answers(engine)
        assert before == expected(version) and addresses(engine) == pointers
        engine.check_integrity()
        engine.saver.check_integrity()


def end_update(engine: Engine, how: str) -> None:
    """Begin an update with shadow pages, write it, and end it."""
    offer = engine.begin_update(engine.weights_version + 1, shadow=True)
    receipt = write(offer, seed=1, **({"nbytes": 1} if how == "refused" else {}))
    if how == "commit":
        engine.verify_update(receipt)
        engine.commit_update(offer.version)
    elif how == "abort":
        engine.abort_update("enough")
    elif how == "sleep":
        engine.sleep()
        engine.wake_up()
    else:
        with pytest.raises(WeightUpdateError, match="nbytes.*goes on with version"):
            engine.verify_update(receipt)


@pytest.mark.alone
def test_pages_are_held_from_begin_to_the_end_and_no_longer(engine: Engine, device: str) -> None:
    for how in ("commit", "abort", "refused", "sleep"):  # what is taken once: tables, a lease's thread
        end_update(engine, how)
    answers(engine)
    report, counted = engine.report(), family_bytes(device)
    size = report.tags[WEIGHTS].committed_bytes
    engine.begin_update(engine.weights_version + 1, shadow=True)
    assert shadow_bytes(engine) == size and family_bytes(device) == counted + size
    engine.begin_update(engine.weights_version + 1, shadow=True)
    assert shadow_bytes(engine) == size
    update(engine, engine.weights_version + 1, seed=1)  # in place: replaces it
    for how in ("replaced", "commit", "abort", "refused", "sleep"):
        if how != "replaced":
            end_update(engine, how)
        assert answers(engine) and not shadow_bytes(engine), how
        assert engine.report().committed_bytes == report.committed_bytes and family_bytes(device) == counted, how
    assert WEIGHTS_SHADOW not in engine.tags


@pytest.mark.parametrize("how", ["abort", "refused", "sleep"])
def test_the_old_version_is_back_where_an_update_fails(engine: Engine, how: str) -> None:
    update(engine, 3, seed=3)
    before = answers(engine)
    end_update(engine, how)
    assert answers(engine) == before == expected(3) and engine.weights_version == 3
    engine.abort_update("one of the other engines refused")  # sent to all
    assert answers(engine) == before
    with pytest.raises(WeightUpdateError, match="no weight update is open"):
        engine.commit_update(4)
    assert update(engine, 4, seed=4, shadow=True).version == 4
    assert answers(engine) == expected(4)
    engine.abort_update("another engine did not commit")
    with pytest.raises(StateError, match="another engine did not commit"):
        answers(engine)


def test_calls_out_of_order_change_nothing(engine: Engine) -> None:
    offer = engine.begin_update(1, shadow=True)
    with pytest.raises(WeightUpdateError, match="version 1 is not verified; call verify_update"):
        engine.commit_update(1)
    receipt = write(offer, seed=1)
    engine.verify_update(receipt)
    with pytest.raises(WeightUpdateError, match="version 1 is verified already"):
        engine.verify_update(receipt)
    with pytest.raises(WeightUpdateError, match="version 2 was not verified, but version 1"):
        engine.commit_update(2)
    with pytest.raises(ValueError, match="version -1 is older"):
        engine.begin_update(-1, shadow=True)
    engine.commit_update(1)
    assert answers(engine) == expected(1)


def test_no_room_for_shadow_pages_changes_nothing(path: Path, device: str) -> None:
    saver = MemorySaver(device=device)
    engine = Engine.from_pretrained(path, device=device, kv_tokens=512, saver=saver)
    before, report = answers(engine), engine.report()
    for again in range(3):  # no pages so far; then: no memory behind them
        saver.limit_bytes = engine.report().committed_bytes
        with pytest.raises(OutOfMemory, match="weights_shadow"):
            engine.begin_update(1, shadow=True)
        engine.abort_update("one engine had no room")
        assert answers(engine) == before and engine.report().committed_bytes == report.committed_bytes
        saver.limit_bytes = None
        if again == 1:
            engine.begin_update(1, shadow=True)
            engine.abort_update("made once")
    saver.check_integrity()


def test_a_writer_that_holds_the_pages_stops_commit_and_sleep_only(engine: Engine) -> None:
    before = answers(engine)
    offer = engine.begin_update(1, shadow=True)
    engine.verify_update(write(offer, seed=1))
    with attach(offer.ticket):
        with pytest.raises(LeaseError):
            engine.commit_update(1)
        with pytest.raises(LeaseError):
            engine.sleep()
        assert answers(engine) == before
        engine.abort_update("a writer hangs")
        assert answers(engine) == before and shadow_bytes(engine)
        with pytest.raises(LeaseError):
            engine.sleep()
    engine.sleep(level=2)
    assert engine.report().committed_bytes == 0
    engine.wake_up()
    update(engine, 1, seed=2, shadow=True)
    assert answers(engine) == expected(2)


def test_requests_run_on_during_an_update_and_hold_the_commit_up(engine: Engine) -> None:
    before, said = answers(engine), list[str]()

    def meddle(done: int, total: int, generated: int) -> None:
        if generated == 6:
            engine.verify_update(write(engine.begin_update(1, shadow=True), seed=1))
        elif generated == 9:
            with pytest.raises(StateError, match="cannot commit a weight update while requests run") as caught:
                engine.commit_update(1)
            said.append(str(caught.value))

    out = engine.generate(PROMPTS, GREEDY, on_progress=meddle)
    assert [samples[0].token_ids for samples in out] == before and len(said) == 1
    engine.commit_update(1)
    assert answers(engine) == expected(1)


def test_prefixes_are_those_of_the_version_that_is_served(engine: Engine) -> None:
    answers(engine)
    offer = engine.begin_update(1, shadow=True)

    def found() -> int:
        start = engine.stats.prefix_hit_tokens
        assert answers(engine)
        return engine.stats.prefix_hit_tokens - start

    assert found() > 0
    engine.verify_update(write(offer, seed=1))
    assert found() > 0
    engine.commit_update(1)
    assert found() == 0
    end_update(engine, "abort")
    assert found() > 0


@pytest.mark.parametrize("shadow", [False, True])
def test_some_parameters_only(engine: Engine, shadow: bool) -> None:
    update(engine, 1, seed=1)
    offer = engine.begin_update(2, shadow=shadow, names=[*NORMS, NORMS[0]])
    assert offer.names == NORMS
    verified = engine.verify_update(write(offer, seed=2))
    assert engine.commit_update(2).digest == verified.digest == engine.store.digest(names=NORMS)
    for piece in engine.manifest.slices:
        source = tiny(2 if piece.name in NORMS else 1).get_parameter(piece.name)
        assert torch.equal(engine.store.tensor(piece.name).cpu(), source), piece.name
    assert answers(engine) != expected(1)


@pytest.mark.parametrize("shadow", [False, True])
def test_names_that_cannot_be_are_refused(engine: Engine, shadow: bool) -> None:
    for names, match in (([], "names is empty"), (["lm_head.weight", "lora.A"], r"no parameters lora\.A \(1 in all")):
        with pytest.raises(ValueError, match=match):
            engine.begin_update(1, shadow=shadow, names=names)
    assert engine.unavailable_reason() is None and not shadow_bytes(engine)
    offer = engine.begin_update(1, shadow=shadow, names=["lm_head.weight"])
    assert offer.names == ("model.embed_tokens.weight",)
    engine.sleep(level=2)
    engine.wake_up()
    with pytest.raises(StateError, match=r"some parameters only: the weights were discarded by sleep"):
        engine.begin_update(1, shadow=shadow, names=NORMS)


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_ends_an_update_in_place(engine: Engine, level: int) -> None:
    receipt = write(engine.begin_update(1), seed=1)
    engine.sleep(level)
    for call in (lambda: engine.verify_update(receipt), lambda: engine.begin_update(1)):
        with pytest.raises(StateError, match="tag weights is paused"):
            call()
    engine.wake_up()
    with pytest.raises(WeightUpdateError, match="no weight update is open"):
        engine.commit_update(1)
    with pytest.raises(StateError, match="a sleep ended the update to version 1" if level == 1 else "discarded"):
        answers(engine)


def test_other_tensors_on_the_tag_forbid_shadow_pages(path: Path) -> None:
    for first in (True, False):
        saver = MemorySaver(device="cpu")
        other = saver.empty((256,), tag=WEIGHTS) if first else None
        engine = Engine.from_pretrained(path, kv_tokens=512, saver=saver)
        other = saver.empty((256,), tag=WEIGHTS) if other is None else other
        committed = engine.report().committed_bytes
        with pytest.raises(StateError, match="place the other tensors on another tag"):
            engine.begin_update(1, shadow=True)
        assert engine.report().committed_bytes == committed and answers(engine)


def test_what_was_verified_is_over_once_its_pages_are_written_anew(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = answers(engine)
    engine.verify_update(write(engine.begin_update(1, shadow=True), seed=1))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="device lost"):
        patch.setattr("rollout.shadow.ShadowPages.copy_all", fail)
        engine.begin_update(1, shadow=True, names=NORMS)
    with pytest.raises(WeightUpdateError, match="no weight update is open"):
        engine.commit_update(1)
    assert answers(engine) == before


def fail(pages: ShadowPages) -> None:
    raise OSError("device lost")
