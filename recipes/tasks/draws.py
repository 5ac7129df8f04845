"""Draws of a reasoning-gym generator, the same in every process."""

import contextlib
import io
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

from recipes.child_process import call_in_child

HASHED = (
    "isomorphic_strings",
    "knight_swap",
    "polynomial_multiplication",
    "ransom_note",
    "word_ladder",
)
"""Generators whose draws follow the order of sets of texts, which differs between processes."""
PATIENCE = 3.0
"""Seconds of drawing after which a line tells how long it takes."""


def draw(name: str, options: dict[str, Any], setting: str) -> list[dict[str, Any]]:
    """Return all entries of a generator, whose `setting` a line names if they take long."""
    from reasoning_gym.factory import create_dataset

    entries = []
    with _quiet_and_seeded():
        dataset: Any = create_dataset(name, **options)
        begun, told = time.monotonic(), False
        for index in range(dataset.size):
            entries.append(dataset[index])
            if not told and (taken := time.monotonic() - begun) > PATIENCE:
                told, seconds = True, taken / (index + 1) * dataset.size
                line = f"{setting}: drawing takes about {seconds:.0f} s at every start"
                print(f"memsaver: {line}; a smaller size takes less", file=sys.stderr)
    return entries


@contextlib.contextmanager
def _quiet_and_seeded() -> Iterator[None]:
    """Suppress prints, and seed the global generator, from which some generators draw."""
    state = random.getstate()
    random.seed(0)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        random.setstate(state)


def draw_reproducibly(name: str, options: dict[str, Any], setting: str) -> list[dict[str, Any]]:
    """Return what `draw` returns, from a process with fixed hashes if the generator needs one."""
    if name not in HASHED:
        return draw(name, options, setting)
    return call_in_child(draw, name, options, setting, environment={"PYTHONHASHSEED": "0"})
