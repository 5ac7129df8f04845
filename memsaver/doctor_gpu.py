"""Defines what the doctor tries out on a device, and what it asks of NVIDIA's driver and GPUs.

Every check returns its status, what it found and, where something is to be done, the remedy. The
table that names them, and runs each on its own, is in ``doctor.py``.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import os
import re
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from memsaver.errors import BackendError, TagError, format_bytes
from memsaver.saver import MemorySaver
from memsaver.sharing.lease import attach

LIBCUDA, LIBNVML = "libcuda.so.1", "libnvidia-ml.so.1"
DEVICE_FILE = Path("/dev/nvidiactl")
BINDINGS = 13  # the major version of cuda-bindings that memsaver is written for
TAG = "doctor"
SAMPLE_BYTES = 4 << 20
SPEEDS = ((40.0, "as PCIe 5 x16 or faster"), (18.0, "as PCIe 4 x16"), (9.0, "as PCIe 3 x16"))
_SLOW = 6.0  # GB/s
REPORT = "report it with the whole table and your installation"
CUDA_TORCH = "install a torch that is built for CUDA: https://pytorch.org/get-started"
NAME_ONE = "name a GPU that nvidia-smi lists and CUDA_VISIBLE_DEVICES lets through"

_VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_FD_EXPORT = 103  # CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_PINNED_BYTES, _CHUNK_BYTES = 256 << 20, 64 << 20

Status = Literal["ok", "warn", "fail", "skip"]
Finding = tuple[Status, str] | tuple[Status, str, str]


class Target(NamedTuple):
    """The GPU to try, or why there is none. ``remedy``: where the user named one that fails."""

    gpu: torch.device | None
    why_not: str = ""
    remedy: str = ""
    cpu_only: bool = False


def one_line(error: BaseException) -> str:
    """The text of an exception on one line, or its type where it has no text."""
    return " ".join(str(error).split()) or type(error).__name__


def judge(good: bool, found: str, wrong: str, remedy: str = REPORT) -> Finding:
    """The finding of a check that either holds or fails."""
    return ("ok", found) if good else ("fail", wrong, remedy)


def version(text: str) -> tuple[int, ...]:
    """``"2.13.0+cpu"`` -> ``(2, 13)``."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def choose_target(device: str | torch.device | None) -> Target:
    """Never raises: what is wrong with ``device`` is told by the check of the GPUs."""
    try:
        return _choose(device)
    except Exception as error:
        remedy = "look at nvidia-smi; torch cannot tell which GPUs there are"
        return Target(None, one_line(error), remedy)


