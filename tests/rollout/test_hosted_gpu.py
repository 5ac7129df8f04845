"""A real vLLM and a real SGLang as rollouts of our trainer: syncs, sleeps, log-probs, cycles.

The tests at the end are about one of the two engines.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from memsaver import MemorySaver, StateError
from memsaver.memory.torch_allocator import empty_torch_cache
from memsaver.native import build
from rollout import Completion, SamplingParams
from rollout.hosted import SglangRollout, VllmRollout
from rollout.tag_names import CUDA_GRAPH, KV_CACHE, WEIGHTS
from tests.helpers.docs.pages import ROOT
from tests.helpers.trainer_bridge.models import describe, write_model
from trainer_bridge import Cycle, SequenceBatch, Trainer, TrainerConfig

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

SHAPE: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 1024, "initializer_range": 0.1,
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SIZES: dict[str, Any] = {"kv_tokens": 8192, "max_running": 32, "max_context_len": 256}


def needs(package: str) -> pytest.MarkDecorator:
    absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(absent, reason=f"{package} is not installed")


def prompts(seed: int, count: int = 8) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, 1000) for _ in range(rng.randint(1, 90))] for _ in range(count)]


def tokens(answers: list[list[Completion]]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in group] for group in answers]


@dataclass
class Pair:
    """A rollout and the trainer that writes its weights."""

    rollout: Any
    trainer: Trainer
    versions: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def is_sglang(self) -> bool:
        return isinstance(self.rollout, SglangRollout)

    def synced(self) -> int:
        """Wake both sides up and sync new random weights; return the version."""
        version = next(self.versions)
        generator = torch.Generator("cuda:0").manual_seed(version)
        with torch.no_grad():
            for name, shard in self.trainer.shards().items():
                noise = torch.empty_like(shard).normal_(0, 0.1, generator=generator)
                shard.copy_(noise if shard.ndim > 1 or name.endswith("bias") else 1 + noise)
        self.rollout.wake_up()
        self.trainer.reload()
        self.trainer.sync_weights(version)
        return version

    def load(self, factor: float = 1.0) -> None:
        """Load the trainer's weights, times `factor`, by the engine's own loader."""
        shards = self.trainer.shards().items()
        tensors = [(name, (shard * factor).bfloat16()) for name, shard in shards]
        torch.cuda.synchronize()
        if self.is_sglang:
            good, why = self.rollout.engine.engine.update_weights_from_tensor(tensors)
            assert good, why
        else:
            self.rollout.engine.model.load_weights(tensors)
            self.rollout.engine.reset_prefix_cache()

    def close(self) -> None:
        if self.is_sglang:
            self.rollout.wake_up()
            os.kill(self.rollout.engine.engine.get_all_child_pids()[0], signal.SIGKILL)
            with pytest.raises(StateError, match="SGLang's scheduler has ended"):
                self.rollout.sleep(1)
            assert self.trainer.shards()  # this process is still alive
        self.trainer.close()
        self.rollout.close()


def vllm(path: str, **options: Any) -> VllmRollout:
    return VllmRollout.from_pretrained(path, load_weights=False, **SIZES, **options)


def sglang(path: str, **options: Any) -> SglangRollout:
    # These backends run on every GPU and need no other package.
    backends = {"attention_backend": "triton", "sampling_backend": "pytorch"}
    return SglangRollout.from_pretrained(path, load_weights=False, **SIZES, **backends, **options)


# Model, tied embeddings, engine. Qwen2 and Llama have different runners in vLLM 0.24.
KINDS = {
    "vllm-qwen2": ("qwen2", True, lambda path: vllm(path, cuda_graphs=False)),
    "vllm-llama": ("llama", False, lambda path: vllm(path, cuda_graphs=True)),
    "sglang-qwen2": ("qwen2", True, sglang),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=needs(kind.partition("-")[0])) for kind in KINDS],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model, tied, make = KINDS[request.param]
    path = describe(tmp_path_factory.mktemp(model), model, tie_word_embeddings=tied, **SHAPE)
    rollout: Any = make(path)
    saver = MemorySaver("cuda:0")
    config = TrainerConfig(
        model_path=path, device="cuda:0", random_init=True, param_dtype="bfloat16"
    )
    made = Pair(rollout, Trainer(config, saver))
    made.trainer.connect([rollout])
    yield made
    made.close()
    saver.close()


def test_sync_writes_the_same_bytes_as_the_loader(pair: Pair) -> None:
    version, rollout = pair.synced(), pair.rollout
    digest, answers = rollout.digest(), tokens(rollout.generate(prompts(1), GREEDY))
    pair.load(factor=2.0)
    assert rollout.digest() != digest
    pair.load()
    assert rollout.digest() == digest and rollout.served_version() == version
    assert tokens(rollout.generate(prompts(1), GREEDY)) == answers


def test_answers_stay_the_same_over_sleeps(pair: Pair) -> None:
    """Sleep 20 times with SGLang, because the memory of its graphs leaves, too."""
    rollout, free = pair.rollout, MemorySaver("cuda:0")
    for level in (1, 2) * (10 if pair.is_sglang else 2):
        version = pair.synced()
        answers = tokens(rollout.generate(prompts(2), GREEDY))
        held = rollout.report().committed_bytes
        empty_torch_cache(free.device)
        before = free.free_bytes
        rollout.sleep(level)
        assert rollout.report().committed_bytes == 0 and free.free_bytes - before >= held
        with pytest.raises(StateError, match="paused: weights, kv_cache"):
            rollout.generate(prompts(2), GREEDY)
        rollout.wake_up([WEIGHTS])
        assert "paused: kv_cache" in str(rollout.unavailable_reason())
        if level == 2:
            assert rollout.served_version() is None
            pair.trainer.sync_weights(version)
        rollout.wake_up()
        assert tokens(rollout.generate(prompts(2), GREEDY)) == answers
    free.close()


def test_new_weights_do_not_reuse_prefixes_of_old_weights(pair: Pair) -> None:
    pair.synced()
    old = tokens(pair.rollout.generate(prompts(3), GREEDY))
    version = pair.synced()
    new = pair.rollout.generate(prompts(3), GREEDY)
    pair.rollout.sleep(1)
    pair.rollout.wake_up()
    assert tokens(new) == tokens(pair.rollout.generate(prompts(3), GREEDY)) != old
    assert {number for group in new for number in group[0].weight_versions} == {version}


def test_log_probs_match_the_trainers(pair: Pair) -> None:
    """Compare log-probs up to bf16 rounding, with the temperature and without SGLang's top-k."""
    pair.synced()
    top_k = 50 if pair.is_sglang else 0
    params = SamplingParams(
        max_tokens=16, temperature=0.7, top_k=top_k, n=2, seed=3, ignore_eos=True
    )
    answers = pair.rollout.generate(prompts(4), params)
    if not pair.is_sglang:  # SGLang has no seeds here
        assert tokens(pair.rollout.generate(prompts(4), params)) == tokens(answers)
    flat = [(p, sample) for p, group in zip(prompts(4), answers, strict=True) for sample in group]
    batch = SequenceBatch(
        prompt_ids=[prompt for prompt, _ in flat],
        response_ids=[sample.token_ids for _, sample in flat],
        temperature=0.7,
    )
    scored = pair.trainer.compute_log_prob(batch)
    gaps: list[float] = []
    for logprobs, (_, sample) in zip(scored, flat, strict=True):
        gaps += [abs(a - b) for a, b in zip(logprobs, sample.logprobs, strict=True)]
    print(f"mean mismatch {sum(gaps) / len(gaps):.4f}, largest {max(gaps):.3f}")
    assert sum(gaps) / len(gaps) < 0.1
    assert all(len(set(map(tuple, group))) == 2 for group in tokens(answers))


