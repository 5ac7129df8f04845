"""Checks and decisions of `open_ray` before any process is started."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from rollout import SamplingParams
from tests.helpers.ports import free_port
from tests.helpers.trainer_bridge.models import config
from trainer_bridge import open_ray
from trainer_bridge.coordinator import actor_arguments
from trainer_bridge.remote.actor import RemoteRollout, dispatch_prompts
from trainer_bridge.remote.group import RemoteActor, connected, cores
from trainer_bridge.remote.placement import Placement

ray = pytest.importorskip("ray")


@pytest.mark.parametrize(
    ("engine", "options", "message"),
    [
        ({}, {"devices": 0}, "nodes=1 and devices=0 must be at least 1"),
        ({}, {"nodes": 0}, "nodes=0 and devices=1 must be at least 1"),
        (
            {"tensor_parallel_size": 2},
            {"devices": 3},
            "tensor_parallel_size=2 does not divide devices=3",
        ),
        ({"tensor_parallel_size": 2}, {"nodes": 2}, "an engine stays on one machine"),
        (
            {},
            {"devices": 2, "alias": True},
            r"alias=True needs one device, with both ranks, not 2; sync by copies",
        ),
        (
            {},
            {"rollout_devices": 1, "alias": True},
            r"alias=True needs one device, with both ranks, not 2; sync by copies",
        ),
        (
            {},
            {"colocate": False},
            "rollout_devices=0 with colocate=False leaves no device to the engines",
        ),
        (
            {"tensor_parallel_size": 2},
            {"devices": 2, "rollout_devices": 1},
            "tensor_parallel_size=2 does not divide rollout_devices=1",
        ),
        (
            {"device": "cuda:0"},
            {},
            "engine device cuda:0 and trainer device cpu differ; use one device",
        ),
    ],
)
def test_open_ray_refuses_devices_that_do_not_fit(
    engine: dict[str, Any], options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "trainer_bridge.coordinator.connected", lambda *_: pytest.fail("a cluster was started")
    )
    with pytest.raises(ValueError, match=message):
        with open_ray(config("nowhere"), engine, **options):
            pass


def test_replicas_get_different_seeds_and_ranks_of_one_engine_the_same() -> None:
    given = {
        "path": "x",
        "device": "cpu",
        "dtype": "torch.float32",
        "seed": 2**63 - 1,
        "kv_tokens": 64,
    }
    actors = [
        actor_arguments(given, on_gpu=False, threads=1, replica=rank // 2) for rank in range(4)
    ]
    assert [actor["engine"]["seed"] for actor in actors] == [2**63 - 1, 2**63 - 1, 0, 0]
    assert all(
        (actor["engine"]["kv_tokens"], actor["dtype"], actor["threads"]) == (64, "float32", 1)
        for actor in actors
    )


def test_dispatch_weighs_requests_by_answers_and_beams() -> None:
    assert dispatch_prompts([[1]], [SamplingParams()], 3) == [[0], [], []]
    prompts = [[0], [0], [0] * 8, [0] * 8]
    params = [SamplingParams(max_tokens=50, n=2), SamplingParams(max_tokens=10, beam_width=10)]
    params += [SamplingParams(max_tokens=2)] * 2
    assert dispatch_prompts(prompts, params, 2) == [[0, 2], [1, 3]]


def test_replicas_refuse_params_that_do_not_fit_the_prompts() -> None:
    replicas = RemoteRollout([RemoteActor(None, f"rollout[{rank}]") for rank in range(2)], 1.0)
    with pytest.raises(ValueError, match="2 prompts but 1 SamplingParams"):
        replicas.generate([[1], [2]], [SamplingParams()])


@pytest.mark.parametrize(
    ("options", "engines", "owners", "bundles"),
    [
        ({"devices": 2}, [0, 1], [0, 1], [(0, 0, 2), (0, 1, 2)]),
        (
            {"nodes": 2, "devices": 2, "rollout_devices": 3, "colocate": False},
            [4, 5, 6, 7, 8, 9],
            [0, 1, 0, 2, 3, 2],
            [
                *[(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1)],
                *[(0, 2, 1), (0, 3, 1), (0, 4, 1), (1, 2, 1), (1, 3, 1), (1, 4, 1)],
            ],
        ),
        (
            {"nodes": 2, "rollout_devices": 1},
            [0, 1, 2, 3],
            [0, 1, 0, 1],
            [(0, 0, 2), (1, 0, 2), (0, 1, 1), (1, 1, 1)],
        ),
        (
            {"devices": 2, "rollout_nodes": 1, "colocate": False},
            [2, 3],
            [None, None],
            [(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1)],
        ),
        (
            {"rollout_devices": 1, "rollout_nodes": 1},
            [0, 1, 2, 3],
            [0, 0, None, None],
            [(0, 0, 2), (0, 1, 1), (1, 0, 1), (1, 1, 1)],
        ),
    ],
    ids=["colocated", "apart", "both", "far", "near and far"],
)
def test_engines_belong_to_a_trainer_rank_of_their_device_or_machine(
    options: dict[str, Any],
    engines: list[int],
    owners: list[int | None],
    bundles: list[tuple[int, int, int]],
) -> None:
    placement = Placement(**options)
    assert [*placement.engines] == engines and placement.owners() == owners
    assert placement.bundles() == bundles
    assert placement.ranks == sum(ranks for *_, ranks in bundles)


class FakeRay:
    """A stand-in for Ray that records calls of `ray.init` and `ray.shutdown`.

    Like Ray, it replaces the handler of SIGTERM.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[dict[str, Any]] = []
        self.ended = 0
        patch.setattr(ray, "is_initialized", lambda: False)
        patch.setattr(ray, "init", self.init)
        patch.setattr(ray, "shutdown", self.shutdown)
        store = {"object_store_memory": 100.0}
        node = {"NodeManagerAddress": "10.0.0.2", "Alive": True, "Resources": store}
        patch.setattr(ray, "nodes", lambda: [node, {"Alive": False, "Resources": {}}])
        patch.setenv("RAY_USAGE_STATS_ENABLED", "perhaps")
        patch.delenv("RAY_ADDRESS", raising=False)

    def init(self, **options: Any) -> None:
        self.asked.append({**options, "reports": os.environ["RAY_USAGE_STATS_ENABLED"]})
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def shutdown(self) -> None:
        self.ended += 1


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return FakeRay(monkeypatch)


