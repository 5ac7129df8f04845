"""torch_memory_saver's own examples (test/examples/*.py), rewritten for the drop-in."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memsaver.compat.savers import GraphPools, Savers
from memsaver.compat.torch_memory_saver import TorchMemorySaver
from memsaver.errors import BackendError, StateError, TagError
from memsaver.native import cuda_hook
from tests.helpers.memory import counted, open_files_in, process_bytes
from tests.helpers.memsaver.savers import ERROR, inject_fault, large

pytestmark = pytest.mark.alone
Scribble = Callable[[int], None]


def test_signatures_match_version_0_0_10() -> None:
    cpu = ("enable_cpu_backup", False)
    disk = ("enable_disk_backup", False)
    backend = ("cpu_backup_backend", None)
    graph = [("pool", None), ("stream", None), ("capture_error_mode", "global")]
    expected = {
        "region": [("tag", "default"), cpu, disk, backend],
        "cuda_graph": [
            ("cuda_graph", inspect.Parameter.empty),
            *graph,
            ("tag", "default"),
            cpu,
            backend,
        ],
        "disable": [],
        "pause": [("tag", None)],
        "resume": [("tag", None)],
        "get_cpu_backup": [("x", inspect.Parameter.empty), ("zero_copy", False)],
        "set_disk_backup_dir": [("path", inspect.Parameter.empty)],
    }
    for name, parameters in expected.items():
        signature = inspect.signature(getattr(TorchMemorySaver(), name))
        assert [
            (parameter.name, parameter.default) for parameter in signature.parameters.values()
        ] == parameters


def test_backup_restores_only_regions_that_enable_it(
    tms: TorchMemorySaver, device: str, scribble: Scribble
) -> None:
    # From cpu_backup.py: one tag has memory with and without a backup.
    with tms.region(enable_cpu_backup=True):
        kept = torch.full((20_000_000,), 10, dtype=torch.uint8, device=device)
        typed = torch.full((10, 20, 30), 1.5, device=device)
    with tms.region(enable_cpu_backup=False):
        lost = torch.full((20_000_000,), 20, dtype=torch.uint8, device=device)
    for backend in ("pinned", "mmap"):
        with tms.region(enable_cpu_backup=True, cpu_backup_backend=backend):
            kept_too = torch.full((1000,), 11, dtype=torch.uint8, device=device)
    tms.pause()
    scribble(64 << 20)
    tms.resume()
    assert bool((kept == 10).all()) and bool((typed == 1.5).all()) and bool((kept_too == 11).all())
    assert lost[:3].tolist() != [20, 20, 20]


def test_get_cpu_backup_returns_content_of_paused_tensors(
    tms: TorchMemorySaver, device: str
) -> None:
    with tms.region("weights", enable_cpu_backup=True):
        first = torch.full((1001,), 7, dtype=torch.uint8, device=device)
        typed = torch.randn(10, 20, 30, device=device)
        scalar = torch.tensor(2.5, dtype=torch.float64, device=device)
    with tms.region("kv"):
        lost = torch.ones(10, 10, device=device)
    for other in (torch.ones(10, device=device), typed, lost):
        assert tms.get_cpu_backup(other) is None
    with pytest.raises(ValueError, match="contiguous"):
        tms.get_cpu_backup(lost.t())
    expected = typed.cpu().clone()
    tms.pause()
    with pytest.raises(StateError, match="enable_cpu_backup=True"):
        tms.get_cpu_backup(lost)
    for zero_copy in (False, True):
        for tensor, value in (
            (typed, expected),
            (typed[3], expected[3]),
            (scalar, torch.tensor(2.5).double()),
        ):
            saved = tms.get_cpu_backup(tensor, zero_copy=zero_copy)
            assert saved is not None and saved.device.type == "cpu"
            assert (saved.dtype, saved.shape, saved.stride()) == (
                tensor.dtype,
                tensor.shape,
                tensor.stride(),
            )
            assert torch.equal(saved, value)
    tms.resume("weights")
    assert tms.get_cpu_backup(typed) is None
    assert bool((first == 7).all())


def test_disk_backup_uses_an_unnamed_file(
    tms: TorchMemorySaver, device: str, tmp_path: Path
) -> None:
    # From disk_backup.py; the directory is created, and the file is unnamed.
    folder = tmp_path / "made" / "on demand"
    tms.set_disk_backup_dir(str(folder))
    with tms.region("one", enable_disk_backup=True):
        big = torch.randn(1 << 18, device=device)
    expected = big.cpu().clone()
    tms.pause()
    assert open_files_in(folder) == 1 and not list(folder.iterdir())
    saved = tms.get_cpu_backup(big[7:9], zero_copy=True)
    assert saved is not None and torch.equal(saved, expected[7:9])
    tms.resume()
    assert torch.equal(big.cpu(), expected)


def test_disable_suspends_regions(tms: TorchMemorySaver, savers: Savers, device: str) -> None:
    # From training_engine.py and nested_region.py: disable() gives ordinary memory.

    def on_a_tag(tensor: torch.Tensor) -> bool:
        try:
            return bool(saver.tag_of(tensor))
        except TagError:
            return False

    with tms.region("outer", enable_cpu_backup=True), tms.region("inner", enable_cpu_backup=True):
        saver = savers.current()
        first = torch.ones(1000, device=device)
        with tms.disable():
            plain = torch.full((1000,), 53.0, device=device)
            with tms.disable(), tms.region("third"):
                nested = torch.ones(1000, device=device)
            tms.pause()
            assert bool((plain == 53).all())
            tms.resume()
        second = torch.ones(1000, device=device)
    with tms.disable():
        outside = torch.ones(1000, device=device)
    assert [on_a_tag(x) for x in (first, plain, nested, second, outside)] == [
        True,
        False,
        True,
        True,
        False,
    ]
    assert saver.report().tags["inner:host"].live_bytes >= first.nbytes + second.nbytes
    assert saver.report().tags["outer:host"].live_bytes == 0
    assert bool((first == 1).all())
    with (
        pytest.raises(KeyError, match="an error of the caller"),
        tms.region("inner"),
        tms.disable(),
    ):
        raise KeyError("an error of the caller")
    tms.pause("inner")


def captured(run: Callable[[], None], tms: TorchMemorySaver) -> torch.cuda.CUDAGraph:
    """Capture a function as a CUDA graph with its memory on the tag "graph"."""
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
def test_paused_graph_replays_after_resume(tms: TorchMemorySaver, device: str) -> None:
    # From cuda_graph.py and rl_example.py; the graph's own memory is paused, too.
    with tms.region(tag="kv_cache"):
        cache = torch.full((5, 100_000_000), 1.0, device=device)
    given, result = torch.zeros(5, device=device), torch.zeros((), device=device)

    def step() -> None:
        inner = (given + cache.mean(dim=1)).mean()
        result.copy_((torch.ones(500_000_000, device=device) * inner).mean())

    graph = captured(step, tms)
    given.fill_(100)
    graph.replay()
    assert float(result) == pytest.approx(101, rel=1e-3)
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
    assert float(result) == pytest.approx(202, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda:0"])
def test_graphs_with_same_pool_share_memory(
    tms: TorchMemorySaver, savers: Savers, device: str
) -> None:
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
    for _ in range(4):  # repeated captures hold no more memory
        graphs = [captured_with(None, 0)]
        graphs[0].replay()
        torch.cuda.synchronize()
        graphs.clear()
        with tms.region("other"):  # its end drops the pools of dead graphs
            pass
        torch.cuda.empty_cache()
        committed.append(held())
    assert len(set(committed[1:])) == 1


@pytest.mark.parametrize(
    "names",
    [
        ("cpu", "cpu:0"),
        pytest.param(("cuda:0", "cuda:1"), marks=[pytest.mark.gpu, pytest.mark.gpus(2)]),
    ],
)
def test_tag_on_two_devices_is_resumed_on_both_or_neither(names: tuple[str, str]) -> None:
    # From multi_device_torch_mode.py; without GPUs, two savers of the CPU stand in for them.
    devices = [torch.device(name) for name in names]
    savers = Savers(lambda: devices[0])
    tms, tensors, nbytes = TorchMemorySaver(savers), [], large(names[0])
    for _ in range(2):
        current = (
            torch.cuda.device(devices[0]) if devices[0].type == "cuda" else contextlib.nullcontext()
        )
        with current, tms.region(tag="t", enable_cpu_backup=True):
            tensors.append(torch.full((nbytes,), 3, dtype=torch.uint8, device=devices[0]))
        devices.reverse()
    tms.pause("t")
    tms.resume("t")  # the first use loads kernels
    places = ("cpu",) if "cpu" in names else names
    before = [process_bytes(name) for name in places]
    tms.pause("t")
    assert [saver.is_paused("t:host") for saver in savers] == [True, True]
    assert all(
        held - process_bytes(name) >= nbytes for held, name in zip(before, places, strict=True)
    )
    if "cpu" in names:
        backend: Any = list(savers)[1].backend
        inject_fault(backend, 2, ERROR["cpu"])  # fails the mapping of the new extent
        with pytest.raises(BackendError):
            tms.resume("t")
        assert [saver.is_paused("t:host") for saver in savers] == [True, True]
    tms.resume("t")
    assert [process_bytes(name) for name in places] == [
        counted(held, name) for held, name in zip(before, places, strict=True)
    ]
    assert all(bool((tensor == 3).all()) for tensor in tensors)


class FakePool:
    numbers = iter(range(100))

    def __init__(self) -> None:
        self.id = (0, next(self.numbers))


class FakeGraph:
    """Fake of a CUDA graph and of its capture."""

    capture_stream = None

    def __init__(self, graph: object = None, pool: object = None, **_: object) -> None:
        if graph is not None:
            graph.handle = pool  # type: ignore[attr-defined]

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def test_graphs_with_same_handle_get_same_pool_until_last_one_dies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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

    first = capture((7, 0))
    second = capture((7, 0))
    other_tag = capture((7, 0), "else")
    alone = capture(None)
    third = capture(first.handle)
    assert first.handle == second.handle == third.handle
    assert len({first.handle, other_tag.handle, alone.handle}) == 3
    del first, second
    assert len({pool.id for pool in dropped}) == 1 and capture((7, 0)).handle == third.handle
    last = third.handle
    del third
    dropped.clear()  # as the end of a region does
    assert capture((7, 0)).handle != last
