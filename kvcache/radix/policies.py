"""Which entry goes first: a policy ranks the use of an entry, the lowest rank is evicted first."""

from __future__ import annotations

from collections.abc import Callable

from kvcache.radix.node import Usage
from kvcache.radix.queue import Rank

Policy = Callable[[Usage], Rank]

POLICIES: dict[str, Policy] = {
    "lru": lambda usage: (usage.last_access,),
    "mru": lambda usage: (-usage.last_access,),
    "fifo": lambda usage: (usage.created,),
    "lfu": lambda usage: (usage.hits, usage.last_access),
    "priority": lambda usage: (usage.priority, usage.last_access),
}

FALLING = frozenset({"mru"})  # where use lowers the rank; everywhere else it never does


def policy(name: str) -> Policy:
    if name not in POLICIES:
        raise ValueError(f"no eviction policy {name!r}; there are {', '.join(POLICIES)}")
    return POLICIES[name]
