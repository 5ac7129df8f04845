"""Answers of vLLM to two prompts, as token ids, without training.

    python examples/vllm_plain.py MODEL_DIR

`vllm_loop.py` adds a trainer on the same GPU.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import torch

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # run the engine in this process

PROMPTS = [[1, 2, 3], [4, 5, 6]]
SAMPLES, TOKENS = 16, 8


def score(answer: list[int]) -> float:
    """Return the fraction of an answer's tokens that are below 48."""
    return sum(token < 48 for token in answer) / len(answer)


def main(path: str) -> float:
    """Generate, and return the mean reward."""
    from vllm import LLM, SamplingParams

    llm = LLM(model=path, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=64)
    params = SamplingParams(n=SAMPLES, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    rewards = []
    for output in outputs:
        rewards += [score(list(answer.token_ids)) for answer in output.outputs]
    print(f"reward {sum(rewards) / len(rewards):.3f}")
    return sum(rewards) / len(rewards)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not find_spec("vllm") or not torch.cuda.is_available():
        sys.exit("usage: python examples/vllm_plain.py MODEL_DIR, with vLLM and a GPU")
    main(sys.argv[1])
