"""Exports as Hugging Face folders: what loads them, their bits and bytes, ranks and failures."""

from __future__ import annotations

import errno
import itertools
import json
import os
import resource
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from memsaver import StateError
from rollout import Engine, SamplingParams
from rollout.model import token_ids
from tests.helpers.case_selection import some
from tests.helpers.exports import contents, stored_tensors
from tests.helpers.models import DEEPSEEK_MOE, MLA, greedy
from tests.helpers.ranks import results, start_ranks
from tests.helpers.trainer_bridge.models import (
    config,
    describe,
    make_batch,
    reference_logprobs,
    write_model,
)
from tests.helpers.trainer_bridge.states import assert_same_bits, weights
from tests.helpers.trainer_bridge.tolerance import assert_scores
from trainer_bridge import LoraConfig, Trainer
from trainer_bridge.errors import OtherWeights
from trainer_bridge.models import export_checkpoint
from trainer_bridge.models.files import checkpoint, export

Make = Callable[..., Trainer]
Bits = dict[str, Tensor]
LORA = LoraConfig(rank=4, alpha=8.0, target_modules=("q_proj", "o_proj", "down_proj"))
EXPERTS = LoraConfig(rank=8, alpha=16.0, target_modules=("q_proj", "experts"))
V3: dict[str, Any] = {**MLA, **DEEPSEEK_MOE, "head_dim": 8, "moe_intermediate_size": 24}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 8},
    "ministral": {"sliding_window": 8, **LAYERS},
    "mixtral": {"num_local_experts": 3},
    "qwen3_moe": {"num_experts": 5},
    "deepseek_v2": V3,
    "deepseek_v3": V3,
    "qwen3_next": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
# Dense families share all code of exports; mixtures of experts are spelled in three ways.
COVERING = ("llama", "qwen2", "mixtral", "deepseek_v3", "qwen3_next")
ANSWER = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
PROMPTS = [[3, 17, 40, 9], [55, 2, 71]]
EXTRA = {
    "tokenizer.json": "{}",
    "tokenizer_config.json": '{"model_max_length": 9}',
    "chat_template.jinja": "{{ messages }}",
    "merges.txt": "a b",
    "README.md": "not copied",
    "pytorch_model.bin.index.json": "{}",
}


def learned(trainer: Trainer) -> Trainer:
    trainer.update_actor(make_batch(5))
    return trainer


