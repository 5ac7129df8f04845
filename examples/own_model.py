"""Generate with your own model, and train it with a packaged recipe.

    python examples/own_model.py [MODEL_DIR] [--run-dir RUN_DIR]

MODEL_DIR is a directory as `save_pretrained` writes it. If it has no model, the example writes a
tiny Llama to it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from recipes.run import start_run
from rollout import Engine, SamplingParams

WORDS = ["<pad>", "<unk>", "<s>", "</s>", "user", "assistant", "first", "of", *"abcdefgh"]
TEMPLATE = (
    "{% for message in messages %}"
    "<s> {{ message['role'] }} {{ message['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<s> assistant{% endif %}"
)


def write_model(path: Path) -> None:
    """Write the files that a run reads: configurations, weights and tokenizer."""
    core = Tokenizer(
        models.WordLevel(vocab={word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    marks = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    # The template makes a chat of a prompt. The end token ends an answer.
    PreTrainedTokenizerFast(tokenizer_object=core, chat_template=TEMPLATE, **marks).save_pretrained(
        path
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
    )
    LlamaForCausalLM(config).save_pretrained(path)


def ask(path: Path) -> list[int]:
    """Return the token ids of a greedy answer; the engine reads the directory directly."""
    engine = Engine.from_pretrained(path, kv_tokens=64)
    return engine.generate([[2, 4, 6, 7, 8, 9, 3]], SamplingParams(max_tokens=4, temperature=0))[0][
        0
    ].token_ids


def train(path: Path, run_dir: Path, steps: int = 2) -> Path:
    """Run the packaged recipe `tiny` with this model, and return the run folder."""
    small = [
        "loop.prompts_per_step=8",
        "loop.samples_per_prompt=4",
        f"steps={steps}",
        "eval.every=0",
    ]
    return start_run("tiny", [f"model.path={path}", *small], run_dir)


def main(path: Path, run_dir: Path) -> None:
    if not (path / "config.json").exists():
        write_model(path)
    print("answers", ask(path))
    train(path, run_dir)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Generate with a model, train it with a recipe.")
    parser.add_argument("model", type=Path, nargs="?", default=Path("models/own-model"))
    parser.add_argument("--run-dir", type=Path, default=Path("runs/own-model"))
    arguments = parser.parse_args()
    main(arguments.model, arguments.run_dir)
