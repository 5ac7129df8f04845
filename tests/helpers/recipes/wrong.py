"""Wrong recipes: values outside of a range, by rule, keys that contradict each other, and words of
a wrong form.

A case is the overrides of a recipe (tiny, unless it names another), and words of the one line that
follows. Ranges show when a recipe is loaded, contradictions at the latest when it is prepared.
"""

from __future__ import annotations

from typing import NamedTuple


class Wrong(NamedTuple):
    overrides: list[str]
    words: list[str]
    base: str = "tiny"


def wrong(overrides: str, *words: str, base: str = "tiny") -> Wrong:
    """overrides: apart by spaces. DIR stands for a model directory."""
    return Wrong(overrides.split(), list(words), base)


class Range(NamedTuple):
    """keys: apart by spaces. outside: values that are refused; end: the last that is not."""

    keys: str
    rule: str
    outside: tuple[str, ...]
    end: str


RANGES = [
    Range(
        "ppo.critic_warmup_steps lora.rank eval.every checkpoint.every "
        "checkpoint.max_restarts engine.prefix_states",
        "must be at least 0",
        ("-1",),
        "0",
    ),
    Range(
        "steps engine.page_size engine.max_running engine.max_prefill_tokens "
        "engine.tensor_parallel_size engine.expert_parallel trainer.micro_batch_size "
        "trainer.threads sampling.max_tokens "
        "grpo.prompts_per_step ppo.prompts_per_step ppo.samples_per_prompt ppo.epochs "
        "ppo.mini_batches task.num_digits task.max_prompt_tokens eval.problems checkpoint.keep "
        "cluster.nnodes cluster.n_gpus_per_node",
        "must be at least 1",
        ("0",),
        "1",
    ),
    Range("grpo.samples_per_prompt task.num_terms", "must be at least 2", ("1",), "2"),
    Range(
        "trainer.learning_rate grpo.clip_low grpo.clip_high ppo.clip_low ppo.clip_high "
        "ppo.critic_learning_rate task.held_out_fraction",
        "must lie between 0 and 1",
        ("0.0", "1.0"),
        "0.999",
    ),
    Range(
        "trainer.weight_decay trainer.beta1 trainer.beta2 task.partial_credit",
        "must lie in [0, 1)",
        ("-0.1", "1.0"),
        "0.0",
    ),
    Range("ppo.gamma ppo.gae_lambda", "must lie in (0, 1]", ("0.0", "1.1"), "1.0"),
    Range(
        "trainer.max_grad_norm lora.alpha sampling.temperature ppo.value_clip cluster.call_timeout "
        "cluster.host_gib",
        "must be positive",
        ("0.0", "inf", "nan"),
        "0.001",
    ),
    Range(
        "grpo.kl_coef ppo.kl_coef engine.host_to_device_ratio trainer.router_aux_loss_coef",
        "must not be negative",
        ("-0.1", "inf"),
        "0.0",
    ),
]
OUT_OF_RANGE = {
    "algorithm": wrong("algorithm=dpo", "algorithm=dpo: must be grpo or ppo"),
    "status": wrong("status=dreamt", "status=dreamt: must be run or planned"),
    "driver": wrong("driver=slurm", "driver=slurm: must be inprocess or ray"),
    "device": wrong("device=tpu", "device=tpu: must be auto, cpu, cuda or cuda:N"),
    "seed": wrong("seed=-1", "seed=-1: must lie in [0, 2**63)"),
    "sampling.top_k": wrong("sampling.top_k=5", "sampling.top_k=5: must be 0 (off): training"),
    "sampling.top_p": wrong("sampling.top_p=0.9", "sampling.top_p=0.9: must be 1.0 (off): train"),
    "model.path": Wrong(["model.path=' '"], ["model.path='': must name a directory"]),
    "model.shape": wrong(
        "model.config=null model.shape=qwen2.5-7bb",
        "shape=qwen2.5-7bb: must be one of",
        "set model.shape=qwen2.5-7b",
    ),
    "model.config": wrong(
        "model.config.model_type=null", "model.config={'model_type': None", "has no model_type"
    ),
    "model.dtype": wrong("model.dtype=int8", "model.dtype=int8: must be float32 or bfloat16"),
    "engine.kv_tokens": wrong(
        "engine.kv_tokens=100", "must be a positive multiple of engine.page_size=16"
    ),
    "engine.mem_fraction_static": wrong(
        "engine.kv_tokens=null engine.mem_fraction_static=1.5 device=cuda:0",
        "must lie between 0 and 1",
    ),
    "engine.kind": wrong("engine.kind=trtllm", "kind=trtllm: must be one of native, vllm"),
    "engine.options": wrong(
        "engine.options.attention_backend=triton", "are of engine.kind=vllm and sglang"
    ),
    "engine.sleep_level": wrong(
        "engine.sleep_level=3", "must be 1 (keep on the host) or 2 (discard)"
    ),
    "engine.kv_cache_dtype": wrong("engine.kv_cache_dtype=int4", "must be one of auto, fp8_e4m3"),
    "trainer.dtype": wrong("trainer.dtype=fp32", "trainer.dtype=fp32: must be float32 or bfloat16"),
    "lora.target_modules": wrong(
        "lora.target_modules=[lm_head]", "[lm_head]: must be different names of q_proj"
    ),
    "task.name": wrong("task.name=chess", "task.name=chess: must be one of toy, chain_sum"),
    "task.also_train_digits": wrong(
        "task.also_train_digits=[0]",
        "task.also_train_digits=[0]: must be different numbers",
        base="smollm2-135m",
    ),
    "eval.also_digits": wrong(
        "eval.also_digits=[0]", "also_digits=[0]: must be different numbers of at least 1"
    ),
    "cycle.resident": wrong(
        "cycle.resident=[params,wieghts]", "resident=[params,wieghts]: names unknown tags wieghts"
    ),
    "cycle.overlap": wrong(
        "cycle.overlap=[reference]", "overlap=[reference]: names unknown tags reference; known: par"
    ),
    "cycle.alias": wrong("cycle.alias=yes", "cycle.alias=True: must be one of auto, always, never"),
    "trainer.activation_checkpointing": wrong(
        "trainer.activation_checkpointing=true",
        "activation_checkpointing=True: must be one of layers, mlp, none",
    ),
    "cycle.hand_over": wrong(
        "cycle.hand_over=no", "cycle.hand_over=False: must be one of auto, always, never"
    ),
    "cluster.gpu": wrong("cluster.gpu=h900", "cluster.gpu=h900: must be one of h100-80gb"),
}
WITHOUT_RANGE = [
    *(
        "engine.cuda_graphs",
        "trainer.lr_decay",
        "trainer.optimizer_offload",
        "task.system_prompt",
    ),
    *("grpo.normalize_std", "ppo.normalize_advantages"),
    *("grpo.router_replay", "ppo.router_replay", "model.fp32_router"),
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
VLLM = "device=auto engine.kind=vllm"
OF_VLLM = [
    wrong("engine.kind=vllm", "device=cpu: is not for vLLM's kernels", "set device=auto"),
    wrong(VLLM, "engine.kind=vllm: torch sees no GPU here"),
    wrong(
        f"{VLLM} engine.kv_tokens=null engine.mem_fraction_static=0.5", "graphs, with engine.kin"
    ),
    wrong(f"{VLLM} engine.kv_cache_dtype=fp8_e4m3", "kv_cache_dtype=fp8_e4m3: was not tried"),
    wrong(f"{VLLM} engine.host_to_device_ratio=1", "ratio=1.0: is the native engine's"),
    wrong(f"{VLLM} driver=ray cluster.nnodes=2", "nnodes=2: takes several machines, and one was"),
    wrong(
        f"{VLLM} driver=ray cluster.n_gpus_per_node=2 engine.tensor_parallel_size=2",
        "engine.kind=vllm: torch sees no GPU here",
    ),
    wrong(f"{VLLM} cycle.alias=always", "alias=always: is not for weights that vLLM's buffers"),
    wrong(f"{VLLM} cycle.overlap=[params]", "cycle.overlap=[params]: needs a KV cache that grows"),
    wrong(f"{VLLM} sampling.temperature=0.001", "temperature=0.001: is raised to 0.01"),
]
SGLANG = "device=auto engine.kind=sglang"
OF_SGLANG = [
    wrong("engine.kind=sglang", "device=cpu: is not for SGLang's kernels", "set device=auto"),
    wrong(SGLANG, "engine.kind=sglang: torch sees no GPU here"),
    wrong(
        f"{SGLANG} driver=ray cluster.n_gpus_per_node=2 engine.tensor_parallel_size=2",
        "tensor_parallel_size=2: puts SGLang's workers into processes of their own",
    ),
    wrong(f"{SGLANG} driver=ray cluster.n_gpus_per_node=2", "takes several engines, and one was"),
    wrong(f"{SGLANG} cycle.alias=always", "alias=always: is not for weights that SGLang's"),
]
CONTRADICTIONS = [
    *OF_VLLM,
    *OF_SGLANG,
    wrong(
        "cluster.n_gpus_per_node=2", "driver=inprocess: cannot drive 2 devices", "set driver=ray"
    ),
    wrong("device=cuda:1", "device=cuda:1: names one of the 8 devices", base="qwen2.5-7b-8xh100"),
    wrong("model.path=/nowhere", "model.path=/nowhere: ", "smollm2-135m"),
    wrong("model.config=null", "model.path=null: no model is named", "model.shape=qwen2.5-0.5b"),
    wrong("model.shape=qwen2.5-7b", "model.shape=qwen2.5-7b: excludes model.config"),
    wrong("model.shape=qwen2.5-7b", "no effect with model.path=smollm2-135m", base="smollm2-135m"),
    wrong("model.path=DIR model.config.hidden_size=8", "has no effect with model.path=DIR"),
    wrong("model.config.vocab_size=5", "model.config.vocab_size=5: is less than", "17 words"),
    wrong("engine.mem_fraction_static=0.5", "excludes engine.kv_tokens=2048"),
    wrong("engine.page_size=1 engine.kv_tokens=10", "too small for one request of 9 + 3"),
    wrong(
        "engine.kv_tokens=16 sampling.max_tokens=20",
        "engine.kv_tokens=16: ",
        "engine.kv_tokens=32 or more",
    ),
    wrong(
        "engine.kv_tokens=null engine.mem_fraction_static=0.9",
        "mem_fraction_static=0.9: is a share",
        "device=cpu here",
    ),
    wrong("cycle.alias=always model.dtype=bfloat16", "cycle.alias=always: the trainer's pages are"),
    wrong("engine.page_size=300", "engine.kv_tokens=2048: ", "engine.page_size=300"),
    wrong(
        "engine.kv_cache_dtype=fp4_e2m1 model.config.head_dim=8", "engine.kv_cache_dtype=fp4_e2m1: "
    ),
    wrong(
        "engine.host_to_device_ratio=0.001",
        "host_to_device_ratio=0.001: 2048 tokens times it hold no page",
    ),
    Wrong(  # windows below a host tier
        [
            "engine.host_to_device_ratio=2",
            "model.config={model_type: qwen3, use_sliding_window: true, sliding_window: 8, "
            "max_window_layers: 0}",
        ],
        ["engine.host_to_device_ratio=2.0: pages of this model"],
    ),
    wrong(
        "engine.tensor_parallel_size=2",
        "tensor_parallel_size=2: does not divide cluster.n_gpus_per_node=1",
    ),
    wrong(
        "engine.tensor_parallel_size=2 engine.kv_cache_dtype=fp4_e2m1",
        "excludes engine.kv_cache_dtype=fp4_e2m1",
    ),
    wrong(
        "driver=ray cluster.n_gpus_per_node=2 engine.tensor_parallel_size=2 "
        "engine.expert_parallel=2",
        "engine.expert_parallel=2: the model has no experts to divide; "
        "set engine.expert_parallel=1",
    ),
    wrong(
        "driver=ray cluster.n_gpus_per_node=4 engine.tensor_parallel_size=4 "
        "engine.expert_parallel=3",
        "engine.expert_parallel=3: must divide engine.tensor_parallel_size=4; set "
        "engine.expert_parallel=1",
    ),
    wrong(
        "driver=ray cluster.n_gpus_per_node=3 engine.tensor_parallel_size=3",
        "engine.tensor_parallel_size=3: ",
        "choose a size that divides",
        "set engine.tensor_parallel_size=1",
    ),
    wrong(
        f"{LATENT} lora.rank=2",
        "lora.target_modules=[q_proj,k_proj,v_proj,",
        ": the model has no layers q_proj, k_proj, v_proj; ",
        "set lora.target_modules=[o_proj,gate_proj,up_proj,down_proj]",
    ),
    wrong(
        f"{MIXTURE} lora.target_modules=[experts] lora.rank=12",
        "lora.rank=12: must be a multiple of 8 for adapters of experts; set lora.rank=16",
    ),
    wrong(
        f"{MIXTURE} lora.rank=8",
        "the model has no layers gate_proj, up_proj, down_proj; ",
        "set lora.target_modules=[q_proj,k_proj,v_proj,o_proj,experts]",
    ),
    wrong(
        "trainer.optimizer_offload=true trainer.dtype=bfloat16",
        "optimizer_offload=true: keeps float32 masters, and trainer.dtype=bfloat16",
        "set trainer.dtype=float32",
    ),
    wrong(
        "trainer.optimizer_offload=true lora.rank=2",
        "trainer.optimizer_offload=true: adapters are small",
        "set trainer.optimizer_offload=false",
    ),
    wrong(
        "trainer.optimizer_offload=true cycle.resident=[params,optim]",
        "optim is there with trainer.optimizer_offload=false only",
        "resident=[params]",
    ),
    wrong("lora.alpha=8", "lora.alpha=8: has no effect with lora.rank=0"),
    wrong("lora.target_modules=[q_proj]", "has no effect with lora.rank=0"),
    wrong("sampling.temperature=1e-7", "temperature=1e-07: must be at least 1e-06: the engine"),
    wrong("grpo.clip_low=0.1", "has no effect with algorithm=grpo, which makes one update a step"),
    wrong("algorithm=ppo ppo.clip_high=0.1", "no effect with one update a step", "mini_batches=2"),
    wrong("algorithm=ppo ppo.value_clip=0.1", "has no effect with one update a step"),
    wrong("task.max_prompt_tokens=8", "leaves no problem for training; set", "prompt_tokens=9"),
    wrong("sampling.max_tokens=60", "answer exceed the model's context of 64 tokens"),
    wrong(
        "grpo.prompts_per_step=49", "grpo.prompts_per_step=49: the task has 48 training problems"
    ),
    wrong("algorithm=ppo ppo.prompts_per_step=49", "the task has 48 training problems"),
    wrong("algorithm=ppo ppo.mini_batches=65", "exceeds the step's 64 answers"),
    wrong("algorithm=ppo ppo.critic_warmup_steps=50", "leaves none of steps=50 to the policy"),
    wrong("task.name=chain_sum task.partial_credit=0", "a random model has no tokenizer for it"),
    wrong("task.num_terms=3", "task.num_terms=3: has no effect with task.name=toy"),
    wrong("task.num_digits=3", "task.num_digits=3: has no effect with task.name=toy"),
    wrong(
        "task.also_train_digits=[2]", "task.also_train_digits=[2]: is not defined for task.name=toy"
    ),
    wrong("task.held_out_fraction=0.999999", "leaves no problem for training"),
    wrong(
        "model.path=DIR task.name=chain_sum task.partial_credit=0.5",
        "is not defined for task.name=chain_sum",
    ),
    wrong("eval.also_digits=[2]", "eval.also_digits=[2]: is not defined for task.name=toy"),
    wrong(
        "task.num_digits=2 task.also_train_digits=[]",
        "eval.also_digits=[2]: has task.num_digits=2",
        base="smollm2-135m",
    ),
    wrong(
        "task.num_digits=2",
        "also_train_digits=[2]: ",
        "other than task.num_digits=2",
        base="smollm2-135m",
    ),
    wrong(
        "task.also_train_digits=[2,2]",
        "task.also_train_digits=[2,2]: must be different",
        base="smollm2-135m",
    ),
    wrong(
        "checkpoint.max_restarts=2 checkpoint.every=0",
        "max_restarts=2: needs checkpoints to go on from",
    ),
    wrong(
        "cycle.resident=[optim,critic]",
        "critic is there with algorithm=ppo only",
        "resident=[optim]",
    ),
    wrong("cycle.overlap=[critic_optim]", "critic_optim is there with algorithm=ppo only"),
    wrong(
        "cycle.overlap=[optim] cycle.hand_over=always",
        "cycle.hand_over=always: is not for what leaves beside work, cycle.overlap=[optim]",
    ),
    wrong(
        "cycle.overlap=[params] driver=ray cluster.n_gpus_per_node=2 engine.tensor_parallel_size=2",
        "cycle.overlap=[params]: needs a KV cache that grows, and with engine.tensor_parallel_size",
    ),
    wrong(
        "cycle.overlap=[params] engine.host_to_device_ratio=1",
        "cycle.overlap=[params]: needs a KV cache that grows, and with engine.host_to_device_ratio",
    ),
    Wrong(
        [
            "cycle.overlap=[params]",
            "model.config={model_type: qwen3, use_sliding_window: true, sliding_window: 8, "
            "max_window_layers: 0}",
        ],
        ["cycle.overlap=[params]: needs a KV cache that grows", "sliding windows"],
    ),
    wrong("cycle.overlap=some", "must be auto, or a list of words, as [params, optim]"),
    wrong("grpo.router_replay=true", "the model has no experts to choose"),
    wrong("model.fp32_router=true", "the model has no experts to choose"),
    wrong("cycle.resident=[reference]", "reference is there with grpo.kl_coef above 0"),
    wrong(
        "algorithm=ppo cycle.resident=[reference,critic]",
        "reference is there with ppo.kl_coef",
        "resident=[critic]",
    ),
]
IDLE = {"ppo": "algorithm=grpo", "grpo": "algorithm=ppo"}  # sections that do not count with it

OF_THE_COMMAND = {
    "unknown model type": wrong("model.config.model_type=qwenty", "model.config", "qwenty"),
    "model of bad sizes": wrong(
        "model.config.num_key_value_heads=0", "model.config", "is no model", "correct"
    ),
    "model the engine does not compute": Wrong(
        ["model.config={model_type: gpt2}"], ["config", "GPT2LMHeadModel"]
    ),
    "model misspelt": wrong(
        "model.path=smolm2-135m", "model.path=smolm2-135m", "did you mean smollm2-135m?"
    ),
    "no such GPU": wrong("device=cuda:99", "device=cuda:99", "device=auto"),
    "unknown key": wrong("stepz=3", "command line: stepz: unknown key; did you mean steps?"),
    "unknown key of a section": wrong(
        "sampling.tempreture=3", "did you mean sampling.temperature?"
    ),
    "unknown key, nothing close": wrong("qqq=1", "qqq", "known here", "sampling"),
    "not an override": wrong("steps", "steps", "key=value"),
    "empty part of a key": wrong("sampling..top_k=1", "sampling..top_k=1", "key=value"),
    "bad YAML": wrong("steps=[1", "steps=[1", "quote it"),
    "fraction for an integer": wrong("steps=1.5", "steps=1.5", "an integer"),
    "nothing for an integer": wrong("steps=null", "steps=null", "an integer"),
    "value for a section": wrong("sampling=3", "sampling=3", "max_tokens"),
    "section for a value": wrong("steps.x=3", "steps", "an integer"),
    "unresolved interpolation": wrong("steps=${stepps}", "steps=${stepps}", "an integer"),
    "interpolation of itself": wrong("steps=${steps}", "steps"),
    "several lines": Wrong(["device=a\nb"], ["device=a b: must be auto"]),
}
