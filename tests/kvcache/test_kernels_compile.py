"""The kernels over rows compile without fp8 hardware, into arithmetic that is rounded as the reference's."""

from tests.helpers.compiler import compile_alone

COMPILE = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvcache.ops import kv_write_triton, move_triton, quant_triton

FP8 = dict(HEADS=8, K_DIM=128, V_DIM=64, BLOCK=1024, MANTISSA=3, BIAS=7, LIMIT=448.0)
PLAIN = dict(HEADS=8, K_DIM=128, V_DIM=0, BLOCK=1024, MANTISSA=0, BIAS=0, LIMIT=0.0, inverse_scales=None)
KERNELS = [
    (kv_write_triton._set_kernel, "*bf16", FP8),
    (kv_write_triton._set_kernel, "*u8", PLAIN),
    (kv_write_triton._set_fp4_kernel, "*bf16", dict(HEADS=8, K_DIM=128, V_DIM=64, BLOCKS=64)),
    (quant_triton._read_fp8_kernel, "*bf16", dict(HEADS=8, DIM=128, BLOCK=1024, LIMIT=65504.0, MANTISSA=3)),
    (move_triton._stage_kernel, "*i64", dict(LAYERS=3, WIDTH=288, BLOCK=512, ROWS=16)),
    (move_triton._move_kernel, "*i64", dict(WIDTH=288, BLOCK=512, ROWS=2)),
    (quant_triton._read_fp4_kernel, "*fp16", dict(HEADS=8, DIM=128, BLOCKS=64, LIMIT=65504.0)),
]
for kernel, element, constants in KERNELS:
    types = {name: element for name in ("k", "v", "out", "part", "staged")}
    types |= {"loc": "*i64", "tgt": "*i64", "src": "*i64", "scale": "*fp32", "inverse_scales": "*fp32"}
    signature = {}
    for name in kernel.arg_names:
        number = "i64" if "stride" in name or name.endswith(("_slot", "_head", "count")) else "*u8"
        signature[name] = "constexpr" if name in constants else types.get(name, number)
    ptx = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 80, 32)).asm["ptx"]
    print(kernel.__name__, len(re.findall(r"\\bfma\\.|\\.ftz|e4m3|e5m2", ptx)))
"""


def test_kernels_compile_for_ampere_without_fused_or_flushed_arithmetic() -> None:
    assert [line.split()[1] for line in compile_alone(COMPILE).splitlines()] == ["0"] * 7
