"""Compile the C parts: the shim (as setup.py does), and the hook into torch's CPU allocator."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from memsaver.errors import CompilerError

HERE = Path(__file__).parent


def cache_dir() -> Path:
    """Returns where libraries built on first use are kept (XDG cache of the user)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memsaver"


def find_compiler(*names: str) -> str:
    for name in names:
        if path := shutil.which(name):
            return path
    raise CompilerError(
        f"no C/C++ compiler found (looked for {', '.join(names)}); "
        "install gcc and g++, or use wheels"
    )


def build_library(
    name: str, sources: list[Path], compilers: tuple[str, ...], flags: list[str], version: str
) -> Path:
    """Compile into the cache, keyed by text, headers, flags and ``version``; safe under races."""
    text = b"".join(path.read_bytes() for path in [*sources, *sorted(HERE.glob("*.h"))])
    digest = hashlib.sha256(text + " ".join(flags).encode() + version.encode()).hexdigest()[:16]
    target = cache_dir() / f"{name}-{digest}.so"
    if target.exists():
        return target
    compiler = find_compiler(*compilers)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(built)]
        command += [*map(str, sources), *flags]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise CompilerError(f"{' '.join(command)} failed:\n{result.stderr}")
        os.replace(built, target)
    return target


def shim_library() -> Path:
    """The shim that came with the package, or one built on first use in a source tree."""
    installed = sorted(HERE.glob("_shim*.so"))
    if installed and all(
        path.stat().st_mtime <= installed[-1].stat().st_mtime for path in HERE.glob("*.[ch]")
    ):
        return installed[-1]
    return build_library(
        "shim", sorted(HERE.glob("*.c")), ("cc", "gcc", "clang"), ["-lpthread"], ""
    )


def cpu_hook_library() -> Path:
    """The hook into ``c10::SetCPUAllocator``, for the torch that is imported."""
    import torch

    root = Path(torch.__file__).parent
    flags = ["-std=c++17", f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    return build_library(
        "cpu_hook", [HERE / "cpu_hook.cpp"], ("c++", "g++", "clang++"), flags, torch.__version__
    )