def loaded(folder: Path | str, dtype: torch.dtype = torch.float32) -> Any:
    """Load by transformers, which must miss no weight and find no unknown one."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


def synced(trainer: Trainer, path: str, dtype: torch.dtype = torch.float32) -> Bits:
    """Return the weights that a sync sends to a rollout."""
    device = str(trainer.device)
    engine = Engine.from_pretrained(path, device, kv_tokens=64, dtype=dtype, load_weights=False)
    trainer.connect([engine])
    trainer.sync_weights(1)
    return weights(engine)


def served(folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Bits:
    """Return the weights of an engine that loads an export."""
    return weights(Engine.from_pretrained(str(folder), device, kv_tokens=64, dtype=dtype))


@pytest.mark.parametrize("family", some(*COVERING, whole=sorted({*FAMILIES} - {*COVERING})))
def test_export_of_every_family_is_loaded_and_answers_alike(
    family: str, tmp_path: Path, make_trainer: Make, device: str
) -> None:
    """Compare greedy tokens of transformers and `Engine`, weights with a sync, and sizes."""
    path, out = write_model(tmp_path / "model", family, **FAMILIES[family]), tmp_path / "out"
    trainer = learned(make_trainer(path, device=device))
    trainer.save_pretrained(str(out))
    stored, source = stored_tensors(out), stored_tensors(Path(path))
    assert {name: tensor.shape for name, tensor in stored.items()} == {
        name: tensor.shape for name, tensor in source.items()
    }
    trained = [name for name in stored if not name.endswith("e_score_correction_bias")]
    assert sum(not torch.equal(stored[name], source[name]) for name in trained) > len(trained) / 2
    theirs = loaded(out)
    engine = Engine.from_pretrained(str(out), device, kv_tokens=256)
    assert_same_bits(synced(trainer, path), weights(engine))
    answers = [sample.token_ids for (sample,) in engine.generate(PROMPTS, ANSWER)]
    theirs.generation_config.eos_token_id = theirs.config.eos_token_id = None
    assert answers == [greedy(theirs, prompt, ANSWER.max_tokens) for prompt in PROMPTS]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_random_model_is_spelled_as_transformers_spells_it(
    family: str, tmp_path: Path, make_trainer: Make
) -> None:
    path = write_model(tmp_path / "model", family, **FAMILIES[family])
    expected = stored_tensors(Path(path)).keys()
    trainer = make_trainer(
        describe(tmp_path / "bare", family, **FAMILIES[family]), random_init=True
    )
    trainer.save_pretrained(str(tmp_path / "out"))
    assert stored_tensors(tmp_path / "out").keys() == expected
    assert_same_bits(served(tmp_path / "out"), synced(trainer, path))


def test_stacked_experts_of_the_source_stay_stacked(tmp_path: Path, make_trainer: Make) -> None:
    path, out = write_model(tmp_path / "model", "qwen3_moe", num_experts=5), tmp_path / "out"
    stacked = loaded(path).state_dict()
    del stacked["lm_head.weight"]  # tied
    safetensors.torch.save_file(stacked, f"{path}/model.safetensors", {"format": "pt"})
    trainer = learned(make_trainer(path))
    trainer.save_pretrained(str(out))
    assert stored_tensors(out).keys() == stacked.keys()
    loaded(out)
    assert_same_bits(served(out), synced(trainer, path))


@pytest.mark.parametrize("streamed", [False, True])
def test_masters_are_exported_in_the_dtype_that_the_rollout_serves(
    streamed: bool, tmp_path: Path, make_trainer: Make
) -> None:
    """Router biases keep the dtype that they have in the model's files."""
    path, out = write_model(tmp_path / "model", "deepseek_v3", **V3), tmp_path / "out"
    config_file = Path(path, "config.json")
    fields = json.loads(config_file.read_text())
    del fields["dtype"], fields["architectures"]
    config_file.write_text(json.dumps(fields | {"torch_dtype": "float32"}))
    trainer = learned(make_trainer(path, param_dtype="bfloat16", optimizer_offload=streamed))
    trainer.save_pretrained(str(out))
    fields = json.loads((out / "config.json").read_text())
    assert fields["dtype"] == fields["torch_dtype"] == "bfloat16"
    assert fields["architectures"] == ["DeepseekV3ForCausalLM"]
    stored = stored_tensors(out)
    biases = {name for name in stored if name.endswith("e_score_correction_bias")}
    assert biases == {name for name, tensor in stored.items() if tensor.dtype == torch.float32}
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32, torch.bfloat16}
    config_file.write_text((out / "config.json").read_text())  # the engine needs architectures
    bf16 = torch.bfloat16
    assert_same_bits(served(out, dtype=bf16), synced(trainer, path, bf16))
    trainer.save_pretrained(str(out), dtype="float32")
    assert {tensor.dtype for tensor in stored_tensors(out).values()} == {torch.float32}


def test_family_that_only_the_trainer_supports_is_exported(
    tmp_path: Path, make_trainer: Make
) -> None:
    trainer = learned(make_trainer(write_model(tmp_path / "model", "granite")))
    trainer.save_pretrained(str(tmp_path / "out"))
    batch = make_batch(3)
    with torch.no_grad():
        expected = reference_logprobs(loaded(tmp_path / "out"), batch)
    assert_scores(trainer.compute_log_prob(batch), expected)


