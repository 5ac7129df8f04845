"""The interface of ``vllm.device_allocator.cumem`` that vLLM 0.24.0 and 0.33.0 use.

Taken from the wheels of both versions on PyPI: vllm/device_allocator/cumem.py and its callers
device_allocator/__init__.py, sleep_mode_backend.py, compilation/cudagraph_pool.py,
platforms/interface.py, v1/worker/gpu_worker.py, v1/worker/workspace.py,
v1/worker/lora_model_runner_mixin.py and v1/executor/abstract.py.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from memsaver import compat
from memsaver.compat.savers import Savers
from memsaver.compat.torch_memory_saver import TorchMemorySaver
from memsaver.compat.vllm import CuMemAllocator, cumem_available
from memsaver.errors import OutOfMemory, StateError
from memsaver.memory.torch_allocator import ALLOCATOR_HOOKS, GRAPH_REGISTER
from memsaver.native import cuda_hook
from tests.helpers.memory import process_bytes

Scribble = Callable[[int], None]
NBYTES = 4 << 20

OLD, NEW = "0.24.0", "0.33.0"
SIGNATURES = {
    ("get_instance", OLD): "()",
    ("use_memory_pool", OLD): "(self, tag=None)",
    ("sleep", OLD): "(self, offload_tags=None)",
    ("wake_up", OLD): "(self, tags=None)",
    ("get_current_usage", OLD): "(self)",
    ("discard", NEW): "(self, tags)",
    ("cudagraph_pool", NEW): "(self)",
    ("release_pools", NEW): "(self)",
    ("close", NEW): "(self)",
}
"""Parameters by method and by the first version that has the method."""


@pytest.mark.parametrize(("name", "version"), SIGNATURES, ids=lambda word: str(word))
def test_signature_matches_vllm_apart_from_keyword_only_parameters(name: str, version: str) -> None:
    signature = inspect.signature(getattr(CuMemAllocator, name))
    positional = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind is not parameter.KEYWORD_ONLY
    ]
    plain = inspect.Signature(
        [parameter.replace(annotation=parameter.empty) for parameter in positional]
    )
    assert str(plain) == SIGNATURES[name, version]


def test_class_attributes_match_vllm() -> None:
    assert cumem_available is True
    assert CuMemAllocator.default_tag == CuMemAllocator(Savers()).current_tag == "default"
    assert CuMemAllocator.get_instance() is CuMemAllocator.instance


class Worker:
    """The calls of vLLM's GPU worker in their order, with one tensor per kind of memory."""

    def __init__(self, allocator: CuMemAllocator, version: str, device: str) -> None:
        self.allocator, self.version, self.device = allocator, version, device
        self.plain = self.make(1)
        assert allocator.get_current_usage() == 0  # vLLM's worker asserts it before it loads
        with allocator.use_memory_pool(tag="weights"):
            self.weights = self.make(2)
        if version == OLD:
            with allocator.use_memory_pool(tag="kv_cache"):
                self.cache = self.make(3)
            return
        with allocator.use_memory_pool(tag="runtime"):  # initialize_kv_cache
            self.runtime = self.make(4)
            with allocator.use_memory_pool(tag="kv_cache"):
                assert allocator.current_tag == "kv_cache"
                self.cache = self.make(3)
            assert allocator.current_tag == "runtime"
            self.later = self.make(5)
        self.grow_workspace(NBYTES)

    def make(self, value: int) -> torch.Tensor:
        return torch.full((NBYTES,), value, dtype=torch.uint8, device=self.device)

    def grow_workspace(self, nbytes: int) -> None:
        self.workspace = torch.empty(0)
        with self.allocator.use_memory_pool(tag="workspace"):
            self.workspace = torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def sleep(self, level: int) -> None:
        offload: tuple[str, ...] = ("weights",) if level == 1 else ()
        if self.version == NEW:
            offload += ("runtime", "cudagraph")
        self.allocator.sleep(offload_tags=offload)


def used(device: str) -> int:
    """Return the bytes in use, without torch's cache, which a sleep empties."""
    if device != "cpu":
        torch.cuda.empty_cache()
    return process_bytes(device)


def awake(savers: Savers) -> set[str]:
    return {tag for tag, now in savers.current().report().tags.items() if now.state == "active"}


