"""Imports, and kernels compiled for Hopper, in one separate process that needs no GPU.

Triton's interpreter, in which other tests run kernels, accepts more than the compiler.
"""

import pytest

from tests.helpers.case_selection import some
from tests.helpers.triton_compiler import compile_alone

# KV rows: (dim, value_dim, queries per KV head), dtype, whether products are wide, and the bits of
# an fp8 mantissa, negative if products have the queries' dtype. Attention is latent if dim differs
# from value_dim.
PLAIN, LATENT = (64, 64, 4), (576, 512, 16)
KINDS = [
    ("*bf16", False, 0),
    ("*fp32", True, 0),
    ("*bf16", False, 3),
    ("*bf16", False, -3),
    ("*fp16", False, -2),
]
ATTENTION = some(
    (PLAIN, "*bf16", False, 0),
    (LATENT, "*bf16", False, 3),
    whole=[(dims, *kind) for dims in (PLAIN, (128, 128, 4), LATENT) for kind in KINDS],
)
DTYPES = some("*bf16", whole=["*fp32"])  # of the fused kernels

CODE = """
import sys
import rollout
print("heavy", *{"ray", "transformers"} & set(sys.modules))

import re, subprocess, tempfile
import triton
from kvcache.ops import rotary
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rollout.ops import experts, routing, row_wise as fused, token_sampling as sampling
from rollout.ops import attention_kernels as kernels
from trainer_bridge.ops import decoder_ops, token_scores

OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")

def compiled(kernel, constants, types, options, aligned=()):
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    pointers = [n for n in names if aligned and signature[n][0] == "*"]
    sixteens = [i for i, n in enumerate(names) if n in aligned or n in pointers]
    attrs = {(i,): [["tt.divisibility", 16]] for i in sixteens}
    source = ASTSource(kernel, signature, constants, attrs)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)

def spilled(binary):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        tool = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        report = subprocess.run(tool, capture_output=True, text=True).stdout
        return re.search(r"STACK:(\\d+)", report)[1]

def attention(kernel, dtype, fp8, settings):
    options = {name: value for name, value in settings.items() if name in OPTIONS}
    constants = {name: value for name, value in settings.items() if name not in OPTIONS}
    constants |= {name: None for name in ("scales",) if name in kernel.arg_names and not fp8}
    types = {"scale": "fp32", "table": "*i32", "meta": "*i32", "mapping": "*i64",
             **dict.fromkeys(["scales", "part", "state", "lse"], "*fp32"),
             **dict.fromkeys(["q", "out"], dtype),
             **dict.fromkeys(["k_cache", "v_cache"], "*u8" if fp8 else dtype)}
    strides = [n for n in kernel.arg_names if "stride" in n and n != "stride_meta"]
    made = compiled(kernel, constants, types, options, strides)
    print("attention", kernel.__name__, made.metadata.shared, spilled(made.asm["cubin"]))

for (dim, value_dim, group), dtype, wide, fp8 in ATTENTION:
    latent = dim != value_dim
    cut = kernels.Cut(group, dim, value_dim, wide, latent, fp8)
    attention(kernels.decode_split, dtype, fp8, kernels.decode_blocks(cut) | dict(mapping=None))
    settings = kernels.prefill_blocks(cut) | dict(mapping=None, lse=None)
    attention(kernels.prefill, dtype, fp8, settings)
    if not fp8:
        settings = dict(VALUE_DIM=value_dim, BLOCK_V=value_dim, WINDOWED=True)
        settings["num_warps"] = kernels.combine_warps(value_dim)
        attention(kernels.decode_combine, dtype, fp8, settings)
    if not latent and not fp8:
        attention(kernels.decode_split, dtype, fp8, kernels.decode_blocks(cut, windowed=True))
        attention(kernels.prefill, dtype, fp8, kernels.prefill_blocks(cut, windowed=True))

FP32 = "cos sin temperature falls chosen peaks masses logprobs host_logprobs".split()
INT64 = "target positions slots counters tokens host_tokens last_tokens turn".split()
ELEMENTS = "x residual weight out total gates ups grad q k v k_cache v_cache logits".split()
HEADS = dict(HEADS=14, KV_HEADS=2, DIM=64, VALUE_DIM=64, BLOCK_HEADS=16, BLOCK_V=64)
KEYS = HEADS | dict(VALUE_DIM=0, BLOCK_V=0)
FUSED = [
    (fused._rms_norm, dict(SIZE=896, BLOCK=1024, ROWS=1, ADD=True, ZERO_CENTRED=False)),
    (fused._rms_norm, dict(SIZE=64, BLOCK=64, ROWS=16, ADD=False, ZERO_CENTRED=True)),
    (fused._silu_mul, dict(BLOCK=1024)),
    (rotary._rotate_and_store, dict(HALF=32, BLOCK_HALF=32, BLOCK_REST=1, **HEADS)),
    (rotary._rotate_and_store, dict(HALF=8, BLOCK_HALF=8, BLOCK_REST=64, **HEADS)),
    (rotary._rotate_and_store, dict(HALF=32, BLOCK_HALF=32, BLOCK_REST=1) | KEYS),
    (rotary._rotate_heads, dict(HALF=32, INTERLEAVED=True, BLOCK_HEADS=16, BLOCK_HALF=32)),
    (sampling._reduce_blocks, dict(BLOCK=2048)),
    (sampling._choose, dict(COUNTERS=3, BLOCK=2048, BLOCKS=128)),
    (sampling._score, dict(BLOCKS=128)),
    (sampling._deliver, dict(BLOCK=1024)),
    (sampling._end_step, dict(COUNTERS=3, SLOTS=3, BLOCK=1024)),
    (token_scores._reduce, dict(BLOCK=2048)),
    (token_scores._combine, dict(BLOCKS=128)),
    (decoder_ops._norm_gradients, dict(SIZE=896, BLOCK=1024, ROWS=4)),
    (decoder_ops._norm_gradients, dict(SIZE=8192, BLOCK=8192, ROWS=1)),
    (decoder_ops._gated_gradient, dict(BLOCK=1024)),
    (decoder_ops._rotate, dict(HALF=64, BLOCK=64, HEADS=32, BACK=True)),
]
for kernel, constants in FUSED:
    for element in DTYPES:
        types = {"eps": "fp32", "greedy": "*i1", **dict.fromkeys(FP32, "*fp32"),
                 **dict.fromkeys(INT64, "*i64"), **dict.fromkeys(ELEMENTS, element)}
        scores = kernel.__module__ == "trainer_bridge.ops.token_scores"
        types |= dict(temperature="fp32", out="*fp32") if scores else {}
        if kernel.__module__ == "trainer_bridge.ops.decoder_ops":
            types |= dict(sums="*fp32", cos=element, sin=element, tokens="i32")
        types |= {"rows": "*i64"} if kernel in (sampling._score, sampling._end_step) else {}
        sampler = scores or kernel.__module__ == "rollout.ops.token_sampling"
        options = {} if sampler else {"enable_fp_fusion": False}
        print("fused", kernel.__name__, compiled(kernel, constants, types, options).metadata.shared)

SIZES = dict(CHUNK=32, ROWS=32, EXPERTS=32)
PLACE = SIZES | dict(BLOCK_M=16, BLOCKS=8)
SUMS = dict(TOP_K=2, BLOCK=64)
CHOOSE = dict(TOP_K=8, ROWS=4, EXPERTS=128, CHOICES=8)
TILE = dict(TOP_K=2, EVEN=True, WIDE=False, BLOCK_M=16, BLOCK_N=32, BLOCK_K=128, GROUP=1)
for kernel, constants in (
    (routing._choose, CHOOSE | dict(COMPARED=False, SIGMOID=False, NORMALISE=True)),
    (routing._choose, CHOOSE | dict(COMPARED=True, SIGMOID=True, NORMALISE=True)),
    (experts._product, TILE | dict(GATE=True, KEEP=True)),
    (experts._count, SIZES),
    (experts._place, PLACE | dict(FEW=0)),
    (experts._place, PLACE | dict(FEW=256)),
    (experts._sum, SUMS | dict(ALL=True)),
    (experts._sum, SUMS | dict(ALL=False)),
):
    types = dict(ids="*i64", weights="*fp32", compared="*fp32", scale="fp32")
    types |= dict.fromkeys(("products", "out", "logits", "x", "weight", "kept"), "*bf16")
    types |= dict.fromkeys(("counts", "order", "blocks"), "*i32")
    compiled(kernel, constants, types, None)
    print("experts", kernel.fn.__name__)
"""


