"""Misuse of the drop-ins raises an error and changes nothing; the replaced modules would exit.

Also tests `install` and `uninstall`.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from memsaver import compat
from memsaver.compat.savers import Savers
from memsaver.compat.torch_memory_saver import TorchMemorySaver
from memsaver.errors import StateError
from memsaver.memory.torch_allocator import GRAPH_REGISTER
from tests.helpers.memsaver.savers import python

NAMES = ("torch_memory_saver", "vllm.device_allocator.cumem")


def test_pause_of_paused_tag_and_resume_of_active_tag_are_refused(
    tms: TorchMemorySaver, device: str
) -> None:
    with tms.region("kv", enable_cpu_backup=True):
        kv = torch.ones(1000, device=device)
    with tms.region("weights"):
        torch.ones(1000, device=device)
    with pytest.raises(StateError, match="'kv': not paused"):
        tms.resume("kv")
    tms.pause("kv")
    for tag in ("kv", None):
        with pytest.raises(StateError, match="'kv': paused already"):
            tms.pause(tag)
    with pytest.raises(StateError, match="'weights': not paused"):
        tms.resume()
    tms.resume("kv")
    assert bool((kv == 1).all())
    tms.pause()
    with pytest.raises(StateError, match="'kv', 'weights': paused already"):
        tms.pause()
    tms.resume()
    assert bool((kv == 1).all())


def test_unused_tag_is_accepted_with_one_warning(
    tms: TorchMemorySaver, caplog: pytest.LogCaptureFixture
) -> None:
    # SGLang pauses its tag cuda_graph even if it has no graph.
    with caplog.at_level(logging.WARNING, "memsaver"):
        tms.pause("cuda_graph")
        tms.resume("cuda_graph")
        tms.pause()
        tms.resume()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "'cuda_graph'" in caplog.text and "known: none yet" in caplog.text


def test_region_of_paused_tag_is_refused(tms: TorchMemorySaver, device: str) -> None:
    with tms.region("a"):
        torch.ones(10, device=device)
    tms.pause("a")
    for backup in (False, True):
        with (
            pytest.raises(StateError, match="tag 'a' is paused; call resume"),
            tms.region("a", enable_cpu_backup=backup),
        ):
            pass
    tms.resume("a")
    with tms.region("a", enable_cpu_backup=True):
        torch.ones(10, device=device)


def test_pause_inside_region_is_refused(tms: TorchMemorySaver, device: str) -> None:
    with tms.region("a"):
        kept = torch.ones(10, device=device)
        with pytest.raises(StateError, match="region of it is open"):
            tms.pause("a")
    assert bool((kept == 1).all())
    with pytest.raises(StateError, match="'a:discard' is paused"), tms.region("a"), tms.disable():
        tms.pause("a")  # still paused when the region is entered again
    tms.resume("a")
    with tms.region("a"):
        torch.ones(10, device=device)


@pytest.mark.parametrize("device", ["cpu"])
def test_contradicting_arguments_are_refused(tms: TorchMemorySaver) -> None:
    graph: Any = None
    with pytest.raises(ValueError, match="needs a CUDA device"), tms.cuda_graph(graph):
        pass
    for arguments in (
        {"enable_cpu_backup": True, "enable_disk_backup": True},
        {"cpu_backup_backend": "pinned"},
        {"enable_cpu_backup": True, "cpu_backup_backend": "floppy"},
    ):
        with pytest.raises(ValueError), tms.region(**arguments):  # type: ignore[arg-type]
            pass
    with pytest.raises(AttributeError, match="hook_mod"):
        tms.hook_mod = "torch"  # type: ignore[attr-defined]


def test_tms_init_enable_is_refused(tms: TorchMemorySaver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMS_INIT_ENABLE", "1")
    with pytest.raises(StateError, match="TMS_INIT_ENABLE"):
        tms.pause()
    with pytest.raises(StateError, match="TMS_INIT_ENABLE"), tms.region():
        pass
    monkeypatch.setenv("TMS_INIT_ENABLE", "0")
    tms.pause()


def test_forked_child_has_its_own_savers() -> None:
    savers = Savers(lambda: torch.device("cpu"))
    saver = savers.current()
    assert savers.current() is saver and list(savers) == [saver]
    child = os.fork()
    if child == 0:
        os._exit(not (list(savers) == [] and savers.current() is not saver))
    assert os.waitpid(child, 0)[1] == 0


def test_process_exits_cleanly_with_active_and_paused_tags(device: str) -> None:
    code = f"""
import memsaver.compat, torch
memsaver.compat.install("torch_memory_saver", "vllm.device_allocator.cumem")
from torch_memory_saver import torch_memory_saver, configure_subprocess
from vllm.device_allocator.cumem import CuMemAllocator
torch_memory_saver.hook_mode = "torch"
with torch_memory_saver.region("a", enable_cpu_backup=True):
    a = torch.ones(100000, device={device!r})
with CuMemAllocator.get_instance().use_memory_pool("weights"):
    b = torch.ones(100000, device={device!r})
if {device!r} != "cpu":
    graph = torch.cuda.CUDAGraph()
    with torch_memory_saver.cuda_graph(graph, tag="graph"):
        c = a * 2
    other = torch.cuda.CUDAGraph()
    with CuMemAllocator.get_instance().cudagraph_pool() as pool, torch.cuda.graph(other, pool=pool):
        f = b * 2
torch_memory_saver.pause()
CuMemAllocator.get_instance().sleep(("weights", "cudagraph"))
saver = memsaver.MemorySaver({device!r})
d, e = (saver.empty(100000, tag=tag, content="host") for tag in ("active", "asleep"))
saver.pause("asleep")
cycle = [a, b, d, e]; cycle.append(cycle)
print("end")
"""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    assert python(code, **hidden) == "end"


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(GRAPH_REGISTER, "0")  # install sets it
    assert not set(NAMES) & set(sys.modules)
    yield
    compat.uninstall()
    sys.modules.pop(NAMES[0], None)


@pytest.mark.usefixtures("clean")
def test_install_replaces_modules_until_uninstall() -> None:
    ours = [
        importlib.import_module(f"memsaver.compat.{name}")
        for name in ("torch_memory_saver", "vllm")
    ]
    assert not set(NAMES) & set(sys.modules), "installed by an import"
    compat.install(*NAMES)
    compat.install("torch_memory_saver")
    assert [importlib.import_module(name) for name in NAMES] == ours
    module: Any = ours[0]
    assert isinstance(module.torch_memory_saver, module.TorchMemorySaver)
    compat.uninstall("torch_memory_saver")
    assert set(NAMES) & set(sys.modules) == {"vllm.device_allocator.cumem"}
    compat.uninstall()
    compat.uninstall()
    assert not set(NAMES) & set(sys.modules)


@pytest.mark.usefixtures("clean")
def test_install_is_refused_after_import_of_real_module() -> None:
    real = ModuleType("torch_memory_saver")
    sys.modules["torch_memory_saver"] = real
    with pytest.raises(
        StateError, match="torch_memory_saver is imported already.*at the top of the program"
    ):
        compat.install("vllm.device_allocator.cumem", "torch_memory_saver")
    compat.uninstall()
    assert sys.modules["torch_memory_saver"] is real
    assert "vllm.device_allocator.cumem" not in sys.modules


@pytest.mark.parametrize("names", [(), ("torch",), ("torch_memory_saver", "vllm")])
def test_install_refuses_unknown_names(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"one or more of 'torch_memory_saver', .* not \["):
        compat.install(*names)
    assert "torch_memory_saver" not in sys.modules
