"""Bugs that users of other tools reported, with one test for each report.

Other files test further reports. test_fault_injection and test_saver: an OutOfMemory in resume that
ends the process (torch_memory_saver PR#87) or leaves a tag half mapped (vllm PR#34600).
test_lifetimes: a free while paused (torch_memory_saver#92), concurrent regions, forks.
compat/test_misuse: an exit with paused tags (torch_memory_saver#56). test_saver: nested regions,
and buffers that a module creates. test_stateful: a second release of the same handles
(vllm#36651). test_processes: new addresses for every import (pytorch#186213).
"""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import pytest
import torch

import memsaver
from memsaver import MemorySaver
from memsaver.system.threads import workers
from tests.helpers.case_selection import rounds
from tests.helpers.memory import memory_maps, open_fds
from tests.helpers.memsaver.savers import until
from tests.helpers.peers import Peer

pytestmark = pytest.mark.alone


def test_freed_block_is_never_reused_by_another_tag(device: str) -> None:
    # torch_memory_saver#85: a reused block was paused with the wrong tag.
    saver = MemorySaver(device)
    addresses: dict[str, set[int]] = {"a": set(), "b": set()}
    for step in range(20):
        for tag in addresses:
            with saver.region(tag):
                tensors = [
                    torch.full((1000 * (step % 3 + 1),), 3.0, device=device) for _ in range(3)
                ]
            addresses[tag] |= {tensor.data_ptr() for tensor in tensors}
            del tensors
    assert not addresses["a"] & addresses["b"]
    with saver.region("b"):
        kept = torch.full((1000,), 5.0, device=device)
    saver.pause("a")
    assert bool((kept == 5).all())
    plain = torch.ones(1000, device=device)  # torch's own memory is on neither tag
    saver.pause("b")
    assert bool((plain == 1).all())
    saver.resume()


@pytest.mark.gpu
def test_region_does_not_catch_cublas_workspace() -> None:
    # cuBLAS keeps the workspace of a thread's first multiplication forever, across a pause.
    torch._C._cuda_clearCublasWorkspaces()
    saver = MemorySaver("cuda:0")
    a = torch.randn(512, 512, device="cuda:0", dtype=torch.bfloat16)
    with saver.region("t"):
        inside = a @ a
        wide = a.float() @ a.float()
    live = saver.report().tags["t"].live_bytes
    assert live == inside.nbytes + wide.nbytes
    wanted = (a @ a).cpu()
    saver.pause("t")
    for _ in range(3):
        assert torch.equal((a @ a).cpu(), wanted)
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
def test_nothing_is_unmapped_under_a_running_kernel(fast: bool) -> None:
    # sglang PR#37932: memory was unmapped while a stream wrote to it, an illegal access.
    saver = MemorySaver("cuda:0")
    tensor = saver.empty(64 << 20, torch.uint8, tag="t", content="host").fill_(1)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for value in range(2, 6):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # about 30 ms
            tensor.fill_(value)
        saver.pause("t", streams=[stream] if fast else None)
        saver.resume("t")
        assert int(tensor[0]) == int(tensor[-1]) == value
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_dropped_saver_unmaps_nothing_under_a_running_kernel() -> None:
    for _ in range(3):
        saver = MemorySaver("cuda:0")
        tensor = saver.empty(64 << 20, torch.uint8, tag="t")
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)  # about 50 ms
        tensor.fill_(1)
        del saver, tensor
        gc.collect()
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_saver_dropped_during_graph_capture_is_released_later() -> None:
    numbers = torch.zeros(8, device="cuda:0").add_(0)
    saver = MemorySaver("cuda:0")
    tensor = saver.empty(64 << 20, torch.uint8, tag="t")
    backend, graph = saver.backend, torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers.add_(1)
        del saver, tensor
        gc.collect()
        assert backend.committed_bytes == 64 << 20
    del graph
    other = MemorySaver("cuda:0").empty(1, torch.uint8, tag="t")
    del other
    gc.collect()
    assert backend.committed_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("inside", [False, True], ids=["empty", "region"])
def test_freed_memory_is_reused_only_after_its_work_has_ended(inside: bool) -> None:
    saver, side = MemorySaver("cuda:0"), torch.cuda.Stream()

    def make() -> torch.Tensor:
        if not inside:
            return saver.empty(1 << 24, torch.uint8, tag="t")
        with saver.region("t"):
            return torch.empty(1 << 24, dtype=torch.uint8, device="cuda:0")

    with torch.cuda.stream(side):
        first = make()
        torch.cuda._sleep(200_000_000)  # about 100 ms
        first.fill_(1)
        address = first.data_ptr()
        del first
    second = make().fill_(2)
    torch.cuda.synchronize()
    assert second.data_ptr() == address and bool((second == 2).all())


def _wake(pipe: Connection) -> None:
    saver = MemorySaver("cuda:0")
    nbytes = int(torch.cuda.mem_get_info()[1] * 0.6) >> 21 << 21
    tensor = saver.empty(nbytes, torch.uint8, tag="kv")
    saver.pause()
    pipe.send("ready")
    pipe.recv()
    try:
        saver.resume()
        tensor.fill_(1)
        torch.cuda.synchronize()
        pipe.send("awake")
    except memsaver.OutOfMemory:
        assert saver.report().committed_bytes == 0
        pipe.send("short")
    pipe.recv()


@pytest.mark.gpu
def test_one_of_two_concurrent_resumes_succeeds_when_memory_is_enough_for_one() -> None:
    # vllm PR#37065: each of two processes obtained half of the memory.
    peers = []
    for _ in range(2):  # one after the other, because each fits alone
        peers.append(Peer(_wake))
        assert peers[-1].hear() == "ready"
    for peer in peers:
        peer.tell("wake up")
    assert sorted(peer.hear() for peer in peers) == ["awake", "short"]
    for peer in peers:
        peer.bury()