def _choose(device: str | torch.device | None) -> Target:
    kind, _, number = str(device or "cuda").partition(":")
    if kind == "cpu":
        return Target(None, "asked for the CPU only", cpu_only=True)
    if kind != "cuda" or (number and not number.isdecimal()):
        told = f"{device} is no device that memsaver knows"
        return Target(None, told, "name cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        remedy = NAME_ONE if torch.version.cuda else CUDA_TORCH
        return Target(None, _why_no_gpu(), remedy if device is not None else "")
    index = int(number) if number else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        return Target(None, f"there is no {device}; {torch.cuda.device_count()} visible", NAME_ONE)
    return Target(torch.device("cuda", index))


def _why_no_gpu() -> str:
    if not torch.version.cuda:
        return f"torch {torch.__version__} is built without CUDA"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    return f"torch sees no GPU{named}"


def regions(device: torch.device) -> Finding:
    with contextlib.closing(MemorySaver(device)) as saver:
        with saver.region(TAG):
            tensor = torch.empty(SAMPLE_BYTES, dtype=torch.uint8, device=device)
        try:
            placed = saver.offset_of(tensor) >= 0
        except TagError:
            placed = False
        del tensor
    wrong = "a tensor made inside region() is not on its tag"
    return judge(placed, "tensors made inside region() are on its tag", wrong)


def cycle(device: torch.device) -> Finding:
    """Bytes and address must come back after a pause, and the memory must go in between."""
    with contextlib.closing(MemorySaver(device)) as saver:
        tensor = saver.empty(SAMPLE_BYTES, torch.uint8, tag=TAG, content="host")
        pattern = torch.arange(SAMPLE_BYTES, device=device) % 251
        tensor.copy_(pattern)
        address, before = tensor.data_ptr(), saver.report().committed_bytes
        saver.pause()
        paused = saver.report().committed_bytes
        saver.resume()
        right = torch.equal(tensor.to(torch.int64), pattern) and tensor.data_ptr() == address
        del tensor
    stayed = f"{format_bytes(paused)} stayed in use while paused"
    wrong = stayed if paused else "the content came back changed"
    back = "given back, then restored bit for bit at the same address"
    return judge(right and not paused, f"{format_bytes(before)} {back}", wrong)


def sharing(device: torch.device) -> Finding:
    """Exported, sent through the socket and mapped again, as another process would do it."""
    with contextlib.closing(MemorySaver(device)) as saver:
        tensor = saver.empty(1000, torch.uint8, tag=TAG).fill_(7)
        with attach(saver.share(TAG, writable=True)) as lease:
            seen = lease.tensor((1000,), torch.uint8, saver.offset_of(tensor))
            right = int(seen.sum()) == 7000 and seen.data_ptr() != tensor.data_ptr()
            seen.fill_(9)
            right = right and int(tensor.sum()) == 9000
            del seen
        del tensor
    told = "a tag mapped a second time through share() and attach() shows the same bytes"
    return judge(right, told, "the two mappings of a tag do not show the same bytes")


def ask_driver(name: str, *arguments: int) -> int:
    """A number from libcuda itself: it tells what is wrong where torch and the binding cannot."""
    library, value = ctypes.CDLL(LIBCUDA), ctypes.c_int()
    code = 0 if name == "cuDriverGetVersion" else library.cuInit(0)
    failed = "cuInit" if code else name
    if code := code or getattr(library, name)(ctypes.byref(value), *arguments):
        raise BackendError(f"{failed} failed with error {code} of the CUDA driver")
    return value.value


def count_gpus() -> int:
    """GPUs that are visible to this process; raises where the driver does not start."""
    none = ctypes.CDLL(LIBCUDA).cuInit(0) == _NO_DEVICE
    return 0 if none else ask_driver("cuDeviceGetCount")


def driver() -> Finding:
    try:
        number = ask_driver("cuDriverGetVersion")
    except OSError:
        found = f"{LIBCUDA} is not found"
        if not DEVICE_FILE.exists():
            return "skip", f"{found}: no NVIDIA driver here, memsaver works on the CPU"
        container = "in a container start it with --gpus all (NVIDIA container toolkit)"
        remedy = f"install NVIDIA's driver; {container}"
        return "fail", f"{found}, though there is a GPU ({DEVICE_FILE})", remedy
    major = number // 1000
    found = f"serves CUDA {major}.{number % 1000 // 10}, GPUs visible to it: {count_gpus()}"
    if torch.version.cuda and major < version(torch.version.cuda)[0]:
        remedy = f"update NVIDIA's driver, or install a torch that is built for CUDA {major}"
        return "fail", f"{found}, torch is built for CUDA {torch.version.cuda}", remedy
    return "ok", found


def bindings(target: Target) -> Finding:
    remedy = "pip install 'memsaver[cuda]'"
    try:
        importlib.import_module("cuda.bindings.driver")
        found = importlib.metadata.version("cuda-bindings")
    except ImportError as error:
        if target.gpu is None:
            return "skip", "cuda-bindings is not installed; only a GPU needs it"
        return "fail", f"cuda-bindings does not import: {one_line(error)}", remedy
    if version(found)[0] != BINDINGS:
        return "warn", f"cuda-bindings {found}; memsaver is written for {BINDINGS}", remedy
    return "ok", f"cuda-bindings {found}"


def gpus(target: Target) -> Finding:
    if target.gpu is None:
        return _no_gpu(target)
    lines = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        uuid, total = f"GPU-{properties.uuid}", format_bytes(properties.total_memory)
        free = _free_bytes(uuid, index if index == target.gpu.index else None)
        memory = total if free is None else f"{format_bytes(free)} free of {total}"
        lines.append(f"cuda:{index} {properties.name}, {memory}, {uuid}")
    return "ok", "\n".join(lines)


def _no_gpu(target: Target) -> Finding:
    try:
        count = 0 if target.cpu_only else count_gpus()
    except (OSError, BackendError):
        count = 0  # the check of the driver tells
    found = f"GPUs visible to the driver: {count}, but {target.why_not}"
    if count and not torch.version.cuda:
        return "fail" if target.remedy else "warn", found, CUDA_TORCH
    if target.remedy:
        return "fail", target.why_not, target.remedy
    if not count:
        return "skip", target.why_not
    remedy = "update NVIDIA's driver to one that fits torch's CUDA, or restart the machine"
    return "fail", found, remedy


def _free_bytes(uuid: str, index: int | None) -> int | None:
    """Asks NVML: asking torch costs a context on each GPU; it is asked about ``index`` only."""
    with contextlib.suppress(OSError):
        library, handle = ctypes.CDLL(LIBNVML), ctypes.c_void_p()
        memory = (ctypes.c_ulonglong * 3)()  # total, free, used
        library.nvmlInit_v2()
        found = not library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle))
        if found and not library.nvmlDeviceGetMemoryInfo(handle, memory):
            return int(memory[1])
    return None if index is None else torch.cuda.mem_get_info(index)[0]


