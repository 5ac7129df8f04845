"""``memsaver doctor``: what this machine offers memsaver, what is in the way, and what to do.

The table ``CHECKS`` names every check, in the order in which it is told. What needs no GPU is here;
what is tried out on a device, the driver and the GPUs are in ``doctor_gpu.py``.

>>> [check for check in examine() if check.status == "fail"]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from memsaver import doctor_gpu as gpu
from memsaver.compat import IN_PROCESS, require
from memsaver.doctor_gpu import REPORT, Finding, Status, Target, one_line, version
from memsaver.errors import CompilerError, format_bytes
from memsaver.memory import torch_allocator
from memsaver.native import shim
from memsaver.system.machine import container_memory, meminfo

PYTHONS = (3, 11), (3, 13)  # first and last
TORCH, TRITON = (2, 11), (3, 6)
MAX_MAP_COUNT = Path("/proc/sys/vm/max_map_count")
OPEN_FILES = 4096
MEMORY_MAPS = 65530  # the kernel's own default
LITTLE_MEMORY = 2 << 30
_SECONDS = 120  # for an import
_APT = "(Debian, Ubuntu: apt install gcc g++)"
NEED_COMPILER = f"install a C and C++ compiler {_APT}, or install memsaver from a wheel"
UNIX_SOCKETS = "allow unix sockets in the sandbox (SCM_RIGHTS)"
NO_GPU = "no GPU: "
COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


@dataclass(frozen=True)
class Check:
    """One line of what is told; ``remedy`` says what to do where status is warn or fail."""

    name: str
    status: Status
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        told = self.remedy or self.status in ("ok", "skip")
        assert told, f"{self.name}: {self.status} without a remedy"


class Row(NamedTuple):
    """One check to be made.

    ``looks_at``: what ``look`` is given: nothing of the machine's, the CPU as a device, the
    target, or the GPU, without which it is skipped. ``remedy``: for the error nobody foresaw.
    """

    name: str
    looks_at: Literal["machine", "cpu", "target", "gpu"]
    look: Callable[..., Finding]
    remedy: str


def examine(device: str | torch.device | None = None) -> list[Check]:
    """Every check, in a fixed order. Never raises: a check that breaks is a failed check.

    ``device``: the GPU to try (``None``: the current one, if there is any; ``"cpu"``: no GPU).
    Takes a few seconds, and on a GPU makes its CUDA context and up to 256 MiB of tensors, all given
    back but the context.
    """
    target = gpu.choose_target(device)
    return [run_check(row, target) for row in CHECKS]


def run_check(row: Row, target: Target) -> Check:
    """Make one check on its own, whatever the others did."""
    if row.looks_at == "gpu" and target.gpu is None:
        return Check(row.name, "skip", f"{NO_GPU}{target.why_not}")
    given = {"cpu": torch.device("cpu"), "target": target, "gpu": target.gpu}
    try:
        found = row.look() if row.looks_at == "machine" else row.look(given[row.looks_at])
        return Check(row.name, *found)
    except Exception as error:
        return Check(row.name, "fail", f"{type(error).__name__}: {one_line(error)}", row.remedy)


def main(argv: Sequence[str] | None = None) -> int:
    description = "Examine this machine; exit status 1 when a check failed."
    parser = argparse.ArgumentParser(prog="python -m memsaver.doctor", description=description)
    told = "cuda:N, or cpu for no GPU (default: the current GPU)"
    parser.add_argument("--device", metavar="DEVICE", help=told)
    return report(parser.parse_args(argv).device)


def report(device: str | None) -> int:
    """Examine, print, and return the exit status."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    checks = examine(device)
    table = Table(box=None, pad_edge=False)
    table.add_column("check", overflow="fold")
    table.add_column("status")
    table.add_column("found, and what to do", overflow="fold")
    for check in _without_gpu_together(checks):
        told, colour = Text(check.found), COLOURS[check.status]
        if check.remedy:
            told.append(f"\n-> {check.remedy}", style=colour)
        table.add_row(Text(check.name), Text(check.status, style=colour), told)
    console = Console(highlight=False)
    console.print(table)
    attention = sum(check.status in ("warn", "fail") for check in checks)
    console.print(f"{len(checks)} checks, {attention} need attention")
    return int(any(check.status == "fail" for check in checks))


