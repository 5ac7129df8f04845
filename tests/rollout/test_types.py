"""Validation of sampling parameters and engine configurations."""

import re
from typing import Any

import numpy as np
import pytest

from memsaver.system.plain import Plain
from rollout import DoubleSparsity, EngineConfig, KVTiers, SamplingParams

TIERS = KVTiers(host_ratio=1.0)
ON_DISK = KVTiers(host_ratio=1, preemption="swap", disk_directory="x", disk_bytes=1)
HOST = {"host_ratio": 1.0}
SPARSITY = {"heavy_channel_num": 2, "heavy_token_num": 8}


WRONG: list[tuple[Any, str, list[Any]]] = [  # class, field, and invalid values of the field
    (SamplingParams, "max_tokens", [0, 2.5, True, None]),
    (SamplingParams, "temperature", [-0.1, float("nan"), float("inf"), True, "1", 1e-38]),
    (SamplingParams, "top_k", [-1, 2.5, True, 10**30]),
    (SamplingParams, "top_p", [0.0, 1.5, True]),
    (SamplingParams, "n", [0, 2.5, True]),
    (SamplingParams, "seed", [-1, 2**63, 2.5, True]),
    (SamplingParams, "stop_token_ids", [(1.5,), ("a",), (True,)]),
    (SamplingParams, "beam_width", [0]),
    (EngineConfig, "kv_tokens", [0, 100]),
    (EngineConfig, "max_running", [0]),
    (EngineConfig, "max_prefill_tokens", [0]),
    (EngineConfig, "max_context_len", [1]),
    (EngineConfig, "attention", ["flash"]),
    (EngineConfig, "seed", [-1]),
    (EngineConfig, "prefix_states", [-1]),
    (EngineConfig, "tensor_parallel_size", [0]),
]


@pytest.mark.parametrize(("factory", "key", "values"), WRONG)
def test_invalid_value_is_refused_with_its_field(factory: Any, key: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=re.escape(f"{key}={value!r}")):
            factory(**{key: value})


BEAMS = {"beam_width": 2}
SPARSE = {"double_sparsity": DoubleSparsity(heavy_channel_num=4, heavy_token_num=8)}
RANKS = {"tensor_parallel_size": 2}
TOGETHER: list[tuple[Any, dict[str, Any], str]] = [
    (SamplingParams, BEAMS | {"n": 3}, "n=3 answers of a beam search of 2"),
    (SamplingParams, BEAMS | {"temperature": 0.5}, "samples nothing"),
    (SamplingParams, BEAMS | {"top_k": 5}, "samples nothing"),
    (SamplingParams, BEAMS | {"top_p": 0.5}, "samples nothing"),
    (SamplingParams, BEAMS | {"forced": [5]}, "samples nothing"),
    (SamplingParams, {"forced": range(17)}, "are 17 tokens, more than max_tokens=16"),
    (SamplingParams, BEAMS | {"length_penalty": float("nan")}, "length_penalty=nan"),
    (SamplingParams, BEAMS | {"early_stopping": "soon"}, "early_stopping='soon'"),
    (SamplingParams, {"length_penalty": 2.0}, "set beam_width above 1"),
    (SamplingParams, {"early_stopping": True}, "set beam_width above 1"),
    (EngineConfig, {"tiers": TIERS, "prefix_cache": False}, "has no place for tiers"),
    (EngineConfig, RANKS | {"tiers": ON_DISK}, "ranks must decide alike"),
    (EngineConfig, RANKS | {"kv_cache_dtype": "fp4_e2m1"}, "takes neither double_sparsity nor"),
    (EngineConfig, SPARSE | {"attention": "triton"}, "attention='triton' has no double sparsity"),
    (EngineConfig, SPARSE | {"kv_cache_dtype": "fp8_e4m3"}, "'fp8_e4m3' has no double sparsity"),
    (KVTiers, {}, "give either ratio or size_bytes"),
    (KVTiers, HOST | {"host_bytes": 4}, "give either ratio or size_bytes"),
    (KVTiers, HOST | {"write_policy": "never"}, "write_policy='never' must be one of"),
    (KVTiers, HOST | {"preemption": "never"}, "preemption='never' must be one of"),
    (KVTiers, HOST | {"disk_bytes": 5}, "give disk_directory and disk_bytes together"),
    (KVTiers, HOST | {"layout": "random"}, "layout='random' must be one of"),
    (DoubleSparsity, SPARSITY | {"heavy_channel_num": 0}, "must be at least 1"),
    (DoubleSparsity, SPARSITY | {"recent_token_num": 9}, "exceeds heavy_token_num=8"),
]


@pytest.mark.parametrize(("factory", "fields", "match"), TOGETHER)
def test_contradictory_fields_are_refused(factory: Any, fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        factory(**fields)


def test_numbers_of_numpy_become_numbers_of_python() -> None:
    """Ranks of an engine send them as JSON."""
    given = {"max_tokens": np.int64(6), "temperature": np.float32(0.5), "seed": np.uint8(3)}
    params = SamplingParams(**given, stop_token_ids=np.array([5]), forced=np.array([7]))
    expected = {"max_tokens": 6, "temperature": 0.5, "seed": 3}
    assert params == SamplingParams(**expected, stop_token_ids=(5,), forced=(7,))
    assert Plain(SamplingParams).value(Plain(SamplingParams).text(params)) == params


def test_stop_token_ids_may_be_any_sequence() -> None:
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"stop_token_ids=5 must be a sequence of token ids"):
        SamplingParams(stop_token_ids=5)  # type: ignore[arg-type]
