"""A real vLLM as rollout of our trainer: what a sync writes, what is generated after sleeps, whose
log-probabilities they are.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from memsaver import MemorySaver, StateError
from memsaver.memory.torch_allocator import empty_torch_cache
from rollout import Completion, SamplingParams
from rollout.hosted import VllmRollout
from rollout.types import KV_CACHE, WEIGHTS
from tests.helpers.docs.pages import ROOT
from tests.helpers.trainer_bridge.models import describe, write_model
from trainer_bridge import Cycle, SequenceBatch, Trainer, TrainerConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]

PLAIN = """
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
asked = [{"prompt_token_ids": [5, 9, 77, number]} for number in range(4)]

def answers():
    llm.reset_prefix_cache()
    return [list(each.outputs[0].token_ids) for each in llm.generate(asked, params)]

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
SHAPE: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 1024, "initializer_range": 0.1,
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
# of each: its runner is another in vLLM 0.24; with and without CUDA graphs
KINDS = {"qwen2": (True, False), "llama": (False, True)}


def prompts(seed: int, count: int = 8) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, 1000) for _ in range(rng.randint(1, 90))] for _ in range(count)]


def tokens(answers: list[list[Completion]]) -> list[list[list[int]]]:
    return [[each.token_ids for each in group] for group in answers]


@dataclass
class Pair:
    rollout: VllmRollout
    trainer: Trainer
    versions: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def synced(self) -> int:
        """All awake, new random weights in both."""
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

    def load(self) -> None:
        """The same weights by vLLM's own loader."""
        shards = self.trainer.shards().items()
        self.rollout.engine.model.load_weights([(name, each.bfloat16()) for name, each in shards])


