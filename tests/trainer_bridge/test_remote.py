"""Actors that are called alike: whose error is raised, and who is waited for. The actors here do nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from trainer_bridge import ActorDied, ActorTimeout, RankFailed
from trainer_bridge.errors import SyncError
from trainer_bridge.remote import RemoteActor, RemoteGroup

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray")
SECONDS = 100.0  # a slow machine imports torch in the actors


@pytest.fixture(scope="module")
def group() -> Iterator[RemoteGroup]:
    """Two actors, and the cluster they are on."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)

    class Echo:
        def __init__(self, rank: int | None) -> None:
            self.rank = 1 / 0 if rank is None else rank

        def say(self, value: object) -> object:
            return self.rank, value

        def fail(self, *errors: Exception | None) -> None:
            if (error := errors[self.rank]) is not None:
                raise error

        def nap(self, *seconds: float) -> None:
            time.sleep(seconds[self.rank])

        def die(self, rank: int) -> None:
            if rank == self.rank:
                os._exit(1)
            time.sleep(100)

    actor: Any = ray.remote(num_cpus=0)(Echo)
    handles = [RemoteActor(actor.remote(rank), f"trainer[{rank}]") for rank in range(2)]
    broken = RemoteActor(actor.remote(None), "rollout")
    yield RemoteGroup(handles, SECONDS)
    with pytest.raises(ActorDied, match=r"the rollout actor could not be made \(.*division by zero"):
        RemoteGroup([broken], SECONDS).call("say", 1)
    ray.shutdown()


def test_all_are_called_and_rank_0_answers(group: RemoteGroup) -> None:
    assert group.call("say", "so") == (0, "so")
    assert group.call_all("say", "so") == [(0, "so"), (1, "so")]
    assert group.call_each("say", [("a",), ("b",)]) == [(0, "a"), (1, "b")]
    assert group.call_each("say", [None, ("b",)]) == [None, (1, "b")]
    assert [each.call_one("say", 2) for each in group.each()] == [(0, 2), (1, 2)]
    with pytest.raises(
        ValueError, match=r"report\(\) is of one rank, these are trainer\[0\], trainer\[1\]; ask one of"
    ):
        group.call_one("report")


def test_what_all_raise_is_raised_and_what_one_raises_is_named(group: RemoteGroup) -> None:
    with pytest.raises(ValueError, match=r"^same$"):
        group.call("fail", ValueError("same"), ValueError("same"))
    with pytest.raises(RankFailed, match=r"^the trainer\[1\] actor failed in fail\(\): OSError: cosmic ray$") as caught:
        group.call("fail", None, OSError("cosmic ray"))
    assert isinstance(caught.value.error, OSError) and caught.value.__cause__ is caught.value.error


def test_what_a_rank_raises_because_of_another_is_not_the_cause() -> None:
    """It may come first."""
    pair = RemoteGroup([RemoteActor(None, f"trainer[{rank}]") for rank in range(2)], SECONDS)
    echo = SyncError("write", "rank 1: OSError: cosmic ray")
    error = pair._cause("sync_weights", [(0, echo), (1, OSError("cosmic ray"))], 2)
    assert str(error) == "the trainer[1] actor failed in sync_weights(): OSError: cosmic ray"


def test_who_is_silent_is_named(group: RemoteGroup) -> None:
    group.timeout = 1.0
    try:
        with pytest.raises(ActorTimeout, match=r"the trainer\[0\] actor gave no answer for 1 s in nap\(\)"):
            group.call("nap", 2.0, 0.0)
    finally:
        group.timeout = SECONDS
    group.call("nap", 0.0, 0.0)


def test_nobody_waits_for_the_others_of_one_that_died(group: RemoteGroup) -> None:
    """The last test here: the actors are of no more use."""
    started = time.monotonic()
    with pytest.raises(ActorDied, match=r"the trainer\[1\] actor died in die\(\)"):
        group.call("die", 1)
    with pytest.raises(ActorDied, match=r"the trainer\[1\] actor died in say\(\)"):
        group.call("say", "anybody?")
    assert time.monotonic() - started < 50
