"""Validation of what users write."""

import dataclasses
from typing import Any

import pytest

from rollout import DoubleSparsity, EngineConfig, KVTiers, SamplingParams

TIERS = KVTiers(host_ratio=1.0)
ON_DISK = KVTiers(host_ratio=1, preemption="swap", disk_directory="x", disk_bytes=1)
SPARSITY = {"heavy_channel_num": 2, "heavy_token_num": 8}


@pytest.mark.parametrize(
    ("made", "fields", "match"),
    [
        (SamplingParams, {"max_tokens": 0}, "max_tokens"),
        *(
            (SamplingParams, {"temperature": wrong}, "temperature")
            for wrong in (-0.1, float("nan"), float("inf"))
        ),
        (SamplingParams, {"top_k": -1}, "top_k"),
        *((SamplingParams, {"top_p": wrong}, "top_p") for wrong in (0.0, 1.5)),
        (SamplingParams, {"n": 0}, "n="),
        *((SamplingParams, {"seed": wrong}, "seed") for wrong in (-1, 2**63)),
        *(
            (SamplingParams, {name: 2.5}, f"{name}=2.5 must be whole")
            for name in ("max_tokens", "seed", "top_k", "n")
        ),
        *(
            (SamplingParams, {name: True}, f"{name}=True must be")
            for name in ("max_tokens", "seed", "top_k", "n", "temperature", "top_p")
        ),
        (SamplingParams, {"temperature": "1"}, "temperature='1' must be a number"),
        *(
            (SamplingParams, {"stop_token_ids": wrong}, "stop_token_ids=.* must be token ids")
            for wrong in ((1.5,), ("a",), (True,))
        ),
        (SamplingParams, {"max_tokens": None}, "max_tokens=None must be whole"),
        (SamplingParams, {"top_k": 10**30}, "top_k=10"),
        (
            SamplingParams,
            {"temperature": 1e-38},
            "temperature=1e-38 must be 0 .greedy., or finite and at least 1e-06",
        ),
        (SamplingParams, {"beam_width": 0}, "beam_width=0"),
        (SamplingParams, {"beam_width": 2, "n": 3}, "n=3 answers of a beam search of 2"),
        (SamplingParams, {"beam_width": 2, "temperature": 0.5}, "samples nothing"),
        (SamplingParams, {"beam_width": 2, "top_k": 5}, "samples nothing"),
        (SamplingParams, {"beam_width": 2, "top_p": 0.5}, "samples nothing"),
        (SamplingParams, {"beam_width": 2, "length_penalty": float("nan")}, "length_penalty=nan"),
        (SamplingParams, {"beam_width": 2, "early_stopping": "soon"}, "early_stopping='soon'"),
        (SamplingParams, {"length_penalty": 2.0}, "set beam_width above 1"),
        (SamplingParams, {"early_stopping": True}, "set beam_width above 1"),
        (EngineConfig, {"kv_tokens": 100, "page_size": 16}, "kv_tokens=112"),
        (EngineConfig, {"kv_tokens": 0}, "kv_tokens=0"),
        (EngineConfig, {"max_running": 0}, "max_running"),
        (EngineConfig, {"max_prefill_tokens": 0}, "max_prefill_tokens"),
        (EngineConfig, {"max_context_len": 1}, "max_context_len"),
        (EngineConfig, {"attention": "flash"}, "attention='flash'"),
        (EngineConfig, {"seed": -1}, "seed"),
        (
            EngineConfig,
            {"tiers": TIERS, "prefix_cache": False},
            "prefix_cache=False has no place for tiers",
        ),
        (EngineConfig, {"prefix_states": -1}, "prefix_states=-1 must be at least 0"),
        (EngineConfig, {"tensor_parallel_size": 0}, "tensor_parallel_size=0 must be at least 1"),
        (EngineConfig, {"tensor_parallel_size": 2, "tiers": ON_DISK}, "ranks must decide alike"),
        (
            EngineConfig,
            {"tensor_parallel_size": 2, "kv_cache_dtype": "fp4_e2m1"},
            "takes neither double_sparsity nor",
        ),
        (KVTiers, {}, "give either ratio or size_bytes"),
        (KVTiers, {"host_ratio": 1.0, "host_bytes": 4}, "give either ratio or size_bytes"),
        (
            KVTiers,
            {"host_ratio": 1.0, "write_policy": "never"},
            "write_policy='never' must be one of",
        ),
        (KVTiers, {"host_ratio": 1.0, "preemption": "never"}, "preemption='never' must be one of"),
        (
            KVTiers,
            {"host_ratio": 1.0, "disk_bytes": 5},
            "give disk_directory and disk_bytes together",
        ),
        (KVTiers, {"host_ratio": 1.0, "layout": "random"}, "layout='random' must be one of"),
        (
            DoubleSparsity,
            SPARSITY | {"heavy_channel_num": 0},
            "heavy_channel_num=0 must be at least 1",
        ),
        (
            DoubleSparsity,
            SPARSITY | {"recent_token_num": 9},
            "recent_token_num=9 exceeds heavy_token_num=8",
        ),
        (
            DoubleSparsity,
            SPARSITY | {"channels": (((0, 0),),)},
            r"layer 0, KV head 0 are \(0, 0\); give heavy_channel_n",
        ),
    ],
)
def test_what_is_wrong_is_said_where_it_is_made(
    made: Any, fields: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        made(**fields)


def test_sampling_params_are_frozen_and_take_any_sequence_of_stops() -> None:
    params = SamplingParams(stop_token_ids=[3, 4])  # type: ignore[arg-type]
    assert params.stop_token_ids == (3, 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]
