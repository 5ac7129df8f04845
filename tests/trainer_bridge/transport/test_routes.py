"""Routes and backends of a sync's bytes, without ranks and pages."""

from __future__ import annotations

import logging
import socket
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from trainer_bridge.sync import relay
from trainer_bridge.sync.relay import Routes, Wire, obstacle

HERE = socket.gethostname()
PAIRS = [(0, 0), (1, 0), (1, 1), (2, 1)]
OWNERS = (0, 2)


@pytest.mark.parametrize(
    ("place", "target", "reason"),
    [
        ("a/cpu", "a/cpu", None),
        ("here", f"{HERE}/cpu", None),
        ("a/cpu", "b/cpu", "b is another machine than a"),
        ("a/GPU-0", "a/GPU-0", None),
        ("a/GPU-0", "a/GPU-1", None),  # hidden from this process: only mapping can tell
    ],
)
def test_obstacle_names_another_machine(place: str, target: str, reason: str | None) -> None:
    assert obstacle(place, target) == reason


def routes(*blocked: dict[int, str]) -> Routes:
    return Routes(pairs=PAIRS, owners=OWNERS, blocked=blocked)


def test_pages_are_mapped_wherever_possible(caplog: pytest.LogCaptureFixture) -> None:
    assert not routes({}, {}, {}).indirect

    far = routes({}, {0: "far", 1: "far"}, {})
    assert far.relayed == {(1, 0), (1, 1)} and not far.handled
    with caplog.at_level(logging.WARNING, "memsaver"):
        far.warn()
    assert caplog.messages == ["weight sync by messages for rank->target 1->0, 1->1: far"]


def test_target_that_its_owner_cannot_map_gets_bytes_by_its_handle() -> None:
    both = routes({}, {1: "far"}, {1: "far"})
    assert both.handled == {1} and both.indirect == {(1, 1), (2, 1)} and both.relayed == {(1, 1)}
    near = routes({}, {}, {1: "far"})
    assert near.indirect == {(2, 1)}, "a rank that can map the pages must do so"


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
def test_nccl_is_used_only_between_different_gpus(
    config: str, places: list[str], handled: set[int], on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    agreement = Mock(cpu=Mock(spec=dist.ProcessGroup), group=Mock(spec=dist.ProcessGroup))
    warmed: list[Any] = []
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(relay.dist, "all_reduce", lambda tensor, group: warmed.append(group))
    blocked = [dict.fromkeys(handled, "far"), {0: "far"}]
    ways = Routes(pairs=[(1, 0)], owners=[0], blocked=blocked)
    wire = Wire(agreement, ways, places, torch.device("cpu"))
    assert (wire.on_gpu, warmed) == (on_gpu, [agreement.group] if on_gpu else [])
    assert wire.group is (agreement.group if on_gpu else agreement.cpu)
