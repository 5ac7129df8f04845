"""Updates through shadow pages, aliased pages and messages: served versions, memory, refusals.

Random walks over all calls are in test_update_states.py. This file checks error messages, and cases
in which the device matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from memsaver import LeaseError, MemorySaver, OutOfMemory, StateError, Ticket, attach
from rollout import Engine, WeightUpdateError
from rollout.tag_names import WEIGHTS
from rollout.weights import PackedBox
from rollout.weights.update import write_boxes
from tests.helpers.rollout.answers import GREEDY, ids
from tests.helpers.rollout.updates import (
    PROMPTS,
    Owner,
    addresses,
    answers,
    expected,
    shadow_bytes,
    update,
    weight_bytes,
    write,
)

NORMS = ("model.norm.weight", "model.layers.0.self_attn.q_norm.weight")
NOT_OPEN = "no weight update is open"


@pytest.fixture
def engine(path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> Engine:
    # Refused operations wait for leases this long.
    monkeypatch.setattr("memsaver.tag.transaction.LEASE_GRACE_SECONDS", 0.3)
    return Engine.from_pretrained(path, device=device, kv_tokens=512)


@pytest.fixture
def owner(engine: Engine) -> Iterator[Owner]:
    owner = Owner(engine)
    yield owner
    engine.sleep(level=2)
    engine.saver.check_integrity()
    owner.saver.check_integrity()
    assert owner.saver.leases("params") == 0, "the pages were not given back"
    owner.saver.close()


# ---------------------------------------------------------------- shadow pages


def test_shadow_update_serves_the_old_version_and_its_prefixes_until_the_commit(
    engine: Engine,
) -> None:
    before, pointers = answers(engine), addresses(engine)

    def serves(version: int) -> bool:
        start = engine.stats.prefix_hit_tokens
        assert answers(engine) == before and engine.weights_version == version
        return engine.stats.prefix_hit_tokens > start

    for version in (1, 2, 3):
        offer = engine.begin_update(version, shadow=True)
        assert offer.shadow and offer.names is None
        assert serves(version - 1)
        engine.verify_update(write(offer, seed=version))
        assert serves(version - 1)
        assert engine.commit_update(version).version == version
        before = expected(version)
        assert not serves(version) and addresses(engine) == pointers
        engine.check_integrity()
        engine.saver.check_integrity()


def test_begin_changes_nothing_when_shadow_pages_have_no_room(engine: Engine) -> None:
    saver, before, report = engine.saver, answers(engine), engine.report()
    for attempt in range(3):  # at first without the tag, in the end without its memory
        saver.limit_bytes = engine.report().committed_bytes
        with pytest.raises(OutOfMemory, match="weights_shadow"):
            engine.begin_update(1, shadow=True)
        engine.abort_update("one engine had no room")
        assert answers(engine) == before
        assert engine.report().committed_bytes == report.committed_bytes
        saver.limit_bytes = None
        if attempt == 1:
            engine.begin_update(1, shadow=True)
            engine.abort_update("the tag exists now")
    saver.check_integrity()


def test_writers_lease_refuses_commit_and_sleep_but_not_answers(engine: Engine) -> None:
    with attach(engine.begin_update(1).ticket), pytest.raises(LeaseError):
        engine.sleep()
    assert not engine.saver.is_paused("weights") and not engine.saver.is_paused("kv_cache")
    update(engine, 1, seed=1)
    offer = engine.begin_update(2, shadow=True)
    engine.verify_update(write(offer, seed=2))
    with attach(offer.ticket):
        for call in (lambda: engine.commit_update(2), engine.sleep):
            with pytest.raises(LeaseError):
                call()
        assert answers(engine) == expected(1)
        engine.abort_update("a writer hangs")
        assert answers(engine) == expected(1) and shadow_bytes(engine)
        with pytest.raises(LeaseError):
            engine.sleep()
    engine.sleep(level=2)
    assert engine.report().committed_bytes == 0
    engine.wake_up()
    update(engine, 2, seed=2, shadow=True)
    assert answers(engine) == expected(2)


def test_running_requests_refuse_changes_of_their_weights_and_memory(
    engine: Engine, owner: Owner
) -> None:
    """Check that a shadow update can be written and verified meanwhile, but not committed."""
    before, messages = answers(engine), list[str]()

    def meddle(done: int, total: int, generated: int) -> None:
        if generated == 6 and not messages:
            calls: list[Callable[[], Any]] = [
                engine.sleep,
                lambda: engine.begin_update(1),
                lambda: engine.alias_update(1, owner.ticket(), engine.manifest.layout_hash),
            ]
        elif generated == 9 and len(messages) == 3:
            engine.verify_update(write(engine.begin_update(1, shadow=True), seed=1))
            calls = [lambda: engine.commit_update(1)]
        else:
            return
        for call in calls:
            with pytest.raises(StateError) as caught:
                call()
            messages.append(str(caught.value))

    out = engine.generate(PROMPTS, GREEDY, on_progress=meddle)
    assert ids(out) == [[answer] for answer in before]
    actions = ["begin a weight update", "alias weights", "commit a weight update"]
    assert messages[0].startswith("cannot sleep with unfinished requests: 3.0, 4.0, 5.0")
    assert all(
        message.startswith(f"cannot {action} while requests run: 3.0, 4.0, 5.0")
        for message, action in zip(messages[1:], actions, strict=True)
    )
    engine.commit_update(1)
    assert answers(engine) == expected(1)


@pytest.mark.parametrize("shadow", [False, True])
def test_update_of_some_parameters_leaves_the_rest_unchanged(engine: Engine, shadow: bool) -> None:
    for names, match in (
        ([], "names is empty"),
        (["lm_head.weight", "lora.A"], r"no parameters lora\.A \(1 in total"),
    ):
        with pytest.raises(ValueError, match=match):
            engine.begin_update(1, shadow=shadow, names=names)
    assert engine.unavailable_reason() is None and not shadow_bytes(engine)
    assert engine.begin_update(1, shadow=shadow, names=["lm_head.weight"]).names == (
        "model.embed_tokens.weight",
    )
    update(engine, 1, seed=1)
    offer = engine.begin_update(2, shadow=shadow, names=[*NORMS, NORMS[0]])
    assert offer.names == NORMS
    verified = engine.verify_update(write(offer, seed=2))
    assert engine.commit_update(2).digest == verified.digest == engine.store.digest(names=NORMS)
    engine.sleep(level=2)
    engine.wake_up()
    with pytest.raises(
        StateError, match=r"some parameters only: the weights were discarded by sleep"
    ):
        engine.begin_update(3, shadow=shadow, names=NORMS)


def test_failed_begin_closes_a_verified_update_whose_pages_it_reused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = answers(engine)
    engine.verify_update(write(engine.begin_update(1, shadow=True), seed=1))
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("rollout.weights.pages.ShadowPages.copy_all", lambda pages: 1 / 0)
        engine.begin_update(1, shadow=True, names=NORMS)
    with pytest.raises(WeightUpdateError, match=NOT_OPEN):
        engine.commit_update(1)
    assert answers(engine) == before


# ---------------------------------------------------------------- pages of another saver


def test_refused_alias_changes_nothing(engine: Engine, owner: Owner) -> None:
    update(engine, 3, seed=3)
    before, own = answers(engine), weight_bytes(engine)
    ticket, layout = owner.ticket(), engine.manifest.layout_hash
    with pytest.raises(
        ValueError, match="laid out as other, these weights as .*layout=engine.manifest"
    ):
        engine.alias_update(4, ticket, "other")
    with (
        attach(engine.saver.share(WEIGHTS)),
        pytest.raises(LeaseError, match="'weights' by process"),
    ):
        engine.alias_update(4, ticket, layout)
    assert answers(engine) == before and weight_bytes(engine) == own and engine.weights_version == 3
    receipt = write(engine.begin_update(4, shadow=True), seed=1)
    owner.alias(engine, 4, seed=2)
    with pytest.raises(WeightUpdateError, match=NOT_OPEN):
        engine.verify_update(receipt)
    assert not shadow_bytes(engine)
    with pytest.raises(StateError, match=r"cannot begin .* sleep\(tags=\['weights'\]\) to give"):
        engine.begin_update(5, shadow=True)
    assert answers(engine) == expected(2)


@pytest.mark.parametrize("first", [True, False])
def test_shadow_and_aliased_pages_are_refused_when_other_tensors_lie_on_the_tag(
    path: Path, first: bool
) -> None:
    saver = MemorySaver(device="cpu")
    other = saver.empty((256,), tag=WEIGHTS) if first else None
    engine = Engine.from_pretrained(path, kv_tokens=512, saver=saver)
    other = saver.empty((256,), tag=WEIGHTS) if other is None else other
    committed = engine.report().committed_bytes
    with pytest.raises(StateError, match="shadow pages need .* place other tensors on another tag"):
        engine.begin_update(1, shadow=True)
    with pytest.raises(StateError, match="aliased pages need tag weights for the weights alone"):
        engine.alias_update(1, Owner(engine).ticket(), engine.manifest.layout_hash)
    assert engine.report().committed_bytes == committed and answers(engine)


def paused(owner: Owner) -> Ticket:
    owner.saver.pause()
    return owner.ticket()


FAILURES: dict[str, tuple[type[Exception], Callable[[Owner], Ticket], int | None]] = {
    "pages of version 1 have digest": (WeightUpdateError, Owner.ticket, 3),
    "'params' is paused": (LeaseError, paused, None),
}


@pytest.mark.parametrize("message", FAILURES)
@pytest.mark.parametrize("asleep", [False, True])
def test_failed_alias_poisons_the_engine_and_leaves_it_without_pages(
    engine: Engine, owner: Owner, message: str, asleep: bool
) -> None:
    kind, ticket, claimed = FAILURES[message]
    if asleep:
        engine.sleep(tags=[WEIGHTS])
    owner.fill(1)
    with pytest.raises(kind, match=message):
        engine.alias_update(1, ticket(owner), engine.manifest.layout_hash, claimed)
    assert weight_bytes(engine) == (0, 0) and owner.saver.leases("params") == 0
    engine.wake_up()
    with pytest.raises(StateError, match=f"version 1 could not be aliased: {kind.__name__}"):
        answers(engine)
    update(engine, 1, seed=2)
    assert answers(engine) == expected(2)


# ---------------------------------------------------------------- weights in messages


def test_write_update_is_refused_without_an_open_update_and_while_weights_sleep(
    engine: Engine,
) -> None:
    nothing = torch.empty(0, dtype=torch.uint8)
    with pytest.raises(WeightUpdateError, match=NOT_OPEN):
        engine.write_update([], nothing)
    engine.begin_update(1)
    engine.sleep(2)
    with pytest.raises(StateError, match="tag weights is paused"):
        engine.write_update([], nothing)


BOX = PackedBox(at=0, offset=64, shape=(2, 3), strides=(8, 1), dtype="float32")


@pytest.mark.parametrize(
    "changes", [{"at": 44}, {"at": -4}, {"offset": 60}, {"offset": 88}, {"strides": (1 << 40, 1)}]
)
def test_box_outside_of_pages_or_message_is_refused_before_any_write(
    changes: dict[str, Any], device: str
) -> None:
    pages = torch.zeros(64, dtype=torch.uint8, device=device)
    data = torch.ones(64, dtype=torch.uint8)
    outside = r"outside of the weights \(bytes 64 to 128\) or of the 64 bytes of its message"
    with pytest.raises(WeightUpdateError, match=outside):
        write_boxes(pages, [BOX, replace(BOX, **changes)], data, base=64)
    assert not pages.any()
    write_boxes(pages, [BOX], data, base=64)
    rows = pages.view(torch.int32).view(2, 8)
    assert (rows[:, :3] == 0x01010101).all() and not rows[:, 3:].any()
