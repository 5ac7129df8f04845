"""Over which backend bytes go between ranks. Processes that use it are in test_ranks.py."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from trainer_bridge.transport import wire
from trainer_bridge.transport.wire import make_wire

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("config", "places", "host", "name", "beside"),
    [
        ("cuda:nccl", ["a/GPU-0", "a/GPU-1"], False, "nccl", False),
        ("cpu:gloo,cuda:nccl", ["a/GPU-0", "b/GPU-0"], False, "nccl", False),
        ("cpu:gloo,cuda:nccl", ["a/GPU-0", "a/GPU-1"], True, "gloo", False),
        ("cuda:nccl", ["a/GPU-0", "a/GPU-1"], True, "gloo", True),
        ("cuda:nccl", ["a/GPU-0", "a/GPU-0"], False, "gloo", True),
        ("cpu:gloo,cuda:gloo", ["a/GPU-0", "a/GPU-1"], False, "gloo", False),
        ("cpu:gloo", ["a/cpu", "b/cpu"], False, "gloo", False),
    ],
)
def test_nccl_between_gpus_that_are_apart(
    config: str, places: list[str], host: bool, name: str, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, given = Mock(spec=dist.ProcessGroup), Mock(spec=dist.ProcessGroup)
    warmed: list[Any] = []
    monkeypatch.setattr(wire.dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(wire.dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(wire.dist, "new_group", lambda ranks, backend, timeout: made)
    monkeypatch.setattr(wire.dist, "all_reduce", lambda tensor, group: warmed.append(group))
    found = make_wire(given, {0, 1}, places, CPU, host=host)
    assert (found.name, found.group is made) == (name, beside)
    assert warmed == ([given] if name == "nccl" else [])
