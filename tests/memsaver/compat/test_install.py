"""The aliases: opt-in, refused when they come too late, and undone."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from memsaver import compat
from memsaver.errors import StateError
from tests.helpers.memsaver.savers import ROOT, python

NAMES = ("torch_memory_saver", "vllm.device_allocator.cumem")


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    assert not set(NAMES) & set(sys.modules)
    yield
    compat.uninstall()
    for name in NAMES:
        sys.modules.pop(name, None)


def test_the_modules_are_found_under_the_other_names() -> None:
    compat.install(*NAMES)
    compat.install("torch_memory_saver")
    from memsaver.compat import torch_memory_saver as ours

    found = importlib.import_module("torch_memory_saver")
    assert found is ours and isinstance(found.torch_memory_saver, found.TorchMemorySaver)
    assert callable(found.configure_subprocess)
    assert importlib.import_module("vllm.device_allocator.cumem").CuMemAllocator.default_tag == "default"


def test_undo() -> None:
    compat.install(*NAMES)
    for module in ("torch_memory_saver", "vllm"):
        importlib.import_module(f"memsaver.compat.{module}")  # which installs nothing by itself
    compat.uninstall("torch_memory_saver")
    assert set(NAMES) & set(sys.modules) == {"vllm.device_allocator.cumem"}
    compat.uninstall()
    compat.uninstall()
    assert not set(NAMES) & set(sys.modules)


def test_too_late() -> None:
    real = ModuleType("torch_memory_saver")
    sys.modules["torch_memory_saver"] = real
    with pytest.raises(StateError, match="torch_memory_saver is imported already.*at the top of the program"):
        compat.install("vllm.device_allocator.cumem", "torch_memory_saver")
    compat.uninstall()
    assert sys.modules["torch_memory_saver"] is real
    assert "vllm.device_allocator.cumem" not in sys.modules


@pytest.mark.parametrize("names", [(), ("torch",), ("torch_memory_saver", "vllm")])
def test_unknown_names(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"one or more of 'torch_memory_saver', .* not \["):
        compat.install(*names)
    assert "torch_memory_saver" not in sys.modules


def test_every_python_of_an_environment(tmp_path: Path) -> None:
    """Python runs a sitecustomize.py that it finds on its path: for engines that are started by a command."""
    (tmp_path / "sitecustomize.py").write_text(
        "import memsaver.compat\nmemsaver.compat.install('torch_memory_saver')\n"
    )
    code = "from torch_memory_saver import torch_memory_saver; print(type(torch_memory_saver).__module__)"
    assert python(code, PYTHONPATH=f"{tmp_path}:{ROOT}") == "memsaver.compat.torch_memory_saver"