def test_stop_token_ends_an_answer_and_progress_counts_its_tokens(pair: Pair) -> None:
    pair.synced()
    (whole,) = pair.rollout.generate([prompts(5)[0]], GREEDY)
    stop = whole[0].token_ids[4]
    calls: list[tuple[int, int, int]] = []
    # SGLang would ignore stop tokens with ignore_eos.
    params = replace(GREEDY, ignore_eos=not pair.is_sglang, stop_token_ids=(stop,))
    (cut,) = pair.rollout.generate([prompts(5)[0]], params, lambda *counts: calls.append(counts))
    ends = whole[0].token_ids.index(stop) + 1
    assert cut[0].token_ids == whole[0].token_ids[:ends] and cut[0].finish_reason == "stop"
    assert whole[0].finish_reason == "length" and calls[-1] == (1, 1, ends)


def test_interrupt_leaves_no_request(pair: Pair) -> None:
    pair.synced()
    answers = tokens(pair.rollout.generate(prompts(6), GREEDY))

    def interrupt(done: int, total: int, count: int) -> None:
        raise KeyboardInterrupt

    params = [replace(GREEDY, max_tokens=2 + 16 * number) for number in range(8)]
    with pytest.raises(KeyboardInterrupt):
        pair.rollout.generate(prompts(6), params, interrupt)
    pair.rollout.sleep(1)
    pair.rollout.wake_up()
    assert tokens(pair.rollout.generate(prompts(6), GREEDY)) == answers


