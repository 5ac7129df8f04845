"""The size of the KV pool: bytes of a rank against engines, shares of a device, and defaults."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout import DoubleSparsity, Engine, EngineConfig, SamplingParams, pool_size
from rollout.model import ModelConfig, load_model_config
from rollout.parallel import TensorParallel
from rollout.pool_size import CPU_TOKENS, PoolSizeError, RankBytes, sized
from tests.helpers.models import MLA, save_tiny

PAGE = 4096  # bytes, of the host backend
LAYERS = ["linear_attention", "full_attention", "linear_attention"]
SLIDING = {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "pages": ("qwen3", {"head_dim": 32}, {}),
    "fp8": ("qwen3", {"head_dim": 32}, {"kv_cache_dtype": "fp8_e4m3"}),
    "fp4": ("qwen3", {"head_dim": 32}, {"kv_cache_dtype": "fp4_e2m1"}),
    "labels": (
        "qwen2",
        {},
        {"double_sparsity": DoubleSparsity(heavy_channel_num=3, heavy_token_num=8)},
    ),
    "window": ("mistral", {"sliding_window": 8}, {}),
    "pools": ("qwen2", SLIDING, {"max_running": 3}),
    "latent": ("deepseek_v3", MLA, {}),
    "states": ("qwen3_next", {"layer_types": LAYERS, "num_hidden_layers": 3}, {}),
    "experts": ("qwen3_moe", {"num_experts": 16, "num_experts_per_tok": 4}, {}),
}
Saved = Callable[[str], tuple[Path, EngineConfig]]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """Return a function that saves a model of a kind, with the configuration of its engine."""

    def save(name: str) -> tuple[Path, EngineConfig]:
        kind, overrides, fields = KINDS[name]
        save_tiny(tmp_path / name, kind, **overrides)
        return tmp_path / name, EngineConfig(page_size=4, max_context_len=64, **fields)

    return save


@pytest.mark.parametrize("name", KINDS)
def test_bytes_of_a_rank_equal_the_tags_of_its_engine(name: str, saved: Saved) -> None:
    path, config = saved(name)
    for tokens in (64, 1028):
        fields = {**KINDS[name][2], "page_size": 4, "max_context_len": 64, "kv_tokens": tokens}
        engine = Engine.from_pretrained(path, dtype=torch.bfloat16, load_weights=False, **fields)
        rank = RankBytes(engine.model, config, torch.bfloat16)
        tags = engine.saver.report().tags
        assert rank.weights == tags["weights"].live_bytes
        # A pool per kind of layer, and states in several tensors, begin at pages of their own.
        assert 0 <= tags["kv_cache"].live_bytes - rank.kv_cache(tokens) < 4 * PAGE, tokens


@pytest.mark.parametrize("name", KINDS)
def test_chosen_pool_fits_the_share_and_a_further_page_does_not(name: str, saved: Saved) -> None:
    path, config = saved(name)
    model = load_model_config(path)
    for dtype, share, total in ((torch.float32, 0.9, 1 << 30), (torch.bfloat16, 0.35, 987654321)):
        rank = RankBytes(model, config, dtype)
        tokens = pool_size(model, config, total, share, dtype)
        assert tokens % 4 == 0 and tokens >= 64
        assert rank.taken(tokens, True) <= int(share * total) < rank.taken(tokens + 4, True)


@pytest.mark.parametrize("name", KINDS)
def test_share_without_room_for_a_request_is_refused_with_one_that_has(
    name: str, saved: Saved
) -> None:
    path, config = saved(name)
    model, total = load_model_config(path), 1 << 28
    with pytest.raises(PoolSizeError, match="one request of 64 tokens takes") as caught:
        pool_size(model, config, total, 0.01)
    error = caught.value
    assert "\n" not in str(error) and f"use gpu_share={error.least}, or lower" in str(error)
    assert pool_size(model, config, total, error.least) >= 64
    with pytest.raises(PoolSizeError):
        pool_size(model, config, total, error.least - 0.01)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    with pytest.raises(PoolSizeError, match="raise tensor_parallel_size, or lower max_context_len"):
        pool_size(model, config, 1 << 20, 0.9)


def model_of(path: Path) -> ModelConfig:
    save_tiny(path, "qwen2")
    return load_model_config(path)


def test_step_with_more_rows_tokens_or_filters_takes_more(tmp_path: Path) -> None:
    model, config = model_of(tmp_path), EngineConfig(max_running=4096)
    wide = replace(model, vocab_size=150_000)

    def step(dtype: torch.dtype = torch.bfloat16, filters: bool = False, **changes: Any) -> int:
        return RankBytes(wide, replace(config, **changes), dtype).step(filters=filters)

    logits = 4096 * wide.vocab_size
    assert step() - step(max_running=2048) == logits // 2 * 2 * 2  # two copies of bf16
    assert step(torch.float32) - step() == logits * 2 * 2
    assert step(filters=True) - step() == 54 * logits
    filtered = [step(filters=True, max_running=rows) for rows in range(1, 200)]
    assert filtered == sorted(filtered)  # although few rows take more than many for each
    assert step(tensor_parallel_size=2) - step() == logits * 2 * 2  # all ranks' and joined rows
    few = {"max_running": 1}
    assert step(max_prefill_tokens=1 << 20, **few) > 100 * step(max_prefill_tokens=1 << 10, **few)


@pytest.mark.parametrize("share", [0, -0.1, 1.01, 90, math.nan])
def test_share_outside_of_its_range_is_refused(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, gpu, ranks = model_of(tmp_path), torch.device("cuda:0"), TensorParallel(1, None)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (40 << 30, 80 << 30))
    with pytest.raises(ValueError, match=rf"gpu_share={share} must be above 0 and at most 1; use"):
        pool_size(model, EngineConfig(), 80 << 30, share)
    with pytest.raises(ValueError, match=rf"gpu_share={share} must be above 0 and at most 1; use"):
        sized(EngineConfig(), model, torch.bfloat16, gpu, share, True, ranks)


@pytest.mark.parametrize(
    ("fields", "why"),
    [({}, "the engine is on a CPU"), ({"kv_tokens": 64}, "kv_tokens is given, too")],
)
def test_share_without_a_use_is_refused(fields: Any, why: str, tmp_path: Path) -> None:
    save_tiny(tmp_path)
    with pytest.raises(ValueError, match=f"gpu_share=0.5 sizes .*: {why}; leave it out"):
        Engine.from_pretrained(tmp_path, gpu_share=0.5, **fields)


def test_engine_on_a_cpu_has_a_number_of_tokens(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", max_position_embeddings=5000)
    sizes = [{}, {"page_size": 48}, {"max_context_len": 64}, {"max_context_len": 4999}]
    for fields, tokens in zip(sizes, (CPU_TOKENS, 4128, CPU_TOKENS, 5008), strict=True):
        engine = Engine.from_pretrained(tmp_path, **fields)
        assert engine.config.kv_tokens == engine.cache.pool.size == tokens
        answer = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(answer[0][0].token_ids) == 3


def test_pool_of_a_gpu_takes_its_share_and_no_more_than_requests_can_fill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, total = model_of(tmp_path), 80 << 30
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (total // 2, total))
    config, alone = EngineConfig(max_context_len=128), TensorParallel(1, None)

    def tokens(share: float, **fields: Any) -> int | None:
        changed = replace(config, **fields)
        place = torch.bfloat16, torch.device("cuda:0")
        return sized(changed, model, *place, share, True, alone).kv_tokens

    assert tokens(0.5) == config.max_running * 128
    long = {"max_context_len": 1 << 20}
    wide = replace(config, **long)
    assert tokens(0.05, **long) == pool_size(model, wide, total, 0.05, torch.bfloat16)


@pytest.mark.gpu
def test_default_pool_of_a_gpu_leaves_room_and_serves_filtered_requests(tmp_path: Path) -> None:
    """Build engines without `kv_tokens`, and compare the memory of a step with its estimate."""
    save_tiny(tmp_path, "qwen2", vocab_size=150_000, max_position_embeddings=1 << 19)
    gpu = torch.device("cuda:0")
    for running in (16, 160):  # rows that torch sorts at once, and one by one
        before, total = torch.cuda.mem_get_info(gpu)
        engine = Engine.from_pretrained(tmp_path, gpu, torch.bfloat16, max_running=running)
        assert engine.config.kv_tokens is not None
        rank = RankBytes(engine.model, engine.config, torch.bfloat16)
        most = running * engine.model.max_position_embeddings
        assert rank.taken(engine.config.kv_tokens, True) <= 0.4 * before
        more = rank.taken(engine.config.kv_tokens + 16, True)
        assert engine.config.kv_tokens == most or more > 0.39 * before
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(gpu)
        idle = torch.cuda.memory_allocated(gpu)
        params = SamplingParams(max_tokens=4, n=running, top_p=0.9, top_k=1000, ignore_eos=True)
        engine.generate([[1, 2, 3]], params)
        workspace = 32 << 20  # of cuBLAS
        assert torch.cuda.max_memory_allocated(gpu) - idle <= rank.step(filters=True) + workspace
        del engine
    shared = Engine.from_pretrained(tmp_path, gpu, torch.bfloat16, max_running=16, gpu_share=0.05)
    assert shared.config.kv_tokens is not None
    assert shared.cache.pool.nbytes <= 0.05 * total
