"""Which way bytes go, and over which backend. No ranks, no pages."""

from __future__ import annotations

import logging
import socket
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from trainer_bridge.sync import relay
from trainer_bridge.sync.relay import Routes, Wire, choose_routes, log_routes, obstacle

HERE = socket.gethostname()
PAIRS = [(0, 0), (1, 0), (1, 1), (2, 1)]
SPEAKERS = (0, 2)


@pytest.mark.parametrize(
    ("place", "target", "reason"),
    [
        ("a/cpu", "a/cpu", None),
        ("here", f"{HERE}/cpu", None),
        ("a/cpu", "b/cpu", "b is another machine than a"),
        ("a/GPU-0", "a/GPU-0", None),
        ("a/GPU-0", "a/GPU-1", None),  # hidden here: only mapping can tell
    ],
)
def test_obstacle_is_another_machine(place: str, target: str, reason: str | None) -> None:
    assert obstacle(place, target) == reason


def test_pages_are_taken_wherever_they_can_be_mapped(caplog: pytest.LogCaptureFixture) -> None:
    routes = choose_routes(PAIRS, SPEAKERS, [{}, {}, {}])
    assert not routes.indirect and routes.direct(1) == {0, 1}

    blocked: list[dict[int, str]] = [{}, {0: "far", 1: "far"}, {}]
    routes = choose_routes(PAIRS, SPEAKERS, blocked)
    assert routes.relayed == {(1, 0), (1, 1)} and not routes.handled and routes.direct(1) == set()
    with caplog.at_level(logging.WARNING, "memsaver"):
        log_routes(routes, blocked)
    assert caplog.messages == ["weight sync by messages for rank->target 1->0, 1->1: far"]

    # a target that its speaker cannot map gets bytes by the handle
    routes = choose_routes(PAIRS, SPEAKERS, [{}, {1: "far"}, {1: "far"}])
    assert routes.handled == {1} and routes.indirect == {(1, 1), (2, 1)}
    assert routes.relayed == {(1, 1)} and routes.direct(1) == {0}
    near = choose_routes(PAIRS, SPEAKERS, [{}, {}, {1: "far"}])
    assert near.direct(1) == {0, 1}, "another rank can map it, and does"


@pytest.mark.parametrize(
    ("config", "places", "handled", "on_gpu"),
    [
        ("cuda:nccl", ["a/GPU-0", "a/GPU-1"], set(), True),
        ("cpu:gloo,cuda:nccl", ["a/GPU-0", "b/GPU-0"], set(), True),
        ("cpu:gloo,cuda:nccl", ["a/GPU-0", "a/GPU-1"], {0}, False),
        ("cuda:nccl", ["a/GPU-0", "a/GPU-0"], set(), False),
        ("cpu:gloo", ["a/cpu", "b/cpu"], set(), False),
    ],
)
def test_nccl_is_taken_between_gpus_that_are_apart(
    config: str,
    places: list[str],
    handled: set[int],
    on_gpu: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agreement = Mock(cpu=Mock(spec=dist.ProcessGroup), group=Mock(spec=dist.ProcessGroup))
    warmed: list[Any] = []
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(relay.dist, "all_reduce", lambda tensor, group: warmed.append(group))
    routes = Routes(speakers=[0], indirect=frozenset({(1, 0)}), handled=frozenset(handled))
    wire = Wire(agreement, routes, places, torch.device("cpu"))
    assert (wire.on_gpu, warmed) == (on_gpu, [agreement.group] if on_gpu else [])
    assert wire.group is (agreement.group if on_gpu else agreement.cpu)