def test_cycle_answers_with_the_weights_of_each_update(pair: Pair) -> None:
    """Run two rounds with an update in between."""
    pair.synced()
    pair.rollout.sleep(2)
    cycle = Cycle(pair.trainer, pair.rollout)
    for _ in range(2):
        cycle.to_rollout(next(pair.versions))
        answers = pair.rollout.generate(prompts(7), SamplingParams(max_tokens=8, seed=1))
        cycle.to_score()
        flat = [group[0] for group in answers]
        batch = SequenceBatch(
            prompt_ids=prompts(7), response_ids=[sample.token_ids for sample in flat],
            old_logprobs=[sample.logprobs for sample in flat],
            advantages=[(-1.0) ** number for number in range(len(flat))],
        )  # fmt: skip
        pair.trainer.compute_log_prob(batch)
        cycle.to_train()
        assert pair.rollout.report().committed_bytes == 0
        assert pair.trainer.update_actor(batch)["grad_norm"] > 0


def test_sglang_has_three_tags_and_refuses_too_long_requests(pair: Pair) -> None:
    if not pair.is_sglang:
        pytest.skip("only for SGLang")
    pair.synced()
    tags = {name.partition(":")[0] for name in pair.rollout.report().tags}
    assert tags == {WEIGHTS, KV_CACHE, CUDA_GRAPH}
    longest = replace(GREEDY, max_tokens=200)
    (full,) = pair.rollout.generate([prompts(5, 1)[0][:1] * 56], longest)
    assert len(full[0].token_ids) == 200
    with pytest.raises(ValueError, match="exceed SGLang's"):
        pair.rollout.generate([[2] * 90], longest)


# ---------------------------------------------------------------- tests of one engine


@needs("sglang")
@pytest.mark.gpus(2)
def test_two_sglang_schedulers_serve_the_synced_weights_through_sleeps(tmp_path: Path) -> None:
    """Write both GPUs' shards from one rank, and compare with the weights SGLang loads itself."""
    path = describe(tmp_path / "model", "qwen2", tie_word_embeddings=True, **SHAPE)
    rollout: Any = sglang(path, tp_size=2)
    saver = MemorySaver("cuda:0")
    config = TrainerConfig(model_path=path, device="cuda:0", random_init=True)
    trainer = Trainer(config, saver)
    try:
        trainer.connect([rollout])
        pair = Pair(rollout, trainer)
        seen = []
        for level in (1, 2, 1):
            version = pair.synced()
            digests = [shard.digest() for shard in rollout.shards]
            assert rollout.served_version() == version and len(set(digests)) == 2
            answers = tokens(rollout.generate(prompts(version), GREEDY))
            seen.append(answers)
            pair.load()
            assert digests == [shard.digest() for shard in rollout.shards]
            assert tokens(rollout.generate(prompts(version), GREEDY)) == answers
            rollout.sleep(level)
            assert all(report.committed_bytes == 0 for report in rollout.engine.call_all("report"))
            rollout.wake_up()
            if level == 1:
                assert tokens(rollout.generate(prompts(version), GREEDY)) == answers
        assert seen[0] != seen[1] != seen[2]
    finally:
        trainer.close()
        saver.close()
        rollout.close()


def environment(folder: Path, group: str, **variables: str) -> dict[str, str]:
    """Return the environment of a process that finds our plugins by metadata as pip writes it."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    info = folder / "site" / "memsaver-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: memsaver\nVersion: 1\n")
    lines = [f"{name} = {where}" for name, where in declared[group].items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]))
    places = [str(info.parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places), **variables}


def run_script(folder: Path, script: str, path: str, env: dict[str, str]) -> str:
    """Run a program; return the content of the file that it has written."""
    main, saved = folder / "main.py", folder / "saved"
    main.write_text(script)
    done = subprocess.run(
        [sys.executable, str(main), path, str(saved)],
        capture_output=True, text=True, timeout=200, env=env,
    )  # fmt: skip
    assert saved.exists(), done.stdout[-1500:] + done.stderr[-4000:]
    return saved.read_text()


@needs("vllm")
def test_example_of_the_vllm_page_raises_the_reward(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", "qwen2", hidden_size=256, head_dim=64)
    example = [sys.executable, str(ROOT / "examples" / "vllm_loop.py"), path]
    done = subprocess.run(example, capture_output=True, text=True, timeout=200, cwd=ROOT)
    rewards = [float(text) for text in re.findall(r"^step \d+: reward (\S+)$", done.stdout, re.M)]
    assert len(rewards) == 20, done.stderr[-2000:]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards


VLLM_SCRIPT = """
import sys
from pathlib import Path

import torch
import vllm

