"""The examples that torch_memory_saver tests itself with (test/examples/*.py), stated anew for the drop-in."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from memsaver.compat.savers import Savers
from memsaver.compat.torch_memory_saver import TorchMemorySaver
from memsaver.errors import OutOfMemory, StateError, TagError
from tests.helpers.memory import process_bytes
from tests.helpers.memsaver.savers import large

pytestmark = pytest.mark.alone
Scribble = Callable[[int], None]


def test_the_calls_are_those_of_the_library() -> None:
    """Names, order and defaults of 0.0.10."""
    cpu, disk, backend = ("enable_cpu_backup", False), ("enable_disk_backup", False), ("cpu_backup_backend", None)
    graph = [("pool", None), ("stream", None), ("capture_error_mode", "global")]
    expected = {
        "region": [("tag", "default"), cpu, disk, backend],
        "cuda_graph": [("cuda_graph", inspect.Parameter.empty), *graph, ("tag", "default"), cpu, backend],
        "disable": [],
        "pause": [("tag", None)],
        "resume": [("tag", None)],
        "get_cpu_backup": [("x", inspect.Parameter.empty), ("zero_copy", False)],
        "set_disk_backup_dir": [("path", inspect.Parameter.empty)],
    }
    for name, parameters in expected.items():
        signature = inspect.signature(getattr(TorchMemorySaver(), name))
        assert [(parameter.name, parameter.default) for parameter in signature.parameters.values()] == parameters


def test_cpu_backup(tms: TorchMemorySaver, device: str, scribble: Scribble) -> None:
    """cpu_backup.py: one tag holds memory with and without a backup."""
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


def test_the_backup_of_a_paused_tensor_can_be_read(tms: TorchMemorySaver, device: str) -> None:
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
        for tensor, value in ((typed, expected), (typed[3], expected[3]), (scalar, torch.tensor(2.5).double())):
            saved = tms.get_cpu_backup(tensor, zero_copy=zero_copy)
            assert saved is not None and saved.device.type == "cpu"
            assert (saved.dtype, saved.shape, saved.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
            assert torch.equal(saved, value)
    tms.resume("weights")
    assert tms.get_cpu_backup(typed) is None
    assert bool((first == 7).all())


def test_disk_backup(tms: TorchMemorySaver, device: str, tmp_path: Path, scribble: Scribble) -> None:
    """disk_backup.py: bit-identical over cycles, and the files do not grow. (The folder may change between tags.)"""
    with tms.region("lost", enable_disk_backup=False):
        lost = torch.full((20_000_000,), 20, dtype=torch.uint8, device=device)
    for tag, folder in (("one", tmp_path / "made" / "on demand"), ("two", tmp_path / "two")):
        tms.set_disk_backup_dir(str(folder))
        with tms.region(tag, enable_disk_backup=True):
            big = torch.randn(13 * (1 << 18) + 12345, device=device)
            small = torch.full((7,), 10, dtype=torch.uint8, device=device)
        expected = big.cpu().clone()
        sizes = set()
        for _ in range(3):
            tms.pause()
            sizes.add(file_bytes(folder))
            saved = tms.get_cpu_backup(big[7:9], zero_copy=True)
            assert saved is not None and torch.equal(saved, expected[7:9])
            scribble(64 << 20)
            tms.resume()
            assert torch.equal(big.cpu(), expected) and small.tolist() == [10] * 7
            assert lost[:3].tolist() != [20, 20, 20]
        assert len(sizes) == 1 and big.nbytes <= sizes.pop() < big.nbytes + (1 << 20)
        assert not list(folder.iterdir())  # files without a name: nothing stays behind


def file_bytes(folder: Path) -> int:
    """Bytes of the files of this folder that the process has open, also of those that have no name."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum(os.stat(link).st_size for link in links if os.readlink(link).startswith(f"{folder}/"))


def test_disable(tms: TorchMemorySaver, savers: Savers, device: str) -> None:
    """training_engine.py (and nested_region.py): what is made in disable() is ordinary memory, even beside a pause."""

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
    assert [on_a_tag(x) for x in (first, plain, nested, second, outside)] == [True, False, True, True, False]
    assert saver.report().tags["inner:host"].live_bytes >= first.nbytes + second.nbytes
    assert saver.report().tags["outer:host"].live_bytes == 0
    assert bool((first == 1).all())
    with pytest.raises(KeyError, match="of my own"), tms.region("inner"), tms.disable():
        raise KeyError("of my own")
    tms.pause("inner")


def test_memory_margin(tms: TorchMemorySaver, savers: Savers, device: str) -> None:
    tms.memory_margin_bytes = 1 << 20
    with tms.region("a"):
        torch.ones(1000, device=device)
    tms.memory_margin_bytes = 1 << 50
    with pytest.raises(OutOfMemory, match="region 'a:discard' needs") as caught, tms.region("a"):
        torch.ones(8 << 20, device=device)
    assert "memory_margin_bytes" in caught.value.__notes__[0]
    assert savers.current().limit_bytes is None
    tms.memory_margin_bytes = 0
    with tms.region("a"):
        torch.ones(8 << 20, device=device)


def test_weights_are_resumed_before_the_kv_cache(tms: TorchMemorySaver, device: str) -> None:
    """simple.py, and the SGLang RL memory post (hebiao064.github.io/rl-memory-management): between the two stages the
    weights are updated, and the KV cache's memory is still free."""
    with tms.region(tag="weights", enable_cpu_backup=True):
        weights = torch.randn(large(device) // 16, device=device)
    with tms.region(tag="kv_cache"):
        kv_cache = torch.zeros(large(device) // 2, dtype=torch.uint8, device=device)
    weights.add_(1)  # loads the kernel before memory is counted
    expected, full = weights.cpu().clone(), process_bytes(device)
    addresses = weights.data_ptr(), kv_cache.data_ptr()
    tms.pause("weights")
    tms.pause("kv_cache")
    empty = process_bytes(device)
    assert full - empty >= weights.nbytes + kv_cache.nbytes
    tms.resume("weights")
    assert torch.equal(weights.cpu(), expected)
    weights.add_(1)
    assert process_bytes(device) - empty < weights.nbytes + kv_cache.nbytes
    tms.resume("kv_cache")
    kv_cache.fill_(1)
    assert (weights.data_ptr(), kv_cache.data_ptr()) == addresses
    assert torch.equal(weights.cpu(), expected + 1)
    assert process_bytes(device) == full
