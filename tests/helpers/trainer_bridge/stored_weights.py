"""The weight store of a rollout rank and its updates, without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memsaver import MemorySaver, attach
from rollout.tag_names import WEIGHTS_SHADOW
from rollout.weights import ParamSlice, WeightLayout, WeightOffer
from rollout.weights.params import ParamGroup
from rollout.weights.store import WeightStore
from rollout.weights.update import WeightUpdate
from tests.helpers.trainer_bridge.targets import UNTOUCHED


class StoredWeights:
    """An `UpdatableEngine`, in which bytes outside parameters and padding are UNTOUCHED."""

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        aliases: Mapping[str, str],
        dtype: torch.dtype,
        place: str,
        initial: Any,
    ) -> None:
        """Load version 0.

        Args:
            groups: Parameters of this rank.
            aliases: Tied names.
            dtype: Dtype of the store.
            place: Place of the rank's device.
            initial: Whole tensors by name.
        """
        self.saver = MemorySaver("cpu")
        self.place = place
        self.store = WeightStore(groups, dict(aliases), dtype, self.saver)
        self.store.arena.fill_(UNTOUCHED)
        self.update = WeightUpdate(self.store, self.saver, lambda: None)
        self.verify_update = self.update.verify
        self.commit_update = self.update.commit
        self.abort_update = self.update.abort
        self.store.load(initial.items(), "a seed")
        self._mine = torch.zeros(self.store.arena.numel(), dtype=torch.bool)
        for piece in self.store.manifest.slices:
            size = getattr(torch, piece.dtype).itemsize
            for byte in range(size):
                self._elements(self._mine, piece, size, byte).fill_(True)
        for first, nbytes in self.store.manifest.zeros:
            self._mine[first : first + nbytes] = True

    def weight_layout(self) -> WeightLayout:
        return WeightLayout(manifest=self.store.manifest, place=self.place)

    def begin_update(
        self, version: int, *, shadow: bool = False, names: Sequence[str] | None = None
    ) -> WeightOffer:
        offer = self.update.begin(version, shadow, names)
        if shadow and names is None:
            with attach(offer.ticket) as lease:
                lease.tensor((lease.nbytes,), torch.uint8).fill_(UNTOUCHED)
        return offer

    def read(self, piece: ParamSlice) -> Tensor:
        return self.store.box(piece)

    def check_bytes(self) -> None:
        """Check that only slices were written, padding is zero, and shadow pages are released.

        A lease that is used after its sync prevents the saver from closing.
        """
        assert bool((self.store.arena[~self._mine] == UNTOUCHED).all()), (
            "bytes of no parameter were written"
        )
        for first, nbytes in self.store.manifest.zeros:
            assert not self.store.arena[first : first + nbytes].any(), "padding is not zero"
        tags = self.saver.report().tags
        assert WEIGHTS_SHADOW not in tags or tags[WEIGHTS_SHADOW].committed_bytes == 0

    @staticmethod
    def _elements(flat: Tensor, piece: ParamSlice, size: int, byte: int) -> Tensor:
        strides = piece.strides or torch.empty(piece.shape, device="meta").stride()
        return flat.as_strided(
            piece.shape, [stride * size for stride in strides], piece.offset + byte
        )
