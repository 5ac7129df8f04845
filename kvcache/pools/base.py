"""Defines what every device pool of keys and values does."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor


class KVPool(ABC):
    """Device memory for keys and values by token id; page 0 takes the writes of padded tokens.

    A pool owns storage only, never the decision who uses a slot. While its memsaver tag is paused
    no method but the byte counts may be called: the memory is not mapped. After a resume contents
    are undefined but for page 0. Slots `loc` are int64 `[n]` on the pool's device; on a GPU they
    are not range-checked, that would synchronize. A wrong layer, dtype, shape or device raises
    ValueError that names it, before anything is written.
    """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Return the bytes of the storage that is usable now, the padding page included."""

    @property
    @abstractmethod
    def bytes_per_token(self) -> int:
        """Return the bytes that one token takes over all layers."""

    @abstractmethod
    def set_kv_buffer(self, layer_id: int, loc: Tensor, k: Tensor, v: Tensor) -> None:
        """Write one token's key and value a row into the slots `loc`; never modify k and v."""

    @abstractmethod
    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """Return views of a layer's keys and values, to read and write, valid as long as the pool.

        fp8: as stored, to be multiplied by the scales. ValueError for FP4, without views.
        """

    @abstractmethod
    def get_rows(self, layer_id: int, loc: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values in slots `loc`, scales applied; reads these only."""

    @abstractmethod
    def scales(self, layer_id: int) -> tuple[float, ...]:
        """Return what stored values of the layer are multiplied by, a number a kind of row."""

    @abstractmethod
    def set_scales(self, layer_id: int, *scales: float) -> None:
        """Set the scales of an fp8 layer, a number a kind of row, as fp32; rows written before are
        not rescaled.
        """

    @abstractmethod
    def device_scales(self, layer_id: int) -> Tensor | None:
        """Return `scales` of keys and values, fp32 `[2]` on the device (one kind of row is both),
        always at one address, so that a captured graph sees new ones; None where they are 1 for
        good.
        """

    @abstractmethod
    def move_kv_cache(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        """Copy slots `src_loc` to `tgt_loc` in every layer, all read before any is written."""

    @abstractmethod
    def on_resume(self) -> None:
        """Zero page 0, as 0 x NaN spreads; to be called after every resume and graph capture."""


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """ValueError unless a tensor has this shape (None: any length) and device, and such a dtype."""
    sizes = zip(shape, tensor.shape, strict=False)
    fits = tensor.ndim == len(shape) and all(want in (None, size) for want, size in sizes)
    if not fits or tensor.dtype not in dtypes or tensor.device != device:
        lengths = ", ".join("n" if length is None else str(length) for length in shape)
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; the pool takes "
            f"{' or '.join(map(str, dtypes))} [{lengths}] on {device}"
        )


def check_loc(name: str, loc: Tensor, device: torch.device, count: int | None = None) -> None:
    """ValueError unless `loc` is int64 `[count]` on `device`."""
    check_tensor(name, loc, (count,), (torch.int64,), device)
