"""What comes for a prompt goes into its pages, unless they are not its own any more."""

from __future__ import annotations

from multiprocessing import Pipe

import pytest
import torch

from kvcache import ReqHandle
from rollout.samples import Chunk, Sample
from rollout.split import MappedReader
from rollout.split.channel import Peers
from rollout.split.inbox import Inbox
from rollout.split.messages import Ask, Filled, First, Hello
from tests.helpers.rollout.answers import GREEDY
from tests.helpers.rollout.split import TOKEN

SLOTS = [3, 4, 6]


@pytest.mark.parametrize("lost", [None, "preempted", "admitted anew", "recomputed"])
def test_late_bytes_are_left_in_the_ring(lost: str | None) -> None:
    mine, theirs = Pipe()
    hello = Hello(tp_size=1, tp_rank=0, geometry="equal", ring_bytes=40 * TOKEN)
    theirs.send(hello)
    k, v = (torch.zeros(2, 8, 4, 16) for _ in range(2))
    ring = torch.full((40 * TOKEN,), 0x40, dtype=torch.uint8)
    inbox = Inbox((k, v), 4, 0, 1, Peers("prefill", [mine], hello, 5.0), MappedReader(), ring)
    sample = Sample(
        request=0, index=0, prompt=[5, 6, 7], params=GREEDY, seed=0, stop_ids=frozenset(),
        handle=ReqHandle(1, 0), remote=True,
    )  # fmt: skip
    inbox.ask(Chunk(sample=sample, start=0, length=3, slots=torch.tensor(SLOTS)))
    assert theirs.recv() == hello
    ask = theirs.recv()
    assert isinstance(ask, Ask) and ask.prompt == [5, 6, 7]
    if lost == "recomputed":
        sample.remote = False
    elif lost:
        sample.handle = ReqHandle(1, 1) if lost == "admitted anew" else None
    theirs.send(Filled(number=0, nth=0, first=First(tokens=(9,), logprobs=(-1.0,), version=0)))
    inbox.receive(5)
    for part in (k, v):
        assert part.any((0, 2, 3)).nonzero().flatten().tolist() == (SLOTS if lost is None else [])
    (transfer,) = inbox.transfers
    assert transfer.complete and transfer.wanted == (lost is None) and inbox.allocator.outstanding == 0
    theirs.close()