@pytest.mark.soak
def test_region_entered_at_every_step_reuses_its_memory(device: str, fds: int) -> None:
    # Torch keeps blocks of tensors that outlive their region until memsaver has it free them. NeMo
    # RL#2619: some bytes stayed at every step until a long run ran out of memory.
    saver = MemorySaver(device)
    if device != "cpu":  # release the memory that earlier tests left in torch's cache
        gc.collect()
        torch.cuda.empty_cache()
    del [torch.ones(1 << 24, device=device)][0]  # on a GPU, fills torch's cache
    cached = 0 if device == "cpu" else torch.cuda.memory_reserved()
    weights = saver.empty(1 << 20, torch.uint8, tag="weights", content="host").fill_(1)
    held, maps = set(), []
    for step in range(rounds(20, 2000)):
        with saver.region("kv"):
            tensors = [
                torch.ones(3 << 20, device=device),
                *(torch.ones(1000 + step % 7, device=device) for _ in "abc"),
            ]
        saver.pause("weights", release=("driver", "retain")[step % 2])
        saver.resume("weights")
        held.add((saver.report().committed_bytes, open_fds()))
        maps.append(memory_maps())
        del tensors
    assert len(held) == 1 and maps[-1] <= maps[10] + 4
    assert device == "cpu" or torch.cuda.memory_reserved() >= cached, (
        "torch's own cache was emptied"
    )
    saver.trim()
    report = saver.report()
    assert report.committed_bytes == report.tags["weights"].committed_bytes and bool(
        (weights == 1).all()
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dies", ["inside", "after"])
def test_memory_is_not_reused_while_a_stream_writes_it(dies: str) -> None:
    # Torch frees a region's memory without waiting, because the allocator knows the stream.
    saver = MemorySaver("cuda:0")
    one, other, nbytes = torch.cuda.Stream(), torch.cuda.Stream(), 256 << 20
    with torch.cuda.stream(one):
        with saver.region("x"):
            first = torch.empty(nbytes, dtype=torch.uint8, device="cuda:0")
            if dies == "inside":
                torch.cuda._sleep(1_000_000_000)  # most of a second
                address = first.fill_(1).data_ptr()
                del first
        if dies == "after":
            torch.cuda._sleep(1_000_000_000)
            address = first.fill_(1).data_ptr()
            del first
    with torch.cuda.stream(other), saver.region("x"):
        second = torch.full((nbytes,), 2, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    assert second.data_ptr() == address
    assert bool((second == 2).all())
    del second
    saver.close()


@pytest.mark.gpu
def test_host_memory_is_pinned_during_graph_capture() -> None:
    # By default, CUDA refuses this in all threads and ends the capture.
    saver, numbers = MemorySaver("cuda:0"), torch.zeros(8, device="cuda:0").add_(0)
    arena, graph = saver.pinned_arena, torch.cuda.CUDAGraph()
    before = arena.committed_bytes
    with torch.cuda.graph(graph):
        numbers.add_(1)
        saver.reserve_host({"t": before + (64 << 20)})
        until(lambda: not arena.coming_bytes)
        assert arena.committed_bytes >= before + (64 << 20)
        arena.trim()
    graph.replay()
    assert numbers.tolist() == [1] * 8
    saver.close()


@pytest.mark.gpu
def test_copies_keep_captures_valid_on_all_of_torchs_streams() -> None:
    # Torch hands out 32 streams in turn, so that a new stream may already be in use.
    saver, numbers = MemorySaver("cuda:0"), torch.zeros(8, device="cuda:0")
    tensor = saver.empty(1 << 20, torch.uint8, tag="t", content="host").fill_(7)
    torch.cuda.synchronize()

    def pause_and_resume() -> None:
        saver.pause("t", streams=())
        saver.resume("t")

    with ThreadPoolExecutor(1) as another:
        for _ in range(32):
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
                numbers.add_(1)
                another.submit(pause_and_resume).result(60)
            graph.replay()
    assert numbers.tolist() == [32] * 8
    assert bool((tensor == 7).all())
    saver.close()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("way", ["prefetches", "beside", "another thread's"])
def test_content_is_copied_during_graph_capture(way: str, mode: str) -> None:
    # In mode "global", CUDA refuses to wait for an event in every thread and ends the capture.
    saver, numbers = MemorySaver("cuda:0"), torch.zeros(8, device="cuda:0").add_(0)
    tensor = saver.empty(256 << 20, torch.uint8, tag="t", content="host").fill_(7)
    graph, go = torch.cuda.CUDAGraph(), threading.Event()
    saver.pause("t")
    saver.resume("t")
    torch.cuda.synchronize()

    def pause_and_resume() -> None:
        go.wait(60)
        saver.pause("t", streams=())
        saver.resume("t")

    with ThreadPoolExecutor(1) as another:
        if way == "prefetches":
            saver.pause("t")
        thread = another if way == "another thread's" else workers(way, 1)
        moved = thread.submit(go.wait, 60)  # the copies wait for it
        if way == "prefetches":
            prefetch = saver.begin_resume("t")
        elif way == "beside":
            saver.save("t", 1)
        else:
            moved = thread.submit(pause_and_resume)
        with torch.cuda.graph(graph, capture_error_mode=mode):
            numbers.add_(1)
            go.set()
            thread.submit(int).result(60)  # runs after the copies
        moved.result(60)
    graph.replay()
    assert numbers.tolist() == [1] * 8
    if way == "prefetches":
        prefetch.wait()
    saver.pause("t")  # uses the copy that `save` made
    saver.resume("t")
    assert bool((tensor == 7).all())
    saver.close()
