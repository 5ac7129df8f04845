"""Record of a log-prob mismatch: a folder with the weights that sampled and an unequal sequence.

The folder is a Hugging Face folder of the model, in the dtype of forward, with one more file.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from torch import nn

from trainer_bridge.config import Dtype, TrainerConfig
from trainer_bridge.learning.batch import SequenceBatch
from trainer_bridge.learning.correction import unequal_tokens
from trainer_bridge.learning.tokens import Tokens, unequal_places
from trainer_bridge.models.files.export import ShardedWeights, save_folder

FILE = "mismatch.json"


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
        sequence: Number in the batch of the first sequence with unequal tokens.
        prompt_ids: Token ids of its prompt.
        response_ids: Token ids of its response.
        mask: Whether each response token is learned; only these are compared.
        rollout: The rollout's log-probability of each response token.
        trainer: The trainer's log-probability of each response token.
    """

    updates: int
    seed: int
    temperature: float
    dtype: Dtype
    device: str
    fp32_router: bool
    sequence: int
    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[bool]
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

    @classmethod
    def read(cls, directory: str | Path) -> Self:
        """Read the record of a folder.

        Raises:
            FileNotFoundError: There is none.
            ValueError: An older version wrote it, with several sequences.
        """
        values = json.loads(Path(directory, FILE).read_text(encoding="utf-8"))
        if "sequences" in values:
            rule = "was written by an older memsaver, which can read it"
            raise ValueError(f"{Path(directory, FILE)} {rule}; record it anew")
        return cls(**values)


class BitComparison:
    """The comparison of an exact trainer's log-probabilities with those of the rollout.

    It saves the first difference to `TrainerConfig.mismatch_dir`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._saved = model, False

    def count(self, config: TrainerConfig, updates: int, batch: SequenceBatch, own: Tokens) -> int:
        """Return the number of unequal tokens; unless `config.exact` is "warn", raise for any.

        A collective call. `own` are the log-probabilities of the model after `updates` updates.
        """
        unequal = unequal_tokens(batch, own)
        if unequal is None:
            return 0
        if config.mismatch_dir is not None and not self._saved:
            self._saved = True
            record = _record(config, updates, batch, own, unequal.sequence)
            unequal.remedy = _save(config.mismatch_dir, ShardedWeights(self._model, config), record)
        if config.exact != "warn":
            raise unequal
        return unequal.count


def _save(directory: str, weights: ShardedWeights, record: MismatchRecord) -> str:
    """Save weights and record; return how to continue, or why they were not saved."""
    try:
        save_folder(directory, weights, texts={FILE: json.dumps(asdict(record))})
    except (OSError, ValueError, RuntimeError) as error:  # full disk, other files, other rank
        return f"{directory}, for memsaver trace-mismatch, was not written: {error}"
    return f"memsaver trace-mismatch {directory} names the operation"


def _record(
    config: TrainerConfig, updates: int, batch: SequenceBatch, own: Tokens, number: int
) -> MismatchRecord:
    rollout = batch.whole(batch.tokens("rollout_logprobs"))
    return MismatchRecord(
        updates=updates,
        seed=config.seed,
        temperature=batch.temperature,
        dtype=config.param_dtype or config.dtype,
        device=config.device.split(":")[0],
        fp32_router=config.fp32_router,
        sequence=number,
        prompt_ids=list(map(int, batch.prompt_ids[number])),
        response_ids=list(map(int, batch.response_ids[number])),
        mask=[True] * len(own[number]) if batch.mask is None else Tokens.of(batch.mask)[number],
        rollout=rollout[number],
        trainer=own[number],
    )
