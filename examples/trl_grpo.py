"""TRL's GRPO with colocated vLLM on memsaver's tags, and a sync that writes its weights in place.

    VLLM_PLUGINS=memsaver python examples/trl_grpo.py [MODEL]

With several GPUs: `VLLM_PLUGINS=memsaver accelerate launch examples/trl_grpo.py [MODEL]`.
"""

from __future__ import annotations

import argparse
import sys

import torch

import trainer_bridge.adoption.trl

try:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    sys.exit(f"{error}; run: pip install trl vllm")


def short(completions: list[str], **_: object) -> list[float]:
    """Reward short answers."""
    return [-float(len(answer)) for answer in completions]


def main(path: str) -> None:
    """Train for one epoch over 64 prompts."""
    config = GRPOConfig(
        output_dir="runs/trl",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=True,
        vllm_gpu_memory_utilization=0.4,
    )
    prompts = Dataset.from_dict({"prompt": [f"Count to {number}." for number in range(64)]})
    trainer = GRPOTrainer(model=path, reward_funcs=short, args=config, train_dataset=prompts)
    sync = trainer_bridge.adoption.trl.use(trainer)
    trainer.train()
    print(sync.receipt)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a model to give short answers.")
    parser.add_argument("model", nargs="?", default="Qwen/Qwen2.5-0.5B-Instruct")
    model = parser.parse_args().model
    if not torch.cuda.is_available():
        sys.exit("examples/trl_grpo.py needs a GPU for vLLM")
    main(model)
