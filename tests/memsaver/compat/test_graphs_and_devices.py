"""The examples of torch_memory_saver with CUDA graphs, and with several devices, stated anew for the drop-in."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memsaver.allocator import cuda_hook
from memsaver.compat.graphs import GraphPools
from memsaver.compat.savers import Savers
from memsaver.compat.torch_memory_saver import TorchMemorySaver
from memsaver.errors import BackendError
from tests.helpers.memory import process_bytes
from tests.helpers.memsaver.savers import large

pytestmark = pytest.mark.alone


def captured(run: Callable[[], None], tms: TorchMemorySaver) -> torch.cuda.CUDAGraph:
    """``run`` as a CUDA graph, whose memory is a tag's."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with tms.cuda_graph(graph, tag="graph"):
        run()
    return graph


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda:0"])
def test_cuda_graph(tms: TorchMemorySaver, device: str) -> None:
    """cuda_graph.py (and rl_example.py); the graph's own memory is paused, too."""
    with tms.region(tag="kv_cache"):
        cache = torch.full((5, 100_000_000), 1.0, device=device)
    given, found = torch.zeros(5, device=device), torch.zeros((), device=device)

    def step() -> None:
        inner = (given + cache.mean(dim=1)).mean()
        found.copy_((torch.ones(500_000_000, device=device) * inner).mean())

    graph = captured(step, tms)
    given.fill_(100)
    graph.replay()
    assert float(found) == pytest.approx(101, rel=1e-3)
    torch.cuda.empty_cache()
    before = process_bytes(device)
    tms.pause("kv_cache")
    assert before - process_bytes(device) > 1_900_000_000
    before = process_bytes(device)
    tms.pause("graph")
    assert before - process_bytes(device) > 1_900_000_000
    other = torch.zeros(2_500_000_000, dtype=torch.uint8, device=device)
    del other
    torch.cuda.empty_cache()
    tms.resume("graph")
    tms.resume("kv_cache")
    cache.fill_(2)
    given.fill_(200)
    graph.replay()
    assert float(found) == pytest.approx(202, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda:0"])
def test_graphs_share_memory_as_they_are_told(tms: TorchMemorySaver, savers: Savers, device: str) -> None:
    nbytes = 64 << 20
    results = [torch.zeros((), device=device) for _ in range(4)]
    handle = torch.cuda.graph_pool_handle()

    def captured_with(pool: tuple[int, int] | None, number: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with tms.cuda_graph(graph, pool=pool, tag="graph"):
            results[number].copy_(torch.full((nbytes // 4,), number + 1.0, device=device).mean())
        return graph

    def held() -> int:
        return savers.current().report().tags["graph:discard"].committed_bytes

    graphs = [captured_with(handle, 0)]
    first = held()
    assert first >= nbytes
    graphs += [captured_with(handle, 1), captured_with(graphs[0].pool(), 2)]
    assert held() < first + nbytes
    graphs.append(captured_with(None, 3))
    assert held() >= first + nbytes
    tms.pause("graph")
    tms.resume("graph")
    for graph in graphs:
        graph.replay()
    assert [float(result) for result in results] == [1, 2, 3, 4]


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda:0"])
def test_capturing_again_and_again_holds_no_more(tms: TorchMemorySaver, savers: Savers, device: str) -> None:
    committed = []
    for _ in range(4):
        graph = torch.cuda.CUDAGraph()
        with tms.cuda_graph(graph, tag="graph"):
            torch.full((16 << 20,), 1.0, device=device).mean()
        graph.replay()
        torch.cuda.synchronize()
        del graph
        with tms.region("other"):  # at a region's end the pools of dead graphs are dropped
            pass
        torch.cuda.empty_cache()
        committed.append(savers.current().report().tags["graph:discard"].committed_bytes)
    assert len(set(committed[1:])) == 1


@pytest.mark.gpu
@pytest.mark.gpus(2)
@pytest.mark.parametrize("device", ["cuda:0"])
def test_multi_device_torch_mode(device: str) -> None:
    """multi_device_torch_mode.py: a tag is on every device, and is paused on all."""
    tms, nbytes = TorchMemorySaver(Savers()), large(device)
    tms.hook_mode = "torch"
    tensors = []
    for index in (0, 1):
        with torch.cuda.device(index), tms.region(tag="t"):
            tensors.append(torch.full((nbytes,), 1, dtype=torch.uint8, device=f"cuda:{index}"))
    before = [process_bytes(f"cuda:{index}") for index in (0, 1)]
    tms.pause("t")
    paused = [process_bytes(f"cuda:{index}") for index in (0, 1)]
    assert all(one - other >= nbytes for one, other in zip(before, paused, strict=True))
    tms.resume("t")
    assert [process_bytes(f"cuda:{index}") for index in (0, 1)] == before
    assert [int(tensor.fill_(2)[0]) for tensor in tensors] == [2, 2]


def test_a_tag_on_two_devices_is_resumed_on_both_or_on_none() -> None:
    """Two savers of the CPU stand for the devices."""
    devices = [torch.device("cpu"), torch.device("cpu", 0)]
    savers = Savers(lambda: devices[0])
    tms, tensors = TorchMemorySaver(savers), []
    for _ in range(2):
        with tms.region(tag="t", enable_cpu_backup=True):
            tensors.append(torch.arange(1000.0))
        devices.reverse()
    tms.pause("t")
    assert [saver.is_paused("t:host") for saver in savers] == [True, True]
    backend: Any = list(savers)[1].backend
    backend.inject_fault(2, errno.ENOMEM)  # the call after the new extent: it is mapped
    with pytest.raises(BackendError):
        tms.resume("t")
    assert [saver.is_paused("t:host") for saver in savers] == [True, True]
    tms.resume("t")
    assert all(torch.equal(tensor, torch.arange(1000.0)) for tensor in tensors)


class FakePool:
    numbers = iter(range(100))

    def __init__(self) -> None:
        self.id = (0, next(self.numbers))


class FakeGraph:
    """Instead of a CUDA graph, and of its capture."""

    capture_stream = None

    def __init__(self, graph: object = None, pool: object = None, **_: object) -> None:
        if graph is not None:
            graph.handle = pool  # type: ignore[attr-defined]

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def test_which_pool_a_graph_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """By handle, without a GPU; and a pool is dropped no earlier than its last graph."""
    dropped: list[Any] = []
    monkeypatch.setattr(cuda_hook, "pools", dropped)
    monkeypatch.setattr(torch.cuda, "graph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 0)
    saver: Any = SimpleNamespace(device="cuda:0", mem_pool=lambda tag, content: FakePool())
    pools = GraphPools()

    def capture(handle: tuple[int, int] | None, tag: str = "graph") -> Any:
        graph: Any = FakeGraph()
        with pools.capture(graph, saver, tag, "discard", handle, None, "global"):
            pass
        return graph

    first, second, other_tag, alone = capture((7, 0)), capture((7, 0)), capture((7, 0), "else"), capture(None)
    third = capture(first.handle)
    assert first.handle == second.handle == third.handle
    assert len({first.handle, other_tag.handle, alone.handle}) == 3
    del first, second
    assert len({pool.id for pool in dropped}) == 1 and capture((7, 0)).handle == third.handle
    last = third.handle
    del third
    dropped.clear()  # as at a region's end
    assert capture((7, 0)).handle != last
