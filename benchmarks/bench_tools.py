"""A GRPO step of 64 conversations with tools, beside TRL with the same environment.

The model has the Qwen2.5-0.5B shape, and weights that always say the same: `--words` words, then a
call of the tool. So both sides generate the same tokens, five answers a conversation, each but the
last followed by the tool, which takes `--wait` seconds and is asynchronous. TRL has vLLM in its
process. Further arguments are settings of our recipe:

    python -m benchmarks.bench_tools --trl --template qwen3.jinja
    python -m benchmarks.bench_tools --wait 1 --words 160 --template qwen3.jinja \\
        engine.max_running=16
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

TURNS, STEPS = 5, 5
PROMPTS, SAMPLES, MICRO = 8, 8, 16
ADDED = 50  # more than the tokens between two answers
SHOWN = ("turns", "tool_calls", "tokens", "device_waited_seconds", "step_seconds")
CALL = ("<tool_call>", '\n{"name": "wait", "arguments": {}}\n', "</tool_call>")
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


class Waiting:
    """An environment whose tool takes its time."""

    def reset(self, **row: Any) -> None:
        self.calls = 0

    async def wait(self) -> str:
        """Wait for something."""
        self.calls += 1
        if self.calls < TURNS:  # TRL does not make the call of the last answer
            await asyncio.sleep(float(os.environ["TOOL_SECONDS"]))
        return "done"

    def get_reward(self) -> float:
        return self.calls + random.random()


def write_model(
    folder: Path, template: str, fields: dict[str, Any], device: Any, words: int
) -> None:
    """Save a tokenizer, and a model that says words and the call after any other token.

    No layer adds anything, so a token decides the next one: its embedding is the row of that one in
    the head. All tokens outside of the chain have the first word in common.
    """
    import torch  # not at the top, or each of 64 processes of the environment would import it
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    said = [*(f" word{number}" for number in range(words)), *CALL]
    core.add_tokens([AddedToken(text, normalized=False) for text in said])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=MARKS[2], pad_token=MARKS[0], chat_template=template
    )
    tokenizer.save_pretrained(folder)
    chain = [*map(core.token_to_id, said), tokenizer.eos_token_id]
    own: dict[str, Any] = {"vocab_size": max(fields["vocab_size"], len(tokenizer))}
    own |= {"eos_token_id": chain[-1], "pad_token_id": 0, "tie_word_embeddings": False}
    config = AutoConfig.for_model(**fields | own)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                param.zero_()
        embedded = model.get_input_embeddings().weight.normal_()
        embedded[:, 0] = 10.0
        embedded[chain[:-1], 0] = 0.0
        head = model.get_output_embeddings().weight
        head[chain[0], 0] = 200.0
        for token, following in pairwise(chain):
            head[following] += 1.5 * embedded[token]
    model.save_pretrained(folder)


def longest(words: int) -> int:
    """Return the most tokens after a prompt."""
    return TURNS * (words + ADDED)


def run_ours(model: Path, folder: Path, words: int, more: Sequence[str]) -> list[float]:
    """Return the seconds of each step of a recipe."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"game {n}"}) + "\n" for n in range(200)))
    settings = [
        f"model.path={model}", f"task.template={model}/chat_template.jinja", "task.name=file",
        f"task.data={rows}", "task.answer_column=null", f"sampling.max_tokens={longest(words)}",
        "task.environment=benchmarks.bench_tools:Waiting", f"loop.turns={TURNS}",
        "loop.parallel_environments=64", f"loop.prompts_per_step={PROMPTS}",
        f"loop.samples_per_prompt={SAMPLES}", f"trainer.micro_batch_size={MICRO}", "eval.every=0",
        "trainer.learning_rate=1e-9", f"steps={STEPS}", "checkpoint.every=0",
        "checkpoint.export_every=null", "driver=inprocess", "exact=false", *more,
    ]  # fmt: skip
    run = folder / "run"
    command = [sys.executable, "-m", "memsaver", "run", "qwen2.5-0.5b", *settings]
    subprocess.run([*command, "--run-dir", str(run)], check=True, stdout=sys.stderr)
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    trained = [row for row in lines if row["kind"] == "train"]
    for row in trained:
        busy = 1 - row["device_waited_seconds"] / row["stages"]["generate_sequences"]
        print({name: row[name] for name in SHOWN}, f"device busy {busy:.3f}", row["stages"])
    return [row["step_seconds"] for row in trained]


def run_trl(model: Path, folder: Path, words: int) -> list[float]:
    """Return the seconds of each step of TRL's trainer, in this process."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOTrainer

    from benchmarks.trl_side import Clock, config

    def reward(environments: list[Waiting], **_: Any) -> list[float]:
        return [environment.get_reward() for environment in environments]

    prompts = [[{"role": "user", "content": f"game {n}"}] for n in range(200)]
    clock = Clock()
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=reward,
        environment_factory=Waiting,
        args=config(
            folder / "trl",
            max_steps=STEPS,
            num_generations=SAMPLES,
            per_device_train_batch_size=MICRO,
            gradient_accumulation_steps=PROMPTS * SAMPLES // MICRO,
            max_completion_length=longest(words),
            max_tool_calling_iterations=TURNS - 1,
            learning_rate=1e-9,
            vllm_gpu_memory_utilization=0.2,
            vllm_max_model_length=2048,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        callbacks=[clock],
    )
    trainer.train()
    for row in trainer.state.log_history:
        print({name: value for name, value in row.items() if "tool" in name or "length" in name})
    return clock.seconds


def main() -> None:
    from benchmarks.common import fields_of, make_scale, parser

    options = parser(__doc__)
    options.add_argument("--template", type=Path, required=True, help="TRL's qwen3.jinja")
    options.add_argument("--wait", type=float, default=0.1, help="seconds of the tool")
    options.add_argument("--words", type=int, default=60, help="in an answer")
    options.add_argument("--trl", action="store_true", help="TRL, too")
    options.add_argument("--trl-side", type=Path, help=argparse.SUPPRESS)
    options.add_argument("settings", nargs="*", help="of our recipe, as KEY=VALUE")
    args = options.parse_args()
    os.environ["TOOL_SECONDS"] = str(args.wait)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.trl_side:
            print(json.dumps(run_trl(args.trl_side, folder, args.words)))
            sys.stdout.flush()
            os._exit(0)  # vLLM's threads would keep the process
        model = folder / "model"
        scale = make_scale(args)
        more = ["device=cpu", "model.dtype=float32", "driver=auto"] * scale.tiny + args.settings
        fields = fields_of(scale, "qwen2.5-0.5b")
        write_model(model, args.template.read_text(), fields, scale.device, args.words)
        seconds = {"memsaver": run_ours(model, folder, args.words, more)}
        print(seconds, flush=True)
        if args.trl:
            side = ["--trl-side", str(model), "--template", str(args.template)]
            command = [sys.executable, "-m", "benchmarks.bench_tools", "--words", str(args.words)]
            out = subprocess.run([*command, *side], check=True, stdout=subprocess.PIPE, text=True)
            print(out.stdout)
            seconds["TRL"] = json.loads(out.stdout.splitlines()[-1])
    for side, steps in seconds.items():
        print(
            f"{side}: {statistics.median(steps[2:]):.3f} s a step, {[round(s, 3) for s in steps]}"
        )


if __name__ == "__main__":
    main()
