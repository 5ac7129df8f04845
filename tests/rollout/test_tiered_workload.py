"""A random workload over device, host and disk with both ways of preemption and changing weights.

Every row that a sample reads was computed from its own tokens under the present weights.
"""

from __future__ import annotations

import errno
import os
import random
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest

from kvcache.tiers import WritePolicy
from tests.helpers.case_selection import rounds, some
from tests.helpers.rollout.tiered_world import World


def on_disk(tmp_path: Path, dice: random.Random, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the fields of a small disk that is full at random."""
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
            victim.write_bytes(dice.choice(files).read_bytes())  # a whole page of other tokens


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
def test_samples_read_only_rows_of_their_own_tokens_and_weights(
    policy: WritePolicy, disk: bool, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(f"{policy} {disk}")
    extra = on_disk(tmp_path, dice, monkeypatch) if disk else {}
    world = World(device, dice, 24 if disk else 60, write_policy=policy, **extra)
    for _ in range(rounds(500, 20_000)):
        if len(world.scheduler.unfinished) < 6:
            world.submit()
        event = dice.choices(
            ["step", "raise", "pause", "park", "abort", "fail", "damage"],
            [90, 1.5, 1.5, 2, 2, 2, 3],
        )[0]
        if event == "damage":
            damage(tmp_path, dice)
        elif event != "step":
            world.disturb(event)
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
    assert min(world.reads[kind] for kind in ("hit", "miss")) >= 20 and world.version >= 3
    assert world.reads["parked"] >= 5
    if disk:
        assert world.blocks.tiers.lower.lost_pages > 0
