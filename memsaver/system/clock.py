"""The clock of events and spans."""

import time

# Read once, so that setting the system's clock changes no difference between two times.
_EPOCH = time.time() - time.monotonic()


def steady_time() -> float:
    """Return the seconds since 1970, by a clock that is never set while the process runs.

    Processes of one machine agree, unless the system's clock was set between their starts.
    """
    return _EPOCH + time.monotonic()
