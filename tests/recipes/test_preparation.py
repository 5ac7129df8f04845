"""Preparation of runs, with files of a random model, arguments, pool sizes, and prompt limits."""

from __future__ import annotations

import json
import re
import types
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

import recipes
from recipes.arguments import cycle_arguments, engine_arguments, open_pair, trainer_config
from recipes.setup.model_files import TOY_TEMPLATE, describe_random_model, toy_tokenizer
from recipes.setup.pool import engine_rank
from recipes.setup.preparation import Setup, prepare
from recipes.tasks.toy import TOY_WORDS
from rollout import AdapterSlots, KVTiers
from rollout.config import EngineConfig
from rollout.model.loading import load_model_config
from tests.helpers.trainer_bridge.other_trainers import STAND_IN
from trainer_bridge import LoraConfig

GIB = 2**30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Patch torch to report a GPU of 80 GiB."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    properties = types.SimpleNamespace(total_memory=80 * GIB, major=9, minor=0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)


def test_random_model_is_described_without_weights(tmp_path: Path) -> None:
    setup = prepare(recipes.load("tiny"), tmp_path / "run")
    assert setup.model_dir == tmp_path / "run" / "model"
    made = tmp_path / "made"
    made.mkdir()
    assert setup.model_dir.stat().st_mode == made.stat().st_mode  # Others may export the run.
    names = {file.name for file in setup.model_dir.iterdir()}
    assert {"config.json", "generation_config.json"} <= names
    assert {"tokenizer.json", "tokenizer_config.json"} <= names
    assert not [name for name in names if "safetensors" in name]
    config = json.loads((setup.model_dir / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["vocab_size"] == len(setup.tokenizer)
    assert load_model_config(setup.model_dir).stop_token_ids == {setup.tokenizer.eos_token_id}
    wider = prepare(recipes.load("tiny", ["model.config.vocab_size=1000"]), tmp_path / "wide")
    assert load_model_config(wider.model_dir).vocab_size == 1000


def test_arguments_of_trainer_and_engine_follow_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["trainer.dtype=bfloat16", "model.dtype=bfloat16"]
    words += ["engine.cuda_graphs=false", "device=cpu", "driver=ray"]
    words += ["engine.kv_cache_dtype=fp8_e5m2", "engine.host_to_device_ratio=1.5"]
    words += ["engine.preemption=recompute"]
    two = ["engine.tensor_parallel_size=2", "cluster.n_gpus_per_node=2"]
    for more in [], two:
        setup = prepare(recipes.load("tiny", [*words, *more]), tmp_path)
        config, engine = trainer_config(setup), engine_arguments(setup)
        assert config.dtype == config.param_dtype == "bfloat16"
        assert config.random_init is True
        assert engine["tiers"] == KVTiers(host_ratio=1.5, preemption="recompute")
        assert (engine["cuda_graphs"], engine["kv_cache_dtype"]) == (False, "fp8_e5m2")
        assert engine["tensor_parallel_size"] == (2 if more else 1)
        EngineConfig(
            **{key: value for key, value in engine.items() if key not in ("dtype", "kind")}
        )
    monkeypatch.setattr("recipes.arguments.open_ray", lambda *args, **words: words)
    ray = prepare(recipes.load("tiny", ["driver=ray", "cluster.call_timeout=7"]), tmp_path)
    places = {"devices": 1, "nodes": 1, "address": None}
    places |= {"rollout_devices": 0, "rollout_nodes": 0, "colocate": True}
    places |= {"object_store_bytes": 256 << 20, "ports": None}
    note = lambda number, error: None  # noqa: E731
    assert open_pair(ray, nullcontext, note) == {
        **places, "timeout": 7.0, "alias": False, "stage": nullcontext,
        "max_engine_restarts": 2, "on_replaced": note,
    }  # fmt: skip
    words = [
        "driver=ray",
        "cluster.rollout_gpus=3",
        "cluster.colocate=false",
        "engine.kv_tokens=null",
        "engine.max_running=9999",
        "eval.every=0",
    ]
    apart = prepare(recipes.load("tiny", words), tmp_path)
    opened = open_pair(apart, nullcontext, note)
    assert (opened["rollout_devices"], opened["colocate"], opened["alias"]) == (3, False, False)
    assert cycle_arguments(apart)["resident"] >= {"weights", "kv_cache", "cuda_graph"}
    far = ["cluster.rollout_nodes=2", "cluster.ports=20000-20009", "cluster.object_store_gib=1"]
    opened = open_pair(prepare(recipes.load("tiny", [*words, *far]), tmp_path), nullcontext, note)
    assert (opened["nodes"], opened["rollout_nodes"], opened["address"]) == (1, 2, "auto")
    assert (opened["ports"], opened["object_store_bytes"]) == ((20000, 20009), 1 << 30)
    far.append("cluster.address=10.0.0.1:6379")
    opened = open_pair(prepare(recipes.load("tiny", [*words, *far]), tmp_path), nullcontext, note)
    assert opened["address"] == "10.0.0.1:6379"
    one = prepare(recipes.load("tiny", [*words, "cluster.rollout_gpus=1"]), tmp_path)
    assert one.kv_tokens == 3 * apart.kv_tokens, "each engine has a third of the requests"
    plain = prepare(recipes.load("tiny"), tmp_path)
    undecided = prepare(recipes.load("tiny", ["cycle.resident=auto"]), tmp_path)
    assert trainer_config(undecided).leaving == ()
    ppo = ["algorithm=ppo", "loss.kl_coef=0.1", "cycle.resident=[critic]", "cycle.alias=never"]
    everything = prepare(recipes.load("tiny-ppo", ppo), tmp_path)
    assert trainer_config(everything).leaving == ("params", "optim", "critic_optim", "reference")
    served = prepare(recipes.load("tiny", ["cycle.resident=[]", "cycle.alias=always"]), tmp_path)
    assert trainer_config(served).leaving == ("optim",)
    vllm = replace(plain.recipe.engine, kind="vllm", options={"async_scheduling": False})
    hosted = replace(plain, recipe=replace(plain.recipe, engine=vllm, device="cuda:0"))
    assert not engine_arguments(hosted)["async_scheduling"]
    assert engine_arguments(hosted)["tensor_parallel_size"] == 1
    assert engine_arguments(plain)["tiers"] is None and trainer_config(plain).lora is None
    adapted = recipes.load("tiny", ["lora.rank=2", "lora.alpha=3", "lora.target_modules=[v_proj]"])
    expected = LoraConfig(rank=2, alpha=3.0, target_modules=("v_proj",), served_as="policy")
    setup = prepare(adapted, tmp_path)
    assert trainer_config(setup).lora == expected
    slots = AdapterSlots(slots=2, rank=2, target_modules=("v_proj",))
    assert engine_arguments(setup)["adapters"] == slots


LAYERS = "layer_types: [linear_attention, full_attention]"
LINEAR = f"model.config={{model_type: qwen3_next, num_experts: 0, {LAYERS}}}"
TWO_RANKS = "driver=ray cluster.n_gpus_per_node=2 engine.tensor_parallel_size=2"


def test_ranks_that_alias_the_base_of_adapters_have_all_of_it_each(tmp_path: Path) -> None:
    words = ["lora.rank=2", "driver=ray", "cluster.n_gpus_per_node=2", "cycle.alias=always"]
    setup = prepare(recipes.load("tiny", words), tmp_path)
    assert setup.decisions.alias and trainer_config(setup).replicate
    assert "weights" in cycle_arguments(setup)["resident"]
    for other in ("lora.merge=true", "engine.tensor_parallel_size=2"):
        with pytest.raises(
            recipes.RecipeError, match="the trainer's pages are shards on 2 devices"
        ):
            prepare(recipes.load("tiny", [*words, other]), tmp_path)
    with pytest.raises(ValueError, match="replicate=True: is for adapters, without a critic"):
        replace(trainer_config(setup), lora=None)


@pytest.mark.parametrize("word", ["lora.merge=true", LINEAR])
def test_adapters_are_merged_where_asked_or_where_the_engine_cannot_serve_them(
    word: str, tmp_path: Path
) -> None:
    chosen = ["lora.rank=2", "lora.target_modules=[o_proj]", word]
    setup = prepare(recipes.load("tiny", chosen), tmp_path)
    lora = trainer_config(setup).lora
    assert lora is not None and lora.served_as is None and setup.recipe.lora.merge is True
    assert engine_arguments(setup)["adapters"] is None and not setup.decisions.alias


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen2.5-7b", f"{TWO_RANKS} engine.kv_cache_dtype=fp8_e4m3"),
        ("qwen2.5-0.5b", "model.dtype=float32"),
    ],
)
def test_memory_fraction_covers_weights_and_pool(
    name: str, words: str, tmp_path: Path, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compute from the config of a random model, for whole weights and for a rank's part."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    share = ["engine.kv_tokens=null", "engine.mem_fraction_static=0.6"]
    check_share(prepare(recipes.load(name, [*share, *words.split()]), tmp_path))


def test_tensor_parallel_size_of_vllm_must_divide_its_heads(
    tmp_path: Path, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(STAND_IN)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)

    def prepared(devices: int, ranks: int) -> Setup:
        size = f"cluster.n_gpus_per_node={devices} engine.tensor_parallel_size={ranks}"
        words = ["engine.kind=vllm", "driver=ray", "device=auto", *size.split()]
        return prepare(recipes.load("tiny", words), tmp_path)

    assert engine_arguments(prepared(4, 2))["tensor_parallel_size"] == 2
    assert prepared(4, 1).kv_tokens == prepared(4, 2).kv_tokens
    with pytest.raises(recipes.RecipeError, match="size=3: does not divide the model's 4 heads"):
        prepared(3, 3)


def check_share(setup: Setup) -> None:
    """Check that the engine fills the share up to less than a page."""
    recipe, model = setup.recipe, load_model_config(setup.model_dir)
    rank = engine_rank(recipe, model, setup.longest_prompt)
    budget = recipe.engine.mem_fraction_static * 80 * GIB
    assert rank.taken(setup.kv_tokens, False) <= budget < rank.taken(setup.kv_tokens + 16, False)
    assert setup.device == "cuda:0" and setup.kv_tokens % 16 == 0


def test_memory_fraction_covers_states_of_linear_layers(tmp_path: Path, gpu: None) -> None:
    share = ["device=cuda:0", "engine.kv_tokens=null", "engine.mem_fraction_static=0.9", LINEAR]
    setup = prepare(recipes.load("tiny", share), tmp_path)
    check_share(setup)
    with pytest.raises(
        recipes.RecipeError,
        match="weights, states and steps take .* set engine.tensor_parallel_size",
    ):
        prepare(recipes.load("tiny", [*share, "engine.max_running=80000"]), tmp_path / "more")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["cluster.n_gpus_per_node=2"],
            ["cluster.n_gpus_per_node=2", "torch sees 1 GPU here", "n_gpus_per_node=1"],
        ),
        (
            ["cluster.rollout_gpus=2"],
            ["rollout_gpus=2: torch sees 1 GPU here, and", "set cluster.rollout_gpus=0"],
        ),
        (
            ["cluster.rollout_gpus=1", "cluster.colocate=false"],
            ["cluster.n_gpus_per_node=1 of them train", "rollout_gpus=0 cluster.colocate=true"],
        ),
        (
            ["cluster.n_gpus_per_node=8", "device=cpu", "engine.tensor_parallel_size=8"],
            ["engine.tensor_parallel_size=8", "cannot be shared", "tensor_parallel_size=1"],
        ),
    ],
)
def test_missing_devices_and_unsuitable_sizes_are_refused(
    words: list[str], expected: list[str], tmp_path: Path, gpu: None
) -> None:
    with pytest.raises(recipes.RecipeError) as caught:
        prepare(recipes.load("tiny", ["driver=ray", "device=auto", *words]), tmp_path / "run")
    for word in expected:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