@pytest.mark.parametrize(("actors", "cpus"), [(2, max(2, cores())), (1000, 1000)])
def test_own_cluster_has_cpus_for_all_actors_and_is_ended_on_error(
    actors: int, cpus: int, cluster: FakeRay
) -> None:
    with pytest.raises(KeyError), connected(None, actors):
        assert cluster.ended == 0
        raise KeyError
    (asked,) = cluster.asked
    assert (asked["address"], asked["num_cpus"]) == ("local", cpus)
    assert asked["include_dashboard"] is False
    assert asked["reports"] == "0" and os.environ["RAY_USAGE_STATS_ENABLED"] == "perhaps"
    assert cluster.ended == 1


@pytest.fixture
def listening() -> Iterator[str]:
    """Yield an address at which something accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("given", ["auto", None])
def test_running_cluster_is_joined_and_left(
    given: str | None, listening: str, cluster: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = lambda *_: None  # noqa: E731
    monkeypatch.setenv("RAY_ADDRESS", listening)
    before = signal.signal(signal.SIGTERM, own)
    try:
        with connected(given, 1, 100):
            assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
    used = [asked["address"] for asked in cluster.asked]
    assert used == [given or listening] and cluster.ended == 1


@pytest.mark.parametrize("empty", ["", " "])
def test_empty_address_of_the_environment_starts_an_own_cluster(
    empty: str, cluster: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", empty)
    with connected(None, 1):
        pass
    assert [asked["address"] for asked in cluster.asked] == ["local"]


def test_address_without_a_cluster_is_refused_immediately(cluster: FakeRay) -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(
        ValueError,
        match=rf"^no Ray cluster answers at {address} \(.*refused\); start one .* or set",
    ):
        with connected(address, 1):
            pass
    assert not cluster.asked


def test_node_with_a_small_object_store_is_named(cluster: FakeRay, listening: str) -> None:
    with pytest.raises(
        ValueError,
        match=r"on 10\.0\.0\.2 has 100 of the 101 bytes .*ray start --object-store-memory=101$",
    ):
        with connected(listening, 1, 101):
            pass
    assert cluster.ended == 1
