"""Calls of groups of actors: answers, errors and timeouts, with actors that only echo."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout import SamplingParams
from rollout.actor_base import ActorBase
from tests.helpers.ray_cluster import RayCluster
from trainer_bridge import ActorDied, ActorTimeout, RankFailed
from trainer_bridge.errors import SyncError
from trainer_bridge.remote import actor as remote_actor
from trainer_bridge.remote.actor import RemoteRollout, dispatch_prompts
from trainer_bridge.remote.group import RemoteActor, RemoteGroup, node_addresses

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray")
SECONDS = 200.0  # a busy machine starts actors slowly


def start(*ranks: int) -> list[RemoteActor]:
    class Echo(ActorBase):  # pickled by value
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def say(self, value: object) -> object:
            return self.rank, value

        def generate(self, prompts: list[Any], params: list[Any]) -> list[Any]:
            return [
                (self.rank, prompt, sampling.max_tokens)
                for prompt, sampling in zip(prompts, params, strict=True)
            ]

        def follow(self) -> None:
            return

        def fail(self, *errors: Exception | None) -> None:
            if (error := errors[self.rank]) is not None:
                raise error

        def wait(self, *files: str | None) -> None:
            while (name := files[self.rank]) and not os.path.exists(name):
                time.sleep(0.05)

        def abort_update(self, reason: str) -> None:
            self.reason = reason

        def unavailable_reason(self) -> str | None:
            return getattr(self, "reason", None)

    actor: Any = ray.remote(num_cpus=0)(Echo)
    return [RemoteActor(actor.remote(rank), f"trainer[{rank}]") for rank in ranks]


@pytest.fixture(scope="module")
def ranks(ray_cluster: RayCluster) -> Iterator[list[RemoteActor]]:
    actors = start(0, 1)
    yield actors
    for actor in actors:
        ray.kill(actor.handle)


@pytest.fixture
def group(ranks: list[RemoteActor]) -> RemoteGroup:
    return RemoteGroup(ranks, SECONDS)


def test_group_calls_all_ranks_and_returns_answer_of_rank_0(group: RemoteGroup) -> None:
    assert group.call("say", "so") == (0, "so")
    assert group.call_all("say", "so") == [(0, "so"), (1, "so")]
    assert group.call_each("say", [("a",), ("b",)]) == [(0, "a"), (1, "b")]
    assert group.call_each("say", [None, ("b",)]) == [None, (1, "b")]
    assert group.call("say", value="so") == (0, "so")
    assert [rank.call("say", 2) for rank in group.each()] == [(0, 2), (1, 2)]
    with pytest.raises(
        ValueError,
        match=r"report\(\) needs one rank, not trainer\[0\], trainer\[1\]; call it on one of",
    ):
        group.report()


def test_replicas_answer_in_the_order_of_the_prompts(
    ranks: list[RemoteActor],
) -> None:
    """Call both ranks of an engine of two ranks, and expect the answer of the first."""
    prompts = [[1] * length for length in (3, 9, 4, 5, 8)]
    params = [SamplingParams(max_tokens=number + 1) for number in range(5)]
    dispatched = dispatch_prompts(prompts, params, 2)
    expected = [(int(number in dispatched[1]), prompts[number], number + 1) for number in range(5)]
    assert {rank for rank, *_ in expected} == {0, 1}
    first, second = ranks
    assert RemoteRollout(ranks, SECONDS).generate(prompts, params) == expected
    engines = RemoteRollout([first, second, second, first], SECONDS, engine_size=2)
    assert engines.generate(prompts, params) == expected
    assert engines.generate(prompts[:1], params[0]) == [(0, prompts[0], 1)], (
        "one replica has nothing to do"
    )


def test_error_of_all_ranks_is_raised_and_error_of_one_rank_is_named(group: RemoteGroup) -> None:
    with pytest.raises(ValueError, match=r"^same$"):
        group.call("fail", ValueError("same"), ValueError("same"))
    with pytest.raises(
        RankFailed, match=r"^the trainer\[1\] actor failed in fail\(\): OSError: cosmic ray$"
    ) as caught:
        group.call("fail", None, OSError("cosmic ray"))
    assert isinstance(caught.value.error, OSError) and caught.value.__cause__ is caught.value.error


@pytest.mark.parametrize("cause", [0, 1])
def test_error_caused_by_another_rank_is_not_reported_as_cause(
    cause: int, group: RemoteGroup
) -> None:
    errors = [SyncError("write", f"rank {cause}: OSError: cosmic ray"), OSError("cosmic ray")]
    with pytest.raises(RankFailed) as caught:
        group.call("fail", *(errors if cause else errors[::-1]))
    assert str(caught.value) == f"the trainer[{cause}] actor failed in fail(): OSError: cosmic ray"


def test_silent_actor_is_named(group: RemoteGroup, tmp_path: Path) -> None:
    group.call("say", "both have started")
    group.timeout = 0.3
    with pytest.raises(
        ActorTimeout, match=r"the trainer\[0\] actor gave no answer for 0\.3 s in wait\(\)"
    ):
        group.call("wait", str(tmp_path / "release"), None)
    (tmp_path / "release").touch()


def test_loss_of_a_node_is_the_cause_of_an_earlier_error_of_communication(
    ranks: list[RemoteActor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let a rank fail before the cluster reports the death of a rank on another node."""

    class Dying:  # without an import of torch
        def call(self, *args: object) -> None:
            time.sleep(2)
            os._exit(1)

    monkeypatch.setattr("trainer_bridge.remote.group.GRACE_SECONDS", 0.1)
    actor: Any = ray.remote(num_cpus=0)(Dying)
    (here,) = node_addresses()  # the other rank's node is no part of the cluster
    near = RemoteActor(ranks[0].handle, "trainer[0]", here)
    group = RemoteGroup([near, RemoteActor(actor.remote(), "trainer[1]", "10.0.0.2")], SECONDS)
    with pytest.raises(ActorDied, match=r"the trainer\[1\] actor died with its node 10\.0\.0\.2"):
        group.call("fail", RuntimeError("connection reset"))


