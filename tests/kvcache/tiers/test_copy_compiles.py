"""The copy kernel compiles for a GPU, with accesses as wide as their unit and no spills."""

from tests.helpers.compiler import compile_alone

COMPILE = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvcache.ops import host_copy_triton as ops

kernel = ops.copy_rows_kernel
for unit in (16, 2):
    for to_host in (True, False):
        constants = dict(UNIT=unit, WORD=ops.WORDS[unit], VECTOR=2 if unit == 16 else 1, BLOCK=ops.BLOCK)
        constants["TO_HOST"] = to_host
        types = dict.fromkeys(("table", "host_rows", "device_slots"), "*i64") | dict.fromkeys(constants, "constexpr")
        signature = {name: types.get(name, "i32") for name in kernel.arg_names}
        source = ASTSource(kernel, signature, constants)
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": ops.WARPS}).asm["ptx"]
        print(unit, ".local" in ptx, *sorted(set(re.findall(r"st\\.global[.\\w]*", ptx))))
"""


def test_the_kernel_stores_whole_units() -> None:
    assert compile_alone(COMPILE).splitlines() == ["16 False st.global.v2.b64"] * 2 + ["2 False st.global.b16"] * 2