def _without_gpu_together(checks: Sequence[Check]) -> list[Check]:
    """Put the checks that want a GPU, where there is none, into one line at the end."""
    skipped = [check for check in checks if check.found.startswith(NO_GPU)]
    others = [check for check in checks if check not in skipped]
    names = ", ".join(check.name for check in skipped)
    together = [Check("of a GPU", "skip", f"{skipped[0].found} ({names})")] if skipped else []
    return [*others, *together]


def python() -> Finding:
    here, (first, last) = sys.version_info[:2], PYTHONS
    if first <= here <= last:
        return "ok", platform.python_version()
    spans = f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"
    found = f"{platform.python_version()}, tested are {spans}"
    return "fail" if here < first else "warn", found, f"use Python {spans}"


def torch_version() -> Finding:
    cuda = torch.version.cuda
    found = f"{torch.__version__}, built {f'for CUDA {cuda}' if cuda else 'without CUDA'}"
    if version(torch.__version__) >= TORCH:
        return "ok", found
    needed = ".".join(map(str, TORCH))
    return "fail", f"{found}; {needed} is the oldest that works", f"pip install 'torch>={needed}'"


def shim_loads() -> Finding:
    path = shim.shim_library()
    shim.library()
    came = path.parent == shim.HERE
    return "ok", "came with the package" if came else f"compiled, in {path.parent}"


def cpu_regions(cpu: torch.device) -> Finding:
    try:
        shim.cpu_hook_library()
    except CompilerError as error:
        found = f"region() on the CPU does not work, all else does: {one_line(error)}"
        return "warn", found, NEED_COMPILER
    return gpu.regions(cpu)


def triton(target: Target) -> Finding:
    """Triton compiles a C module for every kernel: by ``CC``, gcc or clang, never ``cc``."""
    matters, install = target.gpu is not None, "pip install 'triton>=3.6'"
    status: Status = "fail" if matters else "warn"
    try:
        importlib.import_module("triton")
        found = importlib.metadata.version("triton")
    except ImportError as error:
        return status, f"does not import: {one_line(error)}", install
    if version(found) < TRITON:
        return status, f"{found}, too old", install
    lacks, remedy = _triton_lacks()
    if lacks and matters:
        return "fail", f"{found}; {lacks}", remedy
    also = f"; {lacks}, which only matters with a GPU" if lacks else ", with a C compiler"
    return "ok", found + also


def _triton_lacks() -> tuple[str, str]:
    if os.environ.get("CC") is None and not (shutil.which("gcc") or shutil.which("clang")):
        remedy = "install gcc (Debian, Ubuntu: apt install gcc), or set CC to a compiler"
        return "no C compiler for its kernels", remedy
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        remedy = "install Python's headers (Debian, Ubuntu: apt install python3-dev)"
        return "Python.h is missing, which its kernels are compiled with", remedy
    return "", ""


