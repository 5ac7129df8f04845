"""What is installed, and whether the parts of memsaver that need no GPU work."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

from memsaver.doctor.check import Finding, Probe, Status, Target, one_line
from memsaver.errors import CompilerError, TagError, format_bytes
from memsaver.native import build, shim
from memsaver.saver import MemorySaver
from memsaver.vmm import registrations as foreign
from memsaver.vmm.backend import Backend

PYTHONS = (3, 11), (3, 13)  # first and last
TORCH = (2, 11)
TRITON = (3, 6)
TAG = "doctor"
SAMPLE_BYTES = 4 << 20
REPORT = "report it with the whole table and your installation"
NEED_GCC = "install a C and C++ compiler (Debian, Ubuntu: apt install gcc g++), or install memsaver from a wheel"


def version(text: str) -> tuple[int, ...]:
    """``"2.13.0+cpu"`` -> ``(2, 13)``."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def python(_: Target) -> Finding:
    here, (first, last) = sys.version_info[:2], PYTHONS
    if first <= here <= last:
        return Finding("ok", platform.python_version())
    status: Status = "fail" if here < first else "warn"
    spans = f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"
    return Finding(status, f"{platform.python_version()}, tested are {spans}", f"use Python {spans}")


def torch_version(_: Target) -> Finding:
    built_for = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    found = f"{torch.__version__}, {built_for}"
    if version(torch.__version__) >= TORCH:
        return Finding("ok", found)
    needed = ".".join(map(str, TORCH))
    return Finding("fail", f"{found}; {needed} is the oldest that works", f"pip install 'torch>={needed}'")


def shim_loads(_: Target) -> Finding:
    path = build.shim_library()
    shim.library()
    return Finding("ok", "came with the package" if path.parent == build.HERE else f"compiled, in {path.parent}")


def cpu_regions(_: Target) -> Finding:
    try:
        build.cpu_hook_library()
    except CompilerError as error:
        return Finding("warn", f"region() on the CPU does not work, all else does: {one_line(error)}", NEED_GCC)
    return regions(torch.device("cpu"))


def regions(device: torch.device) -> Finding:
    with contextlib.closing(MemorySaver(device)) as saver:
        with saver.region(TAG):
            tensor = torch.empty(SAMPLE_BYTES, dtype=torch.uint8, device=device)
        try:
            saver.offset_of(tensor)
        except TagError:
            return Finding("fail", "a tensor made inside region() is not on its tag", REPORT)
        del tensor
    return Finding("ok", "tensors made inside region() are on its tag")


def cpu_cycle(_: Target) -> Finding:
    return cycle(torch.device("cpu"))


def cycle(device: torch.device) -> Finding:
    """Pause and resume with content kept: bytes and address must come back, and the memory must go in between."""
    with contextlib.closing(MemorySaver(device)) as saver:
        tensor = saver.empty(SAMPLE_BYTES, torch.uint8, tag=TAG, content="host")
        pattern = torch.arange(SAMPLE_BYTES, device=device) % 251
        tensor.copy_(pattern)
        address = tensor.data_ptr()
        before = saver.report().committed_bytes
        saver.pause()
        paused = saver.report().committed_bytes
        saver.resume()
        right = torch.equal(tensor.to(torch.int64), pattern) and tensor.data_ptr() == address
        del tensor
    if paused or not right:
        what = f"{format_bytes(paused)} stayed in use while paused" if paused else "the content came back changed"
        return Finding("fail", what, REPORT)
    return Finding("ok", f"{format_bytes(before)} given back, then restored bit for bit at the same address")


def sharing(_: Target) -> Finding:
    """Through the same socket, credentials and fds as another process would use."""
    from memsaver import attach

    with contextlib.closing(MemorySaver("cpu")) as saver:
        tensor = saver.empty(1000, torch.uint8, tag=TAG).fill_(7)
        with attach(saver.share(TAG, writable=True)) as lease:
            seen = lease.tensor((1000,), torch.uint8, saver.offset_of(tensor))
            right = int(seen.sum()) == 7000 and seen.data_ptr() != tensor.data_ptr()
            seen.fill_(9)
            right = right and int(tensor.sum()) == 9000
            del seen
        del tensor
    if not right:
        return Finding("fail", "the two mappings of a tag do not show the same bytes", REPORT)
    return Finding("ok", "a tag mapped a second time through share() and attach() shows the same bytes")


