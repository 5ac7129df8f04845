"""How often a test marked `soak` goes round: a short form everywhere, the full count with --soak (make soak)."""

_long = False


def choose(long: bool) -> None:
    """By conftest, before test modules are imported."""
    global _long
    _long = long


def rounds(short: int, full: int) -> int:
    return full if _long else short