def holds(tensor: torch.Tensor, value: int) -> bool:
    return bool((tensor == value).all())


@pytest.mark.alone
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("version", [OLD, NEW])
def test_worker_sleeps_and_wakes_in_stages(
    allocator: CuMemAllocator,
    savers: Savers,
    version: str,
    level: int,
    device: str,
    scribble: Scribble,
) -> None:
    worker = Worker(allocator, version, device)
    others = set() if version == OLD else {"runtime", "workspace"}
    nbytes = (2 if version == OLD else 5) * NBYTES
    assert awake(savers) == {"weights", "kv_cache", *others}
    assert allocator.get_current_usage() == nbytes
    for _ in range(2):
        full = used(device)
        worker.sleep(level)
        scribble(64 << 20)
        assert awake(savers) == set() and full - used(device) >= 2 * NBYTES
        assert allocator.get_current_usage() == nbytes, "asleep or not"
        allocator.wake_up(["weights"])
        assert awake(savers) == {"weights", *others}
        assert holds(worker.weights, 2) == (level == 1)
        worker.weights.fill_(2)  # at level 2, vLLM loads the weights again in place
        allocator.wake_up(["kv_cache"])
        worker.cache.fill_(3)
        assert holds(worker.weights, 2) and holds(worker.plain, 1)
        if version == NEW:
            assert holds(worker.runtime, 4) and holds(worker.later, 5), "kept at every level"
            worker.workspace.fill_(6)
    worker.sleep(level)
    allocator.wake_up(None)
    allocator.wake_up(None)
    assert holds(worker.weights.fill_(7), 7) and holds(worker.cache.fill_(8), 8)


def test_wake_up_resumes_all_tags_except_unnamed_weights_and_cache(
    allocator: CuMemAllocator, savers: Savers, device: str
) -> None:
    worker = Worker(allocator, NEW, device)
    worker.sleep(1)
    allocator.wake_up([])
    assert awake(savers) == {"runtime", "workspace"}
    assert holds(worker.runtime, 4)
    worker.workspace.fill_(6)
    with allocator.use_memory_pool("runtime"):  # an adapter is loaded in between
        adapter = worker.make(9)
    worker.grow_workspace(2 * NBYTES)
    allocator.wake_up(["kv_cache"])
    worker.cache.fill_(3)
    worker.sleep(1)
    allocator.wake_up()
    assert holds(worker.weights, 2) and holds(adapter, 9)


def test_discard_releases_cache_while_other_tags_are_awake(
    allocator: CuMemAllocator, savers: Savers, device: str
) -> None:
    # vLLM 0.33 calls release_kv_cache_memory, then sleep, and then wakes up in stages.
    worker = Worker(allocator, NEW, device)
    allocator.discard(("kv_cache",))
    assert awake(savers) == {"weights", "runtime", "workspace"}
    assert holds(worker.weights, 2) and holds(worker.runtime, 4)
    worker.sleep(1)
    allocator.wake_up(["weights"])
    allocator.discard("kv_cache")
    assert holds(worker.weights, 2)
    allocator.wake_up(["kv_cache"])
    assert holds(worker.cache.fill_(3), 3)


def test_allocation_on_sleeping_tag_is_awake(
    allocator: CuMemAllocator, savers: Savers, device: str, scribble: Scribble
) -> None:
    with allocator.use_memory_pool("weights"):
        first = torch.full((NBYTES,), 1, dtype=torch.uint8, device=device)
    allocator.sleep("weights")
    scribble(64 << 20)
    with allocator.use_memory_pool("weights"):
        assert allocator.current_tag == "weights"
        second = torch.full((NBYTES,), 2, dtype=torch.uint8, device=device)
    assert holds(second, 2)
    allocator.sleep(())  # discards the second tensor; the first one stays saved
    assert awake(savers) == set()
    scribble(64 << 20)
    with allocator.use_memory_pool("weights"):
        third = torch.full((NBYTES,), 3, dtype=torch.uint8, device=device)
    assert allocator.get_current_usage() == 3 * NBYTES
    awake_now = awake(savers)
    allocator.wake_up(["kv_cache"])
    assert awake(savers) == awake_now and holds(third, 3)
    allocator.wake_up(["weights"])
    assert holds(first, 1) and holds(third, 3)
    assert not holds(second, 2) and holds(second.fill_(2), 2)
    with allocator.use_memory_pool("weights"):
        fourth = torch.full((NBYTES,), 4, dtype=torch.uint8, device=device)
    allocator.sleep("weights")
    scribble(64 << 20)
    allocator.wake_up(["weights"])
    assert all(
        holds(tensor, value) for value, tensor in enumerate((first, second, third, fourth), 1)
    )


