"""Name a compiled library after the sources and flags that it is compiled from.

``setup.py`` loads this file by its path: it imports the standard library only.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
SHIM_SOURCES = sorted(HERE.glob("*.c"))
SHIM_FLAGS = ["-lpthread"]


def library_name(stem: str, sources: Sequence[Path], flags: Sequence[str]) -> str:
    """Return the file name of a library: its stem and a digest of sources, headers and flags."""
    digest = hashlib.sha256("\0".join(flags).encode())
    for path in [*sources, *sorted(HERE.glob("*.h"))]:
        digest.update(path.name.encode() + path.read_bytes())
    return f"{stem}-{digest.hexdigest()[:16]}.so"


def shim_name() -> str:
    """Return the file name of the shim of these sources, in a wheel as in the cache."""
    return library_name("shim", SHIM_SOURCES, SHIM_FLAGS)
