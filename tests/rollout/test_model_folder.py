"""Files of model directories: JSON, shards and their index, tied copies, end tokens."""

import json
import logging
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer

from memsaver import StateError
from rollout import Engine, SamplingParams
from rollout.model.loading import load_model_config
from rollout.model.model_folder import open_tensors, token_ids
from tests.helpers.models import DEEPSEEK_MOE, MLA, greedy, save_tiny
from tests.helpers.rollout.folders import edit_config

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def edit_tensors(file: Path, **changes: torch.Tensor) -> None:
    tensors = load_file(file) | {name.replace("__", "."): value for name, value in changes.items()}
    save_file({name: value.clone() for name, value in tensors.items()}, file, {"format": "pt"})


def answers(path: Path) -> list[int]:
    engine = Engine.from_pretrained(path, kv_tokens=256)
    return engine.generate([[5, 3, 8]], SamplingParams(max_tokens=6, temperature=0))[0][0].token_ids


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere.config\.json not found"):
        load_model_config(tmp_path / "nowhere")


def test_truncated_file_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    file = tmp_path / SINGLE
    whole = file.read_bytes()
    for length in (0, 5, 100, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"safetensors cannot be read \(.*download or save"):
            Engine.from_pretrained(tmp_path)


DAMAGED = {"empty": b"", "mark": "\ufeff{}".encode(), "cut": b'{"a": [1', "list": b"[]"}
DAMAGED |= {"latin": b'{"a": "\xe9"}', "null": b"null"}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_json_file_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    save_tiny(tmp_path).save_pretrained(tmp_path, max_shard_size="40KB")
    (tmp_path / SINGLE).unlink()
    save_tokenizer(tmp_path, {}, None)
    names = ["config", "generation_config", "tokenizer_config", "special_tokens_map", "tokenizer"]
    names = [f"{name}.json" for name in names] + [INDEX]
    Engine.from_pretrained(tmp_path, kv_tokens=256)
    for name in names:
        file = tmp_path / name
        content = file.read_bytes() if file.exists() else None
        file.write_bytes(DAMAGED[damage])
        with pytest.raises(ValueError, match=rf"{name} cannot be read \(.*download or save"):
            Engine.from_pretrained(tmp_path, kv_tokens=256)
        file.unlink() if content is None else file.write_bytes(content)


