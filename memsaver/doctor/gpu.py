"""What needs an NVIDIA driver, and what needs a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import time
from pathlib import Path
from typing import Any

import torch

from memsaver.doctor.check import CUDA_TORCH, Finding, Probe, Target, one_line
from memsaver.doctor.software import REPORT, TAG, cycle, regions, round_trip, version
from memsaver.errors import BackendError, format_bytes
from memsaver.saver import MemorySaver
from memsaver.vmm.backend import make_backend

LIBCUDA = "libcuda.so.1"
LIBNVML = "libnvidia-ml.so.1"
DEVICE_FILE = Path("/dev/nvidiactl")
BINDINGS = 13  # the major version of cuda-bindings that memsaver is written for

_VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_FD_EXPORT = 103  # CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_PINNED_BYTES = 256 << 20
_CHUNK_BYTES = 64 << 20
SPEEDS = ((40.0, "as PCIe 5 x16 or faster"), (18.0, "as PCIe 4 x16"), (9.0, "as PCIe 3 x16"))
_SLOW = 6.0  # GB/s

_INSTALL_DRIVER = "install NVIDIA's driver; in a container start it with --gpus all (NVIDIA container toolkit)"
_LOOK = "look at nvidia-smi and dmesg for errors of the GPU, then retry in a fresh process"


class Libcuda:
    """The few calls that need neither torch nor the binding; they say what is wrong where those cannot."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBCUDA)

    def version(self) -> tuple[int, int]:
        """The newest CUDA that the driver serves."""
        number = self._get("cuDriverGetVersion")
        return number // 1000, number % 1000 // 10

    def count(self) -> int:
        """GPUs that are visible to this process; raises where the driver does not start."""
        if self._library.cuInit(0) == _NO_DEVICE:
            return 0
        self._call("cuInit", 0)
        return self._get("cuDeviceGetCount")

    def attribute(self, index: int, number: int) -> int:
        self._call("cuInit", 0)
        return self._get("cuDeviceGetAttribute", number, self._get("cuDeviceGet", index))

    def _get(self, name: str, *arguments: int) -> int:
        value = ctypes.c_int()
        self._call(name, ctypes.byref(value), *arguments)
        return value.value

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._library, name)(*arguments):
            raise BackendError(f"{name} failed with error {code} of the CUDA driver")


def driver(target: Target) -> Finding:
    try:
        library = Libcuda()
    except OSError:
        found = f"{LIBCUDA} is not found"
        if DEVICE_FILE.exists():
            return Finding("fail", f"{found}, though there is a GPU ({DEVICE_FILE})", _INSTALL_DRIVER)
        return Finding("skip", f"{found}: no NVIDIA driver here, memsaver works on the CPU")
    serves = library.version()
    found = f"serves CUDA {serves[0]}.{serves[1]}, GPUs visible to it: {library.count()}"
    if torch.version.cuda and serves[0] < version(torch.version.cuda)[0]:
        remedy = f"update NVIDIA's driver, or install a torch that is built for CUDA {serves[0]}"
        return Finding("fail", f"{found}, torch is built for CUDA {torch.version.cuda}", remedy)
    return Finding("ok", found)


def gpus(target: Target) -> Finding:
    if target.gpu is None:
        return _no_gpu(target)
    lines = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        uuid = f"GPU-{properties.uuid}"
        free = _free_bytes(uuid, index if index == target.gpu.index else None)
        memory = f"{format_bytes(free)} free of " if free is not None else ""
        total = format_bytes(properties.total_memory)
        lines.append(f"cuda:{index} {properties.name}, {memory}{total}, {uuid}")
    return Finding("ok", "\n".join(lines))


def _no_gpu(target: Target) -> Finding:
    try:
        count = 0 if target.cpu_only else Libcuda().count()
    except (OSError, BackendError):
        count = 0  # the check of the driver tells
    if count and not torch.version.cuda:
        return Finding(
            "fail" if target.remedy else "warn",
            f"GPUs visible to the driver: {count}, but {target.why_not}",
            CUDA_TORCH,
        )
    if target.remedy:
        return Finding("fail", target.why_not, target.remedy)
    if not count:
        return Finding("skip", target.why_not)
    remedy = "update NVIDIA's driver to one that fits torch's CUDA, or restart the machine"
    return Finding("fail", f"GPUs visible to the driver: {count}, but {target.why_not}", remedy)


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def _free_bytes(uuid: str, index: int | None) -> int | None:
    """By NVML, since asking torch costs hundreds of MiB for a context on each GPU; it is asked about ``index`` only."""
    with contextlib.suppress(OSError):
        library, handle, memory = ctypes.CDLL(LIBNVML), ctypes.c_void_p(), _Memory()
        library.nvmlInit_v2()
        found = not library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle))
        if found and not library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
            return int(memory.free)
    return None if index is None else torch.cuda.mem_get_info(index)[0]


