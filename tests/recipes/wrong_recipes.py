"""Wrong recipes, by key: out of range, and contradicting another. `test_wrong_recipes` asks for a case of every key.

A case is the overrides of a recipe (tiny, unless it names another), and words of the one line that follows. Ranges show
when a recipe is loaded, contradictions at the latest when it is prepared.
"""

from __future__ import annotations

from typing import NamedTuple


class Wrong(NamedTuple):
    overrides: list[str]
    words: list[str]
    base: str = "tiny"


def _below(key: str, low: int) -> Wrong:
    return Wrong([f"{key}={low - 1}"], [f"{key}={low - 1}: must be at least {low}"])


def _outside(key: str, value: str, rule: str) -> Wrong:
    return Wrong([f"{key}={value}"], [f"{key}={value}: ", rule])


AT_LEAST = {
    "steps": 1,
    "engine.page_size": 1,
    "engine.max_running": 1,
    "engine.max_prefill_tokens": 1,
    "engine.tensor_parallel_size": 1,
    "trainer.micro_batch_size": 1,
    "trainer.threads": 1,
    "lora.rank": 0,
    "sampling.max_tokens": 1,
    "sampling.top_k": 0,
    "grpo.prompts_per_step": 1,
    "grpo.samples_per_prompt": 2,
    "ppo.prompts_per_step": 1,
    "ppo.samples_per_prompt": 1,
    "ppo.epochs": 1,
    "ppo.mini_batches": 1,
    "ppo.critic_warmup_steps": 0,
    "task.num_terms": 2,
    "task.num_digits": 1,
    "eval.every": 0,
    "eval.problems": 1,
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
    "checkpoint.max_restarts": 0,
    "cluster.nnodes": 1,
    "cluster.n_gpus_per_node": 1,
}

OUT_OF_RANGE = {key: _below(key, low) for key, low in AT_LEAST.items()} | {
    "algorithm": _outside("algorithm", "dpo", "must be grpo or ppo"),
    "status": _outside("status", "dreamt", "must be run or planned"),
    "driver": _outside("driver", "slurm", "must be inprocess or ray"),
    "device": _outside("device", "tpu", "must be auto, cpu, cuda or cuda:N"),
    "seed": _outside("seed", "-1", "must lie in [0, 2**63)"),
    "model.path": Wrong(["model.path=' '"], ["model.path='': must name a directory"]),
    "model.shape": Wrong(
        ["model.config=null", "model.shape=qwen2.5-7bb"],
        ["model.shape=qwen2.5-7bb: must be one of", "set model.shape=qwen2.5-7b"],
    ),
    "model.config": Wrong(["model.config.model_type=null"], ["model.config={'model_type': None", "has no model_type"]),
    "model.dtype": _outside("model.dtype", "int8", "must be float32 or bfloat16"),
    "engine.kv_tokens": _outside("engine.kv_tokens", "100", "must be a positive multiple of engine.page_size=16"),
    "engine.mem_fraction_static": Wrong(
        ["engine.kv_tokens=null", "engine.mem_fraction_static=1.5", "device=cuda:0"], ["must lie between 0 and 1"]
    ),
    "engine.sleep_level": _outside("engine.sleep_level", "3", "must be 1 (keep on the host) or 2 (discard)"),
    "engine.kv_cache_dtype": _outside("engine.kv_cache_dtype", "int4", "must be one of auto, fp8_e4m3"),
    "engine.host_to_device_ratio": _outside("engine.host_to_device_ratio", "-1.0", "must not be negative"),
    "trainer.dtype": _outside("trainer.dtype", "fp32", "must be float32 or bfloat16"),
    "trainer.learning_rate": _outside("trainer.learning_rate", "-1.0", "must lie between 0 and 1"),
    "trainer.weight_decay": _outside("trainer.weight_decay", "1.0", "must lie in [0, 1)"),
    "trainer.beta1": _outside("trainer.beta1", "1.0", "must lie in [0, 1)"),
    "trainer.beta2": _outside("trainer.beta2", "-0.1", "must lie in [0, 1)"),
    "trainer.max_grad_norm": _outside("trainer.max_grad_norm", "0.0", "must be positive"),
    "lora.alpha": _outside("lora.alpha", "0.0", "must be positive"),
    "lora.target_modules": _outside("lora.target_modules", "[lm_head]", "must be different names of q_proj"),
    "sampling.temperature": _outside("sampling.temperature", "nan", "must be positive"),
    "sampling.top_p": _outside("sampling.top_p", "0.0", "must lie in (0, 1]"),
    "grpo.clip_low": _outside("grpo.clip_low", "1.0", "must lie between 0 and 1"),
    "grpo.clip_high": _outside("grpo.clip_high", "0.0", "must lie between 0 and 1"),
    "grpo.kl_coef": _outside("grpo.kl_coef", "inf", "must not be negative, nor infinite"),
    "ppo.gamma": _outside("ppo.gamma", "1.1", "must lie in (0, 1]"),
    "ppo.gae_lambda": _outside("ppo.gae_lambda", "0.0", "must lie in (0, 1]"),
    "ppo.clip_low": _outside("ppo.clip_low", "1.0", "must lie between 0 and 1"),
    "ppo.clip_high": _outside("ppo.clip_high", "0.0", "must lie between 0 and 1"),
    "ppo.kl_coef": _outside("ppo.kl_coef", "-0.1", "must not be negative, nor infinite"),
    "ppo.critic_learning_rate": _outside("ppo.critic_learning_rate", "0.0", "must lie between 0 and 1"),
    "ppo.value_clip": _outside("ppo.value_clip", "0.0", "must be positive"),
    "task.name": _outside("task.name", "chess", "must be one of toy, chain_sum"),
    "task.also_train_digits": Wrong(
        ["task.also_train_digits=[0]"], ["task.also_train_digits=[0]: must be different numbers"], "smollm2-135m"
    ),
    "task.held_out_fraction": _outside("task.held_out_fraction", "1.0", "must lie between 0 and 1"),
    "task.partial_credit": _outside("task.partial_credit", "1.0", "must lie in [0, 1)"),
    "eval.also_digits": _outside("eval.also_digits", "[0]", "must be different numbers of at least 1"),
    "cycle.keep": _outside("cycle.keep", "[params,wieghts]", "names unknown tags wieghts"),
    "cluster.gpu": _outside("cluster.gpu", "h900", "must be one of h100-80gb"),
}
WITHOUT_RANGE = {
    "engine.cuda_graphs",
    "trainer.lr_decay",
    "trainer.activation_checkpointing",
    "grpo.normalize_std",
    "ppo.normalize_advantages",
    "task.system_prompt",
}

