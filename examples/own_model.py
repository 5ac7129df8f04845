"""A model of one's own: a directory as `save_pretrained` writes it, checked, asked, and trained by
a recipe.

    python examples/own_model.py MODEL_DIR

Makes a tiny Llama in MODEL_DIR unless there is a model already.
"""

from __future__ import annotations

import sys
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
    """config.json, model.safetensors, generation_config.json and the tokenizer: all that a run
    reads.
    """
    core = Tokenizer(
        models.WordLevel(vocab={word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    marks = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    # prompts are chats, so there must be a template; the end token says where an answer ends
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
    """Token ids of a greedy answer: the engine reads the directory as the trainer will."""
    engine = Engine.from_pretrained(path, kv_tokens=64)
    return engine.generate([[2, 4, 6, 7, 8, 9, 3]], SamplingParams(max_tokens=4, temperature=0))[0][
        0
    ].token_ids


def train(path: Path, run_dir: Path, steps: int = 2) -> Path:
    """The packaged tiny recipe with this model in the place of its random one; what is learnt is in
    the run folder.
    """
    small = [
        "grpo.prompts_per_step=8",
        "grpo.samples_per_prompt=4",
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
    main(Path(sys.argv[1]), Path("runs/own-model"))
