"""One sequence swapped out and in: what comes back, and when not."""

from __future__ import annotations

import random

import pytest

from kvcache import ReqHandle
from rollout.preemption import Swapped, Victim
from tests.rollout.test_tiered_workload import LAYERS, PAGES, PS, World


def computed(world: World, tokens: list[int]) -> ReqHandle:
    """A sequence whose tokens are all in the cache."""
    admitted = world.blocks.admit([*tokens, 7])
    assert admitted is not None
    handle, found = admitted
    slots = world.blocks.extend([handle], [len(tokens)])
    assert slots is not None
    if found < len(tokens):
        world.write(tokens, slots)
    world.blocks.keep(handle, tokens)
    return handle


def swapped(world: World, tokens: list[int]) -> Swapped:
    """Such a sequence after it was swapped out, with nothing of it left on the device."""
    handle = computed(world, tokens)
    out = world.blocks.swap_out(handle, tokens)
    assert out is not None and out.tokens == len(tokens)
    world.blocks.release(handle, tokens)
    world.blocks.tiers.evict(PAGES * PS)
    world.forget_device()
    return out


def make_world(device: str, monkeypatch: pytest.MonkeyPatch, host_pages: int = 60) -> World:
    world = World(device, random.Random(0), host_pages)
    monkeypatch.setattr(world.blocks.cost, "swaps", lambda victim: True)
    return world


@pytest.mark.parametrize("length", [1, 2, 7, 8])
def test_all_of_a_swapped_sequence_comes_back(length: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(device, monkeypatch)
    tokens = list(range(length))
    out = swapped(world, tokens)
    assert (out.page > 0) == (length % PS > 0) and world.blocks.swapped_pages() == length % PS
    admitted = world.blocks.admit([*tokens, 7], out)
    assert admitted is not None and admitted[1] == length and world.blocks.swapped_pages() == 0
    for layer in range(LAYERS):
        for load in world.blocks.loads():
            load.wait()
        world.check(admitted[0], tokens, layer)
    world.blocks.check_integrity()


@pytest.mark.parametrize("length", [1, 7])
def test_a_last_page_of_other_weights_is_not_taken(length: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even behind whole pages that were computed again under the new ones."""
    world = make_world(device, monkeypatch)
    tokens = list(range(length))
    out = swapped(world, tokens)
    world.blocks.new_weights()
    world.blocks.release(computed(world, tokens), tokens)
    admitted = world.blocks.admit([*tokens, 7], out)
    assert admitted is not None and admitted[1] == length // PS * PS and world.blocks.swapped_pages() == 0
    world.blocks.check_integrity()


def test_others_may_have_computed_more_meanwhile(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(device, monkeypatch)
    tokens = list(range(12))
    out = swapped(world, tokens[:7])
    world.blocks.release(computed(world, tokens), tokens)
    admitted = world.blocks.admit([*tokens, 7], out)
    assert admitted is not None and admitted[1] == 12 and world.blocks.swapped_pages() == 0
    world.blocks.check_integrity()


def test_a_prefix_that_others_hold_is_no_cost_of_a_victim(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, victims = make_world(device, monkeypatch), []
    monkeypatch.setattr(world.blocks.cost, "swaps", victims.append)
    tokens = list(range(8))
    first = computed(world, tokens)
    second = computed(world, [*tokens, 20, 21, 22])
    per_token = world.pool.bytes_per_token
    assert world.blocks.swap_out(second, [*tokens, 20, 21, 22]) is None
    world.blocks.release(first, tokens)
    assert world.blocks.swap_out(second, [*tokens, 20, 21, 22]) is None
    written = 1 * per_token  # all whole pages were written through
    assert victims == [
        Victim(tokens=3, bytes_out=written, bytes_in=3 * per_token),
        Victim(tokens=11, bytes_out=written, bytes_in=11 * per_token),
    ]
    world.blocks.release(second, [*tokens, 20, 21, 22])
    world.blocks.check_integrity()
