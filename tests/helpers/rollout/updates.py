"""Miniature trainers that replace an engine's weights by random models of the same layout."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from memsaver import MemorySaver, Ticket, attach
from memsaver.ops.rows import digest
from rollout import Engine
from rollout.model.decoder import whole_manifest
from rollout.model.loading import load_model_config
from rollout.tag_names import WEIGHTS, WEIGHTS_SHADOW
from rollout.weights import Manifest, UpdateReceipt, WeightOffer, WriteReceipt
from tests.helpers.models import build_tiny, greedy
from tests.helpers.rollout.answers import GREEDY, random_prompts

TINY: dict[str, Any] = {"head_dim": 16, "tie_word_embeddings": True}
PROMPTS = random_prompts((3, 50, 20))


@lru_cache(maxsize=16)
def tiny(seed: int) -> PreTrainedModel:
    return build_tiny("qwen3", seed, **TINY)


@lru_cache
def checkpoint() -> Path:
    """Return a folder with model 0."""
    path = Path(mkdtemp(prefix="memsaver-test-"))
    tiny(0).save_pretrained(str(path))
    return path


@lru_cache
def layout() -> Manifest:
    """Return the places of these models' parameters in an engine."""
    with TemporaryDirectory() as folder:
        tiny(0).save_pretrained(folder)
        return whole_manifest(load_model_config(Path(folder)), torch.float32)


def answers(engine: Engine) -> list[list[int]]:
    return [samples[0].token_ids for samples in engine.generate(PROMPTS, GREEDY)]


def expected(seed: int) -> list[list[int]]:
    """Return the answers of model `seed`."""
    return [greedy(tiny(seed), prompt, GREEDY.max_tokens) for prompt in PROMPTS]


@torch.no_grad()
def greedy_over_old_keys(prompt: list[int], seeds: list[int]) -> list[int]:
    """Return greedy tokens, each by the model of its seed, over keys and values of those before."""
    cache, ids, answer = DynamicCache(), list(prompt), list[int]()
    for seed in seeds:
        fed = torch.tensor([ids])
        logits = tiny(seed)(fed, past_key_values=cache, use_cache=True).logits[0, -1]
        ids = [int(logits.argmax())]
        answer += ids
    return answer


def addresses(engine: Engine) -> list[int]:
    return [engine.store.tensor(piece.name).data_ptr() for piece in engine.manifest.slices]


def shadow_bytes(engine: Engine) -> int:
    tag = engine.report().tags.get(WEIGHTS_SHADOW)
    return 0 if tag is None else tag.committed_bytes


# ---------------------------------------------------------------- by copies


def write(offer: WeightOffer, seed: int, **wrong: int | str) -> WriteReceipt:
    """Write the parameters of model `seed` through a lease.

    Args:
        offer: The engine's offer.
        seed: Seed of the model.
        **wrong: False values for fields of the receipt.
    """
    parameters = dict(tiny(seed).named_parameters())
    total, nbytes = 0, 0
    with attach(offer.ticket) as lease:
        for piece in layout().slices:
            if offer.names is not None and piece.name not in offer.names:
                continue
            target = lease.tensor(piece.shape, getattr(torch, piece.dtype), piece.offset)
            target.copy_(parameters[piece.name].detach())
            total += digest(target, piece.index_base)
            nbytes += target.nbytes
    fields = {"version": offer.version, "layout_hash": offer.layout_hash, "digest": total % 2**64}
    return WriteReceipt(**{**fields, "nbytes": nbytes, **wrong})  # type: ignore[arg-type]


def update(engine: Engine, version: int, seed: int, **how: Any) -> UpdateReceipt:
    """Run a whole update to the parameters of model `seed`; `how` goes to `begin_update`."""
    engine.verify_update(write(engine.begin_update(version, **how), seed))
    return engine.commit_update(version)


# ---------------------------------------------------------------- by pages


class Owner:
    """A saver whose tag "params" can be aliased, laid out like the engine's weights."""

    def __init__(self, engine: Engine) -> None:
        self.manifest = engine.manifest
        self.saver = MemorySaver(engine.saver.device)
        self.block = self.saver.empty(
            (engine.store.arena.nbytes,), torch.uint8, tag="params"
        ).fill_(0xFF)

    def fill(self, seed: int) -> int:
        """Write the parameters of model `seed`; return their digest."""
        parameters, total = dict(tiny(seed).named_parameters()), 0
        for piece in self.manifest.slices:
            tensor = parameters[piece.name].detach()
            self.block[piece.offset : piece.offset + tensor.nbytes].view(tensor.dtype).copy_(
                tensor.view(-1)
            )
            total += digest(tensor, piece.index_base)
        if self.block.is_cuda:
            torch.cuda.synchronize()
        return total % 2**64

    def alias(self, engine: Engine, version: int, seed: int, **how: Any) -> None:
        read = self.fill(seed)
        receipt = engine.alias_update(
            version, self.ticket(), **{"layout_hash": self.manifest.layout_hash, **how}
        )
        assert receipt.version == version == engine.weights_version
        assert receipt.digest in (None, read)

    def ticket(self) -> Ticket:
        return self.saver.share("params")


def weight_bytes(engine: Engine) -> tuple[int, int]:
    """Return the engine's own and aliased bytes of the weights."""
    tag = engine.report().tags[WEIGHTS]
    return tag.committed_bytes, tag.aliased_bytes