def allocator_settings() -> Finding:
    """Regions on a GPU live on torch's caching allocator: what switches that off ends them."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    given = {name: os.environ[name] for name in names if os.environ.get(name)}
    for name, text in given.items():
        if "cudaMallocAsync" in text:
            found = "this allocator ignores memory pools, so that regions on a GPU catch nothing"
            return "warn", f"{name}={text}: {found}", f"take backend:cudaMallocAsync out of {name}"
    if (name := "PYTORCH_NO_CUDA_MEMORY_CACHING") in os.environ:
        found = f"{name} is set: torch uses no memory pools, so that GPU regions catch nothing"
        return "warn", found, f"unset {name} (setting it to 0 is not enough)"
    told = ", ".join(f"{name}={text}" for name, text in given.items())
    return "ok", told or "torch's defaults"


def preload() -> Finding:
    text = os.environ.get("LD_PRELOAD", "")
    if "torch_memory_saver" in text:
        found = f"LD_PRELOAD={text}: torch_memory_saver takes over cudaMalloc in the whole process"
        remedy = "take torch_memory_saver out of LD_PRELOAD; use one memory saver in a process"
        return "warn", found, remedy
    return "ok", f"LD_PRELOAD={text}" if text else "nothing is preloaded"


def registration() -> Finding:
    """Finds what notes physical pages, not addresses, and goes on using them after a pause."""
    if hook := torch_allocator.registering_hook():
        found = "torch registers its segments with NCCL, tags' segments among them"
        return "warn", f"{hook} is set: {found}", f"unset {hook}"
    name, registers = torch_allocator.GRAPH_REGISTER, "NCCL registers buffers of captured graphs"
    if not torch_allocator.registers_graphs():
        return "ok", f"{name}=0: NCCL registers no buffers of captured graphs"
    if name in os.environ:
        found = f"{registers}, under the drop-ins (memsaver.compat) tags' too"
        return "warn", f"{name}={os.environ[name]}: {found}", f"unset {name}, or set it to 0"
    kept = "memsaver's engine keeps them off its tags, and memsaver.compat.install turns it off"
    return "ok", f"{registers}; {kept}"


def memfd() -> Finding:
    if not hasattr(os, "memfd_create"):
        remedy = "use Linux 3.17 or newer and a Python built on it"
        return "fail", "this Python has no os.memfd_create", remedy
    with os.fdopen(os.memfd_create("memsaver-doctor"), "wb") as file:
        file.truncate(4096)
        os.pwrite(file.fileno(), b"x", 4095)
    return "ok", "memory without a file can be made (memfd_create)"


def open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= OPEN_FILES:
        return "ok", f"up to {_limit(soft)}"
    remedy = "run `ulimit -n 65536` in the shell that starts the program"
    if hard != resource.RLIM_INFINITY and hard < OPEN_FILES:
        how = "/etc/security/limits.conf, or docker run --ulimit nofile=65536"
        remedy = f"raise the hard limit: {how}"
    found = f"up to {soft} (hard limit {_limit(hard)}); every shared or paused tag takes some"
    return "warn", found, remedy


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def memory_maps() -> Finding:
    if not MAX_MAP_COUNT.exists():
        return "skip", f"{MAX_MAP_COUNT} does not exist here"
    count = int(MAX_MAP_COUNT.read_text())
    if count >= MEMORY_MAPS:
        return "ok", f"up to {count} in a process"
    set_it = f"sysctl -w vm.max_map_count={MEMORY_MAPS}"
    remedy = f"run `{set_it}` as root, on the host if this is a container"
    return "warn", f"up to {count} in a process (vm.max_map_count)", remedy


def locked_memory(_: torch.device) -> Finding:
    """Only told: CUDA's driver pins pages past this limit; the check of pinned memory tries it."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return "ok", "unlimited"
    outside = "CUDA's pinned memory does not count, InfiniBand does (ulimit -l unlimited)"
    return "ok", f"up to {format_bytes(soft)}; {outside}"


def container_limit() -> Finding:
    group, machine = container_memory(), meminfo("MemTotal")
    if group is None or group.limit >= machine:
        return "ok", f"no limit below the machine's {format_bytes(machine)}"
    found = f"limited to {format_bytes(group.limit)} of the machine's {format_bytes(machine)}"
    found += "; the kernel kills the process beyond that, without an OutOfMemory"
    raised = "raise it (docker run --memory, the pod's memory limit)"
    return "warn", found, f"give MemorySaver('cpu') a limit_bytes below it, or {raised}"


def free_memory() -> Finding:
    free, group = meminfo("MemAvailable"), container_memory()
    if group is not None:
        free = min(free, max(0, group.free))
    found = f"{format_bytes(free)} available"
    if free >= LITTLE_MEMORY:
        return "ok", found
    lives = "content='host' and CPU tags live in this memory"
    return "warn", found, f"end other programs, or raise the container's limit; {lives}"


def passing_files() -> Finding:
    """An open file sent over a unix socket to an abstract address, as leases do it."""
    unix = socket.AF_UNIX, socket.SOCK_SEQPACKET
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as received, os.fdopen(writer, "wb") as sent:
        with socket.socket(*unix) as listener, socket.socket(*unix) as client:
            listener.bind("")  # the kernel picks a free abstract name
            listener.listen()
            client.connect(listener.getsockname())
            with contextlib.closing(listener.accept()[0]) as server:
                socket.send_fds(server, [b"x"], [sent.fileno()])
                fds = socket.recv_fds(client, 16, 1)[1]
        for fd in fds:
            os.write(fd, b"passed")
            os.close(fd)
        if fds and os.read(received.fileno(), 16) == b"passed":
            return "ok", "open files pass through unix sockets"
    return "fail", "an open file did not arrive", UNIX_SOCKETS


