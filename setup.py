"""Only here for the C shim: a plain shared library (no Python module inside) that travels with the package."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "memsaver.allocator._shim",
            ["memsaver/allocator/shim.c"],
            depends=["memsaver/allocator/shim.h"],
            libraries=["pthread"],
        )
    ]
)
