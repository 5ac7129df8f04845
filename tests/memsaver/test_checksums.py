"""Digests of kept content."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import memsaver
from memsaver.checksums import Checksums


def _flip_a_bit(data: torch.Tensor) -> None:
    data[len(data) // 2] ^= 16


def _flip_the_last_bit(data: torch.Tensor) -> None:
    data[-1] ^= 128


def _swap(data: torch.Tensor) -> None:
    words = data[: len(data) // 8 * 8].view(torch.int64)
    words[[3, -2]] = words[[-2, 3]]


def _shift(data: torch.Tensor) -> None:
    data.copy_(data.roll(8))


def _zero(data: torch.Tensor) -> None:
    data.zero_()


@pytest.mark.parametrize("change", [_flip_a_bit, _flip_the_last_bit, _swap, _shift, _zero])
@pytest.mark.parametrize("nbytes", [64, 1003, 3 * (8 << 16) + 5])
def test_checksums_notice_a_change(device: str, change: Callable[[torch.Tensor], None], nbytes: int) -> None:
    data = torch.randint(0, 256, (nbytes + 128,), dtype=torch.uint8).to(device)

    def view(offset: int, nbytes: int) -> torch.Tensor:
        return data[offset : offset + nbytes]

    taken = Checksums.take("kv_cache", [(0, 64), (64, nbytes), (64 + nbytes // 8 * 8, 16)], view)
    taken.verify(view)
    data[-1] ^= 1  # outside every range
    taken.verify(view)
    change(view(64, nbytes))
    with pytest.raises(memsaver.BackendError, match=f"'kv_cache'.*{nbytes} bytes at offset 64 differ"):
        taken.verify(view)


def test_checksums_notice_words_that_differ_in_one_bit_and_swap() -> None:
    generator = torch.Generator().manual_seed(0)
    for bit in range(64):
        words = torch.randint(-(1 << 62), 1 << 62, (100,), generator=generator)
        words[70] = words[30] ^ (1 << bit if bit < 63 else -(1 << 63))
        data = words.view(torch.uint8)
        taken = Checksums.take("t", [(0, 800)], lambda offset, nbytes: data)  # noqa: B023
        words[[30, 70]] = words[[70, 30]]
        with pytest.raises(memsaver.BackendError):
            taken.verify(lambda offset, nbytes: data)  # noqa: B023


def test_checksums_across_a_real_pause(device: str) -> None:
    saver = memsaver.MemorySaver(device)
    with saver.region("weights", content="host"):
        tensors = [torch.randn(100, n, device=device) for n in (1, 7, 1000)]
    base = tensors[0].data_ptr() - saver.offset_of(tensors[0])
    ranges = [(saver.offset_of(tensor), tensor.nbytes) for tensor in tensors]

    def view(offset: int, nbytes: int) -> torch.Tensor:
        return next(t for t in tensors if t.data_ptr() == base + offset).view(torch.uint8).view(-1)[:nbytes]

    taken = Checksums.take("weights", ranges, view)
    saver.pause()
    saver.resume()
    taken.verify(view)
    tensors[1][50, 3] += 1
    with pytest.raises(memsaver.BackendError, match=f"offset {ranges[1][0]} differ \\(1 of 3 ranges\\)"):
        taken.verify(view)
