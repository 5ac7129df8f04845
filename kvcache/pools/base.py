"""Defines what every device pool of keys and values does."""

from abc import ABC, abstractmethod

import torch


class KVPool(ABC):
    """Device memory for keys and values by token id; page 0 takes the writes of padded tokens.

    A pool owns storage only, never the decision who uses a slot. While its memsaver tag is paused
    no method but the byte counts may be called: the memory is not mapped. After a resume contents
    are undefined but for page 0. Slots `loc` are int64 `[n]` on the pool's device; on a GPU they
    are not range-checked, that would synchronise. A wrong layer, dtype, shape or device raises
    ValueError that names it, before anything is written.
    """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the storage that is usable now, the padding page included."""

    @property
    @abstractmethod
    def bytes_per_token(self) -> int:
        """Bytes that one token takes over all layers."""

    @abstractmethod
    def set_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Writes one token's key and value a row into the slots `loc`; never modifies k and v."""

    @abstractmethod
    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a layer's keys and values, to read and write, valid as long as the pool.

        fp8: as stored, to be multiplied by the scales. ValueError for FP4, without views.
        """

    @abstractmethod
    def get_rows(self, layer_id: int, loc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values in slots `loc`, scales applied; reads only these rows."""

    @abstractmethod
    def scales(self, layer_id: int) -> tuple[float, ...]:
        """Returns what stored values of the layer are multiplied by, a number a kind of row."""

    @abstractmethod
    def set_scales(self, layer_id: int, *scales: float) -> None:
        """fp8: a number a kind of row, as fp32; rows written before are not rescaled."""

    @abstractmethod
    def device_scales(self, layer_id: int) -> torch.Tensor | None:
        """`scales` of keys and values, fp32 `[2]` on the device (one kind of row is both), always
        at one address, so that a captured graph sees new ones; None where they are 1 for good.
        """

    @abstractmethod
    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copies slots `src_loc` to `tgt_loc` in every layer, all read before any is written."""

    @abstractmethod
    def on_resume(self) -> None:
        """Zeroes page 0, as 0 x NaN spreads; to be called after every resume and graph capture."""


def check_loc(name: str, loc: torch.Tensor, device: torch.device) -> None:
    """ValueError unless `loc` is int64 `[n]` on `device`."""
    if loc.dtype != torch.int64 or loc.ndim != 1:
        raise ValueError(f"{name} must be int64 [n], got {loc.dtype} of shape {tuple(loc.shape)}")
    if loc.device != device:
        raise ValueError(f"{name} on {loc.device} must be on the pool's {device}")


def check_pairs(tgt_loc: torch.Tensor, src_loc: torch.Tensor, device: torch.device) -> None:
    """ValueError unless both are slots and equally many."""
    check_loc("tgt_loc", tgt_loc, device)
    check_loc("src_loc", src_loc, device)
    if tgt_loc.shape != src_loc.shape:
        raise ValueError(
            f"{tuple(tgt_loc.shape)} target slots for {tuple(src_loc.shape)} source slots; "
            "pair them"
        )
