"""The engine's side of a plan: bytes of its tags and of its torch, and a rollout of these alone."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from memsaver import Usage
from recipes.planner.tracing import Unreported
from rollout import Completion, SamplingParams
from rollout.types import CUDA_GRAPH, KV_CACHE, WEIGHTS

HandedOver = tuple[tuple[str, ...], str]
"""Tags of one side that leave, and the tag of the other that takes their memory."""
LEAST = 1 << 30  # bytes: of a pool that wakes partly; a tag takes and gives pieces of so many


@dataclass(frozen=True, kw_only=True)
class EngineSizes:
    """One rank's. wanted: of a pool that grows, what requests use at once. idle: what torch holds
    while nothing is computed; generating: the most of it in a step.
    """

    weights: int
    kv_cache: int
    wanted: int
    cuda_graph: int
    idle: int
    generating: int

    @property
    def tags(self) -> dict[str, int]:
        return {WEIGHTS: self.weights, KV_CACHE: self.kv_cache, CUDA_GRAPH: self.cuda_graph}


class PlannedRollout(Unreported):
    """Sleeps, wakes up, and answers with as many tokens as it may (`Rollout`)."""

    weights_version = 0

    def __init__(self, sizes: EngineSizes, staged: bool = True) -> None:
        """staged: False wakes all tags up with the first."""
        self._sizes, self._staged = sizes, staged
        self._asleep = set(sizes.tags)
        self._pool = self._grown = sizes.kv_cache  # bytes while it is awake, and with answers
        self._kept = 0
        self.answered: Callable[[], None] = lambda: None  # what is over then
        self.handed_over: set[HandedOver] = set()  # by both sides
        self._torch = self._peak = sizes.idle

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Any, on_progress: Any = None
    ) -> list[list[Completion]]:
        self._pool = self._grown
        self.answered()
        # Which torch keeps, until the KV cache sleeps.
        self._torch = self._peak = self._sizes.generating
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        return [[_longest(param.max_tokens)] * param.n for param in each]

    def sleep(
        self,
        level: int = 1,
        unfinished: str = "raise",
        tags: Sequence[str] | None = None,
        into: str | None = None,
    ) -> None:
        chosen = set(self._sizes.tags if tags is None else tags)
        self._kept = self._sizes.weights if level == 1 and WEIGHTS in chosen else 0
        self._asleep |= chosen
        if into is not None:
            self.handed_over.add((tuple(sorted(chosen)), into))
        if KV_CACHE in chosen:
            self._torch = self._sizes.idle

    def wake_up(self, tags: Sequence[str] | None = None, partly: bool = False) -> None:
        self._asleep -= set(self._sizes.tags if tags is None or not self._staged else tags)
        whole = self._sizes.kv_cache
        self._pool = min(whole, LEAST) if partly else whole
        self._grown = min(whole, self._sizes.wanted) if partly else whole

    def wind_down(self) -> None:
        """Only ever makes room earlier."""

    def take_usage(self) -> Usage:
        peak, self._peak = self._peak, self._torch
        tags = self._sizes.tags | {KV_CACHE: self._pool}
        return planned_usage(tags, self._asleep, self._torch, peak, self._kept)

    def abort_update(self, reason: str) -> None:
        raise AssertionError(reason)


def planned_usage(
    sizes: Mapping[str, int], away: Set[str], torch_bytes: int, torch_peak: int, host: int = 0
) -> Usage:
    """A process has all tags but those that are away, and torch's own."""
    return Usage(
        tags={tag: 0 if tag in away else nbytes for tag, nbytes in sizes.items()},
        torch_bytes=torch_bytes,
        torch_peak_bytes=torch_peak,
        device_used_bytes=None,
        host_bytes=host,
    )


def _longest(tokens: int) -> Completion:
    return Completion(
        token_ids=[0] * tokens,
        logprobs=[0.0] * tokens,
        finish_reason="length",
        weight_versions=[0] * tokens,
    )
