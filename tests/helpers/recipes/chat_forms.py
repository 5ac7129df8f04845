"""Chat formats with the templates that TRL ships, and tokenizers of bytes."""

from __future__ import annotations

import re
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from recipes.setup.prompts import PromptFormat
from tests.helpers.rollout.package_names import Wheel

ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>", "cohere2": "<|END_RESPONSE|>",
    "deepseek_r1_distill": "<｜end▁of▁sentence｜>", "gemma": "<end_of_turn>",
    "gemma3": "<end_of_turn>", "gemma4": "<turn|>", "glm4moe": "<|user|>", "gptoss": "<|return|>",
    "lfm2": "<|im_end|>", "llama3_1": "<|eot_id|>", "llama3_2": "<|eot_id|>",
    "nemotron_3_nano": "<|im_end|>", "phi3": "<|end|>", "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>", "qwen3_5_think": "<|im_end|>", "qwen3_8": "<|im_end|>",
    "qwen3_instruct_2507": "<|im_end|>",
}  # fmt: skip
"""End token of answers by template."""


def form_of(name: str) -> PromptFormat:
    """Return the format of a template with a tokenizer of bytes and the template's marks."""
    folder = Wheel("trl").folder
    assert folder is not None
    template = (Path(folder) / "chat_templates" / f"{name}.jinja").read_text()
    marks = re.findall(r"<\|[^|<>\s']+\|?>|</?[a-z_|]+>|<[｜][^<>]*[｜]>", template)
    core = Tokenizer(models.BPE(vocab=alphabet(), merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = [AddedToken(mark, special=True) for mark in sorted({*marks, ENDS[name]})]
    core.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=ENDS[name])
    return PromptFormat(tokenizer=tokenizer, template=template)


def alphabet() -> dict[str, int]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return {letter: number for number, letter in enumerate(letters)}
