"""fp8 and FP4 latent rows driven by the engine: what it answers is exactly what rounded rows give."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache import MLACacheConfig, MLATokenToKVPool, MLATokenToKVPoolFP4
from kvcache.config import FP4_DTYPE, kv_dtype
from rollout import Engine
from tests.helpers.models import MLA, save_tiny
from tests.rollout.test_quantised_cache import (
    DTYPES,
    PROMPTS,
    answers,
    assert_agreement,
    assert_poison_changes_nothing,
    assert_same,
)

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim")  # Triton's interpreter, `tl.range`
RANK, ROPE = 32, 16


def engine_of(path: Path, device: str, dtype: str, **config: Any) -> Engine:
    if not (path / "config.json").is_file():
        save_tiny(path, "deepseek_v3", **{**MLA, "kv_lora_rank": RANK, "qk_rope_head_dim": ROPE})
    return Engine.from_pretrained(path, device=device, kv_cache_dtype=dtype, **{"kv_tokens": 512, **config})


def round_rows(engine: Engine, dtype: str, scale: float = 1.0) -> None:
    """Rows of a plain engine go through a quantised pool, and are stored plainly after."""
    plain = engine.kv_pool
    assert isinstance(plain, MLATokenToKVPool)
    stored = kv_dtype(dtype, torch.float32)
    config = MLACacheConfig(
        num_layers=2, size=512, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, dtype=stored, device=plain.device,
        compute_dtype=torch.float32,
    )  # fmt: skip
    pool = (MLATokenToKVPoolFP4 if stored == FP4_DTYPE else MLATokenToKVPool)(config)
    if scale != 1:
        for layer in range(2):
            pool.set_scales(layer, scale)
    write = plain.set_mla_kv_buffer

    def write_rounded(layer: int, loc: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor) -> None:
        pool.set_mla_kv_buffer(layer, loc, latent, rope)
        rows, _ = pool.get_rows(layer, loc)
        write(layer, loc, rows[..., :RANK], rows[..., RANK:])

    plain.set_mla_kv_buffer = write_rounded  # type: ignore[method-assign]


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_an_engine_with_rounded_rows(tmp_path: Path, dtype: str, device: str) -> None:
    """Prompts in chunks beside decoding; on a GPU in CUDA graphs (fp8) and without (FP4). The same after a pause."""
    engine = engine_of(tmp_path, device, dtype, max_prefill_tokens=24)
    plain = engine_of(tmp_path, device, "auto", max_prefill_tokens=24, cuda_graphs=False)  # they keep what they call
    round_rows(plain, dtype)
    out = answers(engine)
    assert_same(out, answers(plain))
    engine.sleep(tags=["kv_cache"])
    assert engine.report().tags["kv_cache"].committed_bytes == 0
    engine.wake_up()
    assert_same(answers(engine), out)
    engine.check_integrity()


@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_equals_an_engine_with_rounded_rows(tmp_path: Path, dtype: str) -> None:
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    engine = engine_of(tmp_path, device, dtype, attention="triton")
    plain = engine_of(tmp_path, "cpu", "auto", attention="torch")
    scale = 1.0
    if dtype != "fp4_e2m1":
        scale = 0.1
        for layer in range(2):
            engine.kv_pool.set_scales(layer, scale)
    round_rows(plain, dtype, scale)
    assert_same(answers(engine, PROMPTS[:2]), answers(plain, PROMPTS[:2]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_poisoned_free_slots_change_nothing(tmp_path: Path, dtype: str, device: str) -> None:
    # No prefix cache: it would hold tokens that were computed.
    assert_poison_changes_nothing(engine_of(tmp_path, device, dtype, max_prefill_tokens=24, prefix_cache=False))


def test_bytes_of_a_token(tmp_path: Path) -> None:
    sizes = {dtype: engine_of(tmp_path, "cpu", dtype).kv_pool.bytes_per_token for dtype in ("auto", *DTYPES)}
    assert sizes == {"auto": 2 * 48 * 4, "fp8_e4m3": 2 * 48, "fp8_e5m2": 2 * 48, "fp4_e2m1": 2 * 27}


# mean |log-probability gap| at most, share of equal greedy tokens at least
BOUNDS = {"fp8_e4m3": (0.12, 0.8), "fp8_e5m2": (0.25, 0.65), "fp4_e2m1": (0.6, 0.4)}


def test_agreement_with_the_unquantised_engine(tmp_path: Path) -> None:
    assert_agreement(lambda dtype: engine_of(tmp_path, "cpu", dtype, kv_tokens=1024), BOUNDS)


def test_latent_and_rotary_key_must_be_whole_blocks(tmp_path: Path) -> None:
    save_tiny(tmp_path, "deepseek_v3", **MLA)  # 16 + 8
    with pytest.raises(ValueError, match="multiple.* of 16"):
        Engine.from_pretrained(tmp_path, kv_cache_dtype="fp4_e2m1")