def test_actor_that_waits_for_a_lost_node_ends_the_call(
    ranks: list[RemoteActor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_bridge.remote.group.LOOK_SECONDS", 0.1)
    waiting = RemoteActor(ranks[0].handle, "rollout[1]", "10.0.0.2")
    with pytest.raises(
        ActorDied, match=r"rollout\[1\] actor died with its node 10\.0\.0\.2 in wait"
    ):
        RemoteGroup([waiting], SECONDS).call("wait", str(tmp_path / "release"))
    (tmp_path / "release").touch()


def test_abort_waits_briefly_for_a_busy_engine_and_precedes_its_next_call(
    ranks: list[RemoteActor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_actor, "GRACE_SECONDS", 0.5)
    rollout, file = RemoteRollout(ranks, SECONDS), tmp_path / "go"
    ranks[1].start("wait", None, str(file))
    started = time.monotonic()
    rollout.abort_update("a rank is lost")
    assert time.monotonic() - started < SECONDS / 4
    file.touch()
    assert rollout.call_all("unavailable_reason") == ["a rank is lost"] * 2


def test_dead_actor_ends_the_call_of_its_group(ranks: list[RemoteActor], tmp_path: Path) -> None:
    class Dying:  # without an import of torch
        def call(self, *args: object) -> None:
            os._exit(1)

    actor: Any = ray.remote(num_cpus=0)(Dying)
    dying = RemoteGroup([ranks[0], RemoteActor(actor.remote(), "trainer[1]")], SECONDS)
    with pytest.raises(ActorDied, match=r"the trainer\[1\] actor died in wait\(\)"):
        dying.call("wait", str(tmp_path / "release"))
    with pytest.raises(ActorDied, match=r"the trainer\[1\] actor died in say\(\)"):
        dying.call("say", "anybody?")
    (tmp_path / "release").touch()


def test_actor_that_cannot_start_reports_its_error(ray_cluster: RayCluster) -> None:
    class Broken:
        def __init__(self) -> None:
            raise ZeroDivisionError("division by zero")

        def call(self, *args: object) -> None: ...

    actor: Any = ray.remote(num_cpus=0)(Broken)
    with pytest.raises(ActorDied, match=r"could not start \(.*division by zero"):
        RemoteGroup([RemoteActor(actor.remote(), "trainer")], SECONDS).call("say", 1)
