"""What our rollout calls of vLLM is there, by its sources: nothing of it is imported. Where vllm is
not installed, put a wheel's folder on PYTHONPATH.
"""

from __future__ import annotations

import pytest

from tests.helpers.rollout.wheel import Wheel

WHEEL = Wheel("vllm")
pytestmark = pytest.mark.skipif(WHEEL.folder is None, reason="vllm is not installed")

OPTIONS = {
    "dtype", "load_format", "skip_tokenizer_init", "enforce_eager", "seed", "block_size",
    "num_gpu_blocks_override", "kv_cache_memory_bytes", "gpu_memory_utilization", "max_num_seqs",
    "max_num_batched_tokens", "max_model_len", "logprobs_mode", "enable_sleep_mode", "model",
    "compilation_config", "tensor_parallel_size", "distributed_executor_backend",
    "disable_custom_all_reduce",
}  # fmt: skip
FIELDS = {
    "EngineArgs": OPTIONS,
    "SamplingParams": {
        "n", "max_tokens", "temperature", "seed", "stop_token_ids", "ignore_eos", "logprobs",
        "flat_logprobs", "output_kind", "detokenize",
    },
    "FlatLogprobs": {"logprobs"},
    "CompletionOutput": {"index", "token_ids", "logprobs", "finish_reason"},
    "RequestOutputKind": {"FINAL_ONLY"},
    "TokensInput": {"type", "prompt_token_ids"},
    "GroupCoordinator": {"cpu_group", "world_size"},
    "UnquantizedMoeBackend": {"TRITON", "BATCHED_TRITON"},
}  # fmt: skip
# method of a class -> its first parameters
METHODS = {
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
NEAR = ("config", "vllm")
PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "MLAAttention")


@pytest.mark.parametrize("name", FIELDS)
def test_fields(name: str) -> None:
    assert WHEEL.lacks(name, FIELDS[name]) == set()


@pytest.mark.parametrize(("name", "method"), METHODS)
def test_methods(name: str, method: str) -> None:
    assert WHEEL.has_method(name, method, METHODS[name, method])


def test_layers_that_are_told_apart() -> None:
    assert all(WHEEL.classes(name) for name in PLAIN)


def test_words_that_are_passed() -> None:
    places = dict(WHEEL.sources())
    text = "\n".join(text for path, text in places.items() if path.parent.name in NEAR)
    for word in ("processed_logprobs", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_PLUGINS"):
        assert word in text
    assert "VLLM_ALLREDUCE_USE_SYMM_MEM" in at("vllm", "envs.py")
    assert "def get_mem_allocator_instance" in at("device_allocator", "__init__.py")


def at(*place: str) -> str:
    (text,) = [text for path, text in WHEEL.sources() if path.parts[-2:] == place]
    return text


def test_a_worker_of_a_group_that_is_there() -> None:
    """What the external launcher reads, and that it takes torch's default group; on which sides
    vLLM draws by itself.
    """
    launcher = at("executor", "uniproc_executor.py")
    for word in ('os.environ["RANK"]', 'os.environ["LOCAL_RANK"]'):
        assert word in launcher
    groups = at("distributed", "parallel_state.py")
    for word in ("def get_tp_group", "if not torch.distributed.is_initialized()"):
        assert word in groups
    assert 'backend == "external_launcher"' in at("executor", "abstract.py")
    assert "np.random.randint" in at("sample", "states.py")
