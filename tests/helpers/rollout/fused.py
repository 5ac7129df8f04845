"""A model with vLLM's parameter layout and loaders, and an engine without a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Glm4MoeConfig, Qwen3MoeConfig

from memsaver import MemorySaver
from rollout.tag_names import KV_CACHE, WEIGHTS
from tests.helpers.models import SIZES, save_tiny

PADDED_TO = 64
STACKED = (
    ("qkv_proj", "q_proj", 0),
    ("qkv_proj", "k_proj", 1),
    ("qkv_proj", "v_proj", 2),
    ("gate_up_proj", "gate_proj", 0),
    ("gate_up_proj", "up_proj", 1),
)
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"normed": False},
    "qwen2": {"normed": False, "biased": True},
    "qwen3": {},
}
Make = Callable[[tuple[int, ...]], nn.Parameter]


def plain(param: Tensor, loaded: Tensor) -> None:
    assert param.size() == loaded.size()
    param.data.copy_(loaded)


class Share(NamedTuple):
    """A rank's part of the model, divided as vLLM divides it."""

    rank: int = 0
    size: int = 1

    def heads(self, count: int) -> int:
        """Return the heads of a rank, at least one."""
        return max(1, count // self.size)

    def padded(self, param: Tensor, loaded: Tensor) -> None:
        first = self.rank * len(param)
        count = max(0, min(len(param), len(loaded) - first))
        param[:count].data.copy_(loaded.narrow(0, min(first, len(loaded)), count))
        param[count:].data.fill_(0)

    def columns(self, param: Tensor, loaded: Tensor) -> None:
        width = param.shape[1]
        param.data.copy_(loaded.narrow(1, self.rank * width, width))

    def stacked(self, sizes: Sequence[int]) -> Callable[..., None]:
        def load(param: Tensor, loaded: Tensor, part: int) -> None:
            place = param.data.narrow(0, sum(sizes[:part]), sizes[part])
            copies = sizes[part] * self.size // len(loaded)  # ranks with the same heads
            place.copy_(loaded.narrow(0, self.rank // copies * sizes[part], sizes[part]))

        return load

    def experts(self, param: Tensor, loaded: Tensor, expert: int, part: str) -> None:
        place = param.data[expert]
        if part == "down_proj":
            self.columns(place, loaded)
            return
        half = place.shape[0] // 2
        place = place.narrow(0, 0 if part == "gate_proj" else half, half)
        place.copy_(loaded.narrow(0, self.rank * half, half))


WHOLE = Share()


class FusedModel(nn.Module):
    """Parameters under vLLM's names, for transformers' config of a Llama, Qwen2 or Qwen3.

    The model may have experts.
    """

    def __init__(
        self, config: Any, biased: bool, normed: bool, make: Make, share: Share = WHOLE
    ) -> None:
        super().__init__()
        self._make = make
        self.loaders: dict[str, Callable[..., None]] = {}
        self._named: dict[str, nn.Parameter] = {}
        hidden, inner = config.hidden_size, config.intermediate_size // share.size
        width = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
        heads = [config.num_attention_heads, *[config.num_key_value_heads] * 2]
        sizes = [share.heads(count) * width for count in heads]
        rows = -(-config.vocab_size // PADDED_TO) * PADDED_TO // share.size
        self.skip = ("lm_head.",) if config.tie_word_embeddings else ()
        self._add("model.embed_tokens.weight", (rows, hidden), share.padded)
        if not config.tie_word_embeddings:
            self._add("lm_head.weight", (rows, hidden), share.padded)
        self._add("model.norm.weight", (hidden,), plain)
        for layer in range(config.num_hidden_layers):
            at = f"model.layers.{layer}."
            self._add(f"{at}self_attn.qkv_proj.weight", (sum(sizes), hidden), share.stacked(sizes))
            if biased:
                self._add(f"{at}self_attn.qkv_proj.bias", (sum(sizes),), share.stacked(sizes))
            for norm in ("q_norm", "k_norm") if normed else ():
                self._add(f"{at}self_attn.{norm}.weight", (width,), plain)
            self._add(f"{at}self_attn.o_proj.weight", (hidden, sizes[0]), share.columns)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                self._add(f"{at}{norm}.weight", (hidden,), plain)
            if count := getattr(config, "num_experts", 0) or getattr(config, "n_routed_experts", 0):
                inner = config.moe_intermediate_size // share.size
                self._add(f"{at}mlp.gate.weight", (count, hidden), plain)
                self._add(f"{at}mlp.experts.w13_weight", (count, 2 * inner, hidden), share.experts)
                self._add(f"{at}mlp.experts.w2_weight", (count, hidden, inner), share.experts)
                if hasattr(config, "n_routed_experts"):
                    self._add(f"{at}mlp.gate.e_score_correction_bias", (count,), plain)
                    shared, halves = f"{at}mlp.shared_experts.", [inner, inner]
                    rows = (2 * inner, hidden)
                    self._add(f"{shared}gate_up_proj.weight", rows, share.stacked(halves))
                    self._add(f"{shared}down_proj.weight", (hidden, inner), share.columns)
            else:
                halves = [inner, inner]
                self._add(
                    f"{at}mlp.gate_up_proj.weight", (2 * inner, hidden), share.stacked(halves)
                )
                self._add(f"{at}mlp.down_proj.weight", (hidden, inner), share.columns)
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
            elif matches := [entry for entry in STACKED if f".{entry[1]}." in name]:
                (param, shard, part_number) = matches[0]
                target = name.replace(shard, param)
                self.loaders[target](self._named[target], tensor, part_number)
            else:
                target = name
                self.loaders[target](self._named[target], tensor)
            loaded.add(target)
        return loaded

    def tensors(self) -> dict[str, Tensor]:
        """Copy every parameter and buffer."""
        return {name: tensor.detach().clone() for name, tensor in self.state_dict().items()}


class FusedEngine:
    """Stand-in for `VllmEngine`: memory on tags, a model with loaders, and no forward pass."""

    name = "vLLM"
    graphs_need_content = True

    def __init__(
        self,
        config: Any,
        device: str,
        dtype: torch.dtype = torch.bfloat16,
        *,
        biased: bool = False,
        normed: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        share = (
            Share() if group is None else Share(dist.get_rank(group), dist.get_world_size(group))
        )
        self.group = group
        self.saver = MemorySaver(device=device)

        def make(shape: tuple[int, ...]) -> nn.Parameter:
            tensor = self.saver.empty(shape, dtype, tag=WEIGHTS)
            return nn.Parameter(tensor.normal_(), requires_grad=False)

        self.model = FusedModel(config, biased, normed, make, share)
        self.kv_cache = self.saver.empty((1 << 16,), torch.uint8, tag=KV_CACHE)
        self.tables = self.saver.empty((16,), torch.uint8, tag=KV_CACHE)
        self.refill_kv_state()
        self.resets = 0
        self._queued: dict[int, int] = {}  # samples by request

    def add(self, id: int, prompt: Sequence[int], fields: dict[str, Any], stream: bool) -> None:
        self._queued[id] = fields["n"]

    def step(self) -> list[Any]:
        """Answer all requests with one token."""
        fields = {"token_ids": [1], "logprobs": SimpleNamespace(logprobs=[0.0])}
        fields["finish_reason"] = "length"
        queued, self._queued = self._queued, {}
        return [
            SimpleNamespace(
                request_id=str(id),
                num_cached_tokens=None,
                outputs=[SimpleNamespace(index=index, **fields) for index in range(samples)],
            )
            for id, samples in queued.items()
        ]

    def abort(self, ids: Sequence[int]) -> None:
        for id in ids:
            self._queued.pop(id, None)

    def tags_behind(self, tag: str) -> list[str]:
        return [name for name in self.saver.tags if name == tag]

    def check_plain(self) -> None:
        pass

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def refill_kv_state(self) -> None:
        self.tables.fill_(7)

    def run(self, prompts: Any, params: Any, on_step: Any) -> None:
        raise AssertionError("this engine has no forward pass")

    def close(self) -> None:
        self.saver.close()


def random_directory(path: Path, kind: str, **overrides: Any) -> str:
    """Save a tiny model of one of KINDS, or the config of a "qwen3_moe" or "glm4_moe".

    The routers of "glm4_moe" have a bias.
    """
    if kind not in ("qwen3_moe", "glm4_moe"):
        save_tiny(path, kind, **overrides)
        return str(path)
    sizes: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, **SIZES}
    if kind == "qwen3_moe":
        sizes |= {"num_experts": 4, "architectures": ["Qwen3MoeForCausalLM"]}
        config: Any = Qwen3MoeConfig(**sizes, head_dim=16)
    else:
        sizes |= {"n_routed_experts": 4, "architectures": ["Glm4MoeForCausalLM"]}
        config = Glm4MoeConfig(**sizes, head_dim=16, first_k_dense_replace=0)
    config.save_pretrained(path)
    return str(path)


def loaded(engine: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the model's tensors as its loader would write them from weights; restore the model.

    The loader receives the weights under the names of the Hub.
    """
    spelled: list[tuple[str, Tensor]] = []
    for name, tensor in weights.items():
        if name.endswith("experts.gate_up_proj"):
            for number, rows in enumerate(tensor):
                gate, up = rows.chunk(2)
                at = name.removesuffix("gate_up_proj") + str(number)
                spelled += [(f"{at}.gate_proj.weight", gate), (f"{at}.up_proj.weight", up)]
        elif name.endswith("experts.down_proj"):
            at = name.removesuffix("down_proj")
            spelled += [(f"{at}{i}.down_proj.weight", rows) for i, rows in enumerate(tensor)]
        else:
            spelled.append((name, tensor))
    state = engine.model.state_dict().items()
    before = {name: tensor.detach().clone() for name, tensor in state}
    engine.model.load_weights(spelled)
    made = {name: tensor.detach().clone() for name, tensor in state}
    for name, tensor in state:
        tensor.copy_(before[name])
    return made


def same(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, tensors[name]), name
