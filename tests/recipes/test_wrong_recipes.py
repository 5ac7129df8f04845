"""Wrong recipes: every fault is a line that names key, value, rule and remedy."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import recipes
from recipes.cli import main
from recipes.config.load import load, packaged_recipes, recipe_text
from recipes.config.recipe import FIELDS, Recipe, is_section
from recipes.config.rules import VLLM_COLDEST
from recipes.setup.model_files import describe_random_model, toy_tokenizer
from recipes.tasks.toy import TOY_WORDS
from rollout.hosted import COLDEST as COLDEST_OF_VLLM
from rollout.requests import COLDEST
from tests.helpers.docs.pages import ROOT

PPO = ROOT / "examples" / "plans" / "qwen2.5-1.5b-ppo.yaml"
ON_HOST = "trainer.optimizer_offload=true"
ONE = "driver=inprocess"
TWO = "driver=ray cluster.n_gpus_per_node=2 engine.tensor_parallel_size=2"
TP = "engine.tensor_parallel_size"
APART = "driver=ray cluster.rollout_gpus=1 cluster.colocate=false"
FOUR = "driver=ray cluster.n_gpus_per_node=4 engine.tensor_parallel_size=4"
VLLM, SGLANG = "device=auto engine.kind=vllm", "device=auto engine.kind=sglang"
GROWS = "cycle.overlap=[params]: needs a KV cache that grows"
FILE = "task.name=file task.data=x.jsonl"
DECOUPLED = "correction.mode=decoupled"
TOO = "task.mixture=[{name:\u00a0toy}]"
# Rules between keys: recipe, overrides, a part of the message.
RULES = [
    ("tiny", "model.config=null", "model.path=null: no model is named; set model.path=DIRECTORY"),
    ("tiny", "model.config.model_type=null", "has no model_type; set model.config.model_type="),
    ("tiny", "model.shape=qwen2.5-7b", "model.shape=qwen2.5-7b: excludes model.config; set model"),
    ("qwen2.5-7b", "model.shape=qwen2.5-7bb", "smollm2-135m; set model.shape=qwen2.5-7b"),
    ("tiny", "engine.options.x=1", "engine.options={'x': 1}: need engine.kind=vllm or sglang"),
    ("tiny", "engine.mem_fraction_static=0.5", "static=0.5: excludes engine.kv_tokens=2048"),
    ("tiny", "engine.kv_tokens=100", "multiple of engine.page_size=16; set engine.kv_tokens=112"),
    ("tiny", f"{TWO} engine.kv_cache_dtype=fp4_e2m1", "excludes engine.tensor_parallel_size=2"),
    ("tiny", f"{FOUR} engine.expert_parallel=3", "must divide engine.tensor_parallel_size=4"),
    ("tiny", "engine.tensor_parallel_size=2", "does not divide cluster.n_gpus_per_node=1, the"),
    ("qwen2.5-7b", "trainer.optimizer_offload=true", "trainer.dtype=bfloat16: trainer.optimizer_"),
    ("qwen2.5-7b", "model.dtype=float16", "trainer.dtype=bfloat16: model.dtype=float16 needs"),
    ("tiny", f"{ON_HOST} trainer.optimizer=adamw_8bit", "set trainer.optimizer=adamw"),
    ("tiny", "trainer.optimizer_offload=true lora.rank=2", "which are small (lora.rank=2)"),
    ("tiny", "lora.rank=12 lora.target_modules=[experts]", "8 for adapters of experts; set lora."),
    ("tiny", "lora.rank=1 lora.target_modules=[q_proj,q_proj]", "names a layer twice"),
    ("tiny", "lora.rank=8 lora.target_modules=[experts] lora.merge=false", "set lora.merge=auto"),
    ("tiny", "trackers=[tensorboard,tensorboard]", "names a tracker twice; set trackers=[]"),
    ("tiny-ppo", "loop.mini_batches=999", "loop.mini_batches=999: exceeds the step's"),
    ("tiny", "loop.mini_batches=769", "loop.mini_batches=769: exceeds the step's 768 answers; set"),
    ("tiny", "loop.samples_per_prompt=1", "nothing to compare an answer with; set loop.samples_p"),
    ("tiny", "grpo.baseline=batch", "grpo.scale=group: excludes grpo.baseline=batch; set grpo.sca"),
    (
        "tiny",
        "grpo.baseline=batch grpo.scale=none loop.prompts_per_step=1 loop.samples_per_prompt=1",
        "loop.prompts_per_step=1: leaves grpo.baseline=batch a single answer; set loop.prompts",
    ),
    (
        "tiny",
        "loss.dual_clip=3 loss.kind=cispo",
        "loss.dual_clip=3.0: excludes loss.kind=cispo, wh",
    ),
    ("tiny", "loss.kl_coef=1 loss.kl_estimator=k1", "set loss.kl_estimator=k3, or loss.kl_in=rewa"),
    ("tiny-ppo", "loss.kl_in=loss loss.kl_estimator=k1", "because its expected gradient is 0; set"),
    (
        "tiny-ppo",
        "loss.reference_every=2 lora.rank=1",
        "whose frozen base is the reference (lora.rank=1); set loss.reference_every=0",
    ),
    ("tiny-ppo", "steps=5 ppo.critic_warmup_steps=5", "leaves none of steps=5 to the policy"),
    ("tiny", "steps=5 trainer.warmup_steps=5", "leaves none of steps=5 to the whole learning rate"),
    (
        "tiny-ppo",
        "steps=5 ppo.critic_warmup_steps=2 trainer.warmup_steps=3",
        "trainer.warmup_steps=3: leaves none of steps=5 after ppo.critic_warmup_steps=2 to the who",
    ),
    ("tiny", "task.name=file", "task.data=null: names no data for name=file; set task.data=FILE"),
    ("tiny", "task.data=x.jsonl", "task.data=x.jsonl: needs task.name=file; set task.name=file"),
    ("tiny", f"{FILE} task.answer_column=null", "column=null: without answers, nothing scores; "),
    (
        "tiny",
        TOO,
        "task.mixture[0].label=null: task has the name toy, too, which figures need apart",
    ),
    ("tiny", f"{TOO} task.mixture[0].label=b task.mixture[0].data=x", "task.mixture[0].data=x: ne"),
    ("tiny", TOO.replace("task.mixture", "eval.sets"), "set eval.sets[0].label=toy_2"),
    ("smollm2-135m-2digits", "eval.sets[0].weight=2", "eval.sets[0].weight=2.0: has no effect on"),
    ("tiny", "task.held_out_fraction=0", "leaves eval.every=10 no problem; set task.held_out_frac"),
    ("tiny", "checkpoint.max_restarts=2 checkpoint.every=0", "needs checkpoints to continue from"),
    ("tiny", f"{ONE} cluster.n_gpus_per_node=2", "cannot drive 2 devices; set driver=ray"),
    ("qwen2.5-7b", f"{TWO} device=cuda:1", "device=cuda:1: names one of the 2 devices of cluster"),
    ("tiny", f"{ONE} cluster.rollout_gpus=1", "cannot drive 2 devices; set driver=ray"),
    ("tiny", "loop.max_staleness=1", "loop.max_staleness=1: needs engines on devices of their own"),
    (
        "tiny",
        f"{APART} loop.max_staleness=1 grpo.sampling_rounds=2",
        "leaves the next prompts open",
    ),
    ("tiny", f"{APART} loop.max_staleness=1 exact=true", "samples by older weights"),
    ("tiny", "cluster.colocate=false", "leaves no device to the engines (cluster.rollout_gpus=0)"),
    (
        "tiny",
        f"{TWO} cluster.rollout_gpus=3",
        "does not divide cluster.rollout_gpus=3, the devices",
    ),
    (
        "tiny",
        f"{APART} engine.tensor_parallel_size=2",
        "does not divide cluster.rollout_gpus=1, the",
    ),
    (
        "tiny",
        "driver=ray engine.tensor_parallel_size=2 cluster.n_gpus_per_node=3 cluster.colocate=false "
        "cluster.rollout_nodes=1",
        "does not divide the 3 devices of a machine of cluster.rollout_nodes",
    ),
    ("tiny", f"{ONE} cluster.rollout_nodes=1", "cannot drive 2 devices; set driver=ray"),
    ("tiny", f"{ONE} cluster.address=1.2.3.4:5", "excludes driver=inprocess; set driver=ray"),
    ("tiny", "driver=ray cluster.address=here", "cluster.address=here: "),
    ("tiny", "cluster.ports=30-20", "cluster.ports=30-20: is not a range of ports from 1024 to"),
    ("tiny", "cluster.object_store_gib=0", "cluster.object_store_gib=0"),
    ("tiny", f"{APART} cycle.alias=always", "cycle.alias=always: needs trainer and engine on one"),
    (
        "tiny",
        f"{APART} cycle.hand_over=always",
        "(cluster.colocate=true); set cycle.hand_over",
    ),
    (
        "tiny",
        f"{APART} cycle.overlap=[optim]",
        "cycle.overlap=[optim]: needs trainer and en",
    ),
    ("tiny", "cycle.resident=[optim,critic]", "with algorithm=ppo; set cycle.resident=[optim]"),
    ("tiny", "cycle.resident=[reference]", "reference exists only with loss.kl_coef above 0"),
    ("tiny-ppo", "loss.kl_coef=1 lora.rank=1 cycle.resident=[reference]", "only with lora.rank=0"),
    ("tiny", "cycle.overlap=[critic_optim]", "critic_optim exists only with algorithm=ppo"),
    ("tiny", "trainer.optimizer_offload=true cycle.resident=[optim]", "only with trainer.opt"),
    ("tiny", "cycle.overlap=[optim] cycle.hand_over=always", "cycle.hand_over=always: excludes"),
    ("tiny", f"{DECOUPLED} correction.how=mask correction.low=2", "must be below correction.high"),
    ("tiny", f"{DECOUPLED} correction.reject=max_k3", "the limit that correction.reject=max_k3 ne"),
    (
        "tiny",
        f"{DECOUPLED} correction.reject_above=1",
        "needs correction.reject; set correction.re",
    ),
    (
        "tiny-ppo",
        "correction.mode=bypass",
        "log-probabilities of the trainer for the KL divergence",
    ),
    ("tiny", "correction.mode=bypass loss.kl_coef=1 loss.kl_in=reward", "or loss.kl_in=loss"),
    ("tiny", "engine.kind=vllm", "device=cpu: cannot run vLLM's kernels, with engine.kind=vllm"),
    ("tiny", f"{VLLM} engine.kv_tokens=null engine.mem_fraction_static=0.5", "workspaces and grap"),
    ("tiny", f"{VLLM} engine.kv_cache_dtype=fp8_e4m3", "is untested, with engine.kind=vllm; set"),
    ("tiny", f"{VLLM} engine.host_to_device_ratio=1", "ratio=1.0: needs the native engine, with"),
    ("tiny", f"{VLLM} loop.router_replay=true", "loop.router_replay=true: needs the native engine"),
    ("tiny", f"{VLLM} model.fp32_router=true", "model.fp32_router=true: needs the native engine"),
    ("tiny", f"{VLLM} driver=ray cluster.nnodes=2", "nnodes=2: is untested above one machine"),
    ("tiny", f"{VLLM} driver=ray cluster.rollout_gpus=1", "rollout_gpus=1: is untested, with eng"),
    ("tiny", f"{VLLM} cycle.alias=always", "excludes vLLM, whose buffers lie among its weights"),
    ("tiny", f"{VLLM} cycle.overlap=[params]", f"{GROWS}, and vLLM's does not"),
    ("tiny", f"{VLLM} sampling.temperature=0.001", "temperature=0.001: is raised to 0.01 by vLLM"),
    (
        "tiny",
        "grpo.sampling_rounds=2 grpo.baseline=batch grpo.scale=batch",
        "rounds=2: needs advantages within groups, not grpo.baseline=batch; set grpo.sampling_ro",
    ),
    (
        "tiny",
        "sampling.max_tokens=8 sampling.length_penalty=1 sampling.length_penalty_tokens=9",
        "tokens=9: exceeds sampling.max_tokens=8; set sampling.length_penalty_tokens=8",
    ),
    ("tiny", f"{SGLANG} {TWO}", "size=2: counts trainer ranks that share an engine; SGLang"),
    ("tiny", f"{SGLANG} driver=ray engine.options.tp_size=2", "an actor sees one GPU; set driver"),
    ("tiny", f"{SGLANG} driver=ray cluster.n_gpus_per_node=2", "is untested above one"),
]
# Overrides without effect, and the reason.
IDLE = [
    ("tiny", "ppo.gamma=0.9", "algorithm=grpo; change that, or drop ppo.gamma"),
    ("tiny-ppo", "grpo.scale=none", "algorithm=ppo"),
    ("tiny", "loss.clip_low=0.1", "one update a step (loop.epochs=1, loop.mini_batches=1)"),
    (PPO, "loss.kind=gspo", "one update a step (loop.epochs=1, loop.mini_batches=1)"),
    ("tiny", "loss.dual_clip=3", "one update a step (loop.epochs="),
    ("tiny", "loss.kl_in=reward", "loss.kl_coef=0"),
    ("tiny", "loss.kl_estimator=k1", "loss.kl_coef=0"),
    ("tiny", "loss.reference_every=5", "loss.kl_coef=0"),
    ("tiny-ppo", "loss.reference_every=24", "steps=24"),
    ("tiny-ppo", "loss.reference_every=1", "loss.reference_every=1, by which the policy is its"),
    ("tiny", "correction.high=3", "correction.mode=auto; change that, or drop correction.high"),
    (PPO, "ppo.value_clip=0.1", "one update a step (loop.epochs="),
    ("tiny", "lora.alpha=8", "lora.rank=0"),
    ("tiny", "lora.merge=true", "lora.rank=0"),
    ("tiny", "trainer.final_rate=0.1", "trainer.schedule=constant"),
    ("smollm2-135m", "model.config.hidden_size=8", "model.path=smollm2-135m"),
    ("tiny", "task.split=test", "task.name=toy"),
    ("tiny", "task.extract=number", "task.name=toy"),
    ("tiny", "sampling.length_penalty_tokens=2", "sampling.length_penalty=0"),
    ("tiny", "task.weight=2", "task.mixture=[]"),
]
LATENT = " model.config.".join([
    "algorithm=grpo", "model_type=deepseek_v2", "num_key_value_heads=4", "first_k_dense_replace=2",
    "kv_lora_rank=16", "q_lora_rank=20", "qk_nope_head_dim=12", "qk_rope_head_dim=8",
    "v_head_dim=10",
])  # fmt: skip
MIXTURE = " model.config.".join([
    "algorithm=grpo", "model_type=qwen3_moe", "num_experts=4", "num_experts_per_tok=2",
    "moe_intermediate_size=32",
])  # fmt: skip
WINDOWS = " model.config.".join([
    "algorithm=grpo", "use_sliding_window=true", "sliding_window=8", "max_window_layers=0"
])  # fmt: skip
# Faults that only a preparation finds: overrides of tiny, a part of the message.
PREPARED = [
    (VLLM, "engine.kind=vllm: torch sees no GPU here"),
    ("device=cuda:99", "device=cuda:99: torch sees no GPU here; set device=auto"),
    ("model.path=/nowhere", "model.path=/nowhere: "),
    ("model.path=smolm2-135m", "did you mean smollm2-135m?"),
    ("model.config.model_type=qwenty", "qwenty"),
    ("model.config.num_key_value_heads=0", "is no model"),
    ("model.config={model_type:\u00a0gpt2}", "GPT2LMHeadModel"),
    ("model.config.vocab_size=5", "model.config.vocab_size=5: is less than"),
    ("engine.page_size=1 engine.kv_tokens=10", "too small for one request of 9 + 3"),
    ("engine.kv_tokens=16 sampling.max_tokens=20", "engine.kv_tokens=32 or more"),
    ("engine.kv_tokens=null engine.mem_fraction_static=0.9", "static=0.9: is a share"),
    ("cycle.alias=always model.dtype=bfloat16", "cycle.alias=always: the trainer's pages are"),
    ("engine.kv_cache_dtype=fp4_e2m1 model.config.head_dim=8", "engine.kv_cache_dtype=fp4_e2m1: "),
    ("engine.host_to_device_ratio=0.001", "of 2048 tokens is less than a page"),
    (f"{WINDOWS} engine.host_to_device_ratio=2", "engine.host_to_device_ratio=2.0: its pages"),
    (f"{WINDOWS} cycle.overlap=[params]", "sliding windows"),
    (f"{TWO} cycle.overlap=[params]", GROWS),
    ("engine.host_to_device_ratio=1 cycle.overlap=[params]", GROWS),
    (f"{TWO} engine.expert_parallel=2", "the model has no experts to divide"),
    (TWO.replace("2", "3"), "choose a size that divides"),
    (f"{LATENT} lora.rank=2", "set lora.target_modules=[o_proj,gate_proj,up_proj,down_proj]"),
    (f"{MIXTURE} lora.rank=8", "set lora.target_modules=[q_proj,k_proj,v_proj,o_proj,experts]"),
    ("task.max_prompt_tokens=8", "; set task.max_prompt_tokens=9"),
    ("task.max_prompt_tokens=8", "training of toy (64 longer than task.max_prompt_tokens=8, up to"),
    ("task.held_out_fraction=0.999999", "leaves no problem for training of toy"),
    ("sampling.max_tokens=60", "answer exceed the model's context of 64 tokens"),
    ("loop.prompts_per_step=49", "toy has 48 training problems, and its share can be 49; set loop"),
    (
        "task.name=reasoning_gym:chain_sun",
        "has no generator chain_sun; set task.name=reasoning_gym:chain_sum",
    ),
    ("loop.router_replay=true", "the model has no experts to choose"),
    ("model.fp32_router=true", "the model has no experts to choose"),
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model's directory whose file of weights has no tensor."""
    folder = tmp_path_factory.mktemp("model")
    describe_random_model(load("tiny").model.config, toy_tokenizer(TOY_WORDS), folder)
    save_file({}, folder / "model.safetensors")
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a run that must not start, on a machine without a GPU."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    return tmp_path / "run"


