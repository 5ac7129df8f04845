"""Names of vLLM and SGLang that our rollouts and plugins use exist in the packages' sources.

Nothing is imported. If a package is not installed, put the folder of its wheel on PYTHONPATH.
"""

from __future__ import annotations

import pytest

from tests.helpers.rollout.package_names import Wheel

WHEELS = {package: Wheel(package) for package in ("vllm", "sglang")}
VLLM_OPTIONS = {
    "dtype", "load_format", "skip_tokenizer_init", "enforce_eager", "seed", "block_size",
    "num_gpu_blocks_override", "kv_cache_memory_bytes", "gpu_memory_utilization", "max_num_seqs",
    "max_num_batched_tokens", "max_model_len", "logprobs_mode", "enable_sleep_mode", "model",
    "compilation_config", "tensor_parallel_size", "distributed_executor_backend",
    "disable_custom_all_reduce",
}  # fmt: skip
VLLM_FIELDS = {
    "EngineArgs": VLLM_OPTIONS,
    "SamplingParams": {
        "n", "max_tokens", "temperature", "seed", "stop_token_ids", "ignore_eos", "logprobs",
        "flat_logprobs", "output_kind", "detokenize",
    },
    "FlatLogprobs": {"logprobs"},
    "RequestOutput": {"request_id", "outputs", "num_cached_tokens"},
    "CompletionOutput": {"index", "token_ids", "logprobs", "finish_reason"},
    "RequestOutputKind": {"FINAL_ONLY"},
    "TokensInput": {"type", "prompt_token_ids"},
    "GroupCoordinator": {"cpu_group", "world_size"},
    "UnquantizedMoeBackend": {"TRITON", "BATCHED_TRITON"},
}  # fmt: skip
# First parameters by class and method.
VLLM_METHODS = {
    ("LLM", "collective_rpc"): ["self", "method"],
    ("LLM", "reset_prefix_cache"): ["self"],
    ("LLM", "sleep"): ["self", "level"],
    ("LLM", "wake_up"): ["self", "tags"],
    ("LLMEngine", "add_request"): ["self", "request_id", "prompt", "params"],
    ("LLMEngine", "step"): ["self"],
    ("LLMEngine", "has_unfinished_requests"): ["self"],
    ("LLMEngine", "abort_request"): ["self", "request_ids"],
    ("Worker", "get_model"): ["self"],
    ("GPUModelRunner", "post_kv_cache_wake_up"): ["self"],
    ("CuMemAllocator", "get_instance"): [],
}
# Text that files must contain.
VLLM_WORDS = {
    "vllm/envs.py": [
        "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_PLUGINS", "VLLM_ALLREDUCE_USE_SYMM_MEM",
    ],
    "config/*.py": ["processed_logprobs"],
    "device_allocator/__init__.py": ["def get_mem_allocator_instance"],
    # The external launcher reads these variables and joins torch's default group.
    "executor/uniproc_executor.py": ['os.environ["RANK"]', 'os.environ["LOCAL_RANK"]'],
    "executor/abstract.py": ['backend == "external_launcher"'],
    "distributed/parallel_state.py": [
        "def get_tp_group", "if not torch.distributed.is_initialized()",
    ],
    # vLLM draws seeds from NumPy's global generator.
    "sample/states.py": ["np.random.randint"],
}  # fmt: skip
VLLM_CLASSES = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "MLAAttention")
SGLANG_FIELDS = {
    "ServerArgs": {
        "model_path", "dtype", "load_format", "skip_tokenizer_init", "grammar_backend",
        "disable_cuda_graph", "disable_prefill_cuda_graph", "cuda_graph_max_bs_decode",
        "random_seed", "page_size", "max_total_tokens", "mem_fraction_static",
        "max_running_requests", "chunked_prefill_size", "context_length", "base_gpu_id",
        "enable_memory_saver", "custom_sigquit_handler", "enable_deterministic_inference",
        "tp_size", "dp_size", "pp_size", "nnodes", "moe_runner_backend", "log_level",
        "attention_backend", "sampling_backend", "disable_custom_all_reduce",
    },
    "SamplingParams": {
        "n", "max_new_tokens", "temperature", "top_k", "top_p", "ignore_eos", "stop_token_ids",
        "sampling_seed", "stream_interval",
    },
    "HookType": {"AROUND", "REPLACE"},
    "RpcReqInput": {"method"},
    "Engine": {"run_scheduler_process_func"},
}  # fmt: skip
SGLANG_METHODS = {
    ("Engine", "async_generate"): ["self", "prompt", "sampling_params", "input_ids"],
    ("Engine", "get_all_child_pids"): ["self"],
    ("Engine", "shutdown"): ["self"],
    ("TokenizerManager", "abort_request"): ["self", "rid", "abort_all"],
    ("TokenizerManager", "auto_create_handle_loop"): ["self"],
    ("HookRegistry", "register"): ["cls", "target", "hook", "hook_type"],
    ("TorchMemorySaverAdapter", "create"): ["enable"],
    ("TorchMemorySaverAdapter", "check_validity"): ["self", "caller_name"],
    ("TorchMemorySaverAdapter", "configure_subprocess"): ["self"],
    ("TorchMemorySaverAdapter", "region"): ["self", "tag", "enable_cpu_backup"],
    ("TorchMemorySaverAdapter", "cuda_graph"): ["self"],
    ("TorchMemorySaverAdapter", "disable"): ["self"],
    ("TorchMemorySaverAdapter", "pause"): ["self", "tag"],
    ("TorchMemorySaverAdapter", "resume"): ["self", "tag"],
    ("Scheduler", "handle_rpc_request"): ["self", "recv_req"],
    ("Scheduler", "is_fully_idle"): ["self"],
    ("Scheduler", "flush_cache"): ["self", "empty_cache"],
    ("SubprocessWatchdog", "stop"): ["self"],
}
SGLANG_WORDS = {
    "srt/plugins/__init__.py": ['"sglang.srt.plugins"', "envs.SGLANG_PLUGINS"],
    "srt/constants.py": ['"kv_cache"', '"weights"', '"cuda_graph"'],
    "srt/managers/io_struct.py": ["def sock_send(", "def sock_recv("],
    "srt/managers/scheduler.py": [
        "def run_scheduler_process(", "    load_plugins()", "self.memory_saver_adapter =",
        "self.max_req_len,", "self.max_total_num_tokens", "    tp_rank: int,",
        "self.tp_cpu_group = self.tp_group.cpu_group", "barrier(group=self.tp_group.cpu_group)",
        "self.server_args = server_args",
    ],
    "srt/managers/scheduler_components/request_receiver.py": ["recv_reqs = broadcast_pyobj("],
    "srt/managers/tp_worker.py": ["def model_runner(self)"],
    "srt/managers/tokenizer_manager.py": ["_subprocess_watchdog"],
    "srt/entrypoints/engine.py": ["self.loop =", "self.send_to_rpc =", "self.tokenizer_manager ="],
    "srt/model_executor/runner_backend/full_cuda_graph_backend.py": [
        "SGLANG_MEMORY_SAVER_CUDA_GRAPH",
    ],
    "srt/layers/quantization/unquant.py": [
        "class UnquantizedLinearMethod", "class UnquantizedEmbeddingMethod",
        "class UnquantizedFusedMoEMethod", "self.use_flashinfer_trtllm_moe",
        "self.use_triton_kernels",
    ],
    "srt/models/deepseek_v2.py": ["w_kc"],
}  # fmt: skip
CONTRACTS = {
    "vllm": (VLLM_FIELDS, VLLM_METHODS, VLLM_WORDS),
    "sglang": (SGLANG_FIELDS, SGLANG_METHODS, SGLANG_WORDS),
}


