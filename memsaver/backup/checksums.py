"""Is content what it was? Digests of a tag's live ranges, on a GPU at the speed of reading them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from memsaver.common.digest import Digest
from memsaver.common.ranges import Ranges, joined
from memsaver.errors import BackendError

View = Callable[[int, int], torch.Tensor]
"""``view(offset, nbytes)``: these bytes of the tag, as a uint8 tensor where they are."""

_WORD = 4
_BYTES = 1 << 62  # numbers of single bytes, apart from those of words


def fingerprint(ranges: Ranges, view: View) -> Digest:
    """One digest of all ranges (offset, nbytes), to be run as often as their addresses hold."""
    parts = (_parts(offset, view(offset, nbytes)) for offset, nbytes in joined(ranges))
    return Digest([*itertools.chain.from_iterable(parts)])


def _parts(offset: int, data: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
    """Splits into whole words and odd bytes; each element is numbered by its place in the tag."""
    words = data.numel() // _WORD * _WORD
    parts = [(data[:words].view(torch.int32), offset // _WORD)] if words else []
    return parts + ([(data[words:], _BYTES + offset + words)] if words < data.numel() else [])


@dataclass(frozen=True)
class Checksums:
    """A digest of each range: taken before a pause that keeps content, compared after a resume."""

    tag: str
    digests: Mapping[tuple[int, int], int]

    @classmethod
    def take(cls, tag: str, ranges: Ranges, view: View) -> Checksums:
        return cls(tag, {item: fingerprint([item], view).run() for item in ranges})

    def verify(self, view: View, end: int) -> None:
        """Raise ``BackendError`` where a range changed; ranges beyond ``end`` were trimmed."""
        there = {item: digest for item, digest in self.digests.items() if sum(item) <= end}
        changed = [
            item for item, digest in there.items() if fingerprint([item], view).run() != digest
        ]
        if changed:
            offset, nbytes = changed[0]
            raise BackendError(
                f"content of tag {self.tag!r} changed across a pause: "
                f"{nbytes} bytes at offset {offset} differ ({len(changed)} of {len(there)} "
                "ranges); define it anew, and look for what wrote to its backup"
            )
