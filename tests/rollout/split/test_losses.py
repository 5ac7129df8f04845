"""Prefill ranks that die, refuse, fall silent or have other weights.

Answers are correct, or refused with a reason.
"""

from __future__ import annotations

import os
import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from kvcache.staging import Watermark
from memsaver import MemorySaver, StateError
from rollout import Engine, SamplingParams
from rollout.errors import PeerLostError
from rollout.parallel import TensorParallel
from rollout.scheduling.samples import Step
from rollout.split import GroupTransport, MappedTransport, PromptServer, RemotePrompts
from rollout.split.control import Ask, Closed, Filled, Hello, Range, Refused, StagedCache
from tests.helpers.ranks import results, start_ranks
from tests.helpers.rollout.answers import random_prompts
from tests.helpers.rollout.saved import Saved
from tests.helpers.rollout.split import (
    CONFIG,
    KEY,
    MODEL,
    TOKEN,
    Counted,
    CountedGroup,
    CountedMapped,
    Split,
    generate,
    make_transport,
    serve,
    tokens,
)
from tests.helpers.rollout.split_peer import Far

GREEDY = SamplingParams(max_tokens=6, temperature=0)
CALLS = [(random_prompts((9, 30, 50, 21)), GREEDY), (random_prompts((12,), seed=8), GREEDY)]


