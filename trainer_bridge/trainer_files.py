"""The files of a trainer: checkpoints of its models, and exports of its policy."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainer_bridge.config import DTYPES, Dtype
from trainer_bridge.learning.trainer_model import Model
from trainer_bridge.models.adapters.lora import Adapters
from trainer_bridge.models.files import checkpoint
from trainer_bridge.models.files.checkpoint_writer import Staging
from trainer_bridge.models.files.export import ShardedWeights, save_folder
from trainer_bridge.models.runtime import Runtime
from trainer_bridge.models.sharded_model import fill_weights
from trainer_bridge.tag_names import REFERENCE, TRAINED


class TrainerFiles:
    """Writer and reader of the files of one trainer, which owns it.

    A checkpoint holds the trained models. It holds the reference only after a refresh, because
    every trainer builds the first reference itself. Saves, loads and exports are collective calls.
    """

    def __init__(
        self, models: Sequence[Model], adapters: Adapters | None, runtime: Runtime, began_with: str
    ) -> None:
        """Take the models, the policy first; `began_with` is the digest of its first weights."""
        self._models, self._runtime, self._began_with = models, runtime, began_with
        self._reference = next((model for model in models if model.optimizer is None), None)
        self._adapters = None if adapters is None else adapters.identity()
        self._staging = Staging(runtime)
        self._saving: checkpoint.BegunCheckpoint | None = None

    def tags(self, directory: str | None = None) -> list[str]:
        """Return the tags that a save needs, or with a directory, a load of its checkpoint."""
        stored = directory is not None and _has_reference(directory)
        return [*TRAINED, *([REFERENCE] if stored or self._refreshed() else [])]

    def save(self, directory: str, extra: dict[str, Any], wait: bool) -> None:
        """Save a checkpoint; see `Trainer.save_checkpoint`."""
        self.finish(wait=True)
        values = {"extra": extra, "adapters": self._adapters, "began_with": self._began_with}
        for model in self._models:
            values |= model.values()
        tensors, staging = self._tensors(self._refreshed()), None if wait else self._staging
        self._saving = checkpoint.BegunCheckpoint(directory, tensors, values, staging)
        if wait:
            self.finish(wait=True)

    def finish(self, wait: bool) -> bool:
        """Finish a checkpoint that is being written; see `Trainer.finish_checkpoint`."""
        if self._saving is not None and (wait or self._saving.written()):
            saving, self._saving = self._saving, None
            saving.finish()
        return self._saving is None

    def drop(self) -> None:
        """Remove a checkpoint that is not finished, without the other ranks, and warn."""
        if self._saving is not None:
            self._saving.drop()
            self._saving = None
            text = "close() has dropped a checkpoint; call finish_checkpoint() before"
            warnings.warn(text, stacklevel=3)

    def load(self, directory: str) -> dict[str, Any]:
        """Load a checkpoint, and return its `extra`; see `Trainer.load_checkpoint`."""
        self.finish(wait=True)
        for model in self._models:
            model.zero_grad()
        stored, reference = _has_reference(directory), self._reference
        values = checkpoint.load(directory, self._tensors(stored), self._adapters, self._began_with)
        if reference is not None and self._refreshed() and not stored:
            fill_weights(reference.module, reference.config, self._runtime)
        for model in self._models:
            model.restore(values)
        return values["extra"]

    def export(self, directory: str, dtype: Dtype | None, **how: Any) -> None:
        """Save the policy as a Hugging Face folder; see `Trainer.save_pretrained`."""
        if dtype not in (None, *DTYPES):
            raise ValueError(f"dtype={dtype!r} cannot be saved; use {', '.join(DTYPES)}")
        weights = ShardedWeights(self._models[0].module, self._models[0].config)
        save_folder(directory, weights, None if dtype is None else getattr(torch, dtype), **how)

    def _refreshed(self) -> bool:
        return self._reference is not None and self._reference.step > 0

    def _tensors(self, with_reference: bool) -> dict[str, Tensor]:
        tensors = dict[str, Tensor]()
        for model in self._models:
            if with_reference or model is not self._reference:
                tensors |= model.tensors()
        return tensors


def _has_reference(directory: str) -> bool:
    return checkpoint.read_values(directory).get("reference_step", 0) > 0
