"""A GRPO loop in which vLLM generates and an FSDP2 trainer learns, in turns on one GPU.

    python examples/vllm_loop.py MODEL_DIR

The model learns to answer with token ids below 48.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import torch

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # run the engine in this process

from memsaver import MemorySaver
from rollout import SamplingParams
from rollout.hosted import VllmRollout
from trainer_bridge import Cycle, SequenceBatch, Trainer, TrainerConfig

PROMPTS = [[1, 2, 3], [4, 5, 6]]
SAMPLES, TOKENS = 16, 8


def score(answer: list[int]) -> float:
    """Return the fraction of an answer's tokens that are below 48."""
    return sum(token < 48 for token in answer) / len(answer)


def main(path: str, steps: int = 20) -> list[float]:
    """Train, and return the mean reward of each step."""
    sizes = {"kv_tokens": 4096, "max_running": 64, "max_context_len": 64}
    # Capturing CUDA graphs would take longer than it saves in such a short run.
    rollout = VllmRollout.from_pretrained(path, load_weights=False, cuda_graphs=False, **sizes)
    rollout.sleep(level=2)
    saver = MemorySaver("cuda:0")
    config = TrainerConfig(
        model_path=path, device="cuda:0", param_dtype="bfloat16", learning_rate=3e-3
    )
    trainer = Trainer(config, saver)
    trainer.connect([rollout])
    cycle = Cycle(trainer, rollout)
    rewards = []
    for step in range(1, steps + 1):
        cycle.to_rollout(version=step)  # vLLM now has the memory and the trainer's weights
        params = SamplingParams(n=SAMPLES, max_tokens=TOKENS, ignore_eos=True, seed=step)
        groups = rollout.generate(PROMPTS, params)
        cycle.to_train()  # the trainer now has the memory
        rewards.append(learn(trainer, groups))
        print(f"step {step}: reward {rewards[-1]:.3f}")
    trainer.close()
    saver.close()
    rollout.close()
    return rewards


def learn(trainer: Trainer, groups: list) -> float:
    """Update the model from the answers to each prompt; return their mean reward."""
    answers = [answer for group in groups for answer in group]
    scores = [score(answer.token_ids) for answer in answers]
    means = [sum(scores[i : i + SAMPLES]) / SAMPLES for i in range(0, len(scores), SAMPLES)]
    trainer.update_actor(
        SequenceBatch(
            prompt_ids=[prompt for prompt in PROMPTS for _ in range(SAMPLES)],
            response_ids=[answer.token_ids for answer in answers],
            old_logprobs=[answer.logprobs for answer in answers],
            advantages=[reward - means[i // SAMPLES] for i, reward in enumerate(scores)],
        )
    )
    return sum(scores) / len(scores)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not find_spec("vllm") or not torch.cuda.is_available():
        sys.exit("usage: python examples/vllm_loop.py MODEL_DIR, with vLLM and a GPU")
    main(sys.argv[1])
