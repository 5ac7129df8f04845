"""A tiny model with a tokenizer of bytes, which takes any text."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.models import save_tiny

END, PAD, START = "<|im_end|>", "<pad>", "<|im_start|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


TOOLS_TEMPLATE = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}" + TEMPLATE
TOOLS_TEMPLATE += "{# <tool_call> </think> #}"
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


def save_byte_model(folder: Path, *, tools: bool = False) -> Path:
    """Save a random Qwen3 and a tokenizer with a token for each byte; return the folder.

    With `tools`, its chats have thoughts and tool calls, between tokens of their own.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    marks, template = (MARKS, TOOLS_TEMPLATE) if tools else ((), TEMPLATE)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: index for index, token in enumerate([PAD, START, END, *letters, *marks])}
    core = Tokenizer(models.BPE(vocab=ids, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=END, chat_template=template
    )
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    end = {"eos_token_id": ids[END], "pad_token_id": ids[PAD], "bos_token_id": None}
    save_tiny(folder, "qwen3", vocab_size=len(ids), max_position_embeddings=2048, **end)
    tokenizer.save_pretrained(folder)
    return folder
