"""Pause and resume another engine with memsaver alone: here, transformers' `generate`.

Usage: python examples/own_engine.py MODEL_DIR
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, StaticCache

import memsaver

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
PROMPT = [1, 2, 3, 4]


class OtherEngine:
    """An engine whose weights and KV cache are allocated in regions; nothing else uses memsaver."""

    def __init__(self, path: str, saver: memsaver.MemorySaver) -> None:
        loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        config = AutoConfig.from_pretrained(path)
        # A pause saves the weights. Use "discard" if they are synced again before their next use.
        with saver.region("weights", content="host"):
            self.model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32
            ).to(DEVICE)
        self.model.load_state_dict(loaded.state_dict())
        self.cache = StaticCache(config=config, max_cache_len=64)
        heads, width = config.num_key_value_heads, config.head_dim
        # The default content is "discard": a pause saves nothing, and a resume leaves it undefined.
        with saver.region("kv_cache"):
            self.cache.early_initialization(1, heads, width, torch.float32, torch.device(DEVICE))

    def generate(self, prompt: list[int], tokens: int = 8) -> list[int]:
        """Return a greedy answer; the cache starts empty, so a pause may discard it."""
        self.cache.reset()
        ids = torch.tensor([prompt], device=DEVICE)
        settings = {
            "do_sample": False,
            "max_new_tokens": tokens,
            "min_new_tokens": tokens,
            "pad_token_id": 0,
        }
        mask = torch.ones_like(ids)
        return self.model.generate(
            ids, attention_mask=mask, past_key_values=self.cache, **settings
        )[0].tolist()

    def addresses(self) -> list[int]:
        weights = [weight.data_ptr() for weight in self.model.parameters()]
        return weights + [layer.keys.data_ptr() for layer in self.cache.layers]


def main(path: str) -> dict[str, object]:
    """Pause and resume an engine, and return the observations."""
    saver = memsaver.MemorySaver(device=DEVICE)
    engine = OtherEngine(path, saver)
    before, addresses = engine.generate(PROMPT), engine.addresses()
    weights = [weight.detach().clone() for weight in engine.model.parameters()]
    held = saver.report().committed_bytes
    saver.pause()  # weights and KV cache: the trainer's turn
    paused = saver.report().committed_bytes
    # New weights can be written between the two calls, before the KV cache takes its memory.
    saver.resume("weights")
    kept = all(map(torch.equal, weights, engine.model.parameters()))
    saver.resume("kv_cache")
    results = {
        "bytes held": held,
        "bytes held while paused": paused,
        "bytes held afterwards": saver.report().committed_bytes,
        "addresses are the same": engine.addresses() == addresses,
        "weights were kept": kept,
        "answer is the same": engine.generate(PROMPT) == before,
    }
    for name, value in results.items():
        print(f"{name}: {value}")
    saver.close()
    return results


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/own_engine.py MODEL_DIR")
    main(sys.argv[1])
