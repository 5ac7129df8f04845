"""A model whose parameters lie as vLLM's do, with loaders like vLLM's, and an engine around it that
cannot generate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memsaver import MemorySaver
from rollout.tags import KV_CACHE, WEIGHTS

PADDED_TO = 64
STACKED = (
    ("qkv_proj", "q_proj", 0),
    ("qkv_proj", "k_proj", 1),
    ("qkv_proj", "v_proj", 2),
    ("gate_up_proj", "gate_proj", 0),
    ("gate_up_proj", "up_proj", 1),
)
Make = Callable[[tuple[int, ...]], nn.Parameter]


def plain(param: Tensor, loaded: Tensor) -> None:
    assert param.size() == loaded.size()
    param.data.copy_(loaded)


def padded(param: Tensor, loaded: Tensor) -> None:
    param[: loaded.shape[0]].data.copy_(loaded)
    param[loaded.shape[0] :].data.fill_(0)


def stacked(sizes: Sequence[int]) -> Callable[..., None]:
    def load(param: Tensor, loaded: Tensor, part: int) -> None:
        place = param.data.narrow(0, sum(sizes[:part]), sizes[part])
        assert place.shape == loaded.shape
        place.copy_(loaded.narrow(0, 0, sizes[part]))

    return load


def experts(param: Tensor, loaded: Tensor, expert: int, part: str) -> None:
    place = param.data[expert]
    if part != "down_proj":
        half = place.shape[0] // 2
        place = place.narrow(0, 0 if part == "gate_proj" else half, half)
    place.copy_(loaded)


class FusedModel(nn.Module):
    """Parameters by vLLM's names. config: transformers', of a Llama, Qwen2 or Qwen3, with experts
    or without.
    """

    def __init__(self, config: Any, biased: bool, normed: bool, make: Make) -> None:
        super().__init__()
        self._make = make
        self.loaders: dict[str, Callable[..., None]] = {}
        self._named: dict[str, nn.Parameter] = {}
        hidden, inner = config.hidden_size, config.intermediate_size
        width = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
        sizes = [config.num_attention_heads * width, *[config.num_key_value_heads * width] * 2]
        rows = -(-config.vocab_size // PADDED_TO) * PADDED_TO
        self.skip = ("lm_head.",) if config.tie_word_embeddings else ()
        self._add("model.embed_tokens.weight", (rows, hidden), padded)
        if not config.tie_word_embeddings:
            self._add("lm_head.weight", (rows, hidden), padded)
        self._add("model.norm.weight", (hidden,), plain)
        for layer in range(config.num_hidden_layers):
            at = f"model.layers.{layer}."
            self._add(f"{at}self_attn.qkv_proj.weight", (sum(sizes), hidden), stacked(sizes))
            if biased:
                self._add(f"{at}self_attn.qkv_proj.bias", (sum(sizes),), stacked(sizes))
            for norm in ("q_norm", "k_norm") if normed else ():
                self._add(f"{at}self_attn.{norm}.weight", (width,), plain)
            self._add(f"{at}self_attn.o_proj.weight", (hidden, sizes[0]), plain)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                self._add(f"{at}{norm}.weight", (hidden,), plain)
            if count := getattr(config, "num_experts", 0):
                inner = config.moe_intermediate_size
                self._add(f"{at}mlp.gate.weight", (count, hidden), plain)
                self._add(f"{at}mlp.experts.w13_weight", (count, 2 * inner, hidden), experts)
                self._add(f"{at}mlp.experts.w2_weight", (count, hidden, inner), experts)
            else:
                halves = [inner, inner]
                self._add(f"{at}mlp.gate_up_proj.weight", (2 * inner, hidden), stacked(halves))
                self._add(f"{at}mlp.down_proj.weight", (hidden, inner), plain)
        self.register_buffer("cos_sin_cache", make((8, width)).data)

    def _add(self, name: str, shape: tuple[int, ...], loader: Callable[..., None]) -> None:
        self._named[name] = param = self._make(shape)
        self.loaders[name] = loader
        self.register_parameter(name.replace(".", "/"), param)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in tensors:
            if name.startswith(self.skip or "-"):
                continue
            if ".experts." in name:
                head, _, tail = name.partition(".experts.")
                number, part, _ = tail.split(".")
                fused = "w2_weight" if part == "down_proj" else "w13_weight"
                target = f"{head}.experts.{fused}"
                self.loaders[target](self._named[target], tensor, int(number), part)
            elif found := [each for each in STACKED if f".{each[1]}." in name]:
                (param, shard, part_number) = found[0]
                target = name.replace(shard, param)
                self.loaders[target](self._named[target], tensor, part_number)
            else:
                target = name
                self.loaders[target](self._named[target], tensor)
            loaded.add(target)
        return loaded

    def tensors(self) -> dict[str, Tensor]:
        """A copy of every parameter and buffer."""
        return {name: each.detach().clone() for name, each in self.state_dict().items()}


class FusedEngine:
    """Stands for `VllmEngine`: memory on tags, a model with loaders, and no forward pass."""

    name = "vLLM"

    def __init__(
        self,
        config: Any,
        device: str,
        dtype: torch.dtype = torch.bfloat16,
        *,
        biased: bool = False,
        normed: bool = True,
    ) -> None:
        self.saver = MemorySaver(device=device)

        def make(shape: tuple[int, ...]) -> nn.Parameter:
            tensor = self.saver.empty(shape, dtype, tag=WEIGHTS)
            return nn.Parameter(tensor.normal_(), requires_grad=False)

        self.model = FusedModel(config, biased, normed, make)
        self.kv_cache = self.saver.empty((1 << 16,), torch.uint8, tag=KV_CACHE)
        self.tables = self.saver.empty((16,), torch.uint8, tag=KV_CACHE)
        self.refill_kv_state()
        self.resets = 0

    def tags_behind(self, tag: str) -> list[str]:
        return [name for name in self.saver.tags if name == tag]

    def check_plain(self) -> None:
        pass

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.model.load_weights(tensors)

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def refill_kv_state(self) -> None:
        self.tables.fill_(7)

    def run(self, prompts: Any, params: Any, on_step: Any) -> None:
        raise AssertionError("this engine has no forward pass")

    def close(self) -> None:
        self.saver.close()