def test_memory_fraction_below_the_weights_is_refused_with_the_least_value(
    tmp_path: Path, gpu: None
) -> None:
    share = ["engine.kv_tokens=null", "engine.mem_fraction_static=0.1"]
    remedy = r"set engine.mem_fraction_static=0.19$"  # 14.8 of 80 GiB, and one request
    with pytest.raises(
        recipes.RecipeError,
        match=rf"engine.mem_fraction_static=0.1: weights, states and steps take .*{remedy}",
    ):
        prepare(recipes.load("qwen2.5-7b", share), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    share[-1] = "engine.mem_fraction_static=0.19"
    assert prepare(recipes.load("qwen2.5-7b", share), tmp_path).kv_tokens >= 16


def test_unwritable_run_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "model").touch()
    with pytest.raises(
        recipes.RecipeError, match="--run-dir .*: cannot be written: File exists; name a place"
    ):
        prepare(recipes.load("tiny"), tmp_path)


def data_file(folder: Path, rows: list[dict[str, Any]], name: str = "rows") -> str:
    """Write a JSONL file and return the settings that make it the task."""
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / f"{name}.jsonl").write_text(lines)
    return f"{folder}/{name}.jsonl"


def rows_of(prompts: list[Any]) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "answer": "a"} for prompt in prompts]


