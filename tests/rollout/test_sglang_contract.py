"""What our rollout and our plugin call of SGLang is there, by its sources: nothing of it is
imported. Where sglang is not installed, put a wheel's folder on PYTHONPATH.
"""

from __future__ import annotations

import pytest

from tests.helpers.rollout.wheel import Wheel

WHEEL = Wheel("sglang")
pytestmark = pytest.mark.skipif(WHEEL.folder is None, reason="sglang is not installed")

FIELDS = {
    "ServerArgs": {
        "model_path", "dtype", "load_format", "skip_tokenizer_init", "grammar_backend",
        "disable_cuda_graph", "disable_prefill_cuda_graph", "cuda_graph_max_bs_decode",
        "random_seed", "page_size", "max_total_tokens", "mem_fraction_static",
        "max_running_requests", "chunked_prefill_size", "context_length", "base_gpu_id",
        "enable_memory_saver", "custom_sigquit_handler", "enable_deterministic_inference",
        "tp_size", "dp_size", "pp_size", "nnodes", "moe_runner_backend", "log_level",
        "attention_backend", "sampling_backend",
    },
    "SamplingParams": {
        "n", "max_new_tokens", "temperature", "top_k", "top_p", "ignore_eos", "stop_token_ids",
        "sampling_seed", "stream_interval",
    },
    "HookType": {"AROUND", "REPLACE"},
    "RpcReqInput": {"method"},
    "Engine": {"run_scheduler_process_func"},
}  # fmt: skip
# method of a class -> its first parameters
METHODS = {
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
# file -> what it says
WORDS = {
    "srt/plugins/__init__.py": ['"sglang.srt.plugins"', "envs.SGLANG_PLUGINS"],
    "srt/constants.py": ['"kv_cache"', '"weights"', '"cuda_graph"'],
    "srt/managers/io_struct.py": ["def sock_send(", "def sock_recv("],
    "srt/managers/scheduler.py": [
        "def run_scheduler_process(", "    load_plugins()", "self.memory_saver_adapter =",
        "self.max_req_len,", "self.max_total_num_tokens",
    ],
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


@pytest.mark.parametrize("name", FIELDS)
def test_fields(name: str) -> None:
    assert WHEEL.lacks(name, FIELDS[name]) == set()


@pytest.mark.parametrize(("name", "method"), METHODS)
def test_methods(name: str, method: str) -> None:
    assert WHEEL.has_method(name, method, METHODS[name, method])


@pytest.mark.parametrize("place", WORDS)
def test_words(place: str) -> None:
    assert WHEEL.folder is not None
    text = (WHEEL.folder / place).read_text()
    assert [word for word in WORDS[place] if word not in text] == []