def test_large_model_is_divided_into_files_with_an_index(
    tmp_path: Path, make_trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = write_model(tmp_path / "model", "qwen3_moe", num_experts=5), tmp_path / "out"
    trainer = make_trainer(path)
    trainer.save_pretrained(str(tmp_path / "whole"))
    monkeypatch.setattr(export, "_FILE_BYTES", 40_000)
    trainer.save_pretrained(str(out))
    files = sorted(file.name for file in out.glob("*.safetensors"))
    assert files == [
        f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)
    ]
    assert len(files) > 2
    assert all((out / name).stat().st_size < 46_000 for name in files)
    whole = stored_tensors(tmp_path / "whole")
    assert_same_bits(stored_tensors(out), whole)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(value.nbytes for value in whole.values())}
    assert index["weight_map"].keys() == whole.keys()
    loaded(out)
    assert_same_bits(served(out), served(tmp_path / "whole"))
    trainer.save_pretrained(str(out))  # a smaller number of files leaves none of the older ones
    monkeypatch.undo()
    trainer.save_pretrained(str(out))
    assert contents(out) == contents(tmp_path / "whole")


def test_export_has_tokenizer_and_settings_of_the_model(tmp_path: Path, make_trainer: Make) -> None:
    path, out = Path(write_model(tmp_path / "model")), tmp_path / "out"
    for name, text in EXTRA.items():
        (path / name).write_text(text)
    make_trainer(str(path)).save_pretrained(str(out))
    copied = {name for name in EXTRA if name not in ("README.md", "pytorch_model.bin.index.json")}
    names = {file.name for file in out.iterdir()}
    assert names == copied | {"config.json", "generation_config.json", "model.safetensors"}
    assert all((out / name).read_text() == EXTRA[name] for name in copied)
    assert len({file.stat().st_mode for file in out.iterdir()}) == 1
    assert json.loads((out / "config.json").read_text()) == json.loads(
        (path / "config.json").read_text()
    )
    make_trainer(str(path), lora=LORA).save_pretrained(str(tmp_path / "adapters"))
    names = {file.name for file in (tmp_path / "adapters").iterdir()}
    assert names == copied | {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_adapters_are_loaded_by_peft_and_merged_like_a_sync(
    family: str, tmp_path: Path, make_trainer: Make, device: str
) -> None:
    peft = pytest.importorskip("peft")

    lora = LORA if family == "qwen3" else EXPERTS
    path = write_model(tmp_path / "model", family, **FAMILIES[family])
    trainer, batch = learned(make_trainer(path, lora=lora, device=device)), make_batch(4)
    trainer.save_pretrained(str(tmp_path / "adapters"))
    trainer.save_pretrained(str(tmp_path / "merged"), merge_adapters=True)
    adapted = peft.PeftModel.from_pretrained(loaded(path), str(tmp_path / "adapters"))
    assert adapted.peft_config["default"].base_model_name_or_path == path
    named = dict(trainer.model.named_parameters())
    trained = sum(param.nbytes for name, param in named.items() if "lora_" in name)
    assert (
        sum(tensor.nbytes for tensor in stored_tensors(tmp_path / "adapters").values()) == trained
    )
    with torch.no_grad():
        for model in (adapted, loaded(tmp_path / "merged")):
            assert_scores(trainer.compute_log_prob(batch), reference_logprobs(model, batch))
    assert_same_bits(served(tmp_path / "merged", device), synced(trainer, path))


def test_merged_adapters_are_rounded_once_to_the_dtype_of_the_rollout(
    tmp_path: Path, make_trainer: Make
) -> None:
    path, out = write_model(tmp_path / "model"), tmp_path / "out"
    trainer = learned(make_trainer(path, lora=LORA, param_dtype="bfloat16"))
    trainer.save_pretrained(str(out), merge_adapters=True)
    assert {tensor.dtype for tensor in stored_tensors(out).values()} == {torch.bfloat16}
    bf16 = torch.bfloat16
    assert_same_bits(served(out, dtype=bf16), synced(trainer, path, bf16))
    trainer.save_pretrained(str(tmp_path / "adapters"))
    assert {tensor.dtype for tensor in stored_tensors(tmp_path / "adapters").values()} == {
        torch.float32
    }


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "uneven": ("qwen3", {"vocab_size": 97, "hidden_size": 33, "intermediate_size": 45}, {}),
    "columns": ("qwen3_moe", {"num_experts": 5}, {"param_dtype": "bfloat16"}),
    "adapters": ("qwen3", {}, {"lora": LORA, "param_dtype": "float16"}),
    "expert adapters": ("qwen3_moe", {"num_experts": 5}, {"lora": EXPERTS}),
}
COLUMNS = {"model.layers.1.mlp.experts.down_proj": 2}