def virtual_memory(gpu: torch.device) -> Finding:
    number = ask_driver("cuDeviceGet", gpu.index)
    if not ask_driver("cuDeviceGetAttribute", _VIRTUAL_MEMORY, number):
        remedy = "use a GPU of 2016 (Pascal) or newer"
        return "fail", f"{gpu} has no virtual memory management", remedy
    if not ask_driver("cuDeviceGetAttribute", _FD_EXPORT, number):
        remedy = "use Linux on the machine itself: WSL and some virtual GPUs cannot export memory"
        return "fail", f"{gpu} cannot export memory as a file descriptor", remedy
    return "ok", "virtual memory management and export as a file descriptor"


def graph(gpu: torch.device) -> Finding:
    """A graph captured into a tag's pool must compute right after its memory was away."""
    with contextlib.closing(MemorySaver(gpu)) as saver, torch.cuda.device(gpu):
        right = _graph_is_right(saver, torch.arange(4096, dtype=torch.float32, device=gpu))
    wrong = "a CUDA graph in a tag's pool computes wrong after pause and resume"
    return judge(right, "captured into a tag's pool, right after pause and resume", wrong)


def _graph_is_right(saver: MemorySaver, numbers: torch.Tensor) -> bool:
    # Made before the pool: locals go in this order, and a graph must go before its pool.
    captured = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(saver.device)
    pool = saver.mem_pool(TAG)
    stream.wait_stream(torch.cuda.current_stream(saver.device))
    with torch.cuda.stream(stream):
        _ = numbers * 2 + 1  # loads the kernels, which is better not done while capturing
    stream.synchronize()
    pool_id: Any = pool.id  # typed as torch.cuda.graph's own kind of pool
    with torch.cuda.graph(captured, pool=pool_id, stream=stream):
        result = numbers * 2 + 1
    placed = saver.offset_of(result) >= 0  # raises where the pool was not used
    saver.pause()
    saver.resume()
    numbers.add_(1)
    captured.replay()
    right = placed and torch.equal(result.clone(), numbers * 2 + 1)
    captured.reset()
    del result
    return right


def pinned(gpu: torch.device) -> Finding:
    host = torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    on_gpu = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device=gpu)
    speeds = {"to the GPU": 0.0, "back": 0.0}
    for _ in range(3):  # the first round pays for warming up
        for way in speeds:
            started = time.perf_counter()
            for chunk in host.split(_CHUNK_BYTES):
                source, goal = (chunk, on_gpu) if way == "to the GPU" else (on_gpu, chunk)
                goal.copy_(source, non_blocking=True)
            torch.cuda.synchronize(gpu)
            seconds = time.perf_counter() - started
            speeds[way] = max(speeds[way], _PINNED_BYTES / seconds / 1e9)
    del host, chunk, source, goal
    torch._C._host_emptyCache()  # torch would keep the 256 MiB for life
    text = ", ".join(f"{speed:.1f} GB/s {way}" for way, speed in speeds.items())
    return judge_speed(min(speeds.values()), text)


def judge_speed(slowest: float, text: str) -> Finding:
    found = f"{format_bytes(_PINNED_BYTES)} allocated, {text}"
    if slowest >= _SLOW:
        told = (name for least, name in SPEEDS if slowest >= least)
        return "ok", f"{found}: {next(told, 'slower than PCIe 3 x16')}"
    look = "look at the slot (nvidia-smi -q, Link Width) and the NUMA node (topo -m)"
    return "warn", f"{found}: slow", f"content='host' will be slow: {look}"
