"""How an actor looks up the methods that it is asked to call, without Ray."""

from __future__ import annotations

import os
from typing import Any

import pytest

from rollout.actor_base import ActorBase


class Held:
    version = 3

    @property
    def doubled(self) -> int:
        return 2 * self.version

    def add(self, *numbers: int, to: int = 0) -> int:
        return sum(numbers) + to

    def pid(self) -> int:
        raise AssertionError("the actor's own method goes first")


class Actor(ActorBase):
    def __init__(self) -> None:
        self.held: Any = Held()


def test_actor_methods_take_precedence_over_methods_of_the_held_object() -> None:
    actor = Actor()
    assert actor.call("add", 1, 2, to=4) == 7
    assert actor.call("doubled") == 6, "properties are read"
    assert actor.call("pid") == os.getpid()


def test_private_and_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="^_join is private; actors are called by public names$"):
        Actor().call("_join", None, "cpu")
    with pytest.raises(AttributeError, match="'Held' object has no attribute 'nothing'"):
        Actor().call("nothing")
