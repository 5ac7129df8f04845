"""The fused kernels compile for Hopper: the interpreter accepts more than the compiler, which needs no GPU."""

from tests.helpers.compiler import compile_alone

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rollout.ops import activation_triton, norm_triton, rotary_triton, sample_triton

FP32 = ["cos", "sin", "temperature", "peaks", "masses", "logprobs"]
INT64 = ["positions", "slots", "counters", "tokens"]
ELEMENTS = ["x", "residual", "weight", "out", "total", "gate_up", "q", "k", "v", "k_cache", "v_cache", "logits"]
KEYS_ONLY = dict(VALUE_DIM=0, BLOCK_V=0)
HEADS = dict(HEADS=14, KV_HEADS=2, DIM=64, VALUE_DIM=64, BLOCK_HEADS=16, BLOCK_V=64)
KERNELS = [
    (norm_triton._rms_norm, dict(SIZE=896, BLOCK=1024, ROWS=1, ADD=True, ZERO_CENTRED=False)),
    (norm_triton._rms_norm, dict(SIZE=64, BLOCK=64, ROWS=16, ADD=False, ZERO_CENTRED=True)),
    (activation_triton._silu_mul, dict(BLOCK=1024)),
    (rotary_triton._rotate_and_store, dict(HALF=32, BLOCK_HALF=32, BLOCK_REST=1, **HEADS)),
    (rotary_triton._rotate_and_store, dict(HALF=8, BLOCK_HALF=8, BLOCK_REST=64, **HEADS)),
    (rotary_triton._rotate_and_store, dict(HALF=32, BLOCK_HALF=32, BLOCK_REST=1) | HEADS | KEYS_ONLY),
    (rotary_triton._rotate_heads, dict(HALF=32, INTERLEAVED=True, BLOCK_HEADS=16, BLOCK_HALF=32)),
    (sample_triton._reduce_blocks, dict(BLOCK=2048)),
    (sample_triton._choose, dict(COUNTERS=3, BLOCK=2048, BLOCKS=128)),
]
for kernel, constants in KERNELS:
    for element in ("*bf16", "*fp32"):
        types = {
            "eps": "fp32", "greedy": "*i1", **dict.fromkeys(FP32, "*fp32"), **dict.fromkeys(INT64, "*i64"),
            **dict.fromkeys(ELEMENTS, element),
        }
        signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
        options = {} if kernel.__module__ == "rollout.ops.sample_triton" else {"enable_fp_fusion": False}
        source = ASTSource(kernel, signature, constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        print(kernel.__name__, element, compiled.metadata.shared, compiled.metadata.num_warps)
"""


def test_kernels_compile_for_hopper() -> None:
    shared = [int(line.split()[2]) for line in compile_alone(COMPILE).splitlines()]
    assert len(shared) == 18 and max(shared) < 48 * 1024