def save_all(trainer: Trainer, out: Path) -> None:
    trainer.save_pretrained(str(out / "plain"))
    if trainer.config.lora is not None:
        trainer.save_pretrained(str(out / "merged"), merge_adapters=True)


def save_on_rank(rank: int, out: str) -> None:
    for case, (_, _, changes) in CASES.items():
        dims = COLUMNS if case == "columns" else None
        trainer = Trainer(config(f"{out}/{case}/model", **changes), shard_dims=dims)
        learned(trainer)
        trainer.save_checkpoint(f"{out}/{case}/checkpoint")
        save_all(trainer, Path(out, case, "two"))


def test_export_of_two_ranks_equals_that_of_one_and_of_their_checkpoint(
    tmp_path: Path, make_trainer: Make
) -> None:
    """Compare byte by byte; one rank loads the checkpoint of two."""
    for case, (family, fields, _) in CASES.items():
        write_model(tmp_path / case / "model", family, **fields)
    results(start_ranks(save_on_rank, 2, tmp_path / "meet", str(tmp_path)))
    for case, (_, _, changes) in CASES.items():
        place = tmp_path / case
        settings = config(str(place / "model"), **changes)
        alone = make_trainer(str(place / "model"), **changes)
        alone.load_checkpoint(str(place / "checkpoint"))
        save_all(alone, place / "one")
        for name in ("plain", "merged") if settings.lora else ("plain",):
            merge = name == "merged"
            off = place / "offline" / name
            export_checkpoint(str(place / "checkpoint"), str(off), settings, merge_adapters=merge)
            one = contents(place / "one" / name)
            assert contents(place / "two" / name) == one, case
            assert contents(off) == one, case


@pytest.mark.parametrize("family", some("deepseek_v3", whole=["mixtral"]))
def test_checkpoint_of_streamed_masters_is_exported_like_the_trainer(
    family: str, tmp_path: Path, make_trainer: Make
) -> None:
    """Include buffers, which no checkpoint holds, and a random model without files."""
    for number, how in enumerate(({}, {"random_init": True})):
        write = describe if how else write_model
        path = write(tmp_path / f"model{number}", family, **FAMILIES[family])
        how = {**how, "param_dtype": "float16", "optimizer_offload": True}
        trainer, out = learned(make_trainer(path, **how)), tmp_path / f"{number}"
        trainer.save_checkpoint(str(out / "checkpoint"))
        trainer.save_pretrained(str(out / "here"))
        export_checkpoint(str(out / "checkpoint"), str(out / "there"), trainer.config)
        assert contents(out / "here") == contents(out / "there")