def cases(kind: int) -> list[tuple[str, object]]:
    pairs = []
    for package, contract in CONTRACTS.items():
        pairs += [(package, name) for name in contract[kind]]
    return pairs


def wheel_of(package: str) -> Wheel:
    if WHEELS[package].folder is None:
        pytest.skip(f"{package} is not installed")
    return WHEELS[package]


@pytest.mark.parametrize(("package", "name"), cases(0))
def test_class_has_the_fields_that_we_use(package: str, name: str) -> None:
    assert wheel_of(package).lacks(name, CONTRACTS[package][0][name]) == set()


@pytest.mark.parametrize(("package", "method"), cases(1))
def test_method_takes_the_parameters_that_we_pass(package: str, method: tuple[str, str]) -> None:
    assert wheel_of(package).has_method(*method, CONTRACTS[package][1][method])


@pytest.mark.parametrize(("package", "place"), cases(2))
def test_source_contains_the_text_that_we_rely_on(package: str, place: str) -> None:
    texts = [text for path, text in wheel_of(package).sources() if path.match(place)]
    source = "\n".join(texts)
    assert [word for word in CONTRACTS[package][2][place] if word not in source] == []


@pytest.mark.parametrize("name", VLLM_CLASSES)
def test_layer_class_that_we_recognize_by_name_exists(name: str) -> None:
    assert wheel_of("vllm").classes(name)
