"""Validation of what users write."""

import dataclasses
import pickle
from typing import Any

import pytest

from rollout import EngineConfig, Manifest, ParamSlice, SamplingParams, WriteReceipt


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("n", 0),
        ("seed", -1),
        ("seed", 2**63),
    ],
)
def test_sampling_params_name_the_wrong_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


def test_sampling_params_are_frozen_and_take_any_sequence_of_stops() -> None:
    params = SamplingParams(stop_token_ids=[3, 4])  # type: ignore[arg-type]
    assert params.stop_token_ids == (3, 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"kv_tokens": 100, "page_size": 16}, "kv_tokens=112"),
        ({"kv_tokens": 0}, "kv_tokens=0"),
        ({"max_running": 0}, "max_running"),
        ({"max_prefill_tokens": 0}, "max_prefill_tokens"),
        ({"max_context_len": 1}, "max_context_len"),
        ({"attention": "flash"}, "attention='flash'"),
        ({"seed": -1}, "seed"),
    ],
)
def test_engine_config_names_the_wrong_field(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        EngineConfig(**fields)


def piece(**changes: Any) -> ParamSlice:
    fields = {"name": "w", "offset": 0, "shape": (2,), "dtype": "float32", "global_shape": (4,), "start": (2,)}
    return ParamSlice(**{**fields, "index_base": 0, **changes})


@pytest.mark.parametrize("changes", [{"start": (3,)}, {"start": (0, 0)}, {"offset": -1}, {"index_base": -1}])
def test_param_slice_stays_inside_its_parameter(changes: dict[str, Any]) -> None:
    piece()
    with pytest.raises(ValueError, match="w:"):
        piece(**changes)


def test_manifest_refuses_repeated_names_and_dangling_aliases() -> None:
    fields: dict[str, Any] = {"nbytes": 8, "modules": {}, "layout_hash": ""}
    with pytest.raises(ValueError, match="twice"):
        Manifest(slices=(piece(), piece()), aliases={}, **fields)
    with pytest.raises(ValueError, match="alias"):
        Manifest(slices=(piece(),), aliases={"tied": "missing"}, **fields)


def test_receipt_digest_is_64_bits() -> None:
    with pytest.raises(ValueError, match="digest"):
        WriteReceipt(version=1, layout_hash="", digest=2**64, nbytes=0)


def test_a_manifest_is_packed_once_and_unpacked_once() -> None:
    manifest = Manifest(nbytes=8, slices=(piece(),), aliases={"tied": "w"}, modules={}, layout_hash="one")
    first, second = (pickle.loads(pickle.dumps(manifest)) for _ in range(2))
    assert first == manifest and second is first
    other = dataclasses.replace(first, layout_hash="two")  # carries no bytes of the one it was made from
    assert pickle.loads(pickle.dumps(other)) == other != manifest
