"""Checks what has to hold for a prefix tree, by walking it."""

from collections.abc import Callable

import numpy as np

from kvcache.radix.keys import TOKEN_BYTES, Int64Array
from kvcache.radix.node import Generation, RadixNode


def check_generation(generation: Generation, page_size: int) -> tuple[int, int]:
    """Tokens of one version that can be evicted and that are locked; AssertionError when its trees
    contradict themselves.
    """
    evictable = protected = 0
    nodes = list(generation.nodes())
    for root in generation.roots.values():
        assert root.children and root.is_root and root.lock_ref == 0, f"{root} is empty or locked"
        _check_children(root, page_size)
    for node in nodes:
        _check_node(node, page_size)
        if node.lock_ref:
            protected += node.length
        else:
            evictable += node.length
    assert generation.tokens == evictable + protected, (
        f"version {generation.version} counts {generation.tokens} tokens"
    )
    leaves = sum(not node.children and node.lock_ref == 0 for node in nodes)
    assert leaves == len(generation.leaves), (
        "the eviction queue holds nodes that are not in the tree"
    )
    return evictable, protected


def check_pages(pages: Int64Array, ref_counts: Callable[[Int64Array], Int64Array]) -> None:
    """Every page of the cache is in it once and has an owner by the ledger's `ref_counts`."""
    assert len(np.unique(pages)) == len(pages), "a page is in the cache twice"
    assert (ref_counts(pages) > 0).all(), "a page of the cache is free in the ledger"


def _check_node(node: RadixNode, page_size: int) -> None:
    assert node.length and node.length == len(node.pages) * page_size, (
        f"{node} has {len(node.pages)} pages"
    )
    below = sum(child.lock_ref for child in node.children.values())
    assert node.lock_ref == node.own_lock_ref + below, (
        f"{node} has {node.own_lock_ref} locks and {below} below it"
    )
    assert node.own_lock_ref >= 0, f"{node} was unlocked too often"
    _check_children(node, page_size)


def _check_children(node: RadixNode, page_size: int) -> None:
    for edge, child in node.children.items():
        assert child.parent is node and child.generation is node.generation, (
            f"{child} has another parent"
        )
        assert child.run[: page_size * TOKEN_BYTES] == edge, (
            f"{child} is under another run's first page"
        )