def round_trip(backend: Backend) -> Finding:
    """Create, map, export, import, map again: what both mappings show must be the same memory."""
    size = backend.granularity
    with contextlib.ExitStack() as undo:
        handle = backend.create(size).handle
        undo.callback(backend.release, handle, size)
        first = _mapped(backend, handle, undo)
        imported = backend.import_fd(backend.export_fd(handle))
        undo.callback(backend.release, imported, 0)
        second = _mapped(backend, imported, undo)
        undo.callback(backend.synchronize)  # runs first: nothing is unmapped while work is in flight
        first.fill_(3)
        second[: size // 2] = 5
        backend.synchronize()
        right = first.sum(dtype=torch.int64).item() == size // 2 * 8 and torch.equal(first, second)
    if not right:
        return Finding("fail", "memory exported and imported again shows other bytes", REPORT)
    return Finding("ok", f"{format_bytes(size)} created, mapped, exported, imported and mapped again")


def _mapped(backend: Backend, handle: int, undo: contextlib.ExitStack) -> torch.Tensor:
    size = backend.granularity
    address = backend.reserve(size)
    undo.callback(backend.unreserve, address, size)
    backend.map(address, size, handle)
    undo.callback(backend.unmap, address, size)
    backend.set_access(address, size)
    return backend.view(address, size)[0]


def triton(target: Target) -> Finding:
    """Triton compiles a small C module for every kernel: with ``CC``, gcc or clang (never plain ``cc``)."""
    matters = target.gpu is not None
    try:
        importlib.import_module("triton")
        found = importlib.metadata.version("triton")
    except ImportError as error:
        found = f"does not import: {one_line(error)}"
        return Finding("fail" if matters else "warn", found, "pip install 'triton>=3.6'")
    if version(found) < TRITON:
        return Finding("fail" if matters else "warn", f"{found}, too old", "pip install 'triton>=3.6'")
    lacks, remedy = _triton_lacks()
    if not lacks:
        return Finding("ok", f"{found}, with a C compiler")
    if not matters:
        return Finding("ok", f"{found}; {lacks}, which only matters with a GPU")
    return Finding("fail", f"{found}; {lacks}", remedy)


def _triton_lacks() -> tuple[str, str]:
    if os.environ.get("CC") is None and not (shutil.which("gcc") or shutil.which("clang")):
        return "no C compiler for its kernels", "install gcc (Debian, Ubuntu: apt install gcc), or set CC to a compiler"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        remedy = "install Python's headers (Debian, Ubuntu: apt install python3-dev)"
        return "Python.h is missing, which its kernels are compiled with", remedy
    return "", ""


def allocator_settings(_: Target) -> Finding:
    """Regions and pools on a GPU live on torch's own caching allocator: what switches that off switches them off."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    given = {name: os.environ[name] for name in names if os.environ.get(name)}
    for name, text in given.items():
        if "cudaMallocAsync" in text:
            found = f"{name}={text}: this allocator ignores memory pools, so that regions on a GPU catch nothing"
            return Finding("warn", found, f"take backend:cudaMallocAsync out of {name}")
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:
        found = "PYTORCH_NO_CUDA_MEMORY_CACHING is set: torch uses no memory pools, so that GPU regions catch nothing"
        return Finding("warn", found, "unset PYTORCH_NO_CUDA_MEMORY_CACHING (setting it to 0 is not enough)")
    return Finding("ok", ", ".join(f"{name}={text}" for name, text in given.items()) or "torch's defaults")


def preload(_: Target) -> Finding:
    text = os.environ.get("LD_PRELOAD", "")
    if "torch_memory_saver" in text:
        found = f"LD_PRELOAD={text}: torch_memory_saver takes over cudaMalloc in the whole process"
        return Finding("warn", found, "take torch_memory_saver out of LD_PRELOAD; use one memory saver in a process")
    return Finding("ok", f"LD_PRELOAD={text}" if text else "nothing is preloaded")


def registration(_: Target) -> Finding:
    """What notes physical pages instead of addresses goes on using them after a pause."""
    if hook := foreign.registering_hook():
        found = f"{hook} is set: torch registers its segments with NCCL, tags' segments among them"
        return Finding("warn", found, f"unset {hook}")
    if foreign.registers_graphs():
        if foreign.GRAPH_REGISTER in os.environ:
            found = (
                f"{foreign.GRAPH_REGISTER}={os.environ[foreign.GRAPH_REGISTER]}: NCCL registers "
                f"buffers of captured graphs, under the drop-ins (memsaver.compat) tags' too"
            )
            return Finding("warn", found, f"unset {foreign.GRAPH_REGISTER}, or set it to 0")
        found = (
            "NCCL registers buffers of captured graphs; memsaver's engine keeps them off its tags, "
            "and memsaver.compat.install turns it off"
        )
        return Finding("ok", found)
    return Finding("ok", f"{foreign.GRAPH_REGISTER}=0: NCCL registers no buffers of captured graphs")


PROBES = [
    Probe("Python", python, REPORT),
    Probe("torch", torch_version, "install torch anew: pip install --force-reinstall 'torch>=2.11'"),
    Probe("memory shim", shim_loads, NEED_GCC),
    Probe("regions on the CPU", cpu_regions, REPORT),
    Probe("pause and resume on the CPU", cpu_cycle, "put the checks of the shim, memfd and limits right, then retry"),
    Probe("sharing a tag", sharing, "put the checks of memfd and of passing files right, then retry"),
    Probe("Triton", triton, "install triton anew: pip install --force-reinstall 'triton>=3.6'"),
    Probe("torch's allocator settings", allocator_settings, REPORT),
    Probe("preloaded libraries", preload, REPORT),
    Probe("registered memory", registration, REPORT),
]
