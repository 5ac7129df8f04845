"""Double sparsity: what decode attends to, and which channels of the keys it chooses that by."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from torch import Tensor

HeadChannels = tuple[tuple[int, ...], ...]  # [KV head][heavy_channel_num]


@dataclass(frozen=True, kw_only=True)
class DoubleSparsity:
    """Decode scores all cached tokens by a few channels of the keys, and attends to the best.

    heavy_token_num: tokens that a query head attends to, the `recent_token_num` last ones always
    among them.
    heavy_channel_num: channels that are scored. channels: which, [layer][KV head]; None: the first
    ones of every head. Better ones come from `heavy_channels` over keys of a few prompts.
    """

    heavy_channel_num: int
    heavy_token_num: int
    recent_token_num: int = 1
    channels: tuple[HeadChannels, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("heavy_channel_num", "heavy_token_num", "recent_token_num"):
            if getattr(self, name) < 1:
                raise ValueError(f"double_sparsity.{name}={getattr(self, name)} must be at least 1")
        if self.recent_token_num > self.heavy_token_num:
            raise ValueError(
                f"double_sparsity.recent_token_num={self.recent_token_num} exceeds heavy_token_num="
                f"{self.heavy_token_num}, of which they are a part; raise heavy_token_num"
            )
        for layer, heads in enumerate(self.channels or ()):
            for head, chosen in enumerate(heads):
                if not len(set(chosen)) == len(chosen) == self.heavy_channel_num:
                    raise ValueError(
                        f"double_sparsity.channels of layer {layer}, KV head {head} are "
                        f"{tuple(chosen)}; give heavy_channel_num={self.heavy_channel_num} "
                        f"different ones"
                    )

    def check(self, num_layers: int, kv_heads: int, head_dim: int) -> None:
        """ValueError unless the channels are those of a model of this shape."""
        if self.heavy_channel_num > head_dim:
            raise ValueError(
                f"double_sparsity.heavy_channel_num={self.heavy_channel_num}, keys have "
                f"{head_dim} channels; lower it"
            )
        if self.channels is None:
            return
        shape = {(len(self.channels), len(heads)) for heads in self.channels}
        if shape != {(num_layers, kv_heads)}:
            raise ValueError(
                f"double_sparsity.channels are given for (layers, KV heads) {sorted(shape)}, "
                f"the model has {(num_layers, kv_heads)}; give heavy channels for each"
            )
        flat = chain.from_iterable
        if wrong := set(flat(flat(self.channels))) - set(range(head_dim)):
            raise ValueError(
                f"double_sparsity.channels name {sorted(wrong)}, keys have channels "
                f"0..{head_dim - 1}; choose among them"
            )

    def of_layer(self, layer: int, kv_heads: int) -> HeadChannels:
        """The channels of each KV head of a layer."""
        return (
            self.channels[layer]
            if self.channels
            else (tuple(range(self.heavy_channel_num)),) * kv_heads
        )


def heavy_channels(keys: Sequence[Tensor], count: int) -> tuple[HeadChannels, ...]:
    """Returns, for `DoubleSparsity.channels`, the `count` channels of each KV head whose mean |key|
    is largest.

    keys: [n, Hkv, D] of each layer, rotated as the cache holds them (`kv_pool.get_rows`).
    """
    best = (each.float().abs().mean(0).topk(count, -1).indices.sort(-1).values for each in keys)
    return tuple(tuple(map(tuple, layer.tolist())) for layer in best)
