"""A trainer and a rollout without tensors, whose every figure depends on all that was learned.

Their work raises the audit event `tests.fake_side`, at which a test can disturb it.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memsaver import Usage
from memsaver.ops.hash import hash_text
from recipes.config.load import load
from recipes.config.recipe import Recipe
from recipes.setup.preparation import Setup, prepare
from recipes.tasks.toy import TOY_LETTERS
from rollout import Completion, SamplingParams
from trainer_bridge import SequenceBatch
from trainer_bridge.sync import SyncReceipt

NOTHING = Usage(tags={}, torch_bytes=0, torch_peak_bytes=0, device_used_bytes=None, host_bytes=0)


class FakeSide:
    """What the monitor asks of a trainer and of a rollout; neither holds memory."""

    def report(self, others: bool = True) -> Any:
        return SimpleNamespace(tags={})

    def drain_events(self) -> list[Any]:
        return []

    def take_usage(self) -> Usage:
        return NOTHING


class FakeTrainer(FakeSide):
    """Trainer whose weights are a hash of all updates.

    Attributes:
        weights: The hash.
        step: Number of updates.
        version: Version of the newest sync.
        seen: Prompts of all updates, in order.
    """

    def __init__(self) -> None:
        self.weights = self.version = self.step = self._polls = 0
        self.seen: list[list[int]] = []
        self._begun: str | None = None

    def empty_cache(self) -> None: ...

    def offload(self, *tags: str, wait: bool = True, into: str | None = None) -> None: ...

    def reload(self, *tags: str, wait: Any = True) -> None: ...

    def sync_weights(self, version: int) -> SyncReceipt:
        self.version = version
        return SyncReceipt(version=version, digests=(), seconds=0, verify_seconds=0, stages={})

    def compute_log_prob(self, batch: SequenceBatch) -> list[list[float]]:
        sys.audit("tests.fake_side")
        return [[0.0] * len(ids) for ids in batch.response_ids]

    def update_actor(self, batch: SequenceBatch) -> dict[str, float]:
        self.seen += batch.prompt_ids
        self.step += 1
        learned = [*map(list, (batch.prompt_ids, batch.response_ids, batch.advantages or ()))]
        self.weights = hash_text(f"{self.weights}{learned}")
        sys.audit("tests.fake_side")
        return {"loss": float(self.weights)}

    def save_checkpoint(self, directory: str, extra: dict[str, Any], wait: bool) -> None:
        """Write a file into a partial directory, which `finish_checkpoint` renames."""
        state = {"weights": self.weights, "step": self.step, "seen": self.seen, "extra": extra}
        partial = Path(f"{directory}.partial")
        partial.mkdir()
        (partial / "values.json").write_text(json.dumps(state))
        self._begun, self._polls = directory, 0

    def finish_checkpoint(self, wait: bool) -> bool:
        """Rename the partial directory if the caller waits, or asks for the third time."""
        self._polls += 1
        if self._begun is not None and (wait or self._polls == 3):
            shutil.rmtree(self._begun, ignore_errors=True)
            Path(f"{self._begun}.partial").rename(self._begun)
            self._begun = None
        return self._begun is None

    def save_pretrained(self, directory: str, **how: Any) -> None:
        """Replace a directory by one with a file."""
        partial = Path(f"{directory}.partial")
        partial.mkdir()
        (partial / "model.txt").write_text(str(self.weights))
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)

    def load_checkpoint(self, directory: str) -> None:
        state = json.loads(Path(directory, "values.json").read_text())
        self.weights, self.step, self.seen = state["weights"], state["step"], state["seen"]


class FakeRollout(FakeSide):
    """Rollout that answers a prompt right or wrong, by a hash of weights, prompt and seed.

    After 2 and after 8 updates, its answers are better than at any time before.
    """

    def __init__(self, trainer: FakeTrainer, tokenizer: Any) -> None:
        self._trainer = trainer
        self._letters = tokenizer.convert_tokens_to_ids(list(TOY_LETTERS))
        self._end = tokenizer.eos_token_id

    @property
    def weights_version(self) -> int:
        return self._trainer.version

    def wake_up(self, tags: Sequence[str]) -> None: ...

    def sleep(self, level: int, tags: Sequence[str]) -> None: ...

    def abort_update(self, reason: str) -> None: ...

    def generate(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
    ) -> list[list[Completion]]:
        sys.audit("tests.fake_side")
        return [
            [self._answer(prompt, f"{param.seed}/{sample}") for sample in range(param.n)]
            for prompt, param in zip(prompts, params, strict=True)
        ]

    def _answer(self, prompt: list[int], seed: str) -> Completion:
        letters = [token for token in prompt if token in self._letters]
        draw = hash_text(f"{self._trainer.weights}/{prompt}/{seed}")
        right = draw % 100 < {2: 60, 8: 95}.get(self._trainer.step, 20)
        ids = [letters[0 if right else 1], self._end]
        return Completion(
            token_ids=ids, logprobs=[0.0] * 2, finish_reason="stop", weight_versions=[0] * 2
        )


@cache
def _prepared(folder: Path) -> Setup:
    return prepare(load("tiny"), folder)


@contextmanager
def fake_runs(folder: Path) -> Iterator[None]:
    """Run the recipe tiny with the two sides; its model is prepared once for each `folder`."""
    prepared = _prepared(folder)

    def prepare_again(recipe: Recipe, *_: Any) -> Setup:
        return dataclasses.replace(prepared, recipe=recipe)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recipes.run.prepare", prepare_again)
        patch.setattr("recipes.run.open_pair", fake_pair)
        patch.setattr("recipes.logs.run_folder.describe_environment", dict)
        yield


@contextmanager
def fake_pair(setup: Setup, *callbacks: object) -> Iterator[tuple[FakeTrainer, FakeRollout]]:
    """Open the two sides, in place of `open_pair`."""
    trainer = FakeTrainer()
    yield trainer, FakeRollout(trainer, setup.tokenizer)
