"""Provide GPU memory through CUDA's virtual memory management."""

import contextlib
import ctypes
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any

import torch
from cuda.bindings import driver

from memsaver.errors import BackendError
from memsaver.memory.backend import PIECE, Backend, Context, Transfer, Waitable, pieces_of
from memsaver.memory.torch_allocator import outside_tags, releasable
from memsaver.native import cuda_hook, shim
from memsaver.native.shim import Operation
from memsaver.system import gpu_processes
from memsaver.system.devices import device_key
from memsaver.system.threads import workers

# Pieces of an overlapped copy that are queued at a time. A copy engine finishes the work that one
# stream has queued before it serves another, so small copies wait for these pieces.
_QUEUED = 2

# Streams of closed or dead savers, by device.
_idle_streams: defaultdict[int, list[torch.cuda.Stream]] = defaultdict(list)

_FD = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _value(what: str, result: tuple[Any, ...]) -> Any:
    code = result[0]
    if code != driver.CUresult.CUDA_SUCCESS:
        raise BackendError(f"{what} failed: {_error_text(int(code))}")
    return result[1] if len(result) > 1 else None


def _error_text(code: int) -> str:
    name = driver.cuGetErrorName(driver.CUresult(code))[1]
    text = driver.cuGetErrorString(driver.CUresult(code))[1]
    return f"{(name or b'?').decode()} ({(text or b'?').decode()})"


def _allocation_prop(index: int) -> Any:
    prop = driver.CUmemAllocationProp()
    prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = index
    prop.requestedHandleTypes = _FD
    return prop


def _access_desc(index: int) -> Any:
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = index
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def _relax_captures() -> driver.CUstreamCaptureMode:
    """Allow this thread's calls while any thread captures a graph; return the previous mode.

    By default the driver refuses some calls during a capture, and they break it.
    """
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    return _value("capture mode", driver.cuThreadExchangeStreamCaptureMode(relaxed))


@contextlib.contextmanager
def _allow_captures() -> Iterator[None]:
    before = _relax_captures()
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)


def _take_stream(index: int) -> torch.cuda.Stream:
    """Return a stream for exclusive use.

    torch hands out its 32 streams in turn. One of them may be the stream of a capture, which
    another thread's copies would break.
    """
    try:
        return _idle_streams[index].pop()
    except IndexError:
        with torch.cuda.device(index):
            flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
            handle = _value("creating a stream", driver.cuStreamCreate(flags))
        return torch.cuda.ExternalStream(int(handle), index)


def _with_context() -> Context:
    """Set this thread's context, which it lacks before its first call, and allow captures."""
    torch.cuda.set_device(torch.cuda.current_device())
    return _allow_captures()


class CudaPinner:
    """Pinner that page-locks host memory for every GPU of the process."""

    def pin(self, address: int, nbytes: int) -> None:
        portable = driver.CU_MEMHOSTREGISTER_PORTABLE
        with _with_context():
            _value("pinning host memory", driver.cuMemHostRegister(address, nbytes, portable))

    def unpin(self, address: int) -> None:
        with _with_context():
            _value("unpinning host memory", driver.cuMemHostUnregister(address))


class _BegunCopy:
    """A copy that another thread is making."""

    def __init__(self, copying: Future[None]) -> None:
        self._copying = copying

    def synchronize(self) -> None:
        self._copying.result()


