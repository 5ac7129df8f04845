"""Only here for the C shim: a plain shared library (no Python module inside) that travels with the
package.
"""

from glob import glob

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "memsaver.native._shim",
            sorted(glob("memsaver/native/*.c")),
            depends=sorted(glob("memsaver/native/*.h")),
            libraries=["pthread"],
        )
    ]
)
