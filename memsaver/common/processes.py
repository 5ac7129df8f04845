"""Tells what a process is called, for messages that name one."""

from __future__ import annotations

import os
from pathlib import Path

_LONGEST = 40


def command_of(pid: int) -> str:
    """``"python train.py"``: a process's command line, cut, without folders; ``""``: unreadable."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    text = " ".join(
        " ".join(os.path.basename(word) if word.startswith("/") else word for word in words).split()
    )
    # a terminal may read the message
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def process_name(pid: int, command: str) -> str:
    """``"process 1234 (python train.py)"``."""
    return f"process {pid} ({command})" if command else f"process {pid}"
