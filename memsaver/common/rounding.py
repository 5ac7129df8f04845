"""Whole units: pages, huge pages, blocks of a file."""


def round_up(amount: int, unit: int) -> int:
    """The least multiple of ``unit`` that is not below ``amount``."""
    return -(-amount // unit) * unit