SHARE = ["engine.kv_tokens=null"]  # of a GPU, as nothing else says how large the pool is
SUMS = ["model.path=DIR", "task.name=chain_sum", "task.partial_credit=0"]  # DIR: a model directory

CONTRADICTING = (
    {
        "driver": Wrong(["cluster.n_gpus_per_node=2"], ["driver=inprocess: cannot drive 2 devices", "set driver=ray"]),
        "device": Wrong(["device=cuda:1"], ["device=cuda:1: names one of the 8 devices"], "qwen2.5-7b-8xh100"),
        "model.path": Wrong(["model.path=/nowhere"], ["model.path=/nowhere: ", "smollm2-135m"]),
        "model.shape": Wrong(["model.shape=qwen2.5-7b"], ["model.shape=qwen2.5-7b: excludes model.config"]),
        "model.config": Wrong(["model.path=DIR", "model.config.hidden_size=8"], ["has no effect with model.path=DIR"]),
        "engine.kv_tokens": Wrong(
            ["engine.page_size=1", "engine.kv_tokens=10"], ["too small for one request of 9 + 3"]
        ),
        "engine.mem_fraction_static": Wrong(SHARE, ["mem_fraction_static=0.9: is a share", "device=cpu here"]),
        "engine.page_size": Wrong(["engine.page_size=300"], ["engine.kv_tokens=2048: ", "engine.page_size=300"]),
        "engine.kv_cache_dtype": Wrong(
            ["engine.kv_cache_dtype=fp4_e2m1", "model.config.head_dim=8"], ["engine.kv_cache_dtype=fp4_e2m1: "]
        ),
        "engine.host_to_device_ratio": Wrong(
            ["engine.host_to_device_ratio=0.001"], ["host_to_device_ratio=0.001: 2048 tokens times it hold no page"]
        ),
        "engine.tensor_parallel_size": Wrong(
            ["engine.tensor_parallel_size=2"],
            ["engine.tensor_parallel_size=2: does not divide cluster.n_gpus_per_node=1"],
        ),
        "lora.alpha": Wrong(["lora.alpha=8"], ["lora.alpha=8: has no effect with lora.rank=0"]),
        "lora.target_modules": Wrong(["lora.target_modules=[q_proj]"], ["has no effect with lora.rank=0"]),
        "sampling.max_tokens": Wrong(["sampling.max_tokens=60"], ["answer exceed the model's context of 64 tokens"]),
        "grpo.prompts_per_step": Wrong(["grpo.prompts_per_step=49"], ["the task has 48 training problems"]),
        "ppo.prompts_per_step": Wrong(
            ["algorithm=ppo", "ppo.prompts_per_step=49"], ["the task has 48 training problems"]
        ),
        "ppo.mini_batches": Wrong(["algorithm=ppo", "ppo.mini_batches=65"], ["exceeds the step's 64 answers"]),
        "ppo.critic_warmup_steps": Wrong(
            ["algorithm=ppo", "ppo.critic_warmup_steps=50"], ["leaves none of steps=50 to the policy"]
        ),
        "task.name": Wrong(
            ["task.name=chain_sum", "task.partial_credit=0"], ["a random model has no tokenizer for it"]
        ),
        "task.num_terms": Wrong(["task.num_terms=3"], ["task.num_terms=3: has no effect with task.name=toy"]),
        "task.num_digits": Wrong(["task.num_digits=3"], ["task.num_digits=3: has no effect with task.name=toy"]),
        "task.also_train_digits": Wrong(
            ["task.also_train_digits=[2]"], ["task.also_train_digits=[2]: is not defined for task.name=toy"]
        ),
        "task.held_out_fraction": Wrong(["task.held_out_fraction=0.999999"], ["leaves no problem for training"]),
        "task.partial_credit": Wrong([*SUMS, "task.partial_credit=0.5"], ["is not defined for task.name=chain_sum"]),
        "eval.also_digits": Wrong(["eval.also_digits=[2]"], ["eval.also_digits=[2]: is not defined for task.name=toy"]),
        "checkpoint.max_restarts": Wrong(
            ["checkpoint.max_restarts=2", "checkpoint.every=0"], ["max_restarts=2: needs checkpoints to go on from"]
        ),
        "cycle.keep": Wrong(["cycle.keep=[optim,critic]"], ["critic is there with algorithm=ppo only", "keep=[optim]"]),
    }
    | {
        f"ppo.{key}": Wrong([f"ppo.{key}={value}"], [f"ppo.{key}={value}: has no effect with algorithm=grpo"])
        for key, value in {
            "samples_per_prompt": 3,
            "epochs": 2,
            "gamma": 0.9,
            "gae_lambda": 0.9,
            "normalize_advantages": "false",
            "clip_low": 0.1,
            "clip_high": 0.1,
            "kl_coef": 0.1,
            "critic_learning_rate": 1e-4,
            "value_clip": 0.1,
        }.items()
    }
    | {
        f"grpo.{key}": Wrong(
            ["algorithm=ppo", f"grpo.{key}={value}"], [f"grpo.{key}={value}: has no effect with algorithm=ppo"]
        )
        for key, value in {
            "samples_per_prompt": 3,
            "normalize_std": "false",
            "clip_low": 0.1,
            "clip_high": 0.1,
            "kl_coef": 0.1,
        }.items()
    }
)
CONTRADICTING_NOTHING = {
    "algorithm",
    "status",
    "steps",
    "seed",
    "model.dtype",
    "engine.max_running",
    "engine.max_prefill_tokens",
    "engine.sleep_level",
    "engine.cuda_graphs",
    "lora.rank",
    "sampling.temperature",
    "sampling.top_k",
    "sampling.top_p",
    "task.system_prompt",
    "eval.every",
    "eval.problems",
    "checkpoint.every",
    "checkpoint.keep",
    "cluster.nnodes",
    "cluster.n_gpus_per_node",
    "cluster.gpu",
    *(f"trainer.{key}" for key in ("dtype", "learning_rate", "lr_decay", "weight_decay", "beta1", "beta2")),
    *(f"trainer.{key}" for key in ("max_grad_norm", "micro_batch_size", "activation_checkpointing", "threads")),
}

