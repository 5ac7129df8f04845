"""Readers of exported models."""

from __future__ import annotations

import struct
from pathlib import Path

from safetensors import safe_open
from torch import Tensor


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of a folder's files by name."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors, and check that the files have nothing but tensors and headers."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            own = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            assert opened.metadata() == {"format": "pt"}
        (header,) = struct.unpack("<Q", file.read_bytes()[:8])
        assert file.stat().st_size == 8 + header + sum(value.nbytes for value in own.values())
        assert not own.keys() & tensors.keys()
        tensors |= own
    return tensors
