"""Defines what all pools with one block of token rows share; the config gives the kinds of rows."""

import itertools
from collections.abc import Mapping, Sequence

import torch

from kvcache.config import FP4_DTYPE, TokenConfig, store_dtype
from kvcache.pools.base import HostCopy, KVPool, check_copy, check_loc, check_pairs
from kvcache.pools.storage import Part, SlotStorage, make_codec
from memsaver import MemorySaver


class TokenPool(KVPool):
    """Token rows `[L, size + ps, H, W]` for every kind of row of the config, in one storage block.

    The block is on the saver's `tag` (contents discarded by a pause unless the tag says otherwise),
    in plain torch memory without a saver. Slots other than page 0 start undefined. `size` is what
    is usable now: `config.size`, unless the pool was resized or its tag resumed with less.
    """

    fp4 = False  # whether the pool takes configs of FP4

    def __init__(
        self, config: TokenConfig, saver: MemorySaver | None = None, tag: str = "kv_cache"
    ) -> None:
        if self.fp4 != (config.dtype == FP4_DTYPE):
            raise ValueError(
                f"{type(self).__name__} can't store {config.dtype}; "
                "FP4 has pools of its own (...PoolFP4)"
            )
        self.size = config.size
        self.page_size = config.page_size
        self.dtype = config.dtype
        self.store_dtype = store_dtype(config.dtype)
        self._token_config = config
        self._codec = make_codec(config)
        by_row = [self._codec.parts(name, *shape) for name, shape in config.rows.items()]
        self._storage = SlotStorage(
            [*itertools.chain.from_iterable(by_row), *self._extra_parts()],
            num_layers=config.num_layers,
            slots=config.size + config.page_size,
            device=config.device,
            saver=saver,
            tag=tag,
            slot_major=config.slot_major,
        )
        self.device = self._storage.block.device
        self._layers: list[list[tuple[torch.Tensor, ...]]] = []
        for layer in range(config.num_layers):
            self._layers.append([self._stored(parts, layer) for parts in by_row])
        self.on_resume()

    def _stored(self, parts: Sequence[Part], layer: int) -> tuple[torch.Tensor, ...]:
        return tuple(self._storage.parts[part.name][layer] for part in parts)

    def _extra_parts(self) -> Sequence[Part]:
        """Parts beside the rows, for subclasses."""
        return ()

    @property
    def nbytes(self) -> int:
        return self._storage.nbytes

    @property
    def bytes_per_token(self) -> int:
        return self._storage.bytes_per_slot

    def scales(self, layer_id: int) -> tuple[float, ...]:
        self._check_layer(layer_id)
        return self._codec.scales(layer_id)

    def device_scales(self, layer_id: int) -> torch.Tensor | None:
        self._check_layer(layer_id)
        return self._codec.device_scales(layer_id)

    def set_scales(self, layer_id: int, *scales: float) -> None:
        self._check_layer(layer_id)
        self._codec.set_scales(layer_id, scales)

    def get_stored(self, layer_id: int) -> tuple[torch.Tensor, ...]:
        """The stored tensors `[size + ps, H, ...]` of a layer: elements, with FP4 scales, too."""
        self._check_layer(layer_id)
        return tuple(itertools.chain.from_iterable(self._layers[layer_id]))

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        check_pairs(tgt_loc, src_loc, self.device)
        self._storage.move(tgt_loc, src_loc)

    def get_cpu_copy(self, indices: torch.Tensor) -> HostCopy:
        check_loc("indices", indices, self.device)
        return HostCopy(self.format(), self._storage.to_host(indices))

    def load_cpu_copy(self, copy: HostCopy, indices: torch.Tensor) -> None:
        check_loc("indices", indices, self.device)
        self.check_cpu_copy(copy, len(indices))
        self._storage.from_host(copy.tensors, indices)

    def check_cpu_copy(self, copy: HostCopy, count: int) -> None:
        """ValueError unless `load_cpu_copy` can put the copy into `count` slots."""
        check_copy(copy, self.format(), count)

    @property
    def stored(self) -> Mapping[str, torch.Tensor]:
        """All that a slot holds, `[L, N, *row]` a part: views of the memory, rows contiguous."""
        return self._storage.parts

    def format(self) -> tuple[object, ...]:
        """Returns what two pools must have in common so that one can take the other's bytes."""
        config = self._token_config
        shapes = tuple((name, *part.shape[2:]) for name, part in self._storage.parts.items())
        scales = tuple(self._codec.scales(layer) for layer in range(config.num_layers))
        return (config.dtype, config.num_layers, shapes, scales)

    def on_resume(self) -> None:
        usable = max(0, self._storage.refresh() - self.page_size)
        self.size = usable // self.page_size * self.page_size
        self._storage.zero_first(self.page_size)

    def resize(self, tokens: int) -> int:
        """Gives memory back, or takes it again, past `tokens`; returns `size`, usable now.

        For a `slot_major` pool that is the last allocation on its saver's tag. Addresses stay, so
        do contents of the slots that stay; slots that come are undefined, and slots that went must
        not be touched: their pages have to be out of the ledger before. ValueError past
        `config.size`; the saver's errors leave everything as it was.
        """
        if not 0 < tokens <= self._token_config.size:
            raise ValueError(
                f"can't resize to {tokens} tokens; "
                f"the pool was made for 1..{self._token_config.size}"
            )
        self._storage.resize(tokens + self.page_size)
        # on a GPU the saver rounds up to whole extents
        self.size = (self._storage.slots - self.page_size) // self.page_size * self.page_size
        return self.size

    def _check_layer(self, layer_id: int) -> None:
        if not 0 <= layer_id < len(self._layers):
            raise ValueError(
                f"layer {layer_id} is not in this pool; it holds layers 0..{len(self._layers) - 1}"
            )

    def _check_rows(self, loc: torch.Tensor, **rows: tuple[torch.Tensor, tuple[int, int]]) -> None:
        """ValueError unless each fits. rows: name -> (tensor, its wanted heads and width)."""
        check_loc("loc", loc, self.device)
        count, first = loc.shape[0], next(iter(rows.values()))[0].dtype
        for name, (row, shape) in rows.items():
            if row.dtype not in self._codec.accepts:
                raise ValueError(
                    f"{name} is {row.dtype}, the pool stores {self.dtype}; "
                    f"convert {name} before writing it"
                )
            if row.dtype != first:
                raise ValueError(f"{name} is {row.dtype}, beside {first}; give all rows one dtype")
            self._check_shape(name, row, (count, *shape))

    def _check_shape(self, name: str, row: torch.Tensor, shape: tuple[int, int, int]) -> None:
        if row.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(row.shape)}, needed {shape}: [tokens, KV heads, head dim]"
            )
        if row.device != self.device:
            raise ValueError(f"{name} on {row.device} must be on the pool's {self.device}")
