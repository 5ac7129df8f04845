"""Compile the C shim, a plain shared library that any Python loads by ctypes, into the wheel."""

import runpy
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
        return "py3", "none", super().get_tag()[2]


shim = Extension(
    "memsaver.native.shim_library",
    sorted(f"memsaver/native/{path.name}" for path in SOURCES["SHIM_SOURCES"]),
    depends=["memsaver/native/shim.h"],
    extra_link_args=SOURCES["SHIM_FLAGS"],
)
commands: dict[str, Any] = {"build_ext": BuildShim, "bdist_wheel": OneWheel}
setup(ext_modules=[shim], cmdclass=commands)
