"""Record of a log-prob mismatch: a folder with the weights that sampled and unequal sequences.

The folder is a Hugging Face folder of the model, in the dtype of forward, with one more file.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Self

from torch import nn

from trainer_bridge.config import Dtype, TrainerConfig
from trainer_bridge.learning.batch import SequenceBatch
from trainer_bridge.learning.correction import unequal_tokens
from trainer_bridge.learning.tokens import Tokens, unequal_places
from trainer_bridge.models.files.export import ShardedWeights, save_folder

FILE = "mismatch.json"
_MOST = 8  # sequences


@dataclass(frozen=True, kw_only=True)
class UnequalSequence:
    """A sequence with tokens whose log-probabilities differ.

    Attributes:
        number: Its number in the batch of the update.
        prompt_ids: Token ids of the prompt.
        response_ids: Token ids of the response.
        rollout: The rollout's log-probability of each response token.
        trainer: The trainer's log-probability of each response token.
    """

    number: int
    prompt_ids: list[int]
    response_ids: list[int]
    rollout: list[float]
    trainer: list[float]

    @property
    def length(self) -> int:
        """Return the number of tokens, including the prompt."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def places(self) -> list[int]:
        """Return the numbers of the response tokens that differ."""
        return unequal_places(self.rollout, self.trainer)


@dataclass(frozen=True, kw_only=True)
class MismatchRecord:
    """What an update records of a mismatch, apart from the weights.

    Attributes:
        updates: Number of updates before this one.
        seed: Seed of the trainer.
        temperature: Sampling temperature.
        dtype: Dtype of forward.
        device: Device type of the trainer.
        fp32_router: `TrainerConfig.fp32_router`.
        sequences: The first sequences with unequal tokens, at most eight.
    """

    updates: int
    seed: int
    temperature: float
    dtype: Dtype
    device: str
    fp32_router: bool
    sequences: list[UnequalSequence]

    @classmethod
    def read(cls, directory: str | Path) -> Self:
        """Read the record of a folder, or raise FileNotFoundError."""
        values = json.loads(Path(directory, FILE).read_text(encoding="utf-8"))
        return cls(**values | {"sequences": [UnequalSequence(**s) for s in values["sequences"]]})


class BitComparison:
    """The comparison of an exact trainer's log-probabilities with those of the rollout.

    It saves the first difference to `TrainerConfig.mismatch_dir`.
    """

    def __init__(self) -> None:
        self._saved = False

    def count(
        self,
        model: nn.Module,
        config: TrainerConfig,
        updates: int,
        batch: SequenceBatch,
        own: Tokens,
    ) -> int:
        """Return the number of unequal tokens; unless `config.exact` is "warn", raise for any.

        A collective call. `own` are the log-probabilities of `model` after `updates` updates.
        """
        unequal = unequal_tokens(batch, own)
        if unequal is None:
            return 0
        if config.mismatch_dir is not None and not self._saved:
            self._saved = True
            unequal.remedy = _save(config.mismatch_dir, model, config, updates, batch, own)
        if config.exact != "warn":
            raise unequal
        return unequal.count


def _save(
    directory: str,
    model: nn.Module,
    config: TrainerConfig,
    updates: int,
    batch: SequenceBatch,
    own: Tokens,
) -> str:
    """Save weights and record; return how to continue, or why they were not saved."""
    record = MismatchRecord(
        updates=updates,
        seed=config.seed,
        temperature=batch.temperature,
        dtype=config.param_dtype or config.dtype,
        device=config.device.split(":")[0],
        fp32_router=config.fp32_router,
        sequences=list(islice(_unequal(batch, own), _MOST)),
    )
    try:
        texts = {FILE: json.dumps(asdict(record))}
        save_folder(directory, ShardedWeights(model, config), texts=texts)
    except (OSError, ValueError, RuntimeError) as error:  # full disk, other files, other rank
        return f"{directory}, for memsaver trace-mismatch, was not written: {error}"
    return f"memsaver trace-mismatch {directory} names the operation"


def _unequal(batch: SequenceBatch, own: Tokens) -> Iterator[UnequalSequence]:
    rollout = batch.whole(batch.tokens("rollout_logprobs"))
    for number in range(len(batch)):
        sequence = UnequalSequence(
            number=number,
            prompt_ids=list(map(int, batch.prompt_ids[number])),
            response_ids=list(map(int, batch.response_ids[number])),
            rollout=rollout[number],
            trainer=own[number],
        )
        if sequence.places:
            yield sequence
