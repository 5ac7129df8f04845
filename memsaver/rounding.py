"""Whole units: pages, huge pages, blocks of a file."""


def round_up(nbytes: int, unit: int) -> int:
    """The least multiple of ``unit`` that is not below ``nbytes``."""
    return -(-nbytes // unit) * unit
