"""Messages of a relay are bounded and ordered, and contain all copies exactly once."""

from __future__ import annotations

import dataclasses
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memsaver.ops.layout import row_major
from memsaver.ops.rows import RowCopies
from rollout.weights.update import write_boxes
from trainer_bridge.sync.plan import Copy
from trainer_bridge.sync.relay import messages
from trainer_bridge.sync.writer import rows_of_copy, scratch_for


@st.composite
def copies(draw: st.DrawFn) -> list[Copy]:
    """Draw copies of one rank for two targets in order, boxes of up to three dimensions."""
    boxes, offset = [], 0
    for number in range(draw(st.integers(1, 5))):
        whole = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
        start = tuple(draw(st.integers(0, n - 1)) for n in whole)
        shape = tuple(
            draw(st.integers(1, n - first)) for n, first in zip(whole, start, strict=True)
        )
        dtype = draw(st.sampled_from(["float32", "bfloat16"]))
        strides = row_major(whole)
        offset = -(-offset // 4) * 4
        place = {"rank": 0, "target": 0, "name": f"{number}", "offset": offset}
        steps = {"strides": strides, "index_base": 1000 * number, "index_strides": strides}
        boxes.append(Copy(**place, **steps, start=start, shape=shape, dtype=dtype))
        offset += math.prod(whole) * boxes[-1].torch_dtype.itemsize
    split = draw(st.integers(0, len(boxes)))
    return [*boxes[:split], *(dataclasses.replace(copy, target=1) for copy in boxes[split:])]


@settings(max_examples=120)
@given(copies(), st.sampled_from([4, 20, 64, 10_000]))
def test_messages_are_bounded_and_write_the_same_bytes_as_copies(
    given_copies: list[Copy], limit: int
) -> None:
    """Unpack messages by tables and by the boxes of a handle.

    Equal digests show that each element is written once, because they are sums over elements.
    """
    sources = {
        copy.name: torch.randn(6, 6, 6).flatten()[: _held(copy)].view(_shape(copy))
        for copy in given_copies
    }
    expected, pages, boxes = (
        [torch.full((8192,), 0xA5, dtype=torch.uint8) for _ in range(2)] for _ in range(3)
    )
    digest, stage = 0, torch.zeros(10_000, dtype=torch.uint8)
    for copy in given_copies:
        table = RowCopies([rows_of_copy(copy, sources[copy.name])], stage.device)
        digest += table.run(expected[copy.target])
    packed = messages(given_copies, limit)
    for message in packed:
        end = 0
        for copy, at in message.copies:
            assert at >= end and at % 16 == 0 and copy.target == message.target
            end = at + copy.nbytes
        assert end == message.nbytes <= limit
        packing = message.packing(sources, (), scratch_for((), torch.device("cpu")))
        packing.start({message.target: stage}, {})
        digest -= packing.digests()[message.target]
        message.unpacking(stage).start(pages[message.target])
        write_boxes(boxes[message.target], message.boxes(), stage[: message.nbytes])
    assert digest % 2**64 == 0
    for number in range(2):
        assert torch.equal(pages[number], expected[number]) and torch.equal(
            boxes[number], expected[number]
        )
    assert [m.target for m in packed] == sorted(m.target for m in packed)


def _shape(copy: Copy) -> tuple[int, ...]:
    """Return the shape of a shard that ends with the copy's box."""
    return tuple(first + n for first, n in zip(copy.start, copy.shape, strict=True))


def _held(copy: Copy) -> int:
    return math.prod(_shape(copy))
