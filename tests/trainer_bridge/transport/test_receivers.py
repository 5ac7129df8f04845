"""Receiving ranks, which own a target and hold no shards, on a machine without a trainer rank."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from memsaver.system.devices import device_key
from rollout.process_group import RankAddress, join_apart, leave, open_store
from tests.helpers.ports import free_port
from tests.helpers.ranks import results, start_ranks
from tests.helpers.trainer_bridge.sync_ranks import SMALL, holds, low_rank, sources
from tests.helpers.trainer_bridge.targets import PageTarget
from tests.helpers.trainer_bridge.three_params import full, shards, whole
from trainer_bridge.errors import SyncError
from trainer_bridge.sync import relay
from trainer_bridge.sync.agree import group_agreement
from trainer_bridge.sync.weight_sync import WeightSync

TRAINERS = 2  # ranks 0 and 1 hold shards, each with a target on its machine
MACHINES = ["a", "b", "c", "c"]  # ranks 2 and 3 receive the bytes of replicas
WORLD = len(MACHINES)


def connected(rank: int, group: dist.ProcessGroup, seconds: float = 20.0) -> Any:
    """Connect this rank; return the sync, its target, and the function that syncs."""
    place, target = f"{MACHINES[rank]}/cpu", PageTarget(whole("bfloat16"))
    target.place = place
    tensors = sources(rank, TRAINERS, "cpu") if rank < TRAINERS else {}
    sync = WeightSync(
        [shard for shard in shards(TRAINERS) if shard.rank == rank],
        lambda: tensors,
        [target],
        group_agreement(group, timeout=seconds),
        place=place,
        device=torch.device("cpu"),
    )

    def synced(version: int, **how: Any) -> Any:
        return sync.sync(version, **how) if rank < TRAINERS else sync.follow(version)

    return sync, target, synced


def all_kinds(rank: int) -> list[Any]:
    """Sync all, then an adapted parameter alone; return what this rank has after each."""
    assert dist.group.WORLD is not None
    seen = []
    with mock.patch.object(relay, "MESSAGE_BYTES", SMALL):
        sync, target, synced = connected(rank, dist.group.WORLD)
        receipt = synced(1)
        seen.append((receipt.digests, target.digest(), holds(target, "cpu"), receipt.node_bytes))
        target.served_version = lambda: target.version
        target.only = ("proj",)
        how: dict[str, Any] = {}
        if rank < TRAINERS:
            assert sync.holds()
            proj = sources(rank, TRAINERS, "cpu")["proj"]
            how = {"names": ["proj"], "derived": {"proj": low_rank(proj, rank, TRAINERS)}}
        receipt = synced(2, **how)
        target.only = None
        seen.append((target.version, holds(target, "cpu", changed=True)))
    return [*seen, target.messages]


def test_replicas_of_another_machine_get_all_bytes_once(tmp_path: Path) -> None:
    outcomes = results(start_ranks(all_kinds, WORLD, tmp_path / "store"))
    nbytes = sum(2 * tensor.numel() for tensor in full("cpu").values())
    for rank, (whole_sync, part, messages) in enumerate(outcomes):
        digests, digest, right, sent = whole_sync
        assert right and digests == (digest,) * WORLD, rank
        # a and b exchange their halves, and c gets everything once, with gaps between boxes
        assert 2 * nbytes <= sent < 3 * nbytes
        assert part == (2, True), rank
        assert messages == [], "a receiving rank maps the pages of its own engine"


def fail_once(rank: int) -> tuple[str, list[int | None], bool]:
    assert dist.group.WORLD is not None
    _, target, synced = connected(rank, dist.group.WORLD, seconds=60.0)
    target.fail_at = "verify" if rank == 3 else None
    try:
        synced(1)
        error = ""
    except (SyncError, OSError) as caught:
        error = str(caught)
    poisoned, target.fail_at = target.version, None
    synced(2)
    return error, [poisoned, target.version], holds(target, "cpu")


def test_failed_receiver_ends_the_sync_of_all_ranks_and_can_sync_again(tmp_path: Path) -> None:
    for error, versions, right in results(start_ranks(fail_once, WORLD, tmp_path / "store"), 50.0):
        assert "cosmic ray in verify" in error
        assert versions == [None, 2] and right


def die_while_others_write(rank: int) -> tuple[str, int | None]:
    assert dist.group.WORLD is not None
    _, target, synced = connected(rank, dist.group.WORLD, seconds=2.0)
    if rank == 1:
        relay.Message.packing = lambda *_: os._exit(1)  # type: ignore[method-assign]
    with pytest.raises(SyncError) as caught:
        synced(1)
    return str(caught.value), target.version


def test_receivers_of_a_dead_trainer_serve_nothing(tmp_path: Path) -> None:
    ranks = start_ranks(die_while_others_write, WORLD, tmp_path / "store", seconds=3.0)
    try:
        for rank in (0, 2, 3):
            error, version = ranks[rank].hear(40)
            assert "rank 1" in error or "exchange" in error
            assert version in (0, None)
    finally:
        for process in ranks:
            process.kill()


# ---------------------------------------------------------------- groups of their own


def in_a_group_apart(rank: int, *ports: int) -> list[Any]:
    """Sync in one group after the other, none of which is the default group."""
    seen = []
    for port in ports:
        store = open_store("127.0.0.1", (port, port)) if rank == 0 else None
        address = RankAddress(host="127.0.0.1", port=port, rank=rank, size=WORLD, seconds=30.0)
        dist.barrier()
        group = join_apart(address, torch.device("cpu"), store)
        _, target, synced = connected(rank, group)
        seen.append((synced(1).digests, holds(target, "cpu")))
        leave(group)
    return [*seen, os.environ["GLOO_SOCKET_IFNAME"]]


def test_ranks_of_other_default_groups_meet_in_a_group_apart(tmp_path: Path) -> None:
    ports = free_port(), free_port()
    outcomes = results(start_ranks(in_a_group_apart, WORLD, tmp_path / "store", *ports))
    assert outcomes == [outcomes[0]] * WORLD
    (digests, right), again, interface = outcomes[0]
    assert right and len(set(digests)) == 1 and again == (digests, right)
    assert interface == "lo", "the interface that leads to the store"


@pytest.mark.parametrize("rdma", [True, False])
def test_variables_that_the_user_chose_are_kept(
    rdma: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.process_group.RDMA_DEVICES", tmp_path)
    if rdma:
        (tmp_path / "mlx5_0").mkdir()
    for name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # at the end, it is deleted again
    monkeypatch.setenv("NCCL_P2P_NET_CHUNKSIZE", "131072")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "chosen0")
    store = open_store(socket.gethostbyname(socket.gethostname()))
    address = RankAddress(host=store.host, port=store.port, rank=0, size=1, seconds=5.0)
    leave(join_apart(address, torch.device("cpu"), store))
    chosen = [os.environ[f"{name}_SOCKET_IFNAME"] for name in ("GLOO", "NCCL")]
    assert chosen == ["lo", "chosen0"]
    names = ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD", "NCCL_P2P_NET_CHUNKSIZE")
    wide = [os.environ.get(name) for name in names]
    assert wide == ([None, None, "131072"] if rdma else ["4", "4", "131072"])


def test_store_takes_only_the_given_ports() -> None:
    store = open_store("127.0.0.1")
    with pytest.raises(OSError, match=f"no port from {store.port} to {store.port} is free on"):
        open_store("127.0.0.1", (store.port, store.port))


SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"}


def between_gpus(rank: int, port: int) -> tuple[Any, int, bool]:
    """Send from a trainer on one GPU to a receiving rank on another one, by NCCL over sockets."""
    os.environ.update(SOCKETS)
    device = torch.device("cuda", rank)
    store = open_store("127.0.0.1", (port, port)) if rank == 0 else None
    dist.barrier()
    address = RankAddress(host="127.0.0.1", port=port, rank=rank, size=2, seconds=60.0)
    group = join_apart(address, device, store)
    place, tensors = f"{'ab'[rank]}/{device_key(device)}", full(str(device)) if rank == 0 else {}
    target = PageTarget(whole("bfloat16"), str(device), place)
    sync = WeightSync(
        [shard for shard in shards(1) if shard.rank == rank],
        lambda: tensors,
        [target] if rank else [],
        group_agreement(group),
        place=place,
        device=device,
    )
    for version in (1, 2):
        receipt = sync.sync(version) if rank == 0 else sync.follow(version)
    right = rank == 0 or holds(target, str(device))
    leave(group)
    return receipt.digests, receipt.node_bytes, right


@pytest.mark.gpu
@pytest.mark.gpus(2)
def test_receiver_on_another_gpu_gets_all_bytes_by_nccl(tmp_path: Path) -> None:
    ranks = start_ranks(between_gpus, 2, tmp_path / "store", free_port())
    sender, receiver = results(ranks)
    assert sender == receiver and receiver[2] and receiver[1] > 0
