"""Compile the C shim, a plain shared library that any Python loads by ctypes, into the wheel."""

import re
import runpy
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = runpy.run_path("memsaver/native/sources.py")


class BuildShim(build_ext):
    """Build that names the shim by the digest of its sources, as the package looks for it."""

    def get_ext_filename(self, fullname: str) -> str:
        return "/".join([*fullname.split(".")[:-1], SOURCES["shim_name"]()])


class OneWheel(bdist_wheel):
    """Wheel for every Python 3: no file in it depends on the version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag, with the newest glibc of which the shim needs a symbol (manylinux_2_34).

        An editable install asks for the tag before the shim is built.
        """
        platform = super().get_tag()[2]
        built = Path(self.get_finalized_command("build_ext").build_lib).glob("memsaver/native/*.so")
        symbols = re.findall(rb"GLIBC_(\d+)\.(\d+)", b"".join(path.read_bytes() for path in built))
        if symbols:
            major, minor = max((int(major), int(minor)) for major, minor in symbols)
            platform = platform.replace("linux", f"manylinux_{major}_{minor}", 1)
        return "py3", "none", platform


shim = Extension(
    "memsaver.native.shim_library",
    sorted(f"memsaver/native/{path.name}" for path in SOURCES["SHIM_SOURCES"]),
    depends=["memsaver/native/shim.h"],
    extra_link_args=SOURCES["SHIM_FLAGS"],
)
commands: dict[str, Any] = {"build_ext": BuildShim, "bdist_wheel": OneWheel}
setup(ext_modules=[shim], cmdclass=commands)
