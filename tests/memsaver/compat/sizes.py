"""Sizes that stand out."""

from __future__ import annotations


def large(device: str) -> int:
    """Bytes that stand out from what else goes on."""
    return 1 << 30 if device.startswith("cuda") else 64 << 20
