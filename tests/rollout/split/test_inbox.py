"""What comes for a prompt goes into its pages, unless they are not its own any more."""

from __future__ import annotations

from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from rollout import SamplingParams
from rollout.split import DecodeEngine, MappedReader
from rollout.split.geometry import geometry
from rollout.split.messages import Ask, Filled, First, Hello
from tests.helpers.models import save_tiny
from tests.rollout.split.test_split import CONFIG, MODEL, TOKEN


@pytest.mark.parametrize("lost", [None, "preempted", "admitted anew", "aborted"])
def test_late_bytes_are_left_in_the_ring(tmp_path: Path, lost: str | None) -> None:
    save_tiny(tmp_path, "qwen3", **MODEL)
    engine = DecodeEngine.from_pretrained(tmp_path, **CONFIG)
    mine, theirs = Pipe()
    theirs.send(Hello(tp_size=1, tp_rank=0, geometry=geometry(engine.model, engine.cache, torch.float32)))
    engine.connect([mine], MappedReader(), ring_bytes=40 * TOKEN)
    samples = engine._submit([5, 6, 7], SamplingParams(max_tokens=4, temperature=0))
    engine._step()
    hello, ask = theirs.recv(), theirs.recv()
    assert hello.ring_bytes == 40 * TOKEN and isinstance(ask, Ask) and ask.prompt == [5, 6, 7]
    if lost == "aborted":
        engine.scheduler.abort(samples)
    elif lost:
        engine.scheduler.preempt_all()
        if lost == "admitted anew":
            engine.scheduler.schedule()
    inbox = engine.inbox
    inbox._ring.fill_(0x40)
    inbox._k.zero_()
    theirs.send(Filled(number=0, nth=0, first=First(tokens=(9,), logprobs=(-1.0,), version=0)))
    inbox.receive(5)
    assert bool(inbox._k.any()) == (lost is None)
    assert inbox.allocator.outstanding == 0 and inbox.transfers[0].complete
    engine._receive()
    assert engine.split.arrived == (lost is None) and not inbox.transfers
    assert samples[0].output == ([9] if lost is None else [])
    theirs.close()
