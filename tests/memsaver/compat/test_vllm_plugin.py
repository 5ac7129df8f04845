"""The plugin for vLLM's processes, which VLLM_PLUGINS enables.

The packages are stand-ins with the files of 0.24.0 and 0.33.0 that the plugin touches.
"""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.helpers.peers import Peer

ALLOCATOR = "class CuMemAllocator: own = True\n"
PLACES = """
def get_mem_allocator_instance():
    from vllm.device_allocator.cumem import CuMemAllocator
    return CuMemAllocator
"""
# As in 0.33.0, without its log.
BACKENDS = """
class CuMemBackend: pass
class SleepModeBackendFactory:
    _registry = {}
    @classmethod
    def register_backend(cls, name, module_path, class_name):
        if name in cls._registry:
            raise ValueError(f"Sleep-mode backend '{name}' is already registered.")
        cls._registry[name] = (module_path, class_name)
    @classmethod
    def get_backend_class(cls, name):
        if name not in cls._registry:
            raise ValueError(f"Unsupported sleep-mode backend '{name}'.")
        return cls._registry[name]
"""
LOAD = """
import importlib, importlib.metadata, importlib.util
from memsaver.compat.vllm_plugin import register
for _ in range(2):
    register()
from vllm.device_allocator import get_mem_allocator_instance
say("theirs" if hasattr(get_mem_allocator_instance(), "own") else "ours")
from memsaver.memory import torch_allocator
say("held" if torch_allocator._workspaces_in_graphs else "not held")
if importlib.util.find_spec("vllm.device_allocator.sleep_mode_backend"):
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory as factory
    say(str(factory._registry))
"""


@pytest.fixture(params=["0.24.0", "0.33.0"])
def version(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    folder = tmp_path / "vllm" / "device_allocator"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").write_text(PLACES)
    (folder / "cumem.py").write_text(ALLOCATOR)
    if request.param == "0.33.0":
        (folder / "sleep_mode_backend.py").write_text(BACKENDS)
    return request.param


def run(code: str, path: Path, plugins: str | None) -> list[str]:
    """Return what the code says in a process of its own, or its exception."""
    peer = Peer(_run, code, path, plugins)
    lines = peer.hear()
    peer.bury()
    return lines


def _run(pipe: Connection, code: str, path: Path, plugins: str | None) -> None:
    sys.path.insert(0, str(path))
    os.environ.pop("VLLM_PLUGINS", None)
    if plugins is not None:
        os.environ["VLLM_PLUGINS"] = plugins
    lines = list[str]()
    try:
        exec(code, {"say": lines.append})
    except Exception as error:
        lines = [f"{type(error).__name__}: {error}"]
    pipe.send(lines)


@pytest.mark.parametrize("plugins", [None, "", "lora_filesystem_resolver"])
def test_plugin_changes_nothing_unless_named(
    version: str, tmp_path: Path, plugins: str | None
) -> None:
    lines = run(LOAD, tmp_path, plugins)
    assert lines[:2] == ["theirs", "not held"] and lines[2:] in ([], ["{}"])


@pytest.mark.parametrize("plugins", ["memsaver", "other,memsaver"])
def test_plugin_installs_allocator_when_named(version: str, tmp_path: Path, plugins: str) -> None:
    lines = run(LOAD, tmp_path, plugins)
    assert lines[:2] == ["ours", "held"]
    if version == "0.33.0":
        place = "('vllm.device_allocator.sleep_mode_backend', 'CuMemBackend')"
        assert lines[2] == f"{{'memsaver': {place}}}"


def test_plugin_fails_after_import_of_real_module(version: str, tmp_path: Path) -> None:
    (line,) = run("import vllm.device_allocator.cumem\n" + LOAD, tmp_path, "memsaver")
    assert "StateError" in line and "imported already" in line
