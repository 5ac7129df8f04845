"""The weight store: layout, views, digests, loading and refusals."""

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from memsaver import MemorySaver
from memsaver.ops.rows import digest
from rollout.model.decoder import aliases, parameter_groups
from rollout.model.loading import load_model_config
from rollout.model.model_folder import iter_checkpoint
from rollout.tag_names import WEIGHTS
from rollout.weights.store import ALIGNMENT, WeightStore, arena_nbytes, build_manifest
from tests.helpers.models import save_tiny

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
    ("qwen2", {"num_key_value_heads": 1}),
    ("qwen3", {"head_dim": 20, "tie_word_embeddings": True}),
]


def store_for(
    path: Path, saver: MemorySaver | None = None, dtype: torch.dtype = torch.float32
) -> WeightStore:
    config = load_model_config(path)
    return WeightStore(
        parameter_groups(config), aliases(config), dtype, saver or MemorySaver(device="cpu")
    )


@pytest.mark.parametrize(("kind", "overrides"), MODELS)
def test_parameters_lie_in_order_and_fused_tensors_are_views_of_them(
    tmp_path: Path, kind: str, overrides: dict
) -> None:
    model = save_tiny(tmp_path, kind, **overrides)
    store = store_for(tmp_path)
    store.load(iter_checkpoint(tmp_path), "checkpoint")
    assert store.version == 0
    parameters = dict(model.named_parameters())  # has every tied tensor once
    assert set(parameters) == {piece.name for piece in store.manifest.slices}
    end, index = 0, 0
    for piece in store.manifest.slices:
        assert piece.offset >= end and piece.index_base == index
        assert piece.shape == piece.global_shape
        assert set(piece.start) == {0}
        assert piece.dtype == "float32"
        end = piece.offset + 4 * math.prod(piece.shape)
        index += math.prod(piece.shape)
        assert torch.equal(store.tensor(piece.name), parameters[piece.name])
    assert store.manifest.nbytes == end
    assert store.param_nbytes == sum(p.nbytes for p in parameters.values())
    assert (
        store.digest()
        == sum(digest(parameters[s.name], s.index_base) for s in store.manifest.slices) % 2**64
    )
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    biases = "model.layers.0.self_attn.q_proj.bias" in parameters
    assert len(store.manifest.modules) == 2 * (2 + biases)
    for name, module in store.manifest.modules.items():
        short = name.split(".")[-2]
        stacked = torch.cat([store.tensor(name.replace(short, part)) for part in parts[short]])
        fused = store.tensor(name)
        assert module.offset % ALIGNMENT == 0
        assert fused.shape == module.shape
        assert torch.equal(fused, stacked)
        assert fused.data_ptr() == store.tensor(name.replace(short, parts[short][0])).data_ptr()
    tied = overrides.get("tie_word_embeddings")
    assert store.manifest.aliases == (
        {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
    )


def test_digest_covers_the_given_parameters_or_pages_only(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3", tie_word_embeddings=True)
    store = store_for(tmp_path)
    store.load(iter_checkpoint(tmp_path), "checkpoint")
    slices = {piece.name: piece for piece in store.manifest.slices}
    some = ["model.norm.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"]
    expected = sum(
        digest(store.tensor(name), slices[store.manifest.aliases.get(name, name)].index_base)
        for name in some
    )
    assert store.digest(names=some) == expected % 2**64
    assert store.digest(names=[*some, "model.embed_tokens.weight"]) == expected % 2**64
    assert store.digest(names=[]) == 0
    whole, copy = store.digest(), store.arena.clone()
    assert store.digest(copy) == whole == store.digest(names=slices)
    copy[17] += 1
    assert store.digest(copy) != whole == store.digest()


def test_offsets_count_from_the_start_of_the_tag(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    saver = MemorySaver(device="cpu")
    other = saver.empty((1000,), torch.uint8, tag=WEIGHTS)
    store = store_for(tmp_path, saver)
    for piece in store.manifest.slices:
        assert saver.offset_of(store.tensor(piece.name)) == piece.offset
    assert store.manifest.slices[0].offset >= other.nbytes


def test_layout_hash_is_stable_and_changes_with_the_layout(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    config = load_model_config(tmp_path)
    groups = parameter_groups(config)
    manifest = build_manifest(groups, {}, torch.float32)
    assert (
        pickle.loads(pickle.dumps(manifest))
        == manifest
        == build_manifest(groups, {}, torch.float32)
    )
    variants = [
        build_manifest(groups, {}, torch.bfloat16),
        build_manifest(groups, {}, torch.float32, base=512),
        build_manifest(groups[::-1], {}, torch.float32),
        build_manifest(groups, {"tied": "lm_head.weight"}, torch.float32),
    ]
    assert len({variant.layout_hash for variant in [manifest, *variants]}) == 5
    assert manifest.nbytes <= arena_nbytes(groups, torch.float32) < manifest.nbytes + ALIGNMENT


def test_store_loads_sharded_checkpoints_and_casts(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "one")
    model.save_pretrained(str(tmp_path / "many"), max_shard_size="40KB")
    assert (tmp_path / "many" / "model.safetensors.index.json").is_file()
    store = store_for(tmp_path / "many", dtype=torch.bfloat16)
    store.load(iter_checkpoint(tmp_path / "many"), "checkpoint")
    for name, parameter in model.named_parameters():
        assert torch.equal(store.tensor(name), parameter.bfloat16())


def rewrite(path: Path, change: Any) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            "missing model.layers.1.mlp.up_proj.weight, unexpected nothing",
        ),
        (
            lambda t: t.update({"model.layers.0.extra.weight": torch.zeros(1)}),
            "unexpected model.layers.0.extra.weight",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(3)}),
            r"model.norm.weight has shape \(3,\).*\(48,\)",
        ),
    ],
)
def test_checkpoint_that_does_not_fit_is_refused_by_parameter_name(
    tmp_path: Path, change: Any, match: str
) -> None:
    save_tiny(tmp_path)
    rewrite(tmp_path, change)
    store = store_for(tmp_path)
    with pytest.raises(ValueError, match=match):
        store.load(iter_checkpoint(tmp_path), "checkpoint")
    assert store.version is None and "checkpoint" in store.undefined_reason


def test_store_ignores_derived_buffers_and_a_tied_copy(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "qwen2", tie_word_embeddings=True)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(6),
        "mtp.layers.0.mlp.gate.weight": torch.zeros(6),
        "lm_head.weight": model.get_input_embeddings().weight.detach().clone(),
    }
    rewrite(tmp_path, lambda tensors: tensors.update(extra))
    store = store_for(tmp_path)
    store.load(iter_checkpoint(tmp_path), "checkpoint")
    assert store.version == 0


def test_missing_checkpoint_file_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks model\.safetensors; download"):
        list(iter_checkpoint(tmp_path))
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model-00001-of-00002\.safetensors"):
        list(iter_checkpoint(tmp_path))
