"""Measures what bringing a preempted sample back costs: computing it again, or copying pages."""

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Literal, get_args

Preemption = Literal["cheapest", "recompute", "swap"]
Way = Literal["prefill", "to_host", "to_device"]

# observations that count: the median of so many is deaf to single ones, such as a kernel being
# compiled
WINDOW = 15
# a prefill of fewer tokens, a copy of fewer bytes tells of its overhead, not of a rate
LEAST_TOKENS = 64
LEAST_BYTES = 1 << 18
# tokens or bytes a second
START: dict[Way, float] = {"prefill": 10_000.0, "to_host": 8e9, "to_device": 8e9}


def check_preemption(choice: str) -> None:
    """ValueError for a name that is none."""
    if choice not in get_args(Preemption):
        raise ValueError(f"preemption={choice!r} must be one of {', '.join(get_args(Preemption))}")


class Rate:
    """Units a second: the median of the last observations, a start value before there are any."""

    def __init__(self, start: float, least: float) -> None:
        self._start, self._least = start, least
        self._seen: deque[float] = deque(maxlen=WINDOW)

    @property
    def value(self) -> float:
        return median(self._seen) if self._seen else self._start

    def observe(self, amount: float, seconds: float) -> None:
        """Takes no notice of amounts below the least one, nor of no time at all."""
        if amount >= self._least and seconds > 0:
            self._seen.append(amount / seconds)


@dataclass(frozen=True, kw_only=True)
class Victim:
    """Holds what preempting a sample is about. tokens: that nobody else keeps, to be computed again
    or else brought back; bytes_out: of them that the host does not have yet; bytes_in: all of them.
    """

    tokens: int
    bytes_out: int
    bytes_in: int


@dataclass(frozen=True, kw_only=True)
class Swapped:
    """Describes what waits on the host for a preempted sample: its first `tokens`, of weights
    `version` of the prefix cache.

    page: the host page with those past the last whole page; 0 without one.
    """

    tokens: int
    version: int
    page: int


class PreemptionCost:
    """The cheaper way, by measured rates. No tensors, no clock of its own."""

    def __init__(self, choice: Preemption = "cheapest") -> None:
        check_preemption(choice)
        self.choice = choice
        self.rates = {way: Rate(start, self._least(way)) for way, start in START.items()}
        self._tokens = self._prefilled = 0  # of steps whose end was not waited for
        self._seconds = 0.0

    @staticmethod
    def _least(way: Way) -> float:
        return LEAST_TOKENS if way == "prefill" else LEAST_BYTES

    def ran(self, tokens: int, prefilled: int, seconds: float, waited: bool) -> None:
        """A step of `tokens`, `prefilled` of them of prompts. Steps count together up to one whose
        end was waited for: until then seconds are those of queueing work. Tokens that decoded
        beside a prefill count as prefilled.
        """
        self._tokens += tokens
        self._prefilled += prefilled
        self._seconds += seconds
        if waited:
            if self._prefilled >= LEAST_TOKENS:
                self.rates["prefill"].observe(self._tokens, self._seconds)
            self._tokens = self._prefilled = 0
            self._seconds = 0.0

    def copied(self, to_host: bool, nbytes: int, seconds: float) -> None:
        self.rates["to_host" if to_host else "to_device"].observe(nbytes, seconds)

    def recompute_seconds(self, victim: Victim) -> float:
        return victim.tokens / self.rates["prefill"].value

    def swap_seconds(self, victim: Victim) -> float:
        return (
            victim.bytes_out / self.rates["to_host"].value
            + victim.bytes_in / self.rates["to_device"].value
        )

    def swaps(self, victim: Victim) -> bool:
        """Tells whether to copy; where both cost the same, computing needs no host memory."""
        if self.choice == "cheapest":
            return self.swap_seconds(victim) < self.recompute_seconds(victim)
        return self.choice == "swap"
