"""What torch holds outside of tags, from its own list of segments."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from memsaver import MemorySaver
from memsaver.memory.torch_allocator import outside_tags


def segment(address: int, total: int, allocated: int, pool: tuple[int, int]) -> dict[str, Any]:
    sizes = {"total_size": total, "allocated_size": allocated}
    return {"device": 0, "address": address, **sizes, "segment_pool_id": pool}


def test_segments_on_a_tag_are_the_tags_asleep_or_not() -> None:
    """Others in a pool are a graph's; another GPU's do not count."""
    with contextlib.closing(MemorySaver("cpu")) as saver:
        on_tag = saver.empty((4096,), torch.uint8, tag="weights").data_ptr()
        elsewhere = torch.empty(1 << 20).data_ptr()
        listed = [
            segment(on_tag, 64, 64, (1, 0)),
            segment(elsewhere, 20, 5, (0, 0)),
            segment(elsewhere + 64, 10, 10, (0, 0)),
            segment(elsewhere + 128, 7, 3, (0, 2)),
            segment(elsewhere + 256, 9, 9, (0, 0)) | {"device": 1},
        ]
        names = ("torch's cache", "torch's tensors", "torch's private pools")
        for _ in range(2):
            found = outside_tags(listed, 0)
            assert found == dict(zip(names, (15, 15, 7), strict=True))
            saver.pause("weights", content="discard")
    assert outside_tags(listed, 0)["torch's private pools"] == 64 + 7


def test_a_report_asks_who_else_holds_memory_only_where_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with contextlib.closing(MemorySaver("cpu")) as saver:
        monkeypatch.setattr(saver.backend, "other_holders", lambda: {"somebody": 5})
        assert saver.report().others == {"somebody": 5}
        assert saver.report(others=False).others == {}
