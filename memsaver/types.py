"""String types of the options, states and operations of `MemorySaver`."""

from typing import Any, Literal, get_args

Content = Literal["discard", "host", "disk"]
"""Whether a pause discards a tag's content, keeps it in host memory, or keeps it in a file."""

Release = Literal["driver", "retain", "hand_over"]
"""Where a pause puts a tag's memory: back to the driver, into the page pool of this saver, or into
the page pool of another saver.
"""

TagState = Literal["active", "paused"]
"""Whether a tag has memory behind its addresses."""

Operation = Literal[
    "alias", "exchange", "grow", "pause", "prefetch", "resize", "resume", "save", "trim"
]
"""Operation on a tag, as an `Event` records it."""


def check_choice(name: str, value: object, known: Any) -> None:
    """Raise a ``ValueError`` that names the value unless it is one of a Literal type's."""
    if value not in (words := get_args(known)):
        raise ValueError(f"{name}={value!r} must be one of {', '.join(words)}")
