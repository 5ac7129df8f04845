"""An engine that serves pages of another saver: nothing is copied, and they go back whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memsaver import LeaseError, MemorySaver, StateError, Ticket, attach
from rollout import Engine, WeightUpdateError
from rollout.tags import WEIGHTS
from tests.helpers.memory import family_bytes
from tests.helpers.rollout.answers import GREEDY
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


@pytest.fixture
def engine(path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr("memsaver.switch.LEASE_GRACE_SECONDS", 0.3)  # what is refused waits for so long
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


@pytest.mark.alone
def test_the_pages_are_served_where_the_weights_were(engine: Engine, owner: Owner, device: str) -> None:
    answers(engine)  # fills the prefix cache by other weights
    pointers, held, own = addresses(engine), family_bytes(device), weight_bytes(engine)[0]
    size = owner.saver.report().committed_bytes
    for version in (1, 2, 3):
        owner.lend(engine, version, seed=version, digest=owner.fill(version) if version == 2 else None)
        assert weight_bytes(engine) == (0, size) and owner.saver.leases("params") == 1
        assert answers(engine) == expected(version) and addresses(engine) == pointers
        assert family_bytes(device) <= held - own
        if version == 1:
            engine.sleep(level=1)
            engine.wake_up(["kv_cache", "cuda_graph"])
    engine.wake_up()
    assert answers(engine) == expected(3), "a wake_up of what is awake changed something"


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_gives_them_back_and_own_memory_comes_again(engine: Engine, owner: Owner, level: int) -> None:
    own = weight_bytes(engine)[0]
    owner.lend(engine, 1, seed=1)
    with pytest.raises(LeaseError, match="params"):
        owner.saver.pause()
    engine.sleep(level)
    assert weight_bytes(engine) == (0, 0) and engine.report().backup_bytes == 0
    owner.saver.pause()
    engine.wake_up()
    assert weight_bytes(engine) == (own, 0)
    with pytest.raises(StateError, match="weights undefined: a sleep gave the trainer's pages back"):
        answers(engine)
    update(engine, 2, seed=2)
    assert answers(engine) == expected(2)


@pytest.mark.parametrize("shadow", [False, True])
def test_an_open_update_is_over(engine: Engine, owner: Owner, shadow: bool) -> None:
    receipt = write(engine.begin_update(1, shadow=shadow), seed=1)
    owner.lend(engine, 1, seed=2)
    for call in (lambda: engine.verify_update(receipt), lambda: engine.commit_update(1)):
        with pytest.raises(WeightUpdateError, match="no weight update is open"):
            call()
    assert answers(engine) == expected(2)
    assert not shadow_bytes(engine)


REFUSED: dict[str, Callable[[Engine, Path], Any]] = {
    "cannot begin a weight update": lambda engine, path: engine.begin_update(2),
    r"sleep\(tags=\['weights'\]\) gives": lambda engine, path: engine.begin_update(2, shadow=True),
    "cannot load weights: the weights lie": lambda engine, path: engine.load(path),
}


@pytest.mark.parametrize("what", REFUSED)
def test_the_trainers_pages_are_not_written_to(engine: Engine, owner: Owner, path: Path, what: str) -> None:
    owner.lend(engine, 1, seed=1)
    with pytest.raises(StateError, match=what):
        REFUSED[what](engine, path)
    assert answers(engine) == expected(1)


def test_what_is_refused_changes_nothing(engine: Engine, owner: Owner) -> None:
    update(engine, 3, seed=3)
    before, own = answers(engine), weight_bytes(engine)
    ticket, layout = owner.ticket(), engine.manifest.layout_hash
    with pytest.raises(ValueError, match="version 2 is older than the engine's version 3"):
        engine.adopt_update(2, ticket, layout)
    with pytest.raises(ValueError, match="laid out as other, these weights as .*layout=engine.manifest"):
        engine.adopt_update(4, ticket, "other")
    with attach(engine.saver.share(WEIGHTS)), pytest.raises(LeaseError, match="'weights' by process"):
        engine.adopt_update(4, ticket, layout)
    with pytest.raises(StateError, match="cannot adopt weights while requests run"):
        engine.generate(PROMPTS, GREEDY, lambda *_: engine.adopt_update(4, ticket, layout))
    assert answers(engine) == before and weight_bytes(engine) == own and engine.weights_version == 3


def test_other_tensors_on_the_tag_forbid_it(path: Path) -> None:
    for first in (True, False):
        saver = MemorySaver(device="cpu")
        other = saver.empty((256,), tag=WEIGHTS) if first else None
        engine = Engine.from_pretrained(path, kv_tokens=512, saver=saver)
        other = saver.empty((256,), tag=WEIGHTS) if other is None else other
        with pytest.raises(StateError, match="borrowed pages need tag weights for the weights alone"):
            engine.adopt_update(1, Owner(engine).ticket(), engine.manifest.layout_hash)
        assert answers(engine)


def small(owner: Owner) -> Ticket:
    owner.saver.empty((1,), torch.uint8, tag="small")
    return owner.saver.share("small")


def paused(owner: Owner) -> Ticket:
    owner.saver.pause()
    return owner.ticket()


FAILURES: dict[str, tuple[type[Exception], Callable[[Owner], Ticket], int | None]] = {
    "pages of version 1 have digest": (WeightUpdateError, Owner.ticket, 3),
    "'params' is paused": (LeaseError, paused, None),
    "the tag needs .* tag 'small' has": (ValueError, small, None),
    "unknown ticket": (LeaseError, lambda owner: Ticket(**{**vars(owner.ticket()), "token": ""}), None),
}


@pytest.mark.parametrize("what", FAILURES)
@pytest.mark.parametrize("asleep", [False, True])
def test_after_other_failures_it_is_poisoned_and_holds_nothing(
    engine: Engine, owner: Owner, what: str, asleep: bool
) -> None:
    if what.startswith("the tag needs") and engine.saver.device.type == "cuda":
        pytest.skip("on a GPU a page is as large as these weights")
    kind, ticket, claimed = FAILURES[what]
    if asleep:
        engine.sleep(tags=[WEIGHTS])
    owner.fill(1)
    with pytest.raises(kind, match=what):
        engine.adopt_update(1, ticket(owner), engine.manifest.layout_hash, claimed)
    assert weight_bytes(engine) == (0, 0) and owner.saver.leases("params") == 0
    engine.wake_up()
    with pytest.raises(StateError, match=f"version 1 could not be adopted: {kind.__name__}"):
        answers(engine)
    update(engine, 1, seed=2)
    assert answers(engine) == expected(2)


def test_an_abort_gives_them_back(engine: Engine, owner: Owner) -> None:
    owner.lend(engine, 1, seed=1)
    engine.abort_update("another engine failed")
    assert weight_bytes(engine) == (0, 0)
    owner.saver.pause()
    engine.wake_up()
    with pytest.raises(StateError, match="weights undefined: another engine failed"):
        answers(engine)