path, saved = sys.argv[1:]
llm = vllm.LLM(
    path, enable_sleep_mode=True, skip_tokenizer_init=True, gpu_memory_utilization=0.2,
    max_model_len=256, compilation_config={"mode": 0, "cudagraph_capture_sizes": [1, 2, 4]},
)
params = vllm.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
prompts = [{"prompt_token_ids": [5, 9, 77, number]} for number in range(4)]

def answers():
    llm.reset_prefix_cache()
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]

def used():
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30

def allocator(worker):
    from vllm.device_allocator import get_mem_allocator_instance
    return type(get_mem_allocator_instance()).__module__

if __name__ == "__main__":
    assert llm.collective_rpc(allocator) == ["memsaver.compat.vllm"]
    first, awake = answers(), used()
    for level in (1, 2, 1, 2):
        llm.sleep(level)
        asleep = used()
        llm.wake_up(tags=["weights"])
        if level == 2:
            llm.collective_rpc("reload_weights")
        assert used() < awake - 4
        llm.wake_up(tags=["kv_cache"])
        assert asleep < awake - 8 and answers() == first, (level, asleep, awake)
    Path(saved).write_text("done")
"""


@needs("vllm")
def test_vllm_without_our_rollout_sleeps_on_our_tags(tmp_path: Path) -> None:
    """Start vLLM in another process that names the installed plugin, but does not import memsaver.

    It sleeps at both levels and answers as before. Its KV cache fills most of a fifth of 80 GB.
    """
    path = write_model(
        tmp_path / "model", "llama", hidden_size=256, head_dim=64, max_position_embeddings=256
    )
    env = environment(
        tmp_path, "vllm.general_plugins", VLLM_PLUGINS="memsaver",
        VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_ALLOW_INSECURE_SERIALIZATION="1",
    )  # fmt: skip
    assert run_script(tmp_path, VLLM_SCRIPT, path, env) == "done"


# The user starts this engine, whose script neither imports nor names memsaver.
SGLANG_SCRIPT = """
import json, sys
from pathlib import Path
import sglang, torch

def main():
    prompts = [list(range(2, 2 + length)) for length in range(1, 90, 9)]
    greedy = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    engine = sglang.Engine(
        model_path=sys.argv[1], skip_tokenizer_init=True, load_format="dummy", random_seed=0,
        dtype="bfloat16", max_total_tokens=1 << 16, max_running_requests=32, context_length=256,
        attention_backend="triton", sampling_backend="pytorch", grammar_backend="none",
        disable_prefill_cuda_graph=True, enable_memory_saver=True, enable_weights_cpu_backup=True,
    )
    def ask():
        outputs = engine.generate(input_ids=prompts, sampling_params=greedy)
        return [output["output_ids"] for output in outputs]

    answers = [ask()]
    scheduler = engine.get_all_child_pids()[0]
    libraries = Path(f"/proc/{scheduler}/maps").read_text()
    freed = []
    for _ in range(3):
        before = torch.cuda.mem_get_info()[0]
        engine.release_memory_occupation()
        freed.append(torch.cuda.mem_get_info()[0] - before)
        engine.resume_memory_occupation(["weights"])
        engine.resume_memory_occupation(["kv_cache", "cuda_graph"])
        freed.append(torch.cuda.mem_get_info()[0] - before)
        engine.flush_cache()
        answers.append(ask())
    Path(sys.argv[2]).write_text(json.dumps([answers, libraries, freed]))
    engine.shutdown()

if __name__ == "__main__":
    main()
"""


@needs("sglang")
def test_sglang_without_our_rollout_finds_the_plugin_by_its_entry_point(tmp_path: Path) -> None:
    """Run the plugin in a scheduler that SGLang spawns, without a preloaded library."""
    path = describe(tmp_path / "qwen2", "qwen2", tie_word_embeddings=True, **SHAPE)
    env = environment(
        tmp_path,
        "sglang.srt.plugins",
        SGLANG_PLUGINS="memsaver",
        SGLANG_MEMORY_SAVER_CUDA_GRAPH="1",
    )
    answers, libraries, freed = json.loads(run_script(tmp_path, SGLANG_SCRIPT, path, env))
    assert all(answer == answers[0] for answer in answers)
    assert str(build.shim_library()) in libraries and "torch_memory_saver" not in libraries
    # Keys and values of 3 layers with 2 heads of 64 in 2 bytes leave and come back.
    cache = 2 * 3 * 2 * 64 * 2 * (1 << 16)
    assert all(nbytes >= cache for nbytes in freed[::2])
    assert freed[1::2] == [freed[1]] * 3 and abs(freed[1]) < 64 << 20