def test_index_decides_which_shard_holds_a_tensor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Put a copy of one tensor into every other shard."""
    model = save_tiny(tmp_path)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    (tmp_path / SINGLE).unlink()
    places = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    name, others = "model.norm.weight", {*places.values()}
    for shard in others - {places[name]}:
        edit_tensors(tmp_path / shard, model__norm__weight=torch.full((48,), 7.0))
    assert answers(tmp_path) == greedy(model, [5, 3, 8], 6)
    assert f"{name} of " in caplog.text


def test_index_that_names_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    places = dict.fromkeys(load_file(tmp_path / SINGLE), SINGLE)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    assert open_tensors(tmp_path).keys() == places.keys()
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places | {"other.weight": SINGLE}}))
    with pytest.raises(ValueError, match="assigns other.weight to model.safetensors, which lacks"):
        open_tensors(tmp_path)


def test_single_file_beside_an_index_of_others_is_refused(tmp_path: Path) -> None:
    model = save_tiny(tmp_path)
    single = (tmp_path / SINGLE).read_bytes()
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    (tmp_path / SINGLE).write_bytes(single)
    with pytest.raises(ValueError, match=f"both {SINGLE} and {INDEX}.*remove"):
        Engine.from_pretrained(tmp_path)


@pytest.mark.parametrize("layers", [1, 2])
def test_prediction_layers_are_left_out_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, layers: int
) -> None:
    model = save_tiny(tmp_path, "deepseek_v3", **MLA | DEEPSEEK_MOE)
    file, last = tmp_path / SINGLE, DEEPSEEK_MOE["num_hidden_layers"]
    tensors = load_file(file)
    for layer in range(last, last + layers):
        for name, value in list(tensors.items()):
            if f"layers.{last - 1}." in name:
                tensors[name.replace(f"layers.{last - 1}.", f"layers.{layer}.")] = value.clone()
        tensors[f"model.layers.{layer}.eh_proj.weight"] = torch.zeros(48, 96)
    save_file(tensors, file, {"format": "pt"})
    edit_config(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(ValueError, match=rf"unexpected model\.layers\.{last}"):
        Engine.from_pretrained(tmp_path)
    edit_config(tmp_path, num_nextn_predict_layers=layers)
    with caplog.at_level(logging.INFO, "rollout"):
        assert answers(tmp_path) == greedy(model, [5, 3, 8], 6)
    assert f"left out: model.layers.{last}." in caplog.text


@pytest.mark.parametrize("equal", [True, False])
def test_tied_copy_is_used_if_it_differs_as_transformers_does(tmp_path: Path, equal: bool) -> None:
    save_tiny(tmp_path, tie_word_embeddings=True)
    embedding = load_file(tmp_path / SINGLE)[EMBEDDING]
    head = embedding if equal else embedding.roll(3, 0)
    edit_tensors(tmp_path / SINGLE, lm_head__weight=head)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert answers(tmp_path) == greedy(model, [5, 3, 8], 6)
    assert load_model_config(tmp_path).tie_word_embeddings == equal


def save_tokenizer(
    path: Path, config: dict[str, Any] | None, special: dict[str, Any] | None
) -> None:
    core = Tokenizer(models.BPE({"a": 0, "b": 1, "<unk>": 2}, [], unk_token="<unk>"))
    names = ("<end>", "</s>", "<turn>")
    core.add_special_tokens([AddedToken(name, special=True) for name in names])
    core.save(str(path / "tokenizer.json"))
    for name, content in (("tokenizer_config", config), ("special_tokens_map", special)):
        if content is not None:
            (path / f"{name}.json").write_text(json.dumps(content))


FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
ADDED = {"added_tokens_decoder": {"4": {"content": "</s>", "special": True}}}
FORMS: list[tuple[dict[str, Any] | None, dict[str, Any] | None]] = [
    (FAST | {"eos_token": "<end>"}, None),
    (FAST | {"eos_token": {"content": "<end>", "__type": "AddedToken"}}, None),
    (FAST | {"eos_token": "</s>"} | ADDED, None),
    (FAST | {"eos_token": "of no vocabulary"}, None),
    (FAST | {"eos_token": None}, None),
    (FAST, {"eos_token": "<turn>"}),
    (FAST, {"eos_token": {"content": "<turn>", "lstrip": False}}),
    (FAST | {"eos_token": "<end>"}, {"eos_token": "<turn>"}),
    (None, {"eos_token": "<turn>"}),
    ({"tokenizer_class": "LlamaTokenizer"}, None),
    ({"tokenizer_class": "GemmaTokenizer"}, None),
    ({}, None),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_end_token_is_that_of_transformers_tokenizer(tmp_path: Path, form: Any) -> None:
    save_tiny(tmp_path)
    edit_config(tmp_path, eos_token_id=7)
    assert token_ids(tmp_path).ends == {7}
    save_tokenizer(tmp_path, *form)
    end = AutoTokenizer.from_pretrained(tmp_path).eos_token_id
    assert load_model_config(tmp_path).stop_token_ids == {7} | ({end} - {None})


def test_ids_beyond_the_tokenizer_are_sampled_only_if_asked(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    save_tokenizer(tmp_path, FAST | {"eos_token": "<end>"}, None)
    hot = [
        SamplingParams(max_tokens=8, n=16, temperature=5.0, seed=1),
        SamplingParams(max_tokens=8, temperature=0),
        SamplingParams(max_tokens=8, beam_width=2),
    ]
    for asked in (False, True):
        engine = Engine.from_pretrained(tmp_path, sample_all_ids=asked)
        answers = chain.from_iterable(engine.generate([[1, 2]] * len(hot), hot))
        beyond = [any(token > 5 for token in answer.token_ids) for answer in answers]
        assert all(beyond) if asked else not any(beyond)


def test_unreadable_tokenizer_is_reported_and_ends_no_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Unknown"}))
    assert token_ids(tmp_path).ends == set()
    assert "the tokenizer cannot be read" in caplog.text


@pytest.mark.parametrize(
    ("config_ids", "generation_ids", "expected"),
    [(None, None, set()), (5, None, {5}), ([5, 6], None, {5, 6}), (5, 7, {7}), (5, [7, 8], {7, 8})],
)
def test_generation_config_overrides_the_configs_stop_tokens(
    tmp_path: Path, config_ids: Any, generation_ids: Any, expected: set[int]
) -> None:
    save_tiny(tmp_path)
    edit_config(tmp_path, eos_token_id=config_ids)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_ids}))
    assert load_model_config(tmp_path).stop_token_ids == expected
    (tmp_path / "generation_config.json").unlink()
    if generation_ids is None:
        assert load_model_config(tmp_path).stop_token_ids == expected
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["7"]}')
    with pytest.raises(ValueError, match=r"eos_token_id=\['7'\] must be token ids"):
        load_model_config(tmp_path)


OTHERS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, "rope_param"),
    ("llama", {"rms_norm_eps": 0.5}, "rms_norm_eps=0.5"),
    ("llama", {"num_attention_heads": 8, "head_dim": 6}, "num_attention_heads=8.*here 4"),
    ("llama", {"num_hidden_layers": 1}, "num_hidden_layers=1"),
    ("llama", {"eos_token_id": 9}, r"end tokens \[9\] \(here \[\]\)"),
    ("llama", {"max_position_embeddings": 64}, "max_position_embeddings=64"),
    ("llama", {"tie_word_embeddings": True}, "tie_word_embeddings=True.*lm_head.weight"),
    ("mistral", {"sliding_window": 8}, "model_type='mistral'.*sliding_window=8"),
    ("qwen3", {"head_dim": 12}, "model_type='qwen3'.*k_norm.weight"),
]


@pytest.mark.parametrize(("kind", "changes", "match"), OTHERS)
def test_load_refuses_another_model_by_its_keys(
    tmp_path: Path, kind: str, changes: dict[str, Any], match: str
) -> None:
    save_tiny(tmp_path / "own")
    save_tiny(tmp_path / "other", kind, seed=1, **changes)
    engine = Engine.from_pretrained(tmp_path / "own", kv_tokens=256)
    digest = engine.store.digest()
    with pytest.raises(ValueError, match=f"is not the engine's model: .*{match}.*from_pretrained"):
        engine.load(tmp_path / "other")
    assert (engine.store.version, engine.store.digest()) == (0, digest)


def test_load_accepts_another_dtype_and_keys_that_the_model_ignores(tmp_path: Path) -> None:
    save_tiny(tmp_path / "own")
    model = save_tiny(tmp_path / "other", seed=1)
    edit_config(tmp_path / "other", dtype="bfloat16", sliding_window=4, use_cache=False)
    engine = Engine.from_pretrained(tmp_path / "own", kv_tokens=256)
    engine.load(tmp_path / "other")
    greedily = SamplingParams(max_tokens=6, temperature=0)
    assert engine.generate([[5, 3]], greedily)[0][0].token_ids == greedy(model, [5, 3], 6)


def test_load_is_refused_while_requests_run(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    engine = Engine.from_pretrained(tmp_path, kv_tokens=256)
    params = SamplingParams(max_tokens=6, temperature=0)
    own = engine.generate([[5, 3]], params)[0][0].token_ids
    refusals: list[str] = []

    def load(done: int, total: int, tokens: int) -> None:
        with pytest.raises(StateError, match="cannot load weights while requests run") as refused:
            engine.load(tmp_path)
        refusals.append(str(refused.value))

    answer = engine.generate([[5, 3]], params, lambda *now: None if now[0] else load(*now))
    assert answer[0][0].token_ids == own and len(refusals) == 5
