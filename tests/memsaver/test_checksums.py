"""Digests of kept content. (What a digest notices: ops/test_digest; across a real pause: test_debug.)"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import memsaver
from memsaver.checksums import Checksums


def _swap(data: torch.Tensor) -> None:
    words = data[: len(data) // 8 * 8].view(torch.int64)
    words[[3, -2]] = words[[-2, 3]]


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "a bit": lambda data: data[len(data) // 2].bitwise_xor_(16),
    "the last bit": lambda data: data[-1].bitwise_xor_(128),
    "two words swapped": _swap,
    "shifted": lambda data: data.copy_(data.roll(8)),
    "zeroed": torch.Tensor.zero_,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("nbytes", [64, 1003, 3 * (8 << 16) + 5])
def test_checksums_notice_a_change(device: str, change: str, nbytes: int) -> None:
    generator = torch.Generator().manual_seed(nbytes)
    data = torch.randint(0, 256, (nbytes + 128,), dtype=torch.uint8, generator=generator).to(device)

    def view(offset: int, nbytes: int) -> torch.Tensor:
        return data[offset : offset + nbytes]

    taken = Checksums.take("kv_cache", [(0, 64), (64, nbytes), (64 + nbytes // 8 * 8, 16)], view)
    taken.verify(view)
    data[-1] ^= 1  # outside every range
    taken.verify(view)
    CHANGES[change](view(64, nbytes))
    with pytest.raises(memsaver.BackendError, match=f"'kv_cache'.*{nbytes} bytes at offset 64 differ.*of 3 ranges"):
        taken.verify(view)