MORE_CONTRADICTIONS = {
    "two pool sizes": Wrong(["engine.mem_fraction_static=0.5"], ["excludes engine.kv_tokens=2048"]),
    "no model": Wrong(["model.config=null"], ["model.path=null: no model is named", "model.shape=qwen2.5-0.5b"]),
    "fp4 over several ranks": Wrong(
        ["engine.tensor_parallel_size=2", "engine.kv_cache_dtype=fp4_e2m1"], ["excludes engine.kv_cache_dtype=fp4_e2m1"]
    ),
    "ranks that the heads do not divide into": Wrong(
        ["driver=ray", "cluster.n_gpus_per_node=3", "engine.tensor_parallel_size=3"],
        ["engine.tensor_parallel_size=3: ", "choose a size that divides", "set engine.tensor_parallel_size=1"],
    ),
    "a reference that is not there": Wrong(
        ["cycle.keep=[reference]"], ["reference is there with grpo.kl_coef above 0"]
    ),
    "a critic's reference": Wrong(
        ["algorithm=ppo", "cycle.keep=[reference,critic]"], ["reference is there with ppo.kl_coef", "keep=[critic]"]
    ),
    "the task's digits beside themselves": Wrong(
        ["task.num_digits=2", "task.also_train_digits=[]"],
        ["eval.also_digits=[2]: has task.num_digits=2"],
        "smollm2-135m",
    ),
    "the task's digits trained on beside themselves": Wrong(
        ["task.num_digits=2"], ["task.also_train_digits=[2]: ", "other than task.num_digits=2"], "smollm2-135m"
    ),
    "digits trained on twice": Wrong(
        ["task.also_train_digits=[2,2]"], ["task.also_train_digits=[2,2]: must be different"], "smollm2-135m"
    ),
    "shape beside a path": Wrong(
        ["model.shape=qwen2.5-7b"], ["no effect with model.path=smollm2-135m"], "smollm2-135m"
    ),
    "vocabulary too small": Wrong(
        ["model.config.vocab_size=5"], ["model.config.vocab_size=5: is less than", "17 words"]
    ),
    "windows below a host tier": Wrong(
        [
            "engine.host_to_device_ratio=2",
            "model.config={model_type: qwen3, use_sliding_window: true, sliding_window: 8, max_window_layers: 0}",
        ],
        ["engine.host_to_device_ratio=2.0: pages of this model"],
    ),
    "pool below a longer request": Wrong(
        ["engine.kv_tokens=16", "sampling.max_tokens=20"], ["engine.kv_tokens=16: ", "engine.kv_tokens=32 or more"]
    ),
}

