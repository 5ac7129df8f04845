"""A minimal generating engine over `kvcache`: a Llama whose attention reads and writes a KV pool.

python examples/kv_engine.py
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvcache import (
    BlockManager,
    KVPool,
    PagedTokenToKVPoolAllocator,
    ReqHandle,
    ReqToTokenPool,
    layout,
)
from memsaver import MemorySaver

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
POOL_TOKENS, PAGE_SIZE, MAX_REQUESTS, MAX_LENGTH = 512, 4, 8, 64
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [5, 6, 7, 8, 20, 21], [30, 31]]


class Batch(NamedTuple):
    """The batch of one forward pass, as attention needs it."""

    pool: KVPool
    new_slots: Tensor  # slots of the new tokens of all sequences
    slots: list[Tensor]  # slots of all tokens of each sequence
    counts: list[int]  # number of new tokens of each sequence


def pool_attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, batch: Batch, **_: Any
) -> tuple[Tensor, None]:
    """Write the new keys and values to the pool, then attend over the slots of each sequence."""
    pool, layer, outputs = batch.pool, module.layer_idx, []
    pool.set_kv_buffer(layer, batch.new_slots, k[0].transpose(0, 1), v[0].transpose(0, 1))
    for query, slots in zip(q.split(batch.counts, dim=2), batch.slots, strict=True):
        keys, values = (rows.transpose(0, 1)[None] for rows in pool.get_rows(layer, slots))
        new, total = query.shape[2], len(slots)
        causal = torch.ones(new, total, dtype=torch.bool, device=DEVICE).tril(total - new)
        output = scaled_dot_product_attention(
            query, keys, values, attn_mask=causal, scale=scaling, enable_gqa=True
        )
        outputs.append(output.transpose(1, 2))
    return torch.cat(outputs, dim=1), None


AttentionInterface.register("kv_pool", pool_attention)


class Engine:
    """Greedy decoding of a batch of prompts, over a KV pool on the tag `kv_cache`."""

    def __init__(self, model: PreTrainedModel, saver: MemorySaver) -> None:
        self.model, self.saver = model.to(DEVICE), saver
        model.set_attn_implementation("kv_pool")
        self.pool = layout(model.config).build(
            size=POOL_TOKENS, page_size=PAGE_SIZE, device=DEVICE, saver=saver, tag="kv_cache"
        )
        self.ledger = PagedTokenToKVPoolAllocator(POOL_TOKENS, PAGE_SIZE, DEVICE)
        self.table = ReqToTokenPool(MAX_REQUESTS, MAX_LENGTH, DEVICE)
        self.blocks = BlockManager(self.table, self.ledger, self.pool)

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Return the prompts with their greedy continuations."""
        sequences = [list(prompt) for prompt in prompts]
        handles = [self.admit(prompt) for prompt in prompts]
        for _ in range(max_tokens):  # the first step computes the prompts, the others one token
            starts = [self.blocks.seq_len(handle) for handle in handles]
            ends = [len(sequence) for sequence in sequences]
            new_slots = self.blocks.extend(handles, ends)
            if new_slots is None:
                raise RuntimeError(f"the pool has only {self.blocks.available_pages} free pages")
            rows = [self.table.req_to_token[handle.row] for handle in handles]
            slots = [row[:end].long() for row, end in zip(rows, ends, strict=True)]
            spans = [range(*span) for span in zip(starts, ends, strict=True)]
            new = [sequence[start:] for sequence, start in zip(sequences, starts, strict=True)]
            batch = Batch(self.pool, new_slots, slots, [len(tokens) for tokens in new])
            ids, positions = as_row(new), as_row(spans)
            logits = self.model(ids, position_ids=positions, use_cache=False, batch=batch).logits[0]
            last = torch.tensor(batch.counts).cumsum(0) - 1  # the last token of each sequence
            for sequence, token in zip(sequences, logits[last].argmax(-1).tolist(), strict=True):
                sequence.append(token)
        for handle, sequence in zip(handles, sequences, strict=True):
            self.finish(handle, sequence)
        return sequences

    def admit(self, prompt: list[int]) -> ReqHandle:
        handle = self.blocks.admit()
        if handle is None:
            raise RuntimeError(f"there are more than {MAX_REQUESTS} requests")
        return handle

    def finish(self, handle: ReqHandle, sequence: list[int]) -> None:
        self.blocks.release(handle)

    def sleep(self) -> None:
        self.saver.pause("kv_cache")

    def wake_up(self) -> None:
        self.saver.resume("kv_cache")
        self.pool.on_resume()


def as_row(parts: Iterable[Iterable[int]]) -> Tensor:
    return torch.tensor([[*chain.from_iterable(parts)]], device=DEVICE)


def make_model() -> PreTrainedModel:
    """Build a small Llama with random weights."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes, **heads)).eval()


def main() -> None:
    saver = MemorySaver(device=DEVICE)
    engine = Engine(make_model(), saver)
    before = engine.generate(PROMPTS, max_tokens=8)
    print("bytes held:", saver.report().committed_bytes)
    engine.sleep()
    print("bytes held while paused:", saver.report().committed_bytes)
    engine.wake_up()
    print("tokens are the same:", engine.generate(PROMPTS, max_tokens=8) == before)
    saver.close()


if __name__ == "__main__":
    main()
