"""Names pages where no slot number means anything: by the tokens up to their end."""

import hashlib
from collections.abc import Hashable

import numpy as np
import torch

from kvcache.radix.keys import Int64Array, Tokens, as_ids

HASH_BYTES = 16


def stable_hash(*parts: bytes | memoryview) -> bytes:
    """16 bytes that depend on each part, its length included; the same in every process and on
    every machine.
    """
    state = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def page_hashes(tokens: Tokens, page_size: int, namespace: Hashable = None) -> list[bytes]:
    """One for each whole page: of the hash of the page before (of the namespace for the first) and
    its tokens.

    So equal hashes mean equal tokens from the beginning on. ValueError for a namespace (adapter,
    salt) that is no str, int or None: what others hash to need not be the same in the next process.
    """
    ids: Int64Array = as_ids(tokens, "tokens")
    if not (namespace is None or isinstance(namespace, str | int)):
        raise ValueError(
            f"a namespace of tiers is a str, an int or None, got {namespace!r}; make it a str"
        )
    whole = np.ascontiguousarray(ids[: len(ids) // page_size * page_size], dtype="<i8").tobytes()
    parent = stable_hash(f"{type(namespace).__name__} {namespace}".encode())
    hashes = []
    for start in range(0, len(whole), 8 * page_size):
        # both lengths are fixed, so that nothing has to part them
        parent = hashlib.blake2b(
            parent + whole[start : start + 8 * page_size], digest_size=HASH_BYTES
        ).digest()
        hashes.append(parent)
    return hashes


def check_page(content: torch.Tensor, nbytes: int) -> None:
    """ValueError unless it is uint8 `[nbytes]`, all bytes of a page."""
    if content.dtype != torch.uint8 or content.shape != (nbytes,):
        raise ValueError(
            f"a page is uint8 [{nbytes}], got {content.dtype} of {tuple(content.shape)}"
        )
