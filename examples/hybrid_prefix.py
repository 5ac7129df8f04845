"""A prefix cache for a model of attention and linear layers, around transformers' generate.

    python examples/hybrid_prefix.py MODEL_DIR

What a prompt begins with is computed once: keys and values of the attention layers lie in pages,
the states of the linear layers after a beginning in a slot of their own.
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from kvcache import layout
from kvcache.allocators import PagedTokenToKVPoolAllocator
from kvcache.radix import MambaRadixCache
from memsaver import MemorySaver

PAGE = 4
SYSTEM = list(range(3, 14))


class Prefixes:
    """What prompts began with, found again: pools on tag `kv_cache`, and who holds what."""

    def __init__(
        self, model: PreTrainedModel, saver: MemorySaver, tokens: int, states: int
    ) -> None:
        kept = layout(model.config)
        self.model, self.layers = model, {kind: kept.layers(kind) for kind in ("full", "linear")}
        self.kv = kept.build(size=tokens, page_size=PAGE, device=saver.device, saver=saver)
        self.states = kept.build_states(size=states, device=saver.device, saver=saver)
        self.ledger = PagedTokenToKVPoolAllocator(tokens, PAGE, saver.device)
        self.cache = MambaRadixCache(self.ledger, self.states)
        self.computed = 0  # tokens of prompts

    def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The greedy answer; at least the prompt's last token is computed."""
        past = DynamicCache(config=self.model.config)
        whole = (len(prompt) - 1) // PAGE * PAGE
        match = self.cache.match_prefix(prompt[:whole])
        self.cache.inc_lock_ref(match.node)  # it stays while others are evicted
        pages = match.pages.tolist()
        if match.state is not None:
            self._load(past, pages, match.state)
        if match.length < whole:  # states can't go back: stop where the last whole page ends
            with torch.no_grad():
                self.model(torch.tensor([prompt[match.length : whole]]), past_key_values=past)
            self._keep(prompt[:whole], pages, past)
        self.cache.dec_lock_ref(match.node)
        self.computed += len(prompt) - match.length
        ids = torch.tensor([prompt])
        found = self.model.generate(
            ids, past_key_values=past, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
        )
        return found[0, len(prompt) :].tolist()

    def forget(self) -> None:
        """Before a pause of the pools, and after a change of the weights."""
        self.cache.raise_version(self.cache.version + 1)
        self.cache.evict(self.cache.evictable_size)

    def _keep(self, tokens: list[int], pages: list[int], past: DynamicCache) -> None:
        """Of `tokens` the first lie in `pages`. Nothing is kept where there is no room."""
        first = len(pages) * PAGE
        missing = len(tokens) // PAGE - len(pages)
        self.cache.evict(max(0, missing - self.ledger.available_pages) * PAGE)
        if not self.states.available_size():
            self.cache.evict_states(1)
        state = self.states.alloc(1)
        new = self.ledger.alloc_pages(missing) if state else None
        if state is None or new is None:
            self.states.free(state or [])
            return
        at = self._slots(new)
        for layer in self.layers["full"]:
            keys, values = past.layers[layer].keys[0], past.layers[layer].values[0]
            self.kv.set_kv_buffer(layer, at, *(x.transpose(0, 1)[first:] for x in (keys, values)))
        for nth, layer in enumerate(self.layers["linear"]):
            (conv,), recurrent = self.states.states(nth)
            conv[state[0]] = past.layers[layer].conv_states[0][0, :, -conv.shape[-1] :]
            recurrent[state[0]] = past.layers[layer].recurrent_states[0][0]
        entry = [*pages, *new]
        kept = self.cache.insert(tokens, entry, state[0], version=self.cache.version)
        self.ledger.free_pages(entry[len(pages) : kept.length // PAGE])  # which it had already

    def _load(self, past: DynamicCache, pages: list[int], state: int) -> None:
        at = self._slots(pages)
        for layer in self.layers["full"]:
            rows = self.kv.get_rows(layer, at)
            past.update(*(x.transpose(0, 1)[None] for x in rows), layer)
        for nth, layer in enumerate(self.layers["linear"]):
            (conv,), recurrent = self.states.states(nth)
            width = self.model.config.linear_conv_kernel_dim  # transformers keeps one column more
            past.update_conv_state(conv[state][None], layer, conv_kernel_size=width)
            past.update_recurrent_state(recurrent[state][None], layer)

    def _slots(self, pages: list[int]) -> torch.Tensor:
        first = torch.tensor(pages, device=self.kv.device) * PAGE
        return (first[:, None] + torch.arange(PAGE, device=self.kv.device)).flatten()


def main(path: str) -> tuple[list[list[int]], int]:
    """Answers to two prompts that begin alike, and how many prompt tokens were computed."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prefixes = Prefixes(model, MemorySaver(device="cpu"), tokens=256, states=8)
    answers = [prefixes.generate([*SYSTEM, last], max_tokens=8) for last in (1, 2)]
    print(f"{2 * len(SYSTEM) + 2} tokens, {prefixes.computed} computed: {answers}")
    return answers, prefixes.computed


if __name__ == "__main__":
    main(sys.argv[1])