@pytest.mark.parametrize("key", ["task.mixture", "eval.sets"])
def test_prompts_of_further_sets_count_for_the_longest_request(key: str, tmp_path: Path) -> None:
    """Add a set whose prompts have two words more."""
    data = data_file(tmp_path, rows_of([f"a b c d e {n}" for n in range(40)]))
    sets = f"{key}=[{{name: file, data: {data}}}]"
    alone, further = (
        prepare(recipes.load("tiny", words), tmp_path / "run").max_request_tokens
        for words in ([], [sets])
    )
    assert further == alone + 2


def with_template(template: str | None, folder: Path) -> list[str]:
    """Write a model with this chat template and return the overrides that use it."""
    tokenizer = toy_tokenizer(TOY_WORDS)
    tokenizer.chat_template = template
    describe_random_model(recipes.load("tiny").model.config, tokenizer, folder)
    save_file({}, folder / "model.safetensors")
    return [f"model.path={folder}"]


REFUSES = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
ONLY_USER = "{{ messages[-1]['content'] }}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (REFUSES + TOY_TEMPLATE, "prompt=of: the model's chat template refuses a system turn: no "),
        (ONLY_USER, "task.system_prompt=of: the model's chat template ignores a system turn"),
        (
            "{{ messages[0].none.none }}",
            "task.name=toy: the chat template refuses the prompt 'first",
        ),
        ("{% if %}", "task.name=toy: the chat template refuses the prompt 'first of"),
        (None, "task.system_prompt=of: needs a chat template, and the model's tokenizer has none"),
    ],
)
def test_chat_template_that_refuses_a_prompt_fails_in_one_line(
    template: str | None, words: str, tmp_path: Path
) -> None:
    model = with_template(template, tmp_path / "model")
    with pytest.raises(recipes.RecipeError, match=words) as raised:
        prepare(recipes.load("tiny", [*model, "task.system_prompt=of"]), tmp_path / "run")
    assert "\n" not in str(raised.value) and not (tmp_path / "run").exists()


