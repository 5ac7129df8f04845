"""Which way bytes go, what that costs, and what is refused. No ranks, no pages."""

from __future__ import annotations

import socket

import pytest

from trainer_bridge.transport.mapping import obstacle
from trainer_bridge.transport.routes import choose, transports

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


def test_pages_wherever_they_can_be_mapped() -> None:
    routes = choose("auto", PAIRS, SPEAKERS, [{}, {}, {}])
    assert not routes.indirect and routes.direct(1) == {0, 1}
    routes = choose("auto", PAIRS, SPEAKERS, [{}, {0: "far", 1: "far"}, {}])
    assert routes.relayed == {(1, 0), (1, 1)} and not routes.handled and routes.direct(1) == set()
    assert routes.kind((1, 1)) == "relay" and routes.kind((2, 1)) == "pages"


def test_a_target_that_its_speaker_cannot_map_gets_bytes_by_the_handle() -> None:
    routes = choose("auto", PAIRS, SPEAKERS, [{}, {1: "far"}, {1: "far"}])
    assert routes.handled == {1} and routes.indirect == {(1, 1), (2, 1)} and routes.relayed == {(1, 1)}
    assert routes.kind((2, 1)) == routes.kind((1, 1)) == "handle" and routes.direct(1) == {0}
    near = choose("auto", PAIRS, SPEAKERS, [{}, {}, {1: "far"}])
    assert near.kind((1, 1)) == "pages", "another rank can map it, and does"


@pytest.mark.parametrize(
    ("mode", "pairs", "blocked", "message"),
    [
        ("pages", PAIRS, [{}, {1: "it is far"}, {}], r"rank 1 cannot map target 1: it is far \(1 such pairs\)"),
        ("relay", PAIRS, [{}, {}, {1: "it is far"}], "rank 2, which speaks for target 1, cannot map it: it is far"),
        ("relay", [(0, 0), (2, 1)], [{}, {}, {}], "each rank speaks for all targets that it writes"),
        ("nccl", PAIRS, [{}, {}, {}], "transport='nccl' must be one of auto, pages, relay, handle"),
    ],
)
def test_what_cannot_be_had(mode: str, pairs: list[tuple[int, int]], blocked: list[dict], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(mode, pairs, SPEAKERS, blocked)


def test_one_way_only() -> None:
    relayed = choose("relay", PAIRS, SPEAKERS, [{}, {}, {}])
    assert relayed.indirect == {(1, 0), (1, 1)} and relayed.direct(2) == {0, 1}
    handled = choose("handle", PAIRS, SPEAKERS, [{}, {}, {}])
    assert handled.indirect == set(PAIRS) and handled.handled == {0, 1} and handled.relayed == {(1, 0), (1, 1)}


@pytest.mark.parametrize(("wire", "words"), [("nccl", "passes over device memory"), ("gloo", "2 passes over PCIe")])
def test_what_a_table_shows(wire: str, words: str) -> None:
    why = {1: "far"}
    routes = choose("auto", PAIRS, SPEAKERS, [{}, why, why])
    sizes = {(1, 0): 5, (1, 1): 7, (2, 1): 11}
    reasons = {(1, 1): "far", (2, 1): "far"}
    pages, handle = transports(routes, sizes, 100, reasons, wire=wire, on_gpu=True, buffers={"handle": 64 << 20})
    assert (pages.kind, pages.nbytes, pages.pairs, pages.staging_bytes, pages.reason) == ("pages", 82, ((1, 0),), 0, "")
    assert (handle.nbytes, handle.pairs, handle.through) == (18, ((1, 1), (2, 1)), f"{wire} and the handle")
    assert "2 passes over PCIe" in handle.cost
    assert str(handle).endswith("Why: far") and "1->1, 2->1" in str(handle) and "staging 64 MiB" in str(handle)
    relay = transports(choose("relay", PAIRS, SPEAKERS, [{}] * 3), sizes, 100, {}, wire=wire, on_gpu=True, buffers={})
    assert words in relay[1].cost and relay[1].reason == "asked for"
