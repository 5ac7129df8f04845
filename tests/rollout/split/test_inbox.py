"""The inbox writes transferred prompts into their pages, unless a sample has lost its pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvcache import ReqHandle
from rollout.scheduling.samples import Chunk, Sample
from rollout.split import MappedTransport
from rollout.split.control import Ask, Filled, First, Hello, RankPeers, Refused, StagedCache
from rollout.split.remote_prompts import Inbox
from tests.helpers.rollout.answers import GREEDY
from tests.helpers.rollout.split import KEY, TOKEN
from tests.helpers.rollout.split_peer import Far

SLOTS = [3, 4, 6]
FIRST = First(tokens=(9,), logprobs=(-1.0,), version=0)


class World:
    """An inbox with zeroed pages, and the sockets of its prefill ranks."""

    def __init__(self, folder: Path, ranks: int = 1) -> None:
        address = f"ipc://{folder}/line"
        hello = Hello(tp_size=1, tp_rank=0, geometry="equal", ring_bytes=40 * TOKEN)
        greetings = [Hello(tp_size=ranks, tp_rank=i, geometry="equal") for i in range(ranks)]
        self.theirs = [Far(address, KEY, greeting) for greeting in greetings]
        self.k, self.v = (torch.zeros(2, 8, 4, 16) for _ in range(2))
        ring = torch.full((40 * TOKEN,), 0x40, dtype=torch.uint8)
        peers = RankPeers("prefill", hello, KEY, 5.0, 5.0, listen=(address, ranks))
        self.inbox = Inbox(StagedCache(self.k, self.v, 4), peers, MappedTransport(), ring)
        assert [far.recv() for far in self.theirs] == [hello] * ranks

    def ask(self, request: int = 0) -> Sample:
        sample = Sample(
            request=request, index=0, prompt=[5, 6, 7], params=GREEDY, seed=0, stop_ids=frozenset(),
            handle=ReqHandle(1 + request, 0), remote=True,
        )  # fmt: skip
        self.inbox.ask(Chunk(sample=sample, start=0, length=3, slots=torch.tensor(SLOTS)))
        for far in self.theirs:
            ask = far.recv()
            assert isinstance(ask, Ask) and ask.prompt == [5, 6, 7] and ask.number == request
        return sample


@pytest.mark.parametrize("lost", [None, "preempted", "admitted again", "recomputed"])
def test_late_bytes_stay_in_ring_when_sample_has_lost_its_pages(
    tmp_path: Path, lost: str | None
) -> None:
    world = World(tmp_path)
    sample = world.ask()
    if lost == "recomputed":
        sample.remote = False
    elif lost:
        sample.handle = ReqHandle(1, 1) if lost == "admitted again" else None
    world.theirs[0].send(Filled(number=0, nth=0, first=FIRST))
    world.inbox.receive(5)
    for part in (world.k, world.v):
        assert part.any((0, 2, 3)).nonzero().flatten().tolist() == (SLOTS if lost is None else [])
    (transfer,) = world.inbox.transfers.values()
    assert transfer.complete
    assert transfer.wanted == (lost is None)
    assert world.inbox.allocator.outstanding == 0


def test_early_refusal_counts_as_arrived_only_after_all_earlier_prompts(tmp_path: Path) -> None:
    # Both prefill ranks refuse the second of three prompts: the early rank before the late one has
    # sent the first prompt, the late rank when the decode engine has finished both.
    world = World(tmp_path, ranks=2)
    for request in range(3):
        world.ask(request)
    inbox, (early, late) = world.inbox, world.theirs

    def hear(rank: Far, *messages: Filled | Refused) -> int:
        for message in messages:
            rank.send(message)
            inbox.receive(5)
        return inbox.arrived

    refusal = Refused(number=1, reason="too long")
    assert hear(early, Filled(number=0, nth=0, first=FIRST), refusal) == 0
    assert hear(late, Filled(number=0, nth=0, first=FIRST)) == 2
    first, second = inbox.transfers.pop(0), inbox.transfers.pop(1)
    assert (first.refusal, second.refusal) == (None, "too long")
    assert hear(late, refusal) == 0 and inbox.transfers[2].refusal is None
    third = Filled(number=2, nth=0, first=FIRST)
    assert hear(early, third) == 0 and hear(late, third) == 1
    assert inbox.allocator.outstanding == 0