def bindings(target: Target) -> Finding:
    remedy = "pip install 'memsaver[cuda]'"
    try:
        importlib.import_module("cuda.bindings.driver")
        found = importlib.metadata.version("cuda-bindings")
    except ImportError as error:
        if target.gpu is None:
            return Finding("skip", "cuda-bindings is not installed; only a GPU needs it")
        return Finding("fail", f"cuda-bindings does not import: {one_line(error)}", remedy)
    if version(found)[0] != BINDINGS:
        return Finding("warn", f"cuda-bindings {found}; memsaver is written for {BINDINGS}", remedy)
    return Finding("ok", f"cuda-bindings {found}")


def virtual_memory(target: Target) -> Finding:
    assert target.gpu is not None
    library, index = Libcuda(), target.gpu.index
    if not library.attribute(index, _VIRTUAL_MEMORY):
        return Finding("fail", f"{target.gpu} has no virtual memory management", "use a GPU of 2016 (Pascal) or newer")
    if not library.attribute(index, _FD_EXPORT):
        remedy = "use Linux on the machine itself: WSL and some virtual GPUs cannot export memory"
        return Finding("fail", f"{target.gpu} cannot export memory as a file descriptor", remedy)
    return Finding("ok", "virtual memory management and export as a file descriptor")


def exported_memory(target: Target) -> Finding:
    assert target.gpu is not None
    return round_trip(make_backend(target.gpu))


def gpu_regions(target: Target) -> Finding:
    assert target.gpu is not None
    return regions(target.gpu)


def gpu_cycle(target: Target) -> Finding:
    assert target.gpu is not None
    return cycle(target.gpu)


def graph(target: Target) -> Finding:
    """A graph captured into a tag's pool must compute right after its memory was away."""
    device = target.gpu
    assert device is not None
    with contextlib.closing(MemorySaver(device)) as saver, torch.cuda.device(device):
        right = _graph_is_right(saver, torch.arange(4096, dtype=torch.float32, device=device))
    if right:
        return Finding("ok", "captured into a tag's pool, right after pause and resume")
    return Finding("fail", "a CUDA graph in a tag's pool computes wrong after pause and resume", REPORT)


def _graph_is_right(saver: MemorySaver, numbers: torch.Tensor) -> bool:
    captured = torch.cuda.CUDAGraph()  # before the pool: locals go in this order, and a graph must go before its pool
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


def pinned(target: Target) -> Finding:
    device = target.gpu
    assert device is not None
    host = torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    on_gpu = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device=device)
    speeds = {"to the GPU": 0.0, "back": 0.0}
    for _ in range(3):  # the first round pays for warming up
        for way in speeds:
            started = time.perf_counter()
            for chunk in host.split(_CHUNK_BYTES):
                source, goal = (chunk, on_gpu) if way == "to the GPU" else (on_gpu, chunk)
                goal.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)
            speeds[way] = max(speeds[way], _PINNED_BYTES / (time.perf_counter() - started) / 1e9)
    del host, chunk, source, goal
    torch._C._host_emptyCache()  # torch would keep the 256 MiB for life
    return judge_speed(min(speeds.values()), ", ".join(f"{speed:.1f} GB/s {way}" for way, speed in speeds.items()))


def judge_speed(slowest: float, text: str) -> Finding:
    found = f"{format_bytes(_PINNED_BYTES)} allocated, {text}"
    if slowest < _SLOW:
        remedy = "content='host' will be slow: look at the slot (nvidia-smi -q, Link Width) and the NUMA node (topo -m)"
        return Finding("warn", f"{found}: slow", remedy)
    name = next((name for least, name in SPEEDS if slowest >= least), "slower than PCIe 3 x16")
    return Finding("ok", f"{found}: {name}")


_PINNING = "free some host memory; in a container or virtual machine look at its limits (memory, ulimit -l)"
PROBES = [
    Probe("CUDA driver", driver, "restart the container or machine; if that does not help, reinstall NVIDIA's driver"),
    Probe("GPUs", gpus, _LOOK),
    Probe("CUDA binding for Python", bindings, "pip install --force-reinstall 'memsaver[cuda]'"),
    Probe("GPU virtual memory", virtual_memory, _LOOK, needs_gpu=True),
    Probe("exporting GPU memory", exported_memory, _LOOK, needs_gpu=True),
    Probe("pause and resume on the GPU", gpu_cycle, _LOOK, needs_gpu=True),
    Probe("regions on the GPU", gpu_regions, _LOOK, needs_gpu=True),
    Probe("CUDA graphs", graph, _LOOK, needs_gpu=True),
    Probe("pinned memory", pinned, _PINNING, needs_gpu=True),
]
