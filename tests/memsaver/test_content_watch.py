"""Whether the owner of a tag can tell that its content is gone, whatever operation took it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from memsaver import ContentWatch, LeaseError, MemorySaver, attach
from tests.helpers.memsaver.savers import MIB

SIZE = 4 * MIB


class World:
    """Tag "own" is watched; "other" has as many bytes, "theirs" is another saver's."""

    def __init__(self, device: str) -> None:
        self.saver, self.peer = MemorySaver(device), MemorySaver(device)
        self.own = self.saver.empty(SIZE, torch.uint8, tag="own", elastic=True)
        self.resize(0, SIZE // 2, SIZE)  # two extents: on a GPU one goes whole or stays
        self.own.fill_(1)
        self.other = self.saver.empty(SIZE, torch.uint8, tag="other", elastic=True).fill_(2)
        self.theirs = self.peer.empty(SIZE, torch.uint8, tag="theirs").fill_(3)
        self.watch = ContentWatch(self.saver, "own", "other")

    def there_and_back(self, content: str, **how: object) -> None:
        self.saver.pause("own", content=content, **how)  # type: ignore[arg-type]
        self.saver.resume("own")

    def swap(self, content: str) -> None:
        self.saver.pause("other", content="host")
        self.saver.swap(pause="own", resume="other", content=content)
        self.saver.pause("other", content="host")
        self.saver.resume()

    def alias(self) -> None:
        self.saver.pause("own", content="host")
        self.saver.alias("own", self.peer.share("theirs"))

    def end_alias(self) -> None:
        self.alias()
        self.watch.note("own")
        self.saver.pause("own", content="discard")

    def resize(self, *sizes: int) -> None:
        for nbytes in sizes:
            self.saver.resize("own", nbytes)

    def refused_pause(self) -> None:
        with attach(self.saver.share("own")), pytest.raises(LeaseError):
            self.saver.pause("own")

    def saved(self) -> None:
        self.saver.mark_clean("own", 1)
        self.there_and_back("host")
        if copied := self.saver.save("own", 2):
            copied.synchronize()
        self.there_and_back("host")
        self.saver.trim()


@pytest.fixture
def world(device: str) -> Iterator[World]:
    world = World(device)
    yield world
    world.saver.close()
    world.peer.close()


LOST: dict[str, Callable[[World], object]] = {
    "discard": lambda world: world.there_and_back("discard"),
    "keep": lambda world: world.there_and_back("discard", release="retain"),
    "hand over": lambda world: world.there_and_back(
        "discard", release="hand_over", to=world.peer.pool_ticket()
    ),
    "paused": lambda world: world.saver.pause(),
    "swap": lambda world: world.swap("discard"),
    "exchange": lambda world: world.saver.exchange("other", "own"),
    "shrink": lambda world: world.resize(SIZE // 2),
    "shrink and grow": lambda world: world.resize(SIZE // 2, SIZE),
    "alias": World.alias,
    "end of alias": World.end_alias,
}
KEPT: dict[str, Callable[[World], object]] = {
    "host": lambda world: world.there_and_back("host"),
    "disk": lambda world: world.there_and_back("disk"),
    "saved": World.saved,
    "swap": lambda world: world.swap("host"),
    "refused": World.refused_pause,
    "grow and shrink back": lambda world: world.resize(SIZE + MIB, SIZE),
}


@pytest.mark.parametrize("operation", LOST)
def test_an_operation_that_discards_content_is_noticed_until_it_is_noted(
    world: World, operation: str
) -> None:
    LOST[operation](world)
    assert world.watch.lost("own") == ["own"] == world.watch.lost("own")
    world.watch.note("own", "other")
    assert world.watch.lost("own", "other") == []
    missing = {"paused": SIZE, "end of alias": SIZE, "shrink": SIZE // 2}.get(operation, 0)
    assert world.saver.unbacked_bytes("own") <= missing
    assert bool(world.saver.unbacked_bytes("own")) == bool(missing)


@pytest.mark.parametrize("operation", KEPT)
def test_an_operation_that_keeps_content_is_not_noticed(world: World, operation: str) -> None:
    KEPT[operation](world)
    assert world.watch.lost("own", "other") == []
    assert bool((world.own == 1).all()) and bool((world.other == 2).all())
    assert not world.saver.unbacked_bytes("own")