def faults(base: str | Path, *overrides: str) -> str:
    """Return the message about a wrong recipe."""
    with pytest.raises(recipes.RecipeError) as caught:
        load(base, overrides)
    return str(caught.value)


def words_of(overrides: str) -> list[str]:
    """Split overrides at spaces; a no-break space stands for a space within one."""
    return [word.replace("\u00a0", " ") for word in overrides.split(" ")]


@pytest.mark.parametrize(("base", "overrides", "said"), RULES)
def test_contradicting_keys_are_refused(base: str, overrides: str, said: str) -> None:
    assert said in faults(base, *words_of(overrides))


def test_split_of_a_file_is_refused_on_the_command_line() -> None:
    words = ["task.name=file", "task.data=x.jsonl"]
    assert "has no effect with task.data=x.jsonl, a file" in faults("tiny", *words, "task.split=a")
    assert "has no effect with task.name=file" in faults("tiny", *words, "task.parameters.x=1")
    load("tiny", [words[0], "task.data=org/name", "task.split=a"])


@pytest.mark.parametrize(("base", "override", "why"), IDLE)
def test_override_without_effect_is_refused(base: str, override: str, why: str) -> None:
    assert faults(base, override).startswith(f"command line: {override}: has no effect with {why}")


@pytest.mark.parametrize(("overrides", "said"), PREPARED)
def test_recipe_that_cannot_run_here_is_refused_in_one_line(
    overrides: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "tiny", *words_of(overrides), "--run-dir", str(folder)]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and said in line and not folder.exists()


