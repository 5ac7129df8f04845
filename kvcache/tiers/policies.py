"""Decides when a page of the device pool is written to the host tier."""

from typing import Literal, get_args

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
_HITS = {"write_through": 0, "write_through_selective": 2}


def check_policy(policy: str) -> None:
    """ValueError for a name that is none."""
    if policy not in get_args(WritePolicy):
        raise ValueError(
            f"no write policy {policy!r}; there are {', '.join(get_args(WritePolicy))}"
        )


def backup_hits(policy: WritePolicy) -> int | None:
    """After how many hits a page is written while it is on the device (0: when it is inserted);
    None: never.
    """
    return _HITS.get(policy)


def backs_up_on_eviction(policy: WritePolicy) -> bool:
    """Tells whether a page that leaves the device is written then."""
    return policy == "write_back"
