"""Is kept content after a resume what it was before the pause?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from memsaver.errors import BackendError

Ranges = Sequence[tuple[int, int]]
View = Callable[[int, int], torch.Tensor]


@dataclass(frozen=True)
class Checksums:
    """Digests of a tag's live ranges: taken before a pause that keeps the content, compared after the resume."""

    tag: str
    digests: Mapping[tuple[int, int], int]

    @classmethod
    def take(cls, tag: str, ranges: Ranges, view: View) -> Checksums:
        """``ranges``: (offset, nbytes). ``view(offset, nbytes)``: these bytes as a uint8 tensor where they are."""
        return cls(tag, dict(zip(ranges, _digests(ranges, view), strict=True)))

    def verify(self, view: View) -> None:
        """Raise ``BackendError`` where a range's bytes are not what they were."""
        ranges = tuple(self.digests)
        now = _digests(ranges, view)
        changed = [item for item, digest in zip(ranges, now, strict=True) if digest != self.digests[item]]
        if changed:
            offset, nbytes = changed[0]
            raise BackendError(
                f"content of tag {self.tag!r} changed across a pause: {nbytes} bytes at offset {offset} differ "
                f"({len(changed)} of {len(ranges)} ranges); define it anew, and look for what wrote to its backup"
            )


_WORD = 8
_CHUNK_WORDS = {"cpu": 1 << 16, "cuda": 1 << 21}  # the caches of a core; 32 MiB of temporaries on a GPU
_STEP = -0x61C8864680B583EB  # odd constants as signed words: the golden ratio,
_FACTORS = (-0x00AE502812AA7333, -0x3B314601E57A13AD)  # and those of MurmurHash3


def _digests(ranges: Ranges, view: View) -> list[int]:
    """A 64-bit digest of each range; the same on every device.

    Each 8-byte word goes with its position through a bijection of 64 bits; the results are added, modulo 2**64, so the
    order of the additions does not matter. One changed word always changes the sum; so do, but for one case in about
    2**32, words that changed places.
    """
    sums: list[torch.Tensor] = []
    keys: torch.Tensor | None = None
    for offset, nbytes in ranges:
        data = view(offset, nbytes)
        if keys is None:
            keys = torch.arange(_CHUNK_WORDS[data.device.type], device=data.device).mul_(_STEP)
        sums.append(_digest(data, keys))
    return torch.stack(sums).tolist() if sums else []


def _digest(data: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    whole = data.numel() // _WORD * _WORD
    total = torch.full((), data.numel(), dtype=torch.int64, device=data.device)
    for start in range(0, whole, keys.numel() * _WORD):
        chunk = data[start : min(whole, start + keys.numel() * _WORD)].view(torch.int64)
        total += _mixed_sum(chunk, keys, start // _WORD)
    if whole < data.numel():
        tail = torch.zeros(_WORD, dtype=torch.uint8, device=data.device)
        tail[: data.numel() - whole] = data[whole:]
        total += _mixed_sum(tail.view(torch.int64), keys, whole // _WORD)
    return total


def _mixed_sum(words: torch.Tensor, keys: torch.Tensor, first: int) -> torch.Tensor:
    mixed = words + keys[: words.numel()]
    mixed += _signed(first * _STEP)
    halves = mixed.view(torch.int32).view(-1, 2)  # little endian: low, high
    for factor in _FACTORS:
        halves[:, 0] ^= halves[:, 1]
        mixed *= factor
    halves[:, 0] ^= halves[:, 1]
    return mixed.sum()


def _signed(value: int) -> int:
    """The 64-bit word of an integer, as torch takes it."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
