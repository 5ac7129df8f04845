"""The staging kernels compile for a GPU, with accesses as wide as their unit and no spills."""

from tests.helpers.compiler import compile_alone

COMPILE = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvcache.ops import staging_triton as ops

for unit in (16, 2):
    for kernel in (ops.gather_kernel, ops.scatter_kernel):
        constants = dict(K_UNITS=256 // unit, V_UNITS=128 // unit, WORD=ops.WORDS[unit], VECTOR=2 if unit == 16 else 1,
                         COLUMNS=128, CHUNKS=1, BLOCK=1024)
        types = dict(loc="*i64", writers="*i64", k="i64", v="i64", staged="i64") | dict.fromkeys(constants, "constexpr")
        signature = {name: types.get(name, "i32") for name in kernel.arg_names}
        source = ASTSource(kernel, signature, constants)
        ptx = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": ops.WARPS}).asm["ptx"]
        print(unit, ".local" in ptx, *sorted(set(re.findall(r"st\\.global[.\\w]*", ptx))))
"""


def test_kernels_store_whole_units() -> None:
    assert compile_alone(COMPILE).splitlines() == ["16 False st.global.v2.b64"] * 2 + ["2 False st.global.b16"] * 2