@pytest.mark.parametrize(
    ("command", "package", "words", "said"),
    [
        ("run", "bitsandbytes", "trainer.optimizer=adamw_8bit", "trainer.optimizer=adamw_8bit"),
        ("plan", "bitsandbytes", "trainer.optimizer=adamw_8bit", "trainer.optimizer=adamw_8bit"),
        ("run", "ray", "driver=ray", "driver=ray"),
        ("run", "ray", TWO.replace("ray", "auto"), "driver=auto with 2 devices"),
    ],
)
def test_recipe_without_its_package_is_refused_in_one_line(
    command: str,
    package: str,
    words: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *place: None if name == package else find(name, *place),
    )
    folder = ["--run-dir", str(tmp_path / "run")] if command == "run" else []
    assert main([command, "tiny", *words.split(), *folder]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and not [*tmp_path.iterdir()]
    assert f"{said}: needs the package {package}; run: pip install" in line


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("engine.sleep_level=7", "must be 1 or 2 (1 keeps the weights on the host; 2 discards"),
        ("task.name=a:b:c", "must have this form "),
        ("cycle.alias=yes", "must be 'auto', 'always' or 'never' (Whether the rollout serves"),
        ("cycle.resident=[params,wieghts]", "must be 'auto' or be 'params', 'optim', 'critic', "),
        ("sampling=3", "must be a dictionary (Sampling of training answers); set sampling."),
        ("device=a\nb", "must have this form (One of auto (cuda:0"),
    ],
)
def test_invalid_value_is_refused_with_rule_description_and_remedy(
    override: str, line: str
) -> None:
    key, _, value = override.partition("=")
    value = {"yes": "true", "a\nb": "a b"}.get(value, value)
    said = faults("tiny", override)
    assert said.startswith(f"command line: {key}={value}: {line}")
    assert "\n" not in said and f"; set {key}" in said


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("steps", "command line: steps: must be key=value, for example steps=3; "),
        ("sampling..top_k=1", "command line: sampling..top_k=1: must be key=value"),
        ("steps=[1", "command line: steps=[1: while parsing a flow sequence"),
        ("seed=${steps}", "command line: seed=${steps}: ${steps} has a reference, which recipes"),
        ("qqq=1", "command line: qqq: unknown key; known here: model, task, steps, "),
        ("task.mixture=[{nam: toy}]", "command line: task.mixture[0].name: is required and has no"),
        (
            "task.mixture=[{name: toy, lable: b}]",
            "command line: task.mixture[0].lable: unknown key",
        ),
        (
            "eval.sets=[{name: a.b}]",
            "command line: eval.sets[0].name=a.b: must have this form",
        ),
        ("task.mixture=[7]", "command line: task.mixture[0]=7: must be a dictionary"),
        (
            "task.mixture[2].weight=1",
            "command line: task.mixture[2].weight=1: names no item of a list",
        ),
    ],
)
def test_malformed_override_is_refused_in_one_line(override: str, said: str) -> None:
    line = faults("tiny", override)
    assert line.startswith(said)