def test_release_pools_keeps_living_tensors(
    allocator: CuMemAllocator, savers: Savers, device: str
) -> None:
    # vLLM's worker calls release_pools when it ends, but its process may continue.
    allocator.release_pools()
    worker = Worker(allocator, NEW, device)
    allocator.release_pools()
    allocator.close()
    assert holds(worker.weights, 2) and holds(worker.runtime, 4)
    worker.sleep(1)
    allocator.release_pools()
    allocator.wake_up()
    assert holds(worker.weights, 2) and holds(worker.runtime, 4)
    del worker
    allocator.release_pools()
    assert allocator.get_current_usage() == savers.current().report().committed_bytes == 0
    assert holds(Worker(allocator, NEW, device).weights, 2)


@pytest.mark.parametrize("device", ["cpu"])
def test_wake_up_without_enough_memory_raises_and_changes_nothing(device: str) -> None:
    allocator = CuMemAllocator(Savers(lambda: torch.device(device), limit_bytes=64 << 20))
    with allocator.use_memory_pool():
        kept = torch.full((40 << 20,), 1, dtype=torch.uint8)
    allocator.sleep()
    with allocator.use_memory_pool("kv_cache"):
        other = torch.full((40 << 20,), 2, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="are missing") as caught:
        allocator.wake_up()
    assert isinstance(caught.value, OutOfMemory)
    del other
    allocator.sleep(())
    allocator.wake_up([CuMemAllocator.default_tag])
    assert bool((kept == 1).all())


def test_failed_sleep_restores_saved_tags(allocator: CuMemAllocator, device: str) -> None:
    with allocator.use_memory_pool("weights"):
        weights = torch.ones(1 << 20, device=device)
    with allocator.use_memory_pool("kv_cache"):
        torch.ones(1 << 20, device=device)
        with pytest.raises(StateError, match="'kv_cache': a region of it is open"):
            allocator.sleep("weights")
    assert bool((weights == 1).all())


