"""Compile kernels for a GPU and inspect the PTX.

Kernels over rows must need no fp8 hardware and round as the torch reference does. Kernels that copy
bytes must use accesses as wide as their unit, without spills.
"""

from tests.helpers.triton_compiler import compile_alone

COMPILE = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvcache.ops import kv_write, quant
from kvcache.ops import host_copy, staging_copy

FP8 = dict(HEADS=8, K_DIM=128, V_DIM=64, BLOCK=1024, MANTISSA=3, BIAS=7, LIMIT=448.0)
PLAIN = FP8 | dict(V_DIM=0, MANTISSA=0, BIAS=0, LIMIT=0.0, inverse_scales=None)
READ_FP8 = dict(HEADS=8, DIM=128, BLOCK=1024, LIMIT=65504.0, MANTISSA=3)
KERNELS = [
    (kv_write._set_kernel, "*bf16", FP8),
    (kv_write._set_kernel, "*u8", PLAIN),
    (kv_write._set_fp4_kernel, "*bf16", dict(HEADS=8, K_DIM=128, V_DIM=64, BLOCKS=64)),
    (quant._read_fp8_kernel, "*bf16", READ_FP8),
    (kv_write._stage_kernel, "*i64", dict(LAYERS=3, WIDTH=288, BLOCK=512, ROWS=16)),
    (kv_write._move_kernel, "*i64", dict(WIDTH=288, BLOCK=512, ROWS=2)),
    (quant._read_fp4_kernel, "*fp16", dict(HEADS=8, DIM=128, BLOCKS=64, LIMIT=65504.0)),
]


def compiled(kernel, types, constants, other, arch, **options):
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name) or other(name) for name in kernel.arg_names}
    target = GPUTarget("cuda", arch, 32)
    source = ASTSource(kernel, signature, constants)
    return triton.compile(source, target=target, options=options).asm["ptx"]


for kernel, element, constants in KERNELS:
    types = {name: element for name in ("k", "v", "out", "part", "staged")}
    types |= dict(loc="*i64", tgt="*i64", src="*i64", scale="*fp32", inverse_scales="*fp32")
    number = re.compile("stride|(_slot|_head|count)$")
    other = lambda name: "i64" if number.search(name) else "*u8"
    ptx = compiled(kernel, types, constants, other, 80)
    print("arithmetic", len(re.findall(r"\\bfma\\.|\\.ftz|e4m3|e5m2", ptx)))

for unit in (16, 2):
    sizes = dict(WORD=staging_copy.WORDS[unit], VECTOR=2 if unit == 16 else 1)
    staged = sizes | dict(K_UNITS=256 // unit, V_UNITS=128 // unit)
    staged |= dict(COLUMNS=128, CHUNKS=1, BLOCK=1024)
    copied = sizes | dict(UNIT=unit, BLOCK=host_copy.BLOCK)
    copy = host_copy.copy_rows_kernel, host_copy.WARPS
    types = dict(loc="*i64", writers="*i64", k="i64", v="i64", staged="i64")
    types |= dict.fromkeys(("table", "host_rows", "device_slots"), "*i64")
    for kernel, warps, constants, arch in (
        (staging_copy.copy_kernel, staging_copy.WARPS, staged | dict(TO_PAGES=False), 80),
        (staging_copy.copy_kernel, staging_copy.WARPS, staged | dict(TO_PAGES=True), 80),
        (*copy, copied | dict(TO_HOST=True), 90),
        (*copy, copied | dict(TO_HOST=False), 90),
    ):
        ptx = compiled(kernel, types, constants, lambda name: "i32", arch, num_warps=warps)
        print("unit", unit, ".local" in ptx, *sorted(set(re.findall(r"st\\.global[.\\w]*", ptx))))
"""


def test_kernels_compile_without_fused_or_flushed_arithmetic_and_store_whole_units() -> None:
    assert compile_alone(COMPILE).splitlines() == [
        *["arithmetic 0"] * 7,
        *["unit 16 False st.global.v2.b64"] * 4,
        *["unit 2 False st.global.b16"] * 4,
    ]
