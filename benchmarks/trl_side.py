"""TRL's GRPO on the sums of recipe smollm2-135m-2digits, as a side of `bench_trl`.

Model, problems, reward function, batch, learning rate and schedule are those of the recipe. vLLM
generates in TRL's process (colocate).

    python -m benchmarks.trl_side MODEL SEED STEPS OUT
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.bench_trl import RECIPE
from recipes.config.load import load
from recipes.tasks import make_tasks


class Clock(TrainerCallback):  # type: ignore[misc]
    """Callback that keeps the seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._begun = 0.0

    def on_step_begin(self, *args: Any, **more: Any) -> None:
        torch.cuda.synchronize()
        self._begun = time.perf_counter()

    def on_step_end(self, *args: Any, **more: Any) -> None:
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._begun)


def config(folder: Path, **more: Any) -> GRPOConfig:
    """Return TRL's configuration: vLLM in its process, nothing saved, and `more`."""
    return GRPOConfig(
        output_dir=str(folder),
        beta=0.0,
        bf16=True,
        gradient_checkpointing=False,
        use_vllm=True,
        vllm_mode="colocate",
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        **more,
    )


def main(model: str, seed: int, steps: int, out: Path) -> None:
    recipe = load(RECIPE)
    task = make_tasks(recipe.task, recipe.eval.sets).trained[0]
    problems = {problem.text: problem for problem in task.train}

    def reward(prompts: Any, completions: Any, **_: Any) -> list[float | None]:
        pairs = zip(prompts, completions, strict=True)
        texts = ((prompt[-1]["content"], answer[-1]["content"]) for prompt, answer in pairs)
        return [task.score(problems[asked], answer, True).reward for asked, answer in texts]

    rows = [[{"role": "user", "content": text}] for text in problems]
    clock = Clock()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config(
            out / "trl",
            seed=seed,
            max_steps=steps,
            num_generations=recipe.samples_per_prompt,
            per_device_train_batch_size=recipe.answers_per_step,
            max_completion_length=recipe.sampling.max_tokens,
            temperature=recipe.sampling.temperature,
            learning_rate=recipe.trainer.learning_rate,
            lr_scheduler_type=recipe.trainer.schedule,
            warmup_steps=0,
            model_init_kwargs={"dtype": "float32"},
            vllm_gpu_memory_utilization=0.1,
            vllm_max_model_length=256,
        ),
        train_dataset=Dataset.from_dict({"prompt": rows}),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        callbacks=[clock],
    )
    trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    text = json.dumps({"seconds": clock.seconds, "rewards": rewards})
    (out / f"trl_{seed}.json").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    os._exit(0)  # vLLM's threads would keep the process