def test_checkpoint_that_does_not_fit_the_model_is_not_exported(
    tmp_path: Path, make_trainer: Make
) -> None:
    path, out = write_model(tmp_path / "model"), tmp_path / "out"
    trainer, place = make_trainer(path, lora=LORA), str(tmp_path / "step")
    with pytest.raises(ValueError, match="holds no complete checkpoint"):
        export_checkpoint(place, str(out), trainer.config)
    trainer.save_checkpoint(place)
    other = config(write_model(tmp_path / "other", seed=1))
    smaller = config(write_model(tmp_path / "smaller", num_hidden_layers=1))
    rule = r"began with other weights \(digest \w{16}; \w{16} now\); restore the original weights"
    for merge in (False, True):
        with pytest.raises(OtherWeights, match=rule):
            export_checkpoint(place, str(out), other, merge_adapters=merge)
    with pytest.raises(ValueError, match="belongs to another model: unknown model.layers.1"):
        export_checkpoint(place, str(out), smaller)
    bare = config(describe(tmp_path / "bare"), random_init=True)
    with pytest.raises(ValueError, match="adapters of random weights, which only the run"):
        export_checkpoint(place, str(out), bare, merge_adapters=True)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "no space left on device")]
)
def test_failed_export_leaves_the_older_one_whole(
    error: BaseException, tmp_path: Path, make_trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = write_model(tmp_path / "model"), tmp_path / "out"
    trainer = make_trainer(path)
    trainer.save_pretrained(str(out))
    before = contents(out)
    learned(trainer)

    def fails(calls: Iterator[int], at: int, *arguments: object) -> None:
        if next(calls) == at:
            raise error

    for at in range(3):  # weights, config, a copied file
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", partial(fails, itertools.count(), at))
            with pytest.raises(type(error)):
                trainer.save_pretrained(str(out))
        assert contents(out) == before
    assert {entry.name for entry in tmp_path.iterdir()} == {"model", "out"}
    trainer.save_pretrained(str(out))
    assert contents(out) != before


def test_full_disk_is_an_oserror_with_its_number(tmp_path: Path, make_trainer: Make) -> None:
    """Limit the size of files, because safetensors reports no OSError."""
    trainer = make_trainer(write_model(tmp_path / "model"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            trainer.save_pretrained(str(tmp_path / "out"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert not list(tmp_path.glob("out*"))


def fail_on_first(rank: int, path: str, out: str) -> str:
    trainer = Trainer(config(path))
    vars(export)["_FILE_BYTES"] = 10_000  # the first of several files fails
    if rank == 0:
        safetensors.torch.save_file = lambda *_: os.unlink("/nowhere")  # type: ignore[assignment]
    try:
        trainer.save_pretrained(out)
    except Exception as error:
        return type(error).__name__
    return "saved"


def test_export_that_rank_0_cannot_write_fails_on_both(tmp_path: Path) -> None:
    """Expect no wait for the group's timeout, which is longer than the test's."""
    path = write_model(tmp_path / "model")
    ranks = start_ranks(
        fail_on_first, 2, tmp_path / "meet", path, str(tmp_path / "out"), seconds=600.0
    )
    assert results(ranks) == ["FileNotFoundError", "OtherRankFailed"]
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("generation", [None, {}, {"eos_token_id": 3}, {"eos_token_id": [3, 5]}])
@pytest.mark.parametrize("template", [None, "", "{{ 'other' }}"])
def test_export_has_the_end_tokens_and_the_template_of_the_run(
    generation: dict[str, Any] | None, template: str | None, tmp_path: Path, make_trainer: Make
) -> None:
    """The tokenizer's end token counts, and so do those of both configs."""
    path, out = Path(write_model(tmp_path / "model")), tmp_path / "out"
    (path / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    words = models.WordLevel({**{str(id): id for id in range(7)}, "<e>": 7}, "0")
    saved = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="<e>")
    saved.save_pretrained(path)
    tokenizer = json.loads((path / "tokenizer_config.json").read_text())
    settings = json.dumps(tokenizer | {"chat_template": "{{ 'old' }}"})
    (path / "tokenizer_config.json").write_text(settings)
    (path / "chat_template.jinja").write_text("{{ 'own' }}")
    make_trainer(str(path)).save_pretrained(str(out), chat_template=template)
    ends = GenerationConfig.from_pretrained(str(out)).eos_token_id
    assert {*ends} == token_ids(path).ends == token_ids(out).ends > {7}
    kept = json.loads((out / "tokenizer_config.json").read_text())
    jinja = out / "chat_template.jinja"
    if template is None:
        assert jinja.read_text() == "{{ 'own' }}" and kept["chat_template"] == "{{ 'old' }}"
    else:
        assert kept == tokenizer and jinja.is_file() == bool(template)
        assert not template or jinja.read_text() == template


Save = Callable[[Trainer, str], None]
SAVES: dict[str, tuple[Save, str]] = {
    "export": (Trainer.save_pretrained, "config.json"),
    "checkpoint": (Trainer.save_checkpoint, "values.json"),
}


@pytest.mark.parametrize("kind", SAVES)
def test_saving_touches_no_folder_of_others(kind: str, tmp_path: Path, make_trainer: Make) -> None:
    path, (save, own) = write_model(tmp_path / "model"), SAVES[kind]
    trainer, parent = make_trainer(path), tmp_path / "mine"
    for name in ("notes.txt", "data.json", "config.json/x", "out.partial/x", "out.before/x"):
        (parent / name).parent.mkdir(parents=True, exist_ok=True)
        (parent / name).write_text("of the user")
    before = {file: file.read_bytes() for file in parent.rglob("*") if file.is_file()}
    with pytest.raises(ValueError, match=f"holds .*, which is no file of an? {kind}; name"):
        save(trainer, str(parent))
    for _ in range(2):
        save(trainer, str(parent / "out"))
    assert all(file.read_bytes() == content for file, content in before.items())
    assert (parent / "out" / own).is_file()
    names = {"notes.txt", "data.json", "config.json", "out.partial", "out.before", "out"}
    assert {entry.name for entry in parent.iterdir()} == names


def test_two_savers_of_one_directory_leave_one_whole_directory(
    tmp_path: Path, make_trainer: Make
) -> None:
    make_trainer(write_model(tmp_path / "model"))  # opens the process group
    place = tmp_path / "parent" / "out"
    with checkpoint.whole_directory(str(place), ["n"], "a checkpoint") as first:
        Path(first, "n").write_text("first")
        with checkpoint.whole_directory(str(place), ["n"], "a checkpoint") as second:
            Path(second, "n").write_text("second")
        assert (place / "n").read_text() == "second"
    assert (place / "n").read_text() == "first"
    assert [entry.name for entry in place.parent.iterdir()] == ["out"]


def test_export_into_the_own_directory_of_the_model_is_refused(
    tmp_path: Path, make_trainer: Make
) -> None:
    path = write_model(tmp_path / "model")
    trainer, before = make_trainer(path), contents(Path(path))
    with pytest.raises(ValueError, match="is the model's own directory; name another"):
        trainer.save_pretrained(path)
    assert contents(Path(path)) == before


def test_exports_that_nothing_could_load_are_refused(tmp_path: Path, make_trainer: Make) -> None:
    path, out = write_model(tmp_path / "model"), str(tmp_path / "out")
    trainer = make_trainer(path)
    with pytest.raises(ValueError, match="cannot be saved; use float32, bfloat16, float16"):
        trainer.save_pretrained(out, dtype="float8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="merge_adapters=True needs adapters"):
        trainer.save_pretrained(out, merge_adapters=True)
    trainer.offload("params")
    with pytest.raises(StateError, match=r"save_pretrained\(\) needs tag 'params'"):
        trainer.save_pretrained(out)
    drawn = make_trainer(describe(tmp_path / "bare"), lora=LORA, random_init=True)
    with pytest.raises(ValueError, match="has random weights, which no folder holds; set merge_"):
        drawn.save_pretrained(out)
    drawn.save_pretrained(out, merge_adapters=True)
    loaded(out)


def test_base_of_adapters_is_named_as_on_the_hub(tmp_path: Path, make_trainer: Make) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123abcd"
    make_trainer(write_model(snapshot), lora=LORA).save_pretrained(str(tmp_path / "out"))
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == "org/name"
