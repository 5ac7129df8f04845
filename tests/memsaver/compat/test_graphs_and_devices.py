"""The examples of torch_memory_saver with CUDA graphs, and with several devices, stated anew for the drop-in."""

from __future__ import annotations

import contextlib
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
from tests.helpers.memsaver.savers import ERROR, large

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
    torch.cuda.synchronize()
    del graph
    committed = []
    for _ in range(4):  # capturing again and again holds no more
        graphs = [captured_with(None, 0)]
        graphs[0].replay()
        torch.cuda.synchronize()
        graphs.clear()
        with tms.region("other"):  # at a region's end the pools of dead graphs are dropped
            pass
        torch.cuda.empty_cache()
        committed.append(held())
    assert len(set(committed[1:])) == 1


@pytest.mark.parametrize(
    "names", [("cpu", "cpu:0"), pytest.param(("cuda:0", "cuda:1"), marks=[pytest.mark.gpu, pytest.mark.gpus(2)])]
)
def test_a_tag_on_two_devices_is_resumed_on_both_or_on_none(names: tuple[str, str]) -> None:
    """multi_device_torch_mode.py; without GPUs two savers of the CPU stand for them."""
    devices = [torch.device(name) for name in names]
    savers = Savers(lambda: devices[0])
    tms, tensors, nbytes = TorchMemorySaver(savers), [], large(names[0])
    tms.hook_mode = "torch"
    for _ in range(2):
        with tms.region(tag="t", enable_cpu_backup=True):
            tensors.append(torch.full((nbytes,), 3, dtype=torch.uint8, device=devices[0]))
        devices.reverse()
    counted = ("cpu",) if "cpu" in names else names
    before = [process_bytes(name) for name in counted]
    tms.pause("t")
    assert [saver.is_paused("t:host") for saver in savers] == [True, True]
    assert all(one - process_bytes(name) >= nbytes for one, name in zip(before, counted, strict=True))
    backend: Any = list(savers)[1].backend
    backend.inject_fault(2, ERROR[names[0]])  # the call after the new extent: it is mapped
    with pytest.raises(BackendError):
        tms.resume("t")
    assert [saver.is_paused("t:host") for saver in savers] == [True, True]
    tms.resume("t")
    assert all(bool((tensor == 3).all()) for tensor in tensors)
    assert [process_bytes(name) for name in counted] == before


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
