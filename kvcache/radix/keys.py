"""Token ids and page ids as int64 arrays, and how far two runs of tokens agree."""

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Tokens = Sequence[int] | npt.NDArray[np.integer]  # lists, tuples, array('q'), numpy; the last two are not converted


def as_ids(values: Tokens, name: str) -> Int64Array:
    """int64 `[n]`, a view of a dense int64 array. ValueError for anything but integers in one dimension."""
    if isinstance(values, list | tuple):
        try:
            values = array("q", values)  # twice as fast as numpy on 50,000 ids, and refuses floats
        except (TypeError, OverflowError) as error:
            raise ValueError(f"{name} must be integers of 64 bits: {error}") from error
    ids = np.asarray(values)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{name} must be one-dimensional integers, got {ids.dtype} of shape {ids.shape}")
    return np.ascontiguousarray(ids, dtype=np.int64)


def frozen(ids: Int64Array) -> Int64Array:
    """A copy that nobody can change, over bytes, which `common_prefix` compares at the speed of memory."""
    return np.frombuffer(ids.tobytes(), dtype=np.int64)


def common_prefix(a: Int64Array, b: Int64Array) -> int:
    """How many leading entries agree; `a` is frozen. Where they part, stretches grow: an early difference costs little,
    a late one few calls."""
    length = min(len(a), len(b))
    assert isinstance(a.base, bytes) and len(a.base) == a.nbytes
    if a.base.startswith(b[:length].data):
        return length
    start, step = 0, 256
    while start < length:
        stop = min(length, start + step)
        differs = a[start:stop] != b[start:stop]
        if differs.any():
            return start + int(differs.argmax())
        start, step = stop, 8 * step
    return length