def marks(setup: Setup, index: int = 0) -> str:
    """Return the prompt of a problem as text with its special tokens."""
    return setup.tokenizer.decode(setup.tasks.trained[0].train[index].prompt_ids)


def test_prompt_follows_template_arguments_and_system_prompt(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{{ bos_token }} {% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
        "{% if thinking %}first{% endif %}"
    )
    model = with_template(TOY_TEMPLATE, tmp_path / "model")
    own = [*model, f"task.template={template}"]
    turn = marks(prepare(recipes.load("tiny", model), tmp_path / "run"))
    assert turn == "<|im_start|> user first of a a <|im_end|> <|im_start|> assistant"
    setup = prepare(recipes.load("tiny", [*own, "task.system_prompt=of"]), tmp_path / "run")
    assert marks(setup) == "<|im_start|> system of user first of a a"
    argument = "task.template_arguments.thinking=true"
    setup = prepare(recipes.load("tiny", [*own, argument]), tmp_path / "run")
    assert marks(setup) == "<|im_start|> user first of a a first"
    for words, expected in (
        (["task.template_arguments.thinkin=true"], "has no thinkin; did you mean thinking?"),
        ([f"task.template={tmp_path}/none"], "none: cannot be read: No such file or directory; "),
        ([f"task.template={tmp_path}"], "cannot be read: Is a directory"),
    ):
        with pytest.raises(recipes.RecipeError, match=re.escape(expected)) as raised:
            prepare(recipes.load("tiny", [*own, *words]), tmp_path / "run")
        assert "\n" not in str(raised.value)


BEGINS = TemplateProcessing(
    single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 2), ("<|im_end|>", 3)]
)


