"""Only here for the C shim: a plain shared library (no Python module inside) that travels with the package."""

from glob import glob

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "memsaver.allocator._shim",
            sorted(glob("memsaver/allocator/*.c")),
            depends=sorted(glob("memsaver/allocator/*.h")),
            libraries=["pthread"],
        )
    ]
)
