"""Which way bytes go, over which backend, what that costs, and what is refused.

No ranks, no pages.
"""

from __future__ import annotations

import socket
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from trainer_bridge.sync import connection
from trainer_bridge.sync.connection import choose, make_wire, obstacle, transports

HERE = socket.gethostname()
PAIRS = [(0, 0), (1, 0), (1, 1), (2, 1)]
SPEAKERS = (0, 2)


@pytest.mark.parametrize(
    ("place", "target", "reason"),
    [
        ("a/cpu", "a/cpu", None),
        ("here", f"{HERE}/cpu", None),
        ("a/cpu", "b/cpu", "b is another machine than a"),
        ("a/GPU-0", "b/GPU-0", "b is another machine than a"),
        ("a/GPU-0", "a/GPU-0", None),
        ("a/GPU-0", "a/GPU-1", None),
        ("a/GPU-0", "a/cpu", None),
    ],
)
def test_what_can_be_mapped(place: str, target: str, reason: str | None) -> None:
    found = obstacle(place, target)
    assert found is None if reason is None else reason in str(found)


def test_the_way_that_can_be_had() -> None:
    routes = choose("auto", PAIRS, SPEAKERS, [{}, {}, {}])
    assert not routes.indirect and routes.direct(1) == {0, 1}
    routes = choose("auto", PAIRS, SPEAKERS, [{}, {0: "far", 1: "far"}, {}])
    assert routes.relayed == {(1, 0), (1, 1)} and not routes.handled and routes.direct(1) == set()
    assert routes.kind((1, 1)) == "relay" and routes.kind((2, 1)) == "pages"

    # a target that its speaker cannot map gets bytes by the handle
    routes = choose("auto", PAIRS, SPEAKERS, [{}, {1: "far"}, {1: "far"}])
    assert (
        routes.handled == {1} and routes.indirect == {(1, 1), (2, 1)} and routes.relayed == {(1, 1)}
    )
    assert routes.kind((2, 1)) == routes.kind((1, 1)) == "handle" and routes.direct(1) == {0}
    near = choose("auto", PAIRS, SPEAKERS, [{}, {}, {1: "far"}])
    assert near.kind((1, 1)) == "pages", "another rank can map it, and does"
    relayed = choose("relay", PAIRS, SPEAKERS, [{}, {}, {}])
    assert relayed.indirect == {(1, 0), (1, 1)} and relayed.direct(2) == {0, 1}
    handled = choose("handle", PAIRS, SPEAKERS, [{}, {}, {}])
    assert handled.indirect == set(PAIRS) and handled.handled == {0, 1}
    assert handled.relayed == {(1, 0), (1, 1)}


@pytest.mark.parametrize(
    ("mode", "pairs", "blocked", "message"),
    [
        (
            "pages",
            PAIRS,
            [{}, {1: "it is far"}, {}],
            r"rank 1 cannot map target 1: it is far \(1 such pairs\)",
        ),
        (
            "relay",
            PAIRS,
            [{}, {}, {1: "it is far"}],
            "rank 2, which speaks for target 1, cannot map it: it is far",
        ),
        (
            "relay",
            [(0, 0), (2, 1)],
            [{}, {}, {}],
            "each rank speaks for all targets that it writes",
        ),
        ("nccl", PAIRS, [{}, {}, {}], "transport='nccl' must be one of auto, pages, relay, handle"),
    ],
)
def test_what_cannot_be_had(
    mode: str, pairs: list[tuple[int, int]], blocked: list[dict], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        choose(mode, pairs, SPEAKERS, blocked)


@pytest.mark.parametrize(
    ("wire", "words"), [("nccl", "passes over device memory"), ("gloo", "2 passes over PCIe")]
)
def test_what_a_table_shows(wire: str, words: str) -> None:
    why = {1: "far"}
    routes = choose("auto", PAIRS, SPEAKERS, [{}, why, why])
    sizes = {(1, 0): 5, (1, 1): 7, (2, 1): 11}
    reasons = {(1, 1): "far", (2, 1): "far"}
    pages, handle = transports(
        routes, sizes, 100, reasons, wire=wire, on_gpu=True, buffers={"handle": 64 << 20}
    )
    assert (pages.kind, pages.reason) == ("pages", "")
    assert (pages.nbytes, pages.pairs, pages.staging_bytes) == (82, ((1, 0),), 0)
    assert (handle.nbytes, handle.pairs) == (18, ((1, 1), (2, 1)))
    assert handle.through == f"{wire} and the handle"
    assert "2 passes over PCIe" in handle.cost
    assert str(handle).endswith("Why: far")
    assert "1->1, 2->1" in str(handle) and "staging 64 MiB" in str(handle)
    relay = transports(
        choose("relay", PAIRS, SPEAKERS, [{}] * 3),
        sizes,
        100,
        {},
        wire=wire,
        on_gpu=True,
        buffers={},
    )
    assert words in relay[1].cost and relay[1].reason == "asked for"


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
    config: str,
    places: list[str],
    host: bool,
    name: str,
    beside: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, given = Mock(spec=dist.ProcessGroup), Mock(spec=dist.ProcessGroup)
    warmed: list[Any] = []
    monkeypatch.setattr(connection.dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(connection.dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(connection.dist, "new_group", lambda ranks, backend, timeout: made)
    monkeypatch.setattr(connection.dist, "all_reduce", lambda tensor, group: warmed.append(group))
    found = make_wire(given, {0, 1}, places, torch.device("cpu"), host=host)
    assert (found.name, found.group is made) == (name, beside)
    assert warmed == ([given] if name == "nccl" else [])
