"""A tiny model with a tokenizer of bytes, which takes any text."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.models import save_tiny

END, PAD, START = "<|im_end|>", "<pad>", "<|im_start|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_byte_model(folder: Path) -> Path:
    """Save a random Qwen3 and a tokenizer with a token for each byte; return the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: index for index, token in enumerate([PAD, START, END, *letters])}
    core = Tokenizer(models.BPE(vocab=ids, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=END, chat_template=TEMPLATE
    )
    end = {"eos_token_id": ids[END], "pad_token_id": ids[PAD], "bos_token_id": None}
    save_tiny(folder, "qwen3", vocab_size=len(ids), max_position_embeddings=2048, **end)
    tokenizer.save_pretrained(folder)
    return folder
