"""The kernel's limits, and the memory that this process may have."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path

from memsaver.common.host_limits import container_memory, meminfo
from memsaver.doctor.check import Finding, Probe, Target
from memsaver.errors import format_bytes

MAX_MAP_COUNT = Path("/proc/sys/vm/max_map_count")

OPEN_FILES = 4096
MEMORY_MAPS = 65530  # the kernel's own default
LITTLE_MEMORY = 2 << 30


def memfd(_: Target) -> Finding:
    if not hasattr(os, "memfd_create"):
        return Finding("fail", "this Python has no os.memfd_create", "use Linux 3.17 or newer and a Python built on it")
    fd = os.memfd_create("memsaver-doctor")
    try:
        os.ftruncate(fd, 4096)
        os.pwrite(fd, b"x", 4095)
    finally:
        os.close(fd)
    return Finding("ok", "memory without a file can be made (memfd_create)")


def open_files(_: Target) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= OPEN_FILES:
        return Finding("ok", f"up to {_limit(soft)}")
    remedy = "run `ulimit -n 65536` in the shell that starts the program"
    if hard != resource.RLIM_INFINITY and hard < OPEN_FILES:
        remedy = "raise the hard limit: /etc/security/limits.conf, or docker run --ulimit nofile=65536"
    return Finding("warn", f"up to {soft} (hard limit {_limit(hard)}); every shared or paused tag takes some", remedy)


def memory_maps(_: Target) -> Finding:
    if not MAX_MAP_COUNT.exists():
        return Finding("skip", f"{MAX_MAP_COUNT} does not exist here")
    count = int(MAX_MAP_COUNT.read_text())
    if count >= MEMORY_MAPS:
        return Finding("ok", f"up to {count} in a process")
    remedy = f"run `sysctl -w vm.max_map_count={MEMORY_MAPS}` as root, on the host if this is a container"
    return Finding("warn", f"up to {count} in a process (vm.max_map_count)", remedy)


def locked_memory(_: Target) -> Finding:
    """Only told: CUDA's driver pins pages past this limit, and the check of pinned memory tries it out."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("ok", "unlimited")
    found = f"up to {format_bytes(soft)}; CUDA's pinned memory does not count, InfiniBand does (ulimit -l unlimited)"
    return Finding("ok", found)


def container_limit(_: Target) -> Finding:
    machine = meminfo("MemTotal")
    group = container_memory()
    if group is None or group.limit >= machine:
        return Finding("ok", f"no limit below the machine's {format_bytes(machine)}")
    found = f"limited to {format_bytes(group.limit)} of the machine's {format_bytes(machine)}"
    found += "; the kernel kills the process beyond that, without an OutOfMemory"
    remedy = "give MemorySaver('cpu') a limit_bytes below it, or raise it (docker run --memory, the pod's memory limit)"
    return Finding("warn", found, remedy)


def free_memory(_: Target) -> Finding:
    free, group = meminfo("MemAvailable"), container_memory()
    if group is not None:
        free = min(free, max(0, group.limit - group.used))
    if free >= LITTLE_MEMORY:
        return Finding("ok", f"{format_bytes(free)} available")
    remedy = "end other programs, or raise the container's limit; content='host' and CPU tags live in this memory"
    return Finding("warn", f"{format_bytes(free)} available", remedy)


def passing_files(_: Target) -> Finding:
    """An open file sent over a unix socket (SCM_RIGHTS) to an abstract address, as leases do it."""
    reader, writer = os.pipe()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with listener, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            listener.bind("")  # the kernel picks a free abstract name
            listener.listen()
            client.connect(listener.getsockname())
            server, _address = listener.accept()
            with server:
                socket.send_fds(server, [b"x"], [writer])
                _text, fds, _flags, _peer = socket.recv_fds(client, 16, 1)
        for fd in fds:
            os.write(fd, b"passed")
            os.close(fd)
        passed = bool(fds) and os.read(reader, 16) == b"passed"
    finally:
        os.close(reader)
        os.close(writer)
    if passed:
        return Finding("ok", "open files pass through unix sockets")
    return Finding("fail", "an open file did not arrive", "allow unix sockets in the sandbox (SCM_RIGHTS)")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


_SEE_PROC = "run where /proc is mounted"
PROBES = [
    Probe("memory without a file", memfd, "allow memfd_create in the sandbox (seccomp), and free some memory"),
    Probe("open files", open_files, "look at `ulimit -n`"),
    Probe("memory maps", memory_maps, _SEE_PROC),
    Probe("locked memory", locked_memory, "look at `ulimit -l`", needs_gpu=True),
    Probe("container's memory limit", container_limit, _SEE_PROC),
    Probe("available memory", free_memory, _SEE_PROC),
    Probe("passing files between processes", passing_files, "allow unix sockets in the sandbox (SCM_RIGHTS)"),
]