@pytest.fixture(scope="module")
def printed() -> list[list[str]]:
    text = compile_alone(f"ATTENTION, DTYPES = {ATTENTION!r}, {DTYPES!r}\n{CODE}")
    print(text)
    return [line.split() for line in text.splitlines()]


def test_importing_rollout_needs_neither_ray_nor_transformers(printed: list[list[str]]) -> None:
    assert printed[0] == ["heavy"]


def test_attention_kernels_fit_and_spill_no_register(printed: list[list[str]]) -> None:
    """Check that several programs fit on a multiprocessor.

    The limit allows for the few registers that spill with heads of 64 elements, where two programs
    fit only with half of the registers, and for differences between compiler versions.
    """
    lines = [line for line in printed if line[0] == "attention"]
    assert {name for _, name, *_ in lines} == {"decode_split", "decode_combine", "prefill"}
    assert max(int(line[2]) for line in lines) < 110 * 1024
    assert max(int(line[3]) for line in lines) <= 192


def test_fused_kernels_fit_into_shared_memory(printed: list[list[str]]) -> None:
    shared = [int(line[2]) for line in printed if line[0] == "fused"]
    assert len(shared) == 18 * len(DTYPES) and max(shared) < 48 * 1024


def test_kernels_of_experts_compile(printed: list[list[str]]) -> None:
    # The interpreter accepts code that the compiler rejects, such as a loop that changes the type
    # of a variable.
    kernels = [line[1] for line in printed if line[0] == "experts"]
    assert kernels == [
        *("_choose", "_choose", "_product", "_count", "_place", "_place", "_sum", "_sum")
    ]
