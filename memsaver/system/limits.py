"""Name the limit of the process that made a system call fail."""

import errno
import resource

_ADDRESSES = "raise the limit of addresses (ulimit -v, now %d KiB), or pass a smaller reserve_bytes"
_NAMED = {
    errno.EMFILE: (resource.RLIMIT_NOFILE, 1, "raise the limit of open files (ulimit -n, now %d)"),
    errno.EFBIG: (resource.RLIMIT_FSIZE, 1024, "raise the limit of files (ulimit -f, now %d KiB)"),
    errno.ENOMEM: (resource.RLIMIT_AS, 1024, _ADDRESSES),
}


def limit_remedy(code: int) -> str | None:
    """Return how to raise the limit that explains an error code; None if no limit does."""
    if code not in _NAMED:
        return None
    kind, unit, text = _NAMED[code]
    limit = resource.getrlimit(kind)[0]
    return None if limit == resource.RLIM_INFINITY else text % (limit // unit)