@pytest.mark.parametrize("written", ["", "<|im_start|> "], ids=["bare", "begins"])
@pytest.mark.parametrize("template", [None, "none"])
def test_plain_text_begins_with_one_bos_and_is_not_ended(
    template: str | None, written: str, tmp_path: Path
) -> None:
    """Use a tokenizer that puts a token before and after each text."""
    model = with_template(None if template is None else TOY_TEMPLATE, tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    tokenizer.post_processor = BEGINS
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    data = data_file(tmp_path, rows_of([f"{written}first of {word}" for word in "abcdefgh"]))
    words = [*model, "task.name=file", f"task.data={data}", "loop.prompts_per_step=1"]
    words += ["task.template=none"] if template else []
    setup = prepare(recipes.load("tiny", words), tmp_path / "run")
    assert re.fullmatch(r"<\|im_start\|> first of [a-h]", marks(setup))
    chat = with_template("{{ bos_token }} {{ messages[0].content }}", tmp_path / "chat")
    tokenizer.save(str(tmp_path / "chat" / "tokenizer.json"))
    rendered = prepare(recipes.load("tiny", chat), tmp_path / "run")
    assert marks(rendered) == "<|im_start|> first of a a"


def test_messages_are_turns_and_need_a_template(tmp_path: Path) -> None:
    def chat(word: str, *before: dict[str, str]) -> list[dict[str, str]]:
        return [*before, {"role": "user", "content": word}]

    one = {"role": "assistant", "content": "b"}
    chats = [chat(word, *chat("first"), one) for word in "abcdefgh"]
    data = data_file(tmp_path, rows_of(chats))
    words = ["task.name=file", f"task.data={data}", "loop.prompts_per_step=1"]
    setup = prepare(recipes.load("tiny", [*words, "task.system_prompt=in full"]), tmp_path / "run")
    begin = "<|im_start|> system in full <|im_end|> <|im_start|> user first <|im_end|>"
    assert marks(setup).startswith(f"{begin} <|im_start|> assistant b <|im_end|> <|im_start|> user")
    own = rows_of([chat(word, {"role": "system", "content": "c"}) for word in "abcdefgh"])
    words[1] = f"task.data={data_file(tmp_path, own)}"
    setup = prepare(recipes.load("tiny", [*words, "task.system_prompt=in full"]), tmp_path / "run")
    assert marks(setup).startswith("<|im_start|> system c <|im_end|> <|im_start|> user")
    with pytest.raises(recipes.RecipeError, match="rows.jsonl: .* messages need a chat template; "):
        prepare(recipes.load("tiny", [*words, "task.template=none"]), tmp_path / "more")


LONG = """
from dataclasses import replace
from recipes.config.sections import TaskSection
from recipes.tasks import Problem, make_task

def long(section):
    task = make_task(TaskSection(name="toy"))
    odd = Problem(prompt="first of " + "a b " * 40, answer="a")
    return replace(task, train=(task.train[0], odd, *task.train[1:]))
"""


@pytest.mark.parametrize(
    "words", [[], ["engine.kv_tokens=64", "model.config.max_position_embeddings=128"]]
)
def test_too_long_prompt_is_named_and_can_be_left_out(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "long_task.py").write_text(LONG)
    monkeypatch.syspath_prepend(tmp_path)
    words = [*words, "task.name=long_task:long", "loop.prompts_per_step=8"]
    with pytest.raises(recipes.RecipeError) as raised:
        prepare(recipes.load("tiny", words), tmp_path / "run")
    line = str(raised.value)
    assert "('first of a b a b " in line
    remedy = "task.max_prompt_tokens=61"
    assert line.endswith(f"{remedy} (leaves out 1 of 65 problems)")
    setup = prepare(recipes.load("tiny", [*words, remedy]), tmp_path / "run")
    (task,) = setup.tasks.trained
    left_out = f"1 longer than {remedy}, up to 87 tokens ('first of a b a b a b a b a b a b a b...)"
    assert task.summary() == f"long (48 to train, 16 held out; left out: {left_out})"
    assert all(problem.prompt_ids for problem in setup.tasks.problems())
    assert setup.max_request_tokens == 9 + 3


def test_changed_problems_order_template_and_tokenizer_are_named_on_resume(tmp_path: Path) -> None:
    model = with_template(TOY_TEMPLATE, tmp_path / "model")
    (tmp_path / "chat.jinja").write_text(TOY_TEMPLATE)
    rows = rows_of([f"first of {a} {b}" for a in "abcdefgh" for b in "abcd"])
    words = [*model, f"task.template={tmp_path}/chat.jinja", "loop.prompts_per_step=1"]
    words += ["task.name=file", f"task.data={data_file(tmp_path, rows)}"]
    words += [f"task.mixture=[{{name: file, data: {data_file(tmp_path, rows[:20], 'more')}}}]"]

    def prepared() -> Setup:
        return prepare(recipes.load("tiny", words), tmp_path / "run")

    saved = prepared().prompt_digests()
    assert prepared().other_prompts(saved) == prepared().other_prompts({}) == ""
    others = "has other problems, or in another order,"
    data_file(tmp_path, [*rows[:20:-1], *rows[:21]])
    assert prepared().other_prompts(saved) == f"task.data={tmp_path}/rows.jsonl: {others}"
    data_file(tmp_path, rows)
    data_file(tmp_path, [{**row, "answer": "b"} for row in rows[:20]], "more")
    line = f"task.mixture[0].data={tmp_path}/more.jsonl: has other answers or columns"
    assert prepared().other_prompts(saved) == line
    data_file(tmp_path, rows[:20], "more")
    (tmp_path / "chat.jinja").write_text(f"{TOY_TEMPLATE} a")
    line = f"task.template={tmp_path}/chat.jinja: has another text"
    assert prepared().other_prompts(saved) == line
    (tmp_path / "chat.jinja").write_text(TOY_TEMPLATE)
    toy_tokenizer([*TOY_WORDS[::-1]]).save_pretrained(tmp_path / "model")
    assert f"{model[0]}: tokenizer and chat template make" in prepared().other_prompts(saved)