OF_THE_MODEL = {
    "unknown model type": Wrong(["model.config.model_type=qwenty"], ["model.config", "qwenty"]),
    "model of bad sizes": Wrong(["model.config.num_key_value_heads=0"], ["model.config", "is no model", "correct"]),
    "model the engine does not compute": Wrong(
        ["model.config={model_type: gpt2}"], ["model.config", "GPT2LMHeadModel"]
    ),
    "model misspelt": Wrong(["model.path=smolm2-135m"], ["model.path=smolm2-135m", "did you mean smollm2-135m?"]),
    "no such GPU": Wrong(["device=cuda:99"], ["device=cuda:99", "device=auto"]),
}

OF_THE_FORM = {
    "unknown key": Wrong(["stepz=3"], ["stepz: unknown key; did you mean steps?"]),
    "unknown key, nothing close": Wrong(["qqq=1"], ["qqq", "known here", "sampling"]),
    "not an override": Wrong(["steps"], ["steps", "key=value"]),
    "empty part of a key": Wrong(["sampling..top_k=1"], ["sampling..top_k=1", "key=value"]),
    "bad YAML": Wrong(["steps=[1"], ["steps=[1", "quote it"]),
    "fraction for an integer": Wrong(["steps=1.5"], ["steps=1.5", "an integer"]),
    "nothing for an integer": Wrong(["steps=null"], ["steps=null", "an integer"]),
    "value for a section": Wrong(["sampling=3"], ["sampling=3", "max_tokens"]),
    "section for a value": Wrong(["steps.x=3"], ["steps", "an integer"]),
    "unresolved interpolation": Wrong(["steps=${stepps}"], ["steps=${stepps}", "an integer"]),
    "interpolation of itself": Wrong(["steps=${steps}"], ["steps"]),
    "several lines": Wrong(["device=a\nb"], ["device=a b: must be auto"]),
}
