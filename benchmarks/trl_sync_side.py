"""A few steps of TRL's GRPO with random weights, as a side of `bench_trl_sync`.

python -m benchmarks.trl_sync_side CASE SIDE STEPS SAVED [tiny]
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import memsaver.compat
from benchmarks.bench_trl_sync import CASES
from benchmarks.common import Scale, fields_of, settle, write_config

PROMPT, ANSWER, SAMPLES = 24, 64, 8  # tokens and answers of a prompt


class Clock:
    """A weight sync that is called in place of another, which it measures.

    Each sync first wakes vLLM's weights, on which its memory is counted.

    Attributes:
        seconds: Seconds of each sync.
        beyond: Bytes of the device that each sync needed at its peak, beyond vLLM's weights.
    """

    def __init__(self, generation: Any, device: torch.device) -> None:
        self.seconds: list[float] = []
        self.beyond: list[int] = []
        self._sync: Callable[[], None] = generation.sync_weights
        self._device = device
        self._wake_up: Callable[..., None] = generation.llm.wake_up
        generation.llm.wake_up = self._wake
        self._awake = 0  # bytes in use once the weights are awake

    def __call__(self) -> None:
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            settle()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        self._sync()
        settle()
        self.seconds.append(time.perf_counter() - started)
        # torch's allocator kept what it reserved during the sync, but for what it gave back.
        gone = torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved() if on_gpu else 0
        self.beyond.append(self._used() + gone - self._awake)

    def _wake(self, tags: list[str] | None = None) -> None:
        self._wake_up(tags)
        if tags == ["weights"]:
            self._awake = self._used()

    def _used(self) -> int:
        if self._device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free


def word_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose words w0, w1, ... are its tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="w1", pad_token="w2", unk_token="w0", padding_side="left"
    )


def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Reward the share of even tokens."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def prompts(vocabulary: int, count: int) -> list[str]:
    starts = range(3, 3 + 7 * count, 7)
    return [" ".join(f"w{(at + i) % vocabulary}" for i in range(PROMPT)) for at in starts]


def make_model(folder: Path, scale: Scale, case: str) -> Any:
    """Build a model with random weights, fp32 if all of it is trained, else bf16."""
    shape, rank = CASES[case]
    config = AutoConfig.from_pretrained(write_config(folder, fields_of(scale, shape)))
    torch.manual_seed(0)
    with scale.device:
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if rank else torch.float32
        )


def make_trainer(case: str, steps: int, scale: Scale, folder: Path) -> Any:
    import trl.generation.vllm_generation as theirs
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    theirs.LLM = functools.partial(
        theirs.LLM,
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,  # a sync does not depend on graphs
    )
    model, rank = make_model(folder / "model", scale, case), CASES[case].rank
    vocabulary = model.config.vocab_size
    lora = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    batch = 2 * SAMPLES
    return GRPOTrainer(
        model=model,
        reward_funcs=even,
        args=GRPOConfig(
            output_dir=str(folder / "trained"),
            seed=0,
            max_steps=steps,
            num_generations=SAMPLES,
            per_device_train_batch_size=batch,
            max_completion_length=scale.choose(ANSWER, 8),
            learning_rate=1e-4 if rank else 1e-5,
            warmup_steps=0,
            beta=0.0,
            bf16=scale.on_gpu,
            use_cpu=not scale.on_gpu,
            gradient_checkpointing=scale.on_gpu,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_enable_sleep_mode=True,
            vllm_gpu_memory_utilization=0.35,
            vllm_max_model_length=256,
            generation_kwargs={"detokenize": False, "ignore_eos": True},
            logging_steps=1,
            report_to="none",
            save_strategy="no",
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts(vocabulary, steps * batch)}),
        processing_class=word_tokenizer(vocabulary),
        peft_config=lora if rank else None,
    )


def main(case: str, side: str, steps: int, saved: Path, tiny: bool) -> None:
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    scale = Scale(device=device, tiny=tiny)
    if side == "memsaver" and scale.on_gpu:
        memsaver.compat.install("vllm.device_allocator.cumem")  # as with VLLM_PLUGINS=memsaver
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(case, steps, scale, Path(folder))
        if side == "memsaver":
            from trainer_bridge.adoption import trl

            trl.use(trainer)
        generation = trainer.vllm_generation
        generation.sync_weights = clock = Clock(generation, device)
        trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    figures = {"seconds": clock.seconds, "beyond": clock.beyond, "rewards": rewards}
    saved.write_text(json.dumps(figures))


if __name__ == "__main__":
    case, side, steps, saved, *tiny = sys.argv[1:]
    main(case, side, int(steps), Path(saved), bool(tiny))
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads would keep the process