class FakePool:
    numbers = iter(range(1, 100))

    def __init__(self) -> None:
        self.id = (0, next(self.numbers))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return an allocator with a fake saver, to test the choice of graph pools without a GPU."""
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 0)
    monkeypatch.setattr(cuda_hook, "pools", [])
    saver = SimpleNamespace(device=torch.device("cuda", 0), tags=[], paused=set())

    def mem_pool(tag: str) -> FakePool:
        saver.tags.append(tag)
        return FakePool()

    saver.mem_pool, saver.is_paused, saver.trim = mem_pool, saver.paused.__contains__, lambda: None

    class Fakes:
        """Fake `Savers` with one saver."""

        def current(self) -> Any:
            return saver

        def __iter__(self) -> Iterator[Any]:
            return iter([saver])

    fakes: Any = Fakes()
    return SimpleNamespace(allocator=CuMemAllocator(fakes), saver=saver)


def test_all_graphs_are_captured_into_one_pool(graphs: Any) -> None:
    allocator, saver = graphs.allocator, graphs.saver
    handles = []
    for _ in range(3):
        with allocator.cudagraph_pool() as handle:
            assert allocator.current_tag == "cudagraph"
            handles.append(handle)
    assert allocator.current_tag == "default" and len(set(handles)) == 1
    assert saver.tags == ["cudagraph"]
    saver.paused.add("cudagraph")
    with allocator.cudagraph_pool() as other:
        assert other != handles[0], "the first pool's memory is asleep"
    saver.paused.clear()
    with allocator.cudagraph_pool() as again:
        assert again == handles[0]
    allocator.release_pools()
    dropped: list[Any] = cuda_hook.pools
    assert {pool.id for pool in dropped} == {other, again}
    allocator.release_pools()
    with allocator.cudagraph_pool() as new:
        assert new not in (other, again)


@pytest.mark.parametrize("device", ["cpu"])
def test_graph_pool_needs_a_gpu(allocator: CuMemAllocator) -> None:
    with pytest.raises(ValueError, match="needs a CUDA device"), allocator.cudagraph_pool():
        pass
    assert allocator.current_tag == "default"


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Unset all variables about registration, and undo later changes after the test."""
    for name in (GRAPH_REGISTER, *ALLOCATOR_HOOKS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def two_ranks(unset: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    unset.setattr(dist, "is_initialized", lambda: True)
    unset.setattr(dist, "get_world_size", lambda: 2)
    unset.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    return unset


def test_graph_pool_is_refused_while_nccl_registers_graphs(
    graphs: Any, two_ranks: pytest.MonkeyPatch
) -> None:
    # vLLM 0.33 sets the variable to 0 for offloaded graphs, and only warns about other values.
    for value in (None, "1"):
        if value is not None:
            two_ranks.setenv(GRAPH_REGISTER, value)
        with pytest.raises(StateError, match=GRAPH_REGISTER), graphs.allocator.cudagraph_pool():
            pass
    assert graphs.saver.tags == [] and graphs.allocator.current_tag == "default"
    two_ranks.setenv(GRAPH_REGISTER, "0")
    with graphs.allocator.cudagraph_pool():
        pass


@pytest.mark.parametrize("name", ["torch_memory_saver", "vllm.device_allocator.cumem"])
def test_install_disables_graph_registration_unless_set(
    name: str, unset: pytest.MonkeyPatch
) -> None:
    # Graphs outside of tags need this, too, because their collectives may use a tag's buffer.
    with contextlib.ExitStack() as undo:
        undo.callback(compat.uninstall)
        compat.install(name)
        assert os.environ[GRAPH_REGISTER] == "0"
        unset.setenv(GRAPH_REGISTER, "1")
        compat.install(name)
        assert os.environ[GRAPH_REGISTER] == "1", "the user's value was replaced"


def test_install_leaves_variable_unset_after_group_creation(two_ranks: pytest.MonkeyPatch) -> None:
    # NCCL has already read the variable; captures on a tag stay refused.
    with contextlib.ExitStack() as undo:
        undo.callback(compat.uninstall)
        compat.install("vllm.device_allocator.cumem")
        assert GRAPH_REGISTER not in os.environ


@pytest.mark.parametrize("name", ALLOCATOR_HOOKS)
def test_regions_are_refused_while_torch_registers_segments(
    name: str, unset: pytest.MonkeyPatch
) -> None:
    unset.setenv(name, "Yes")
    savers = Savers(lambda: torch.device("cuda", 0))
    for place in (CuMemAllocator(savers).use_memory_pool, TorchMemorySaver(savers).region):
        with pytest.raises(StateError, match=f"{name} is set"), place():
            pass
    Savers(lambda: torch.device("cpu")).current().close()


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("device", ["cuda:0"])
def test_graphs_sleep_and_replay(
    allocator: CuMemAllocator, device: str, scribble: Scribble
) -> None:
    with allocator.use_memory_pool("weights"):
        weight = torch.eye(1024, device=device)
    given = torch.ones(128, 1024, device=device)
    (given @ weight).add_(1)  # loads the kernels
    graphs, results = [], []
    for rows in (128, 64):
        graphs.append(torch.cuda.CUDAGraph())
        with allocator.cudagraph_pool() as pool, torch.cuda.graph(graphs[-1], pool=pool):
            results.append(given[:rows] @ weight + 1)
    torch.cuda.empty_cache()
    before = process_bytes(device)
    for _ in range(2):
        allocator.sleep(("weights", "runtime", "cudagraph"))
        assert process_bytes(device) < before
        scribble(64 << 20)
        allocator.wake_up(["weights"])  # also resumes the graphs' memory
        given.random_()
        for graph, result in zip(graphs, results, strict=True):
            graph.replay()
            assert torch.equal(result, given[: len(result)] + 1)
    allocator.release_pools()  # living graphs keep their pools
    graphs[0].replay()
    assert torch.equal(results[0], given + 1)