class HalfMapped(CountedMapped):
    """Transport whose process dies in its third transfer, with half of it in the ring."""

    def put(self, peer: int, staged: Tensor, offset: int) -> None:
        if self.requests < 2:
            super().put(peer, staged, offset)
            return
        super().put(peer, staged[: len(staged) // 2].clone().fill_(77), offset)
        os._exit(1)


class DyingGroup(CountedGroup):
    """Transport whose process dies instead of sending its third transfer."""

    def put(self, peer: int, staged: Tensor, offset: int) -> None:
        if self.requests == 2:
            os._exit(1)
        super().put(peer, staged, offset)


class Unheard(GroupTransport):
    """Transport to a rank that shares no group with this one; sends nothing."""

    def open(self, *_: Any) -> None:
        return

    def put(self, *_: Any) -> None:
        return


class Discarding(Unheard):
    """Transport whose first transfer discards the KV cache."""

    saver: MemorySaver

    def put(self, *_: Any) -> None:
        self.saver.pause("kv_cache")
        self.saver.resume("kv_cache")


@dataclass(frozen=True, kw_only=True)
class Case:
    how: str = ""
    mapped: bool = True
    on_loss: str = "recompute"
    prefill: dict[str, Any] = field(default_factory=dict)


CASES = {
    "mapped": Case(how="dies"),
    "gloo": Case(how="dies", mapped=False),
    "refuse": Case(how="dies", on_loss="refuse"),
    "silent": Case(how="silent"),
    "newer": Case(how="newer"),
    "small": Case(prefill={"kv_tokens": 32}),
}


def lose(rank: int, path: str, sockets: str) -> Any:
    """Run all cases on decode ranks 0 and 1; each further rank is the prefill rank of a case."""
    groups = [dist.new_group([0, 1]) for _ in CASES]
    dist.barrier()  # no rank dies while other ranks still connect to it
    splits = [
        Split(
            path=path,
            mapped=case.mapped,
            calls=CALLS,
            on_loss=case.on_loss,
            prefill_config=CONFIG | case.prefill,
        )
        for case in CASES.values()
    ]
    if rank > 1:
        nth = rank - 2
        return prefill(splits[nth], addresses(sockets, nth), list(CASES.values())[nth].how)
    reports = []
    for nth, (split, group) in enumerate(zip(splits, groups, strict=True)):
        patience = 2 if nth == list(CASES).index("silent") else 60
        reports.append(
            generate(
                split, group, f"ipc://{sockets}/{nth}.{rank}", sources=[nth + 2], timeout=patience
            )
        )
    return reports


def addresses(sockets: str, nth: int) -> list[str]:
    return [f"ipc://{sockets}/{nth}.{peer}" for peer in range(2)]


def prefill(split: Split, addresses: list[str], how: str) -> Any:
    if how == "silent":
        engine = Engine.from_pretrained(split.path, **CONFIG)
        server = PromptServer(engine, addresses, KEY, MappedTransport())
        time.sleep(60)  # until the process is killed
        server.serve()
    transport: Counted = make_transport(split, [0, 1])
    if how == "dies":
        transport = HalfMapped() if split.mapped else DyingGroup([0, 1])
    return serve(split, None, addresses, transport, version=1 if how == "newer" else 0)


@pytest.fixture(scope="module")
def path(saved: Saved) -> str:
    return str(saved("qwen3", **MODEL)[0])


@pytest.fixture(scope="module")
def reports(path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Return the reports of both decode ranks by case."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks = start_ranks(lose, 2 + len(CASES), folder / "store", path, str(folder), seconds=30)
    try:
        return dict(zip(CASES, zip(*results(ranks[:2]), strict=True), strict=True))  # type: ignore[arg-type]
    finally:
        for rank in ranks:
            rank.kill()


Reports = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def expected(path: str) -> Any:
    engine = Engine.from_pretrained(path, **CONFIG)
    return tokens([engine.generate(prompts, params) for prompts, params in CALLS])


@pytest.mark.parametrize(
    ("case", "arrived", "reason"),
    [
        ("mapped", range(5), "the prefill engine is lost: prefill rank 0 is "),
        ("gloo", range(5), "the prefill engine is lost: prefill rank 0 is "),
        ("silent", range(6), "rank sent nothing for 2 s|reported by another rank"),
        ("newer", [0], "^the prefill engine has weights 1, this one 0$"),
        (
            "small",
            [4],
            "^refused: the prefill engine cannot hold 50 prompt tokens; raise its kv_tokens$",
        ),
    ],
)
def test_decode_engine_recomputes_prompts_that_prefill_engine_does_not_deliver(
    reports: Reports, expected: Any, case: str, arrived: Any, reason: str
) -> None:
    for report in reports[case]:
        assert tokens(report["answers"]) == expected
        assert report["split"].arrived in arrived and report["reason"] is None
        assert report["split"].recomputed > 0 or case == "silent"
        assert report["split"].arrived + report["split"].recomputed == 5 or case not in (
            "newer",
            "small",
        )
        assert report["outstanding"] == 0 or case != "small"
        assert re.search(reason, report["split"].reason)


def test_generate_raises_with_on_loss_refuse_when_prefill_rank_dies(reports: Reports) -> None:
    for report in reports["refuse"]:
        assert report["answers"] == []
        assert report["error"].startswith(
            "PeerLostError: the prefill engine is lost: prefill rank 0 is "
        )
        assert "the prefill engine is lost" in report["reason"]


def greeted(engine: Engine, address: str, listens: bool = False, **changes: Any) -> Far:
    """Return a rank of the peer engine that greets `engine`."""
    cache = StagedCache.of(engine.model, engine.cache, TensorParallel(1, None))
    fields = {"tp_size": 1, "tp_rank": 0, "geometry": cache.geometry, **changes}
    return Far(address, KEY, Hello(**fields), listens=listens)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/line"


@pytest.mark.parametrize(
    ("ring_bytes", "changes", "message"),
    [
        (8, {}, "ring_bytes=8 does not hold one token"),
        (
            1 << 12,
            {"geometry": "something else"},
            "the prefill engine has something else, this one 4 KV heads",
        ),
        (1 << 12, {"tp_size": 2}, "connect to every prefill rank once; these are 0 of 2"),
    ],
)
def test_connect_refuses_engines_that_do_not_match(
    path: str, address: str, ring_bytes: int, changes: dict[str, Any], message: str
) -> None:
    engine = Engine.from_pretrained(path, **CONFIG)
    theirs = greeted(engine, address, **changes)
    with pytest.raises(ValueError, match=message):
        RemotePrompts(
            engine, address, KEY, GroupTransport([0]), prefill_ranks=1, ring_bytes=ring_bytes
        )
    theirs.close()


def test_connect_refuses_an_exact_engine_of_another_size(path: str, address: str) -> None:
    engine = Engine.from_pretrained(path, exact=True, **CONFIG)
    ranks = TensorParallel(1, None, exact=True)
    geometry = StagedCache.of(engine.model, engine.cache, ranks).geometry
    theirs = greeted(engine, address, geometry=geometry.replace("size=1", "size=2"))
    rule = "exact with tensor_parallel_size=2, this one .* exact with tensor_parallel_size=1; they"
    with pytest.raises(ValueError, match=rule):
        RemotePrompts(
            engine, address, KEY, GroupTransport([0]), prefill_ranks=1, ring_bytes=1 << 12
        )
    theirs.close()


def test_serve_raises_and_frees_pages_when_decode_rank_dies(path: str, address: str) -> None:
    # the rank dies after it has requested a prompt, before its ring is ready for the prompt
    engine = Engine.from_pretrained(path, **CONFIG)
    theirs = greeted(engine, address, listens=True, ring_bytes=1 << 12)
    server = PromptServer(engine, [address], KEY, Unheard([0]))
    later = Range(first=0, tokens=2, id=0, offset=0, end=2 * TOKEN, round=1)
    theirs.send(Ask(number=0, prompt=[1, 2], params=GREEDY, seed=0, indices=(0,), ranges=(later,)))
    theirs.close()
    with pytest.raises(PeerLostError, match="stopped serving: decode rank 0 is gone"):
        server.serve()
    engine.check_integrity()


def test_discard_of_unsent_prompts_ends_serve_and_frees_pages(path: str, address: str) -> None:
    engine = Engine.from_pretrained(path, **CONFIG)
    theirs = greeted(engine, address, listens=True, ring_bytes=1 << 12)
    transport = Discarding([0])
    transport.saver = engine.saver
    server = PromptServer(engine, [address], KEY, transport)
    parts = tuple(
        Range(first=nth, tokens=1, id=nth, offset=0, end=TOKEN, round=2 * nth) for nth in range(2)
    )
    theirs.send(Ask(number=0, prompt=[1, 2], params=GREEDY, seed=0, indices=(0,), ranges=parts))
    with pytest.raises(StateError, match="stopped serving: .* before its prompts were sent"):
        server.serve()
    assert engine.unavailable_reason() is None
    engine.check_integrity()
    theirs.close()


def fails_for(engine: Engine, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each step fail that computes a prompt."""
    usual = engine.runner.forward

    def forward(step: Step) -> Any:
        if any(chunk.sample.prompt == prompt for chunk in step.chunks):
            raise ValueError("bad prompt")
        return usual(step)

    monkeypatch.setattr(engine.runner, "forward", forward)


def test_refusals_are_sent_in_order_of_requests(
    path: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first prompt takes all pages, and the ring is not ready for it. Later prompts would fit
    # alone but have to wait too.
    engine = Engine.from_pretrained(path, **CONFIG | {"kv_tokens": 32})
    theirs = greeted(engine, address, listens=True, ring_bytes=1 << 16)
    server = PromptServer(engine, [address], KEY, Unheard([0]))
    prompts = random_prompts((30, 50, 21, 12))
    fails_for(engine, prompts[2], monkeypatch)
    for number, prompt in enumerate(prompts):
        nbytes = 2 * TOKEN * len(prompt)
        part = Range(first=0, tokens=len(prompt), id=number, offset=0, end=nbytes, round=1)
        theirs.send(
            Ask(number=number, prompt=prompt, params=GREEDY, seed=0, indices=(0,), ranges=(part,))
        )
    heard: list[Any] = []

    def decode() -> None:
        theirs.send(Watermark(1, 0))
        heard.extend(theirs.recv() for _ in (engine, *prompts))
        theirs.send(Closed())

    timer = threading.Timer(0.2, decode)  # after some turns without anything to send
    timer.start()
    server.serve()
    timer.join()
    assert [type(message) for message in heard] == [Hello, Filled, Refused, Refused, Filled]
    assert "prefill engine failed: ValueError: bad prompt" in heard[3].reason
    engine.check_integrity()


def test_connect_refuses_model_with_sliding_window(saved: Saved) -> None:
    engine = Engine.from_pretrained(saved("mistral", sliding_window=16)[0], **CONFIG)
    with pytest.raises(ValueError, match="needs full attention with heads in every layer"):
        PromptServer(engine, [], b"", MappedTransport())
