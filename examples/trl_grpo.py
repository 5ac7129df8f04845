"""TRL's GRPO with vLLM beside the trainer: its memory on our tags, its weights written in place.

    VLLM_PLUGINS=memsaver python examples/trl_grpo.py MODEL_DIR

With several GPUs: `VLLM_PLUGINS=memsaver accelerate launch examples/trl_grpo.py MODEL_DIR`.
"""

from __future__ import annotations

import sys

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import trainer_bridge.trl


def short(completions: list[str], **others: object) -> list[float]:
    """Rewards short answers."""
    return [-float(len(answer)) for answer in completions]


def main(path: str) -> None:
    """One epoch over 64 prompts."""
    config = GRPOConfig(
        output_dir="runs/trl",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=True,
        vllm_gpu_memory_utilization=0.4,
    )
    prompts = Dataset.from_dict({"prompt": [f"Count to {number}." for number in range(64)]})
    trainer = GRPOTrainer(model=path, reward_funcs=short, args=config, train_dataset=prompts)
    sync = trainer_bridge.trl.use(trainer)
    trainer.train()
    print(sync.receipt)


if __name__ == "__main__":
    main(sys.argv[1])
