"""Find the compiled C parts, or compile them: the shim, and the hook into torch's CPU allocator.

A library carries the digest of its sources in its name (``sources.py``). A wheel brings the shim
beside the sources; otherwise each library is compiled on first use into the user's cache.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from memsaver.errors import CompilerError
from memsaver.native.sources import HERE, SHIM_FLAGS, SHIM_SOURCES, library_name, shim_name
from memsaver.system.files import cache_dir


def find_compiler(names: Sequence[str], purpose: str) -> str:
    """Return the path of the first of ``names`` that is installed, or raise ``CompilerError``."""
    for name in names:
        if path := shutil.which(name):
            return path
    raise CompilerError(f"{purpose}, and no compiler was found (looked for {', '.join(names)})")


def build_library(
    stem: str, sources: Sequence[Path], flags: Sequence[str], compilers: Sequence[str], purpose: str
) -> Path:
    """Return the library of these sources from the cache, where it is compiled on first use.

    Safe under concurrent builds: the library appears under its name when it is complete. The first
    of ``compilers`` that is installed is used. ``purpose`` begins the error messages: it tells why
    the library is compiled, and the remedy.

    Raises:
        CompilerError: No compiler is installed, it failed, or the cache cannot be written.
    """
    target = cache_dir() / library_name(stem, sources, flags)
    if target.exists():
        return target
    compiler = find_compiler(compilers, purpose)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = Path(folder) / target.name
            command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(built)]
            command += [*map(str, sources), *flags]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode:
                raise CompilerError(f"{' '.join(command)} failed:\n{result.stderr}")
            os.replace(built, target)
    except OSError as error:
        raise CompilerError(
            f"{purpose}, and the cache {target.parent} cannot be written ({error.strerror}); "
            "set XDG_CACHE_HOME to a folder that can"
        ) from error
    return target


def shim_library() -> Path:
    """Return the shim that the wheel brought, or the one compiled from a source tree."""
    packaged = HERE / shim_name()
    if packaged.exists():
        return packaged
    purpose = "a source tree compiles its C shim on first use (install gcc, or memsaver's wheel)"
    return build_library("shim", SHIM_SOURCES, SHIM_FLAGS, ("cc", "gcc", "clang"), purpose)


def cpu_hook_library() -> Path:
    """Return the hook into ``c10::SetCPUAllocator``, compiled for the torch that is imported."""
    import torch

    root = Path(torch.__file__).parent
    flags = ["-std=c++17", f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    flags += [f"-DMEMSAVER_TORCH={torch.__version__}"]  # another torch, another library
    purpose = "region() on the CPU compiles a hook for torch on first use (install g++; or empty())"
    compilers = ("c++", "g++", "clang++")
    return build_library("cpu_hook", [HERE / "cpu_hook.cpp"], flags, compilers, purpose)
