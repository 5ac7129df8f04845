"""ContentWatch: the owner of a tag notices that its content was discarded.

The operations that discard content are in test_stateful.
"""

from __future__ import annotations

import torch

from memsaver import ContentWatch, MemorySaver
from memsaver.content_watch import lost_by_others, shortfall
from tests.helpers.memsaver.savers import MIB


def test_lost_lists_discarded_tags_until_they_are_noted(device: str) -> None:
    saver = MemorySaver(device)
    own, other = (saver.empty(4 * MIB, torch.uint8, tag=tag) for tag in ("own", "other"))
    watch = ContentWatch(saver, "own", "other")
    saver.pause(content="host")
    saver.resume()
    assert watch.lost("own", "other") == []
    saver.pause("own")
    assert watch.lost("own", "other") == ["own"] == watch.lost("own")
    assert saver.unbacked_bytes("own") == own.nbytes and not saver.unbacked_bytes("other")
    assert "content of tag 'own' was discarded" in lost_by_others(watch.lost("own"), "engine")
    watch.note("own")
    assert watch.lost("own", "other") == []
    saver.resume()
    del other


def test_shortfall_names_missing_bytes_and_resize() -> None:
    saver = MemorySaver()
    tensor = saver.empty(4 * MIB, torch.uint8, tag="own", elastic=True)
    assert shortfall(saver, ["own"]) is None
    saver.resize("own", MIB)
    assert shortfall(saver, ["own"]) == (
        "tag 'own' has no memory behind its last 3.0 MiB "
        f"(call MemorySaver.resize('own', {tensor.nbytes}))"
    )
