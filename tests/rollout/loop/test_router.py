"""The choice of a replica."""

from __future__ import annotations

import pytest

from rollout.loop import router as module
from rollout.loop.router import Router


def test_request_goes_to_the_fewest_tokens_or_where_its_key_went(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "KEYS", 2)
    router, names = Router(), "abc"
    assert [router.pick(names, 10) for _ in range(4)] == ["a", "b", "c", "a"]
    router.done("b", 10)
    assert router.pick(names, 1, key="talk") == "b"
    assert [router.pick(names, 99, key="talk") for _ in range(2)] == ["b", "b"]
    assert router.pick("ac", 1, key="talk") == "c"  # its replica is gone
    assert router.pick(names, 1, key="talk") == "c"
    for other in range(2):
        router.pick(names, 50, key=other)
    router.pick(names, 500, key="talk")  # it was forgotten, and is the newest now
    assert router.pick(names, 1, key=0) != router.pick(names, 1, key="talk")