class CudaBackend(Backend):
    """Backend of one GPU, whose UUID is its key."""

    unit = 512  # the block size of torch's caching allocator
    pinner = CudaPinner()

    def __init__(self, device: torch.device, limit_bytes: int | None = None) -> None:
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._prop, self._access = _allocation_prop(index), _access_desc(index)
        recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()  # creates the primary context
        granularity = _value(
            "granularity", driver.cuMemGetAllocationGranularity(self._prop, recommended)
        )
        super().__init__(shim.CUDA, granularity, limit_bytes, self._entry_points())
        properties = torch.cuda.get_device_properties(self.device)
        self._copies = _take_stream(index), _take_stream(index)
        self._return_streams = weakref.finalize(self, _idle_streams[index].extend, self._copies)
        self._return_streams.atexit = False
        self.device_key = device_key(self.device)
        self.total_bytes = properties.total_memory // granularity * granularity

    def close(self) -> None:
        self._return_streams()

    def _entry_points(self) -> shim.Driver:
        library = ctypes.CDLL("libcuda.so.1")
        names = ["cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap", "cuMemSetAccess"]
        names += ["cuMemExportToShareableHandle", "cuMemImportFromShareableHandle", "cuMemcpyAsync"]
        names += ["cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuThreadExchangeStreamCaptureMode"]
        names += ["cuStreamIsCapturing", "cuStreamSynchronize"]
        addresses = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names]
        with torch.cuda.device(self.device):
            context = int(_value("asking for the context", driver.cuCtxGetCurrent()))
        return shim.Driver(*addresses, context, self._prop.getPtr(), self._access.getPtr())

    def reserve(self, nbytes: int) -> int:
        with self._call(Operation.RESERVE, nbytes):
            reserved = driver.cuMemAddressReserve(nbytes, self.granularity, 0, 0)
            return int(_value("reserving addresses", reserved))

    def unreserve(self, address: int, nbytes: int) -> None:
        with self._call(Operation.UNRESERVE, nbytes):
            _value("releasing addresses", driver.cuMemAddressFree(address, nbytes))

    def bind_thread(self) -> None:
        """Set the device's primary context in a worker thread.

        From here on, the thread's calls break no capture of another thread.
        """
        torch.cuda.set_device(self.device)
        _relax_captures()

    def allow_captures(self) -> Context:
        return _allow_captures()

    def synchronize(self, copies: bool = True) -> None:
        if copies:
            wait(self._overlapped)  # their owners get their errors
        with self._call(Operation.SYNCHRONIZE):
            torch.cuda.synchronize(self.device)

    @property
    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def allocate_from(self, slot: int, make_room: Callable[[int], bool]) -> Context:
        """Send this thread's torch allocations to an arena.

        ``make_room`` is never called, because torch holds the lock of its cache while it allocates.
        """
        return cuda_hook.allocate_from(slot, self.device)

    def free_dead_blocks(self, slot: int) -> None:
        cuda_hook.free_dead_blocks(slot, self.device)

    def copy(self, transfers: Sequence[Transfer]) -> None:
        """Copy (to, from, nbytes) transfers and wait for them, but for no other stream."""
        code = self._queue_copy(transfers, self._copies[0])
        self._copies[0].synchronize()
        self._check("copy", code)

    def start_copy(self, transfers: Sequence[Transfer], inward: bool = False) -> torch.cuda.Event:
        stream = self._copies[inward]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        if code := self._queue_copy(transfers, stream):
            # wait for copies queued before the failed one, as the caller unmaps their memory
            stream.synchronize()
        self._check("copy", code)
        return stream.record_event()

    def copy_overlapped(
        self, transfers: Sequence[Transfer], keeper: object, done: Callable[[float], None]
    ) -> Waitable:
        queued = torch.cuda.current_stream(self.device).record_event()
        self._overlapped = [copy for copy in self._overlapped if not copy.done()]
        self._overlapped.append(
            workers("beside", 1).submit(self._piece_by_piece, queued, transfers, keeper, done)
        )
        return _BegunCopy(self._overlapped[-1])

    def _piece_by_piece(
        self,
        queued: torch.cuda.Event,
        transfers: Sequence[Transfer],
        keeper: object,
        done: Callable[[float], None],
    ) -> None:
        self.bind_thread()
        queued.synchronize()
        started = time.perf_counter()
        pieces = ([piece] for piece in pieces_of(transfers, PIECE))
        self.feed(pieces, lambda _: None, inward=False)
        done(time.perf_counter() - started)

    def feed(
        self,
        pieces: Iterable[Sequence[Transfer]],
        queued: Callable[[Waitable | None], None],
        inward: bool,
    ) -> None:
        stream, running = self._copies[inward], deque[torch.cuda.Event]()
        try:
            for piece in pieces:
                self._check("copy", self._queue_copy(piece, stream))
                running.append(stream.record_event())
                queued(running[-1])
                if len(running) == _QUEUED:
                    running.popleft().synchronize()
        finally:
            stream.synchronize()

    def _queue_copy(self, transfers: Sequence[Transfer], stream: torch.cuda.Stream) -> int:
        """Queue copies, with this device current as the driver requires; return its code."""
        with torch.cuda.device(self.device):
            return shim.copy(self.phys, transfers, stream.cuda_stream)

    @property
    def device_free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    @property
    def cached_bytes(self) -> int:
        if cuda_hook.others_open():
            return 0
        return releasable(torch.cuda.memory_snapshot(include_traces=False), self.device.index)

    @property
    def put_off_bytes(self) -> int:
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        active = int(stats["active_bytes"]["all"]["current"])
        return active - torch.cuda.memory_allocated(self.device)

    def free_put_off(self) -> None:
        if not self.forked:
            cuda_hook.free_put_off(self.device)

    def reclaim(self) -> None:
        with cuda_hook.outside_regions():
            cuda_hook.empty_cache(self.device)

    def other_holders(self) -> dict[str, int]:
        """Return the bytes of torch outside of tags, and of holders other than saver and torch."""
        free, total = torch.cuda.mem_get_info(self.device)
        segments = torch.cuda.memory_snapshot(include_traces=False)
        outside = outside_tags(segments, self.device.index)
        own = self.committed_bytes + sum(outside.values())
        rest = gpu_processes.holders(self.device_key, max(0, total - free - own), own)
        return outside | rest

    def error_name(self, code: int) -> str:
        return _error_text(code)