def vllm() -> Finding:
    found = _imported("vllm")
    if found[0] == "ok" and (value := os.environ.get(IN_PROCESS, "0")) != "0":
        told = f"{IN_PROCESS}={value}: its engine would be a process of its own"
        return "warn", f"{found[1]}; {told}", f"unset {IN_PROCESS}, or set it to 0"
    return found


def sglang() -> Finding:
    return _imported("sglang")


def _imported(package: str) -> Finding:
    """Imports it in a process of its own: that may fail, and leaves threads and settings behind."""
    if importlib.util.find_spec(package) is None:
        return "skip", f"not installed; only engine.kind={package} needs it"
    try:
        version = require(package)
    except ValueError as error:
        found, _, remedy = str(error).partition("; ")
        return "warn", found, remedy
    done = subprocess.run(
        [sys.executable, "-c", f"import {package}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        remedy = f"install what it lacks, or {package} anew in an environment of its own"
        return "warn", f"{version}, does not import: {said}", remedy
    return "ok", version


_SEE_PROC = "run where /proc is mounted"
_LOOK = "look at nvidia-smi and dmesg for errors of the GPU, then retry in a fresh process"
_RETRY = "put the checks of the shim, memfd and limits right, then retry"
_SHARE = "put the checks of memfd and of passing files right, then retry"
_MEMFD = "allow memfd_create in the sandbox (seccomp), and free some memory"
_DRIVER = "restart the container or machine; if that does not help, reinstall NVIDIA's driver"
_LIMITS = "in a container or virtual machine look at its limits (memory, ulimit -l)"
_PINNING = f"free some host memory; {_LIMITS}"
_TORCH = "install torch anew: pip install --force-reinstall 'torch>=2.11'"
_TRITON = "install triton anew: pip install --force-reinstall 'triton>=3.6'"
_ENGINE = "try `python -c 'import vllm'`, or sglang, and look at what it says"
_BINDING = "pip install --force-reinstall 'memsaver[cuda]'"

CHECKS = [
    Row("Python", "machine", python, REPORT),
    Row("torch", "machine", torch_version, _TORCH),
    Row("memory shim", "machine", shim_loads, NEED_COMPILER),
    Row("regions on the CPU", "cpu", cpu_regions, REPORT),
    Row("pause and resume on the CPU", "cpu", gpu.cycle, _RETRY),
    Row("sharing a tag", "cpu", gpu.sharing, _SHARE),
    Row("Triton", "target", triton, _TRITON),
    Row("torch's allocator settings", "machine", allocator_settings, REPORT),
    Row("preloaded libraries", "machine", preload, REPORT),
    Row("registered memory", "machine", registration, REPORT),
    Row("memory without a file", "machine", memfd, _MEMFD),
    Row("open files", "machine", open_files, "look at `ulimit -n`"),
    Row("memory maps", "machine", memory_maps, _SEE_PROC),
    Row("locked memory", "gpu", locked_memory, "look at `ulimit -l`"),
    Row("container's memory limit", "machine", container_limit, _SEE_PROC),
    Row("available memory", "machine", free_memory, _SEE_PROC),
    Row("passing files between processes", "machine", passing_files, UNIX_SOCKETS),
    Row("CUDA driver", "machine", gpu.driver, _DRIVER),
    Row("GPUs", "target", gpu.gpus, _LOOK),
    Row("CUDA binding for Python", "target", gpu.bindings, _BINDING),
    Row("GPU virtual memory", "gpu", gpu.virtual_memory, _LOOK),
    Row("exporting GPU memory", "gpu", gpu.sharing, _LOOK),
    Row("pause and resume on the GPU", "gpu", gpu.cycle, _LOOK),
    Row("regions on the GPU", "gpu", gpu.regions, _LOOK),
    Row("CUDA graphs", "gpu", gpu.graph, _LOOK),
    Row("pinned memory", "gpu", gpu.pinned, _PINNING),
    Row("vLLM", "machine", vllm, _ENGINE),
    Row("SGLang", "machine", sglang, _ENGINE),
]

if __name__ == "__main__":
    sys.exit(main())
