"""Process groups of ranks on one or several machines: their store, backends and network."""

import contextlib
import itertools
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, BackendConfig, _world

RDMA_DEVICES = Path("/sys/class/infiniband")
_WIDE = {
    "NCCL_SOCKET_NTHREADS": "4",
    "NCCL_NSOCKS_PERTHREAD": "4",
    "NCCL_P2P_NET_CHUNKSIZE": str(512 << 10),  # bytes
}


@dataclass(frozen=True, kw_only=True)
class RankAddress:
    """One rank's place in a process group, whose store rank 0 keeps at `host` and `port`."""

    host: str
    port: int
    rank: int
    size: int
    seconds: float  # the group's timeout, also for the wait until all ranks have joined


Ports = tuple[int, int]
"""First and last port."""


def open_store(host: str, ports: Ports | None = None) -> dist.TCPStore:
    """Open a group's store on a free port of `host`, an address of this machine.

    All ranks must be able to reach the address. By default, torch's store would listen on all
    addresses of the machine. An OSError says that none of `ports` is free.
    """
    listener = _listener(host, ports)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _listener(host: str, ports: Ports | None) -> socket.socket:
    family = socket.getaddrinfo(host, None)[0][0]
    if ports is None:
        return socket.create_server((host, 0), family=family)
    first, last = ports
    for port in range(first, last + 1):
        with contextlib.suppress(OSError):
            return socket.create_server((host, port), family=family)
    raise OSError(f"no port from {first} to {last} is free on {host}; set cluster.ports to others")


def join(
    address: RankAddress, device: torch.device, store: dist.Store | None = None
) -> dist.ProcessGroup:
    """Initialize this process's default group (gloo for the CPU, NCCL for a GPU) and return it.

    The call returns when all ranks have joined. A GPU becomes the current device. `store` is the
    result of `open_store` on rank 0, and None on the other ranks.
    """
    store = _joined_store(address, store)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=address.rank,
        world_size=address.size,
        timeout=timedelta(seconds=address.seconds),
        device_id=device if on_gpu else None,
    )
    group = dist.group.WORLD
    assert group is not None
    return group


def join_apart(
    address: RankAddress, device: torch.device, store: dist.Store | None = None
) -> dist.ProcessGroup:
    """Return a new group (gloo, with NCCL for a GPU) of processes whose default groups differ.

    Arguments are those of `join`. `dist.new_group` would need all ranks in one default group. The
    group lasts until `leave`.
    """
    timeout = timedelta(seconds=address.seconds)
    store = dist.PrefixStore("apart", _joined_store(address, store))
    group, backends = dist.ProcessGroup(store, address.rank, address.size), "cpu:gloo"
    gloo = dist.ProcessGroupGloo(
        dist.PrefixStore("cpu", store), address.rank, address.size, timeout
    )
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        nccl = dist.ProcessGroupNCCL(
            dist.PrefixStore("cuda", store), address.rank, address.size, options
        )
        group._register_backend(device, dist.ProcessGroup.BackendType.NCCL, nccl)
        backends += ",cuda:nccl"
    group._set_group_name(f"memsaver/apart/{next(_made)}")  # type: ignore[arg-type]
    # torch's functions look up ranks and backends of a group here.
    _world.pg_group_ranks[group] = {rank: rank for rank in range(address.size)}
    _world.pg_backend_config[group] = BackendConfig(Backend(backends))  # type: ignore[assignment]
    return group


def host_group(group: dist.ProcessGroup) -> Any:
    """Return a new gloo group of a group's ranks, which all call this, with the same timeout.

    Another thread may use it beside the group.
    """
    own, store = group.rank(), group.get_group_store()
    kind = "cpu" if "gloo" in dist.get_backend_config(group) else "cuda"
    number = store.add(f"memsaver/host/{own}", 1)  # a group may have several engines
    timeout = group._get_backend(torch.device(kind)).options._timeout
    store = dist.PrefixStore(f"memsaver/host/{number}", store)
    return dist.ProcessGroupGloo(store, own, group.size(), timeout)


def leave(group: dist.ProcessGroup) -> None:
    """End this process's part in a group of `join_apart`."""
    del _world.pg_group_ranks[group], _world.pg_backend_config[group]
    group.shutdown()


_made = itertools.count()


def _joined_store(address: RankAddress, store: dist.Store | None) -> dist.Store:
    """Return the store of a group, and let gloo and NCCL use the interface that leads to it.

    Otherwise they may choose an interface that other machines do not reach. Variables that the user
    has set are kept.
    """
    widen_nccl_sockets()
    if interface := _interface_to(address.host, address.port):
        _set_unless_given("GLOO_SOCKET_IFNAME", interface)
        _set_unless_given("NCCL_SOCKET_IFNAME", f"={interface}")  # else it names a prefix
    if store is not None:
        return store
    timeout = timedelta(seconds=address.seconds)
    return dist.TCPStore(address.host, address.port, is_master=False, timeout=timeout)


def widen_nccl_sockets() -> None:
    """Let NCCL carry more bytes per second over sockets, in groups that connect after this call.

    By default, it has one socket for each connection, and sends pieces of 128 KiB. A machine with
    RDMA devices keeps NCCL's own choice, and any machine the variables that the user has set.
    """
    if not any(RDMA_DEVICES.glob("*")):
        for name, value in _WIDE.items():
            _set_unless_given(name, value)


def _set_unless_given(name: str, value: str) -> None:
    """Set a variable of the environment, unless the user has given it a value."""
    os.environ[name] = os.environ.get(name) or value


def _interface_to(host: str, port: int) -> str | None:
    """Return the network interface from which packets for `host` leave; None if it has no name."""
    family, kind, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # connecting sends nothing
        probe.connect(target)
        own = probe.getsockname()[0]
    for name, uses in psutil.net_if_addrs().items():
        if own in [use.address for use in uses]:
            return name
    return None
