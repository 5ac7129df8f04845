"""The plugin for SGLang's processes, which SGLANG_PLUGINS enables, and its adapter.

The package `sglang` is the stand-in of tests/helpers.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memsaver.compat.savers import Savers
from memsaver.compat.sglang_plugin import SglangAdapter, register

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(ROOT / "tests" / "helpers" / "rollout" / "stand_in_sglang")
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]


def made(enable: bool) -> Any:
    """Create an adapter as SGLang's processes do, after loading the plugins twice."""
    for _ in range(2):
        register()
        importlib.import_module("sglang.srt.plugins").load_plugins()
    name = "sglang.srt.utils.torch_memory_saver_adapter"
    return importlib.import_module(name).TorchMemorySaverAdapter.create(enable=enable)


@pytest.mark.parametrize("plugins", [None, "", "others"])
def test_plugin_changes_nothing_unless_named(
    monkeypatch: pytest.MonkeyPatch, plugins: str | None
) -> None:
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("SGLANG_PLUGINS", plugins)
    assert not isinstance(made(enable=True), SglangAdapter)


def test_plugin_installs_adapter_when_named(
    monkeypatch: pytest.MonkeyPatch, clears_workspaces: Callable[[], bool]
) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "others, memsaver")
    adapter = made(enable=True)
    assert isinstance(adapter, SglangAdapter) and adapter.enabled
    assert not clears_workspaces()
    assert not isinstance(made(enable=False), SglangAdapter)


def test_adapter_supports_calls_of_sglang(savers: Savers, device: str) -> None:
    adapter = SglangAdapter(savers)
    adapter.check_validity("release_memory_occupation")
    with adapter.configure_subprocess(), adapter.region("kv_cache", enable_cpu_backup=False):
        tensor = torch.ones(1 << 16, device=device)
    assert adapter.saver.tag_of(tensor) == "kv_cache:discard"
    before = adapter.saver.report().committed_bytes
    adapter.pause("kv_cache")
    adapter.pause("cuda_graph")  # has no graph
    assert adapter.saver.report().committed_bytes < before
    adapter.resume("kv_cache")
    tensor.fill_(2)


def test_entry_point_is_declared() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points."sglang.srt.plugins"]' in text
    assert 'memsaver = "memsaver.compat.sglang_plugin:register"' in text
