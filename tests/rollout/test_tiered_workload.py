"""A random workload over device, host and disk, with preemption both ways and weights that change:
every row that a sample is given was made of its own tokens under the present weights. And one
sequence swapped out and in.
"""

from __future__ import annotations

import errno
import os
import random
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest

from kvcache import ReqHandle
from kvcache.tiers import WritePolicy
from rollout.serving.prefix import Swapped
from tests.helpers.effort import rounds, some
from tests.helpers.rollout.tiered_world import LAYERS, PAGES, PS, World


def on_disk(tmp_path: Path, dice: random.Random, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A small disk that is full now and then, and whose files are damaged: by each call of the
    third field.
    """
    allocate = os.posix_fallocate

    def sometimes_full(fd: int, offset: int, nbytes: int) -> None:
        if dice.random() < 0.1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", sometimes_full)
    return {"disk_directory": tmp_path, "disk_bytes": 30 * 8192}


def damage(directory: Path, dice: random.Random) -> None:
    if files := sorted(directory.glob("*.kvpage")):
        victim = dice.choice(files)
        if dice.random() < 0.5:
            os.truncate(victim, dice.choice([0, 4096, 8191]))
        else:
            victim.write_bytes(dice.choice(files).read_bytes())  # whole, and of other tokens


@pytest.mark.soak
@pytest.mark.parametrize(
    ("policy", "disk"),
    some(
        ("write_through", True),
        ("write_back", False),
        ("write_through_selective", True),
        whole=list(product(get_args(WritePolicy), [True, False])),
    ),
)
def test_weights_that_change_now_and_then(
    policy: WritePolicy, disk: bool, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(f"{policy} {disk}")
    extra = on_disk(tmp_path, dice, monkeypatch) if disk else {}
    world = World(device, dice, 24 if disk else 60, write_policy=policy, **extra)
    for _ in range(rounds(500, 20_000)):
        if len(world.scheduler.unfinished) < 6:
            world.submit()
        what = dice.choices(
            ["step", "raise", "pause", "abort", "fail", "damage"], [90, 1.5, 2, 2, 2, 3]
        )[0]
        if what == "damage":
            damage(tmp_path, dice)
        elif what != "step":
            world.disturb(what)
        world.step()
        world.check_ledgers()
    while world.scheduler.unfinished:
        world.step()
        world.check_ledgers()
    stats = world.scheduler.stats
    assert (
        min(
            stats.preempted_swap, stats.preempted_recompute, stats.swapped_back, stats.loaded_tokens
        )
        >= 5
    ), stats
    assert min(world.seen.values()) >= 20 and world.version >= 3
    if disk:
        assert world.blocks.tiers.lower.lost_pages > 0


@pytest.mark.parametrize("policy", get_args(WritePolicy))
def test_weights_that_change_at_every_step(
    policy: WritePolicy, device: str, tmp_path: Path
) -> None:
    """Samples run across changes, are swapped, moved below the device and preempted; nothing is
    ever found.
    """
    dice = random.Random(policy)
    world = World(
        device, dice, 24, write_policy=policy, disk_directory=tmp_path, disk_bytes=40 * 8192
    )
    for step in range(150):
        if len(world.scheduler.unfinished) < 6:
            world.submit()
        world.disturb("raise")
        if step % 10 == 9:
            world.disturb("pause")
        world.disturb("raise")
        world.step()
        world.check_ledgers()
    assert world.seen["found"] == 0 and world.seen["nothing found"] > 80
    assert world.scheduler.stats.preempted_recompute > 0
    assert world.scheduler.stats.prefix_hit_tokens == 0


# ---------------------------------------------------------------- one sequence


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


def make_world(device: str, host_pages: int = 60) -> World:
    world = World(device, random.Random(0), host_pages)
    world.blocks.dice = None
    return world


@pytest.mark.parametrize("length", [1, 2, 7, 8])
@pytest.mark.parametrize("meanwhile", ["nothing", "others went on", "new weights"])
def test_a_swapped_sequence_comes_back(length: int, meanwhile: str, device: str) -> None:
    """All of it, and what others have computed beyond; under new weights only what was computed
    again, without the last page that is not whole.
    """
    world = make_world(device)
    tokens = list(range(length))
    out = swapped(world, tokens)
    assert (out.page > 0) == (length % PS > 0) and world.blocks.swapped_pages() == length % PS
    found = length
    if meanwhile == "others went on":
        tokens, found = list(range(12)), 12
    if meanwhile == "new weights":
        world.blocks.new_weights()
        found = length // PS * PS
    if meanwhile != "nothing":
        world.blocks.release(computed(world, tokens), tokens)
    admitted = world.blocks.admit([*tokens, 7], out)
    assert admitted is not None and admitted[1] == found and world.blocks.swapped_pages() == 0
    for layer in range(LAYERS):
        for load in world.blocks.loads():
            load.wait()
        world.check(admitted[0], tokens[:found], layer)
    world.blocks.check_integrity()
