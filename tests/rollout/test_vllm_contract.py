"""What our rollout calls of vLLM is there, by its sources: nothing of it is imported. Where vllm is
not installed, put a wheel's folder on PYTHONPATH.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

FOUND = importlib.util.find_spec("vllm")
pytestmark = pytest.mark.skipif(FOUND is None, reason="vllm is not installed")

OPTIONS = {
    "dtype", "load_format", "skip_tokenizer_init", "enforce_eager", "seed", "block_size",
    "num_gpu_blocks_override", "kv_cache_memory_bytes", "gpu_memory_utilization", "max_num_seqs",
    "max_num_batched_tokens", "max_model_len", "logprobs_mode", "enable_sleep_mode", "model",
    "compilation_config",
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
    "UnquantizedMoeBackend": {"TRITON", "BATCHED_TRITON"},
}  # fmt: skip
# method of a class -> its first parameters
METHODS = {
    ("LLM", "collective_rpc"): ["self", "method"],
    ("LLM", "reset_prefix_cache"): ["self"],
    ("LLMEngine", "add_request"): ["self", "request_id", "prompt", "params"],
    ("LLMEngine", "step"): ["self"],
    ("LLMEngine", "has_unfinished_requests"): ["self"],
    ("LLMEngine", "abort_request"): ["self", "request_ids"],
    ("Worker", "get_model"): ["self"],
    ("CuMemAllocator", "get_instance"): [],
}
PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "MLAAttention")


@cache
def sources() -> list[tuple[Path, str]]:
    assert FOUND is not None and FOUND.submodule_search_locations
    (folder,) = FOUND.submodule_search_locations
    return [(path, path.read_text()) for path in sorted(Path(folder).rglob("*.py"))]


@cache
def classes(name: str) -> list[ast.ClassDef]:
    """All of that name."""
    start = re.compile(rf"^class {name}\b", re.M)
    found = []
    for path, text in sources():
        if start.search(text):
            found += [
                node
                for node in ast.walk(ast.parse(text, str(path)))
                if isinstance(node, ast.ClassDef) and node.name == name
            ]
    return found


def names_in(node: ast.ClassDef) -> set[str]:
    """Fields and members."""
    found: set[str] = set()
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            found.add(each.target.id)
        elif isinstance(each, ast.Assign):
            found.update(target.id for target in each.targets if isinstance(target, ast.Name))
    return found


@pytest.mark.parametrize("name", FIELDS)
def test_fields(name: str) -> None:
    wanted = FIELDS[name]
    left = [wanted - names_in(node) for node in classes(name)]
    assert set() in left, f"{name} lacks {min(left, key=len, default=wanted)}"


@pytest.mark.parametrize(("name", "method"), METHODS)
def test_methods(name: str, method: str) -> None:
    found = []
    for node in classes(name):
        bodies = [each for each in node.body if isinstance(each, ast.FunctionDef)]
        found += [[arg.arg for arg in f.args.args] for f in bodies if f.name == method]
    first = METHODS[name, method]
    assert any(args[: len(first)] == first for args in found), found


def test_layers_that_are_told_apart() -> None:
    assert all(classes(name) for name in PLAIN)


def test_words_that_are_passed() -> None:
    text = "\n".join(text for path, text in sources() if path.parent.name in ("config", "vllm"))
    for word in ("processed_logprobs", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_PLUGINS"):
        assert word in text
    places = dict(sources())
    (place,) = [p for p in places if p.parts[-2:] == ("device_allocator", "__init__.py")]
    assert "def get_mem_allocator_instance" in places[place]