@pytest.fixture(scope="module", params=list(KINDS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    tied, graphs = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    path = describe(folder, request.param, tie_word_embeddings=tied, **SHAPE)
    sizes = {"kv_tokens": 8192, "max_running": 32, "max_context_len": 256}
    rollout = VllmRollout.from_pretrained(path, load_weights=False, cuda_graphs=graphs, **sizes)
    saver = MemorySaver("cuda:0")
    config = TrainerConfig(
        model_path=path, device="cuda:0", random_init=True, param_dtype="bfloat16"
    )
    trainer = Trainer(config, saver)
    trainer.connect([rollout])
    yield Pair(rollout, trainer)
    trainer.close()
    saver.close()
    rollout.close()


def test_a_sync_writes_what_the_loader_would(pair: Pair) -> None:
    version = pair.synced()
    model, rollout = pair.rollout.engine.model, pair.rollout
    written = {name: each.clone() for name, each in model.named_parameters()}
    digest, answers = rollout.digest(), tokens(rollout.generate(prompts(1), GREEDY))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(7)
    assert rollout.digest() != digest
    pair.load()
    for name, each in model.named_parameters():
        assert torch.equal(each, written[name]), name
    assert rollout.digest() == digest and rollout.served_version() == version
    rollout.engine.reset_prefix_cache()
    assert tokens(rollout.generate(prompts(1), GREEDY)) == answers


def test_answers_after_sleeps_are_those_before(pair: Pair) -> None:
    rollout, free = pair.rollout, MemorySaver("cuda:0")
    for level in (1, 2, 1, 2):
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
        assert rollout.saver.is_paused(KV_CACHE)
        if level == 2:
            assert rollout.served_version() is None
            pair.trainer.sync_weights(version)
        rollout.wake_up()
        assert tokens(rollout.generate(prompts(2), GREEDY)) == answers
    free.close()


def test_new_weights_forget_the_prefixes_of_the_old(pair: Pair) -> None:
    pair.synced()
    old = tokens(pair.rollout.generate(prompts(3), GREEDY))
    version = pair.synced()
    new = pair.rollout.generate(prompts(3), GREEDY)
    pair.rollout.sleep(1)
    pair.rollout.wake_up()
    assert tokens(new) == tokens(pair.rollout.generate(prompts(3), GREEDY)) != old
    assert {each for group in new for each in group[0].weight_versions} == {version}


def test_log_probabilities_are_the_trainers(pair: Pair) -> None:
    """Mean apart as far as bf16 goes; the temperature is in both."""
    pair.synced()
    params = SamplingParams(max_tokens=16, temperature=0.7, n=2, seed=3, ignore_eos=True)
    answers = pair.rollout.generate(prompts(4), params)
    assert tokens(pair.rollout.generate(prompts(4), params)) == tokens(answers)
    flat = [(p, each) for p, group in zip(prompts(4), answers, strict=True) for each in group]
    batch = SequenceBatch(
        prompt_ids=[prompt for prompt, _ in flat],
        response_ids=[each.token_ids for _, each in flat],
        temperature=0.7,
    )
    scored = pair.trainer.compute_log_prob(batch)
    gaps: list[float] = []
    for mine, (_, each) in zip(scored, flat, strict=True):
        gaps += [abs(a - b) for a, b in zip(mine, each.logprobs, strict=True)]
    print(f"mean gap {sum(gaps) / len(gaps):.4f}, largest {max(gaps):.3f}")
    assert sum(gaps) / len(gaps) < 0.1
    assert all(len(set(map(tuple, group))) == 2 for group in tokens(answers))


def test_stop_tokens_and_progress(pair: Pair) -> None:
    pair.synced()
    (whole,) = pair.rollout.generate([prompts(5)[0]], GREEDY)
    stop = whole[0].token_ids[4]
    seen: list[tuple[int, int, int]] = []
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, stop_token_ids=(stop,))
    (cut,) = pair.rollout.generate([prompts(5)[0]], params, lambda *each: seen.append(each))
    ends = whole[0].token_ids.index(stop) + 1
    assert cut[0].token_ids == whole[0].token_ids[:ends] and cut[0].finish_reason == "stop"
    assert whole[0].finish_reason == "length" and seen[-1] == (1, 1, ends)


def test_an_interrupt_leaves_no_request(pair: Pair) -> None:
    pair.synced()
    answers = tokens(pair.rollout.generate(prompts(6), GREEDY))

    def interrupt(done: int, total: int, count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pair.rollout.generate(prompts(6), GREEDY, interrupt)
    pair.rollout.sleep(1)
    pair.rollout.wake_up()
    assert tokens(pair.rollout.generate(prompts(6), GREEDY)) == answers


def test_the_cycle(pair: Pair) -> None:
    """Trains between two rounds: the second answers with the new weights."""
    pair.synced()
    pair.rollout.sleep(2)
    cycle = Cycle(pair.trainer, pair.rollout)
    for _ in range(2):
        cycle.to_rollout(next(pair.versions))
        answers = pair.rollout.generate(prompts(7), SamplingParams(max_tokens=8, seed=1))
        cycle.to_score()
        flat = [group[0] for group in answers]
        batch = SequenceBatch(
            prompt_ids=prompts(7), response_ids=[each.token_ids for each in flat],
            old_logprobs=[each.logprobs for each in flat],
            advantages=[(-1.0) ** number for number in range(len(flat))],
        )  # fmt: skip
        pair.trainer.compute_log_prob(batch)
        cycle.to_train()
        assert pair.rollout.report().committed_bytes == 0
        assert pair.trainer.update_actor(batch)["grad_norm"] > 0


def test_the_example_learns(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", "qwen2", hidden_size=256, head_dim=64)
    example = [sys.executable, str(ROOT / "examples" / "vllm_loop.py"), path]
    done = subprocess.run(example, capture_output=True, text=True, timeout=200, cwd=ROOT)
    rewards = [float(each) for each in re.findall(r"^step \d+: reward (\S+)$", done.stdout, re.M)]
    assert len(rewards) == 20, done.stderr[-2000:]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards


def test_a_plain_vllm_sleeps_on_our_tags(tmp_path: Path) -> None:
    """Installed and named, no more: both levels, answers as before, the engine in a process of its
    own. Its KV cache has most of 0.2 of a GPU of 80 GB.
    """
    path = write_model(
        tmp_path / "model", "llama", hidden_size=256, head_dim=64, max_position_embeddings=256
    )
    with (ROOT / "pyproject.toml").open("rb") as file:
        plugins = tomllib.load(file)["project"]["entry-points"]["vllm.general_plugins"]
    installed = tmp_path / "site" / "memsaver-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: memsaver\nVersion: 1\n")
    lines = [f"{name} = {where}" for name, where in plugins.items()]
    (installed / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines]))
    script, saved = tmp_path / "plain.py", tmp_path / "saved"
    script.write_text(PLAIN)
    path_of = os.pathsep.join([str(installed.parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path_of, "VLLM_PLUGINS": "memsaver"}
    env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    done = subprocess.run(
        [sys.executable, str(script), path, str(saved)],
        capture_output=True, text=True, timeout=150, env=env,
    )  # fmt: skip
    assert saved.exists(), done.stdout[-1500:] + done.stderr[-3000:]