def test_unknown_keys_are_named_with_suggestions() -> None:
    lines = faults("tiny", *(f"{key}x=1" for key in FIELDS)).splitlines()
    expected = {f"command line: {key}x: unknown key; did you mean {key}?" for key in FIELDS}
    assert set(lines) == expected


def test_all_faults_are_listed_with_their_places(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = recipe_text(load("tiny")).replace("seed: 0", "seed: -1").replace("device:", "devise:")
    (tmp_path / "mine.yaml").write_text(text)
    assert main(["run", str(tmp_path / "mine.yaml"), "steps=abc"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and lines[1].startswith("memsaver: mine.yaml: seed=-1: must be ")
    assert lines[0].startswith("memsaver: command line: steps=abc: must be a valid integer, ")
    assert lines[2] == "memsaver: mine.yaml: devise: unknown key; did you mean device?"
    assert faults("tiny", "engine.kv_tokens=5", "task.held_out_fraction=0").count("\n") == 1


def test_every_default_is_valid() -> None:
    for key, field in FIELDS.items():
        if is_section(key):
            section = field.annotation
            given = {"name": "toy"} if key == "task" else {}
            assert section(**vars(section(**given))) == section(**given)


def test_least_temperatures_equal_those_of_the_engines() -> None:
    assert (FIELDS["sampling.temperature"].metadata[0].ge, VLLM_COLDEST) == (
        COLDEST,
        COLDEST_OF_VLLM,
    )


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", "{", "config.json is not valid JSON"),
        ("generation_config.json", "[]", "generation_config.json is no mapping"),
        ("tokenizer.json", None, "has no readable tokenizer: tokenizer.json is missing"),
        ("tokenizer.json", "{}", "has no readable tokenizer"),
        ("model.safetensors", "cut off", "model.safetensors cannot be read"),
        ("model.safetensors", None, "lacks model.safetensors"),
    ],
)
def test_damaged_model_directory_is_refused_in_one_line_that_names_the_file(
    name: str,
    content: str | None,
    said: str,
    model_dir: Path,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = folder.parent / "model"
    shutil.copytree(model_dir, model)
    (model / name).unlink()
    if content is not None:
        (model / name).write_text(content)
    assert main(["run", "tiny", f"model.path={model}", "--run-dir", str(folder)]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and f"model.path={model}: " in line and said in line
    assert "download or save the model again" in line or "save_pretrained" in line
    assert not folder.exists()


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("--steps 3 tiny", "--steps; set steps=3"),
        ("tiny --sampling.max_tokens=5", "--sampling.max_tokens=5; set sampling.max_tokens=5"),
        ("tiny --seed", "--seed; set seed=VALUE"),
        ("tiny --quick", "--quick; a recipe's key has no dashes, for example steps=3"),
    ],
)
def test_key_typed_as_an_option_is_answered_with_the_override(
    words: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", *words.split()])
    assert f"unrecognized arguments: {remedy}\n" in capsys.readouterr().err


def test_every_packaged_recipe_is_listed_with_a_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == packaged_recipes()
    assert all(len(line.split()) > 4 for line in lines)


ODD = ["\x0c", "a\x85b", "\u2028", str(10**400), "1e999", "-.inf", ".nan", "???", "~", "''", "0x10"]
ODD += ["${steps}", "${oc.env:HOME}", "[${steps}]", "[1, [2]]", "{a: {b: 1}}", "[null]", "{}", "[]"]
ODD += ["2024-01-01", "!!set {a}", "[params]", "[critic, 7]", "['']"]
JUNK = st.one_of(
    st.text(max_size=20), st.sampled_from(ODD), st.integers().map(str), st.floats().map(str)
)


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from([*FIELDS]), JUNK), min_size=1, max_size=3))
def test_random_overrides_give_a_recipe_or_error_lines(pairs: list[tuple[str, str]]) -> None:
    overrides = [f"{key}={value}" for key, value in pairs]
    try:
        recipe = load("tiny", overrides)
    except recipes.RecipeError as error:
        assert all(line.count(": ") for line in str(error).splitlines())
    else:
        assert isinstance(recipe, Recipe)
